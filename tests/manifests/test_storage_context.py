"""How storage is reached is a value that is handed in: nothing of it is the process's, and none of its secrets show."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from relabel import manifests
from relabel.manifests.files import LEASE_S, RETRY_S, Storage, filesystem_of
from relabel.manifests.secrets import forget_secrets, redacted, secret_in
from relabel.manifests.store import open_run_store, read_url
from tests.vault import Vault

PROCESS_WIDE = {
    "failpoints.py: _armed": "tests arm one by a variable; a process is killed once",
    "failpoints.py: _hits_left": "tests arm one by a variable; a process is killed once",
    "process.py: _came": "a signal is the process's, and asks all that is made in it to end",
    "process.py: _is_draining": "signals go to the process, and so does the wish to end after the next step",
    "process.py: _is_term": "a signal is the process's, and so is which one it was",
    "process.py: _wish": "signals go to the process, and so does the wish to end after the next step",
    "secrets.py: _kept": "a secret of one job must not show in a text about another either",
}
"""What functions of manifests/ may write that outlives a call, and why."""
_CHANGES = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}


@pytest.fixture(autouse=True)
def own_secrets() -> Iterator[None]:
    yield
    forget_secrets()


@pytest.fixture
def vault() -> Iterator[type[Vault]]:
    with Vault.installed() as found:
        yield found


def written_globals(source: str) -> set[str]:
    """Names of a module that its functions bind again (`global`), or whose values they change in place."""
    tree = ast.parse(source)
    targets = [node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)] for node in tree.body]
    held = {target.id for found in targets for target in found if isinstance(target, ast.Name)}
    written: set[str] = set()
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                written |= set(node.names)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
                written |= _name(node.func.value) & held
            elif isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
                written |= _name(node.value) & held
    return written


def _name(node: ast.AST) -> set[str]:
    return {node.id} if isinstance(node, ast.Name) else set()


@pytest.mark.parametrize(
    "body",
    [
        "def f():\n    global held\n    held = 3",
        "def f():\n    held['a'] = 1",
        "def f():\n    del held[0]",
        "def f():\n    held.x = 1",
        "class A:\n    def f(self):\n        held.update(a=1)",
        "f = lambda: held.append(1)",
    ],
)
def test_the_sweep_sees_every_way_to_write_a_global(body: str) -> None:
    assert written_globals(f"held = {{}}\n{body}") == {"held"}
    assert written_globals(f"held: dict[str, int] = {{}}\n{body}") == {"held"}


def test_no_function_of_manifests_keeps_anything_in_its_module() -> None:
    root = Path(manifests.__file__).parent
    found = {
        f"{path.relative_to(root)}: {name}"
        for path in root.rglob("*.py")
        for name in written_globals(path.read_text(encoding="utf-8"))
    }
    assert found == PROCESS_WIDE.keys()


def test_two_storages_of_one_process_reach_their_own_files_alone(vault: type[Vault]) -> None:
    one, other = (Storage.of({"vault": {"key": f"key-of-{name}"}}) for name in ("one", "other"))
    stores = [open_run_store("vault://data", storage, single_writer=True) for storage in (one, other)]
    for name, store in zip((b"one", b"other"), stores, strict=True):
        store.put("name", name)
    assert [read_url("vault://data/name", storage) for storage in (one, other, one)] == [b"one", b"other", b"one"]
    assert [store.read("name") for store in stores] == [b"one", b"other"]
    with pytest.raises(FileNotFoundError):
        read_url("vault://data/name", Storage())


def test_a_storage_shows_none_of_its_options_and_crosses_to_another_process_with_them() -> None:
    storage = Storage.of({"S3A": {"secret": "hidden-3c1", "client_kwargs": {"token": "hidden-4d2"}, "profile": "prod"}})
    assert redacted("hidden-3c1 hidden-4d2") == redacted("hidden-4d2 hidden-3c1")
    assert "hidden" not in redacted("hidden-3c1 hidden-4d2")
    assert secret_in("see hidden-3c1") == "the value of the storage option secret"
    assert redacted("production") == "production"
    for text in (repr(storage), str(storage), f"{[storage]}"):
        assert "hidden" not in text
        assert "profile" not in text
    again = pickle.loads(pickle.dumps(storage))
    assert again.options_of("s3") == storage.options_of("s3") != {}
    assert (again.retry_s, again.lease_s) == (RETRY_S, LEASE_S)


def test_what_a_storage_holds_is_no_ones_to_change(vault: type[Vault]) -> None:
    options = {"vault": {"key": "key-of-one"}}
    storage = Storage.of(options)
    options["vault"]["key"] = "another"
    storage.options_of("vault")["key"] = "another"
    assert storage.options_of("vault") == {"key": "key-of-one"}
    with pytest.raises(AttributeError):
        storage.retry_s = 3.0  # type: ignore[misc]
    assert isinstance(filesystem_of("vault://data", storage)[0], Vault)
    assert fsspec.filesystem("vault", key="key-of-one") is filesystem_of("vault://data", storage)[0]
