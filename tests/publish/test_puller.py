"""The active version is what was pulled: whatever happens to a file or to the link, pull repairs it; verify and show
name it and touch nothing.
"""

import contextlib
import copy
import fcntl
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from email.message import Message
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from relabel.export import puller
from relabel.export.bundles import MANIFEST_NAME, seal_bundle
from relabel.export.publishing import OBJECTS, SigningKey, roll_back
from relabel.manifests import objects
from relabel.manifests.files import Storage
from relabel.manifests.store import LocalStore, open_bundle_store
from tests import seaweed
from tests.faults.conftest import IS_FULL
from tests.killing import killed
from tests.publish.conftest import change_json, publish_to, pull_from, roll_back_in, served_text, write_bundle

Relabel = Callable[..., Any]
FILES = (
    "model.onnx",
    "triton/ecom-fp32/1/model.onnx",
    "tokenizer/tokenizer.json",
    "README.md",
    "load.py",
    "manifest.json",
)


def flip(path: Path) -> None:
    """One bit, in place: as a disk or a slip of the hand does it."""
    with path.open("r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))


def flip_unseen(path: Path) -> None:
    """One bit, with size and time of the last write as they were."""
    held = path.stat()
    flip(path)
    os.utime(path, ns=(held.st_atime_ns, held.st_mtime_ns))


def linked_away(path: Path) -> None:
    """A link to the very bytes that must be there, which may change any time."""
    elsewhere = path.parents[len(path.parts) - 4] / f"elsewhere-{path.name}"
    shutil.copy(path, elsewhere)
    path.unlink()
    path.symlink_to(elsewhere)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


HARMS: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "flipped": flip,
    "flipped unseen": flip_unseen,
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: os.truncate(path, 0),
    "a link": linked_away,
    "a folder": make_folder,
    "a pipe": make_pipe,
    "mode 000": lambda path: path.chmod(0),
    "an unlisted file": lambda path: path.with_name(path.name + ".more").write_text("more"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a loader and a model that it holds under two names, as exports with `--triton` do."""
    folder = write_bundle(tmp_path_factory.mktemp("source") / "ecom", "one", size=5000)
    (folder / "load.py").write_text("VERSION = 1\n")
    (folder / "triton/ecom-fp32/1").mkdir(parents=True)
    shutil.copy(folder / "model.onnx", folder / "triton/ecom-fp32/1/model.onnx")
    seal_bundle(folder, {"name": "ecom", "lineage": {"student": "one"}})
    return folder


@pytest.fixture
def store(tmp_path: Path, source: Path) -> LocalStore:
    bundle_store = open_bundle_store(str(tmp_path / "store"), Storage())
    publish_to(bundle_store, source)
    return bundle_store


def digests(folder: Path) -> dict[str, str]:
    """sha256 by name of all files below a folder, taken from their bytes."""
    files = (path for path in folder.resolve().rglob("*") if not path.is_dir())
    return {
        path.relative_to(folder.resolve()).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }


def state_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """What reading a folder must not change."""
    found = {}
    for path in sorted(folder.rglob("*")):
        held = path.lstat()
        found[str(path)] = (held.st_mode, held.st_ino, held.st_size, held.st_mtime_ns, held.st_ctime_ns)
    return found


def test_whatever_happens_to_a_file_that_serves_pull_repairs_it_and_verify_and_show_name_it(
    relabel: Relabel, store: LocalStore, source: Path, tmp_path: Path
) -> None:
    pull_from(store, tmp_path / "settled")
    every = list(itertools.product(HARMS, ("pull", "verify", "show"), FILES))
    for number, (harm, command, name) in enumerate(every if IS_FULL else every[:: len(FILES) - 1]):
        # each harm and command, files in turn
        size = (source / name).stat().st_size
        dest, what = tmp_path / str(number), f"{name} {harm}, {command}"
        # a copy with links and modes; its files are new ones, so that all are read
        shutil.copytree(tmp_path / "settled", dest, symlinks=True)
        HARMS[harm]((dest / "current").resolve() / name)
        if command == "pull":
            done = relabel("pull", f"{store.url}/ecom", str(dest), "--output", "json")
            assert done.code == 0, (what, done)
            assert any(name in fault for fault in done.json["repaired"]), (what, done.json)
            # under another name, or for its owner alone
            is_here = name.endswith("model.onnx") or harm in (
                "mode 000",
                "an unlisted file",
            )
            assert done.json["fetched_bytes"] in ((0, size) if harm == "mode 000" else (0 if is_here else size,)), what
            assert digests(dest / "current") == digests(source), what
            assert relabel("pull", f"{store.url}/ecom", str(dest)).code == 10, what
            assert relabel("verify", str(dest)).code == 0, what
        else:
            before = state_of(dest)
            done = relabel(command, str(dest))
            assert done.code == 3, (what, done)
            assert name in done.out + done.err, (what, done)
            assert state_of(dest) == before, what
        shutil.rmtree(dest)


def digits_of(record: Any) -> Iterator[tuple[Any, ...]]:
    """The ways to all values of a JSON record that hold a digit."""
    if isinstance(record, dict | list):
        for key, value in record.items() if isinstance(record, dict) else enumerate(record):
            for way in digits_of(value):
                yield (key, *way)
    elif re.search(r"\d", str(record)):
        yield ()


def with_another_digit(record: Any, way: tuple[Any, ...]) -> Any:
    """A record whose value at the end of a way has another first digit."""
    if way:
        changed = copy.copy(record)
        changed[way[0]] = with_another_digit(record[way[0]], way[1:])
        return changed
    text = re.sub(r"\d", lambda digit: str((int(digit[0]) + 1) % 10), str(record), count=1)
    return type(record)(text)


GUARDS: dict[str, int] = {"format": 3, "seen": 5}
"""Fields of `.pull.json` that are written nowhere else, by the exit code of a pull: what a newer relabel may have
written is not overwritten, and a channel that was seen further on was put back.
"""


@pytest.mark.parametrize("is_held", [False, True], ids=["following", "held"])
@pytest.mark.parametrize("at", ["", "@stable", "@v1"])
def test_a_digit_that_changed_in_what_a_pull_remembers_is_repaired_by_the_next_pull(
    relabel: Relabel, tmp_path: Path, source: Path, *, at: str, is_held: bool
) -> None:
    bundle_store = open_bundle_store(str(tmp_path / "store"), Storage())
    publish_to(bundle_store, source, version="v1")
    settled = tmp_path / "settled"
    pull_from(bundle_store, settled, "stable")
    if is_held:
        newer = write_bundle(tmp_path / "newer", "two", size=5000)
        publish_to(bundle_store, newer, version="v2")
        pull_from(bundle_store, settled)
        roll_back_in(settled)
    state = json.loads((settled / ".pull.json").read_bytes())
    ways = list(digits_of(state))
    assert {"folder", "version", "version_sha256", "manifest_sha256", "sequence"} <= {way[-1] for way in ways}
    for number, way in enumerate(ways):
        what, dest = "/".join(map(str, way)), tmp_path / str(number)
        shutil.copytree(settled, dest, symlinks=True)
        (dest / ".pull.json").write_text(json.dumps(with_another_digit(state, way)))
        done = relabel("pull", f"{bundle_store.url}/ecom{at}", str(dest))
        if way[0] in GUARDS and done.code not in (0, 10):
            assert done.code == GUARDS[way[0]], (what, done)
            continue
        assert relabel("verify", str(dest)).code == 0, (what, done)
        assert relabel("pull", f"{bundle_store.url}/ecom{at}", str(dest)).code == 10, what
        assert served_text(dest) == "one", what
        remembered = json.loads((dest / ".pull.json").read_bytes())["served"][0]
        if not is_held:
            for key in ("folder", "version", "version_sha256", "manifest_sha256"):
                assert remembered[key] == state["served"][0][key], (what, key)


def test_what_an_earlier_relabel_remembered_is_read_and_a_later_remark_of_the_store_is_added(
    store: LocalStore, source: Path, tmp_path: Path
) -> None:
    """That relabel did not remember what refused a version. Nothing is switched."""
    dest = tmp_path / "dest"
    pull_from(store, dest)

    def without_remarks(held: dict[str, Any]) -> dict[str, Any]:
        served = [{key: value for key, value in one.items() if key != "refused_by"} for one in held["served"]]
        return {**held, "served": served}

    change_json(dest / ".pull.json", without_remarks)
    assert not pull_from(store, dest).has_switched
    publish_to(store, source, channel=None, failed_audits={Path("audit.json"): ["stuffing is 0.8"]})
    assert not pull_from(store, dest).has_switched
    assert json.loads((dest / ".pull.json").read_bytes())["served"][0]["refused_by"] == ["stuffing is 0.8"]


def test_pythons_caches_next_to_a_loader_are_no_damage(store: LocalStore, tmp_path: Path) -> None:
    """A server that imports `load.py` leaves them; a pull that repaired that would switch each time."""
    dest = tmp_path / "dest"
    pull_from(store, dest)
    cache = (dest / "current").resolve() / "__pycache__"
    cache.mkdir()
    (cache / "load.cpython-311.pyc").write_bytes(b"code")
    assert not pull_from(store, dest).has_switched


def inodes(folder: Path) -> set[int]:
    return {path.stat().st_ino for path in folder.rglob("*") if path.is_file()}


def test_store_and_destination_share_no_file_so_damage_to_one_never_reaches_the_other(
    store: LocalStore, source: Path, tmp_path: Path
) -> None:
    """A local store on the same disk, whose files somebody linked, too."""
    shutil.copytree(tmp_path / "store", tmp_path / "linked", copy_function=os.link)
    linked, dest = open_bundle_store(str(tmp_path / "linked"), Storage()), tmp_path / "dest"
    pull_from(linked, dest)
    publish_to(linked, write_bundle(tmp_path / "two", "two"))
    pull_from(linked, dest)
    roll_back(linked, "ecom", "stable", None)
    pull_from(linked, dest)
    flip((dest / "current").resolve() / "load.py")
    pull_from(linked, dest)
    kept = [inodes(folder) for folder in (dest / ".versions").iterdir()]
    assert not set.union(*kept) & (inodes(tmp_path / "store") | inodes(tmp_path / "linked") | inodes(source))
    assert sum(map(len, kept)) == len(set.union(*kept)), "two versions that share a file share its damage"
    for path in (dest / "current").resolve().rglob("*"):
        if path.is_file():
            path.write_bytes(b"damaged")
    for file in (path for path in (tmp_path / "store" / "objects").rglob("*") if path.is_file()):
        assert hashlib.sha256(file.read_bytes()).hexdigest() == file.name
    pull_from(linked, dest)
    assert digests(dest / "current") == digests(source)


def test_a_repair_killed_before_any_change_is_ended_by_the_next_pull(
    store: LocalStore, source: Path, tmp_path: Path
) -> None:
    for number in range(1, 200, 1 if IS_FULL else 9):
        dest = tmp_path / str(number)
        pull_from(store, dest)
        for name in ("load.py", "README.md"):
            flip((dest / "current").resolve() / name)
        was_killed = killed(lambda dest=dest: pull_from(store, dest), before_change=number)
        pull_from(store, dest)
        assert digests(dest / "current") == digests(source)
        assert not pull_from(store, dest).has_switched
        assert len(list((dest / ".versions").iterdir())) == 1
        if not was_killed:
            assert number > 20
            return
    raise AssertionError("it never ended")


# A pull over every damage to store and folder, by `pull.py`, which needs Python alone, and in part by `relabel pull`
# too: both end in the same code and leave the same files.


SCRIPT = Path(puller.__file__)


class World(NamedTuple):
    """A store with versions one and two, and a folder that serves one."""

    store: Path
    dest: Path

    def file(self, name: str) -> Path:
        """The object of a file of version two."""
        held = json.loads((self.store / "ecom/versions/v2.json").read_bytes())
        sha256 = next(file["sha256"] for file in held["body"]["files"] if file["path"] == name)
        return self.store / "objects" / sha256[:2] / sha256

    @property
    def version(self) -> Path:
        return self.store / "ecom/versions/v2.json"

    @property
    def channel(self) -> Path:
        return self.store / "ecom/channels/stable.json"


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two bundles, with a model that each holds under two names, as exports with `--triton` do."""
    top = tmp_path_factory.mktemp("bundles")
    for text in ("one", "two"):
        folder = write_bundle(top / text, text, size=5000)
        (folder / "triton/1").mkdir(parents=True)
        shutil.copy(folder / "model.onnx", folder / "triton/1/model.onnx")
        seal_bundle(folder, {"name": "ecom", "lineage": {"student": text}})
    return {text: top / text for text in ("one", "two")}


@pytest.fixture(scope="module")
def worlds(
    tmp_path_factory: pytest.TempPathFactory, bundles: dict[str, Path], keys: dict[str, Path]
) -> dict[str, World]:
    """By who signed: nobody, our key, or theirs."""
    found = {}
    for who in ("nobody", "ours", "theirs"):
        key = None if who == "nobody" else SigningKey(str(keys[who]))
        top = tmp_path_factory.mktemp(who)
        bundle_store = open_bundle_store(str(top / "store"), Storage())
        publish_to(bundle_store, bundles["one"], version="v1", key=key)
        pull_from(bundle_store, top / "dest")
        publish_to(bundle_store, bundles["two"], version="v2", key=key)
        found[who] = World(top / "store", top / "dest")
    return found


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RELABEL_TRUST_KEY", raising=False)


def left_in(dest: Path) -> dict[str, str]:
    """What lies in a folder, but for locks: digests of files, targets of links."""
    found = {}
    for path in sorted(dest.rglob("*") if dest.is_dir() else [dest]):
        name = path.relative_to(dest).as_posix()
        if path.is_symlink():
            found[name] = f"→ {os.readlink(path)}"  # noqa: PTH115
        elif path.is_file() and not name.startswith(".locks"):
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.is_fifo():
            found[name] = "a pipe"
    return found


def copied(world: World, top: Path) -> World:
    top.mkdir(parents=True)
    shutil.copytree(world.store, top / "store", symlinks=True)
    shutil.copytree(world.dest, top / "dest", symlinks=True)
    return World(top / "store", top / "dest")


class Ended(NamedTuple):
    code: int
    left: dict[str, str]
    said: str


Harm = Callable[[World], Any]
Pull = Callable[..., int]


@pytest.fixture
def pull(relabel: Relabel, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Pull:
    """`pull(world, harm, "--keep", "1")`: `pull.py` pulls `stable` from a copy of a world that was harmed, and with
    `both=True` so does `relabel pull` from another; the code in which they end, once what they left is found to be the
    same.
    """
    calls = iter(range(1000))

    def one(tool: str, place: World, at: str, options: tuple[str, ...]) -> Ended:
        arguments = [f"{place.store}/ecom{at}", str(place.dest), *options]
        if "--rollback" in options:
            del arguments[0]
        if tool == "relabel":
            outcome = relabel("pull", *arguments)
            return Ended(outcome.code, left_in(place.dest), outcome.out + outcome.err)
        capsys.readouterr()
        code = puller.main(arguments)
        return Ended(code, left_in(place.dest), "".join(capsys.readouterr()))

    def run(world: World, harm: Harm, *options: str, at: str = "@stable", both: bool = False) -> int:
        """What is refused leaves the active version as it was, and writes nothing outside of the folder."""
        top = tmp_path / str(next(calls))
        ended = {}
        for tool in ("relabel", "pull.py") if both else ("pull.py",):
            place = copied(world, top / tool)
            harm(place)
            before = left_in(place.dest / "current"), left_in(place.store)
            ended[tool] = one(tool, place, at, options)
            assert ended[tool].code in (0, 10) or left_in(place.dest / "current") == before[0]
            assert left_in(place.store) == before[1]
        ours = ended["pull.py"]
        assert all(one[:2] == ours[:2] for one in ended.values()), ended
        assert ours.code or served_text(top / "pull.py" / "dest") in ("one", "two"), "the active version is whole"
        assert "Traceback" not in ours.said
        shutil.rmtree(top)
        return ours.code

    return run


def nothing(_world: World) -> None:
    pass


OBJECT_HARMS: dict[str, Callable[[Path], Any]] = {
    "missing": Path.unlink,
    "flipped": flip,
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 9),
    "emptied": lambda path: os.truncate(path, 0),
    "grown": lambda path: path.write_bytes(path.read_bytes() + b"more"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("harm", OBJECT_HARMS)
def test_over_every_damage_to_what_the_store_holds_both_end_alike(
    pull: Pull, worlds: dict[str, World], harm: str
) -> None:
    """Objects that the new version alone has, one that a version here has too, and the records."""
    codes = {}
    for name in ("model.onnx", "README.md", "manifest.json"):
        hit: Harm = lambda world, name=name: OBJECT_HARMS[harm](world.file(name))  # noqa: E731
        codes[name] = pull(worlds["nobody"], hit, both=True)
    assert codes == {"model.onnx": 3, "README.md": 0, "manifest.json": 3}, "what is here is not fetched"
    for record in ("version", "channel"):
        assert pull(worlds["nobody"], lambda world, record=record: OBJECT_HARMS[harm](getattr(world, record))) == 3


def in_body(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda held: {**held, "body": change(held["body"])}


def in_last_move(**values: Any) -> Callable[[Any], Any]:
    return in_body(lambda body: {**body, "moves": [*body["moves"][:-1], {**body["moves"][-1], **values}]})


def in_first_file(**values: Any) -> Callable[[Any], Any]:
    return in_body(lambda body: {**body, "files": [{**body["files"][0], **values}, *body["files"][1:]]})


RECORDS: dict[str, tuple[str, Callable[[Any], Any], int]] = {
    "a digest of another": ("version", in_first_file(sha256="0" * 64), 3),
    "no digest": ("version", in_first_file(sha256="../x"), 3),
    "a size below nothing": ("version", in_first_file(size_bytes=-1), 3),
    "a size that is no number": ("version", in_first_file(size_bytes="1"), 3),
    "a file of more keys": ("version", in_first_file(more=1), 3),
    "another format": ("version", lambda held: {**held, "format": 2}, 3),
    "another kind": ("version", lambda held: {**held, "kind": "channel"}, 3),
    "no body": ("version", lambda held: {**held, "body": None}, 3),
    "signatures that are not valid": ("version", lambda held: {**held, "signatures": "none"}, 3),
    "an invalid signature": ("channel", lambda held: {**held, "signatures": [{}]}, 3),
    "too many signatures": (
        "channel",
        lambda held: {**held, "signatures": [{"algorithm": "a", "key_id": "0" * 16, "signature": ""}] * 17},
        3,
    ),
    "no manifest among the files": (
        "version",
        in_body(lambda body: {**body, "files": [f for f in body["files"] if f["path"] != "manifest.json"]}),
        3,
    ),
    "another bundle's": ("channel", in_body(lambda body: {**body, "name": "other"}), 3),
    "another channel's": ("channel", in_body(lambda body: {**body, "channel": "other"}), 3),
    "more than it may hold": ("channel", in_body(lambda body: {**body, "more": 1}), 3),
    "no move": ("channel", in_body(lambda body: {**body, "moves": []}), 3),
    "an older move on top": ("channel", in_body(lambda body: {**body, "moves": body["moves"][:1]}), 10),
    "a move under the same sequence": ("channel", in_body(lambda body: {**body, "moves": body["moves"][1:]}), 0),
    "sequences that jump": ("channel", in_last_move(sequence=7), 3),
    "sequences from nothing": ("channel", in_last_move(sequence=0), 3),
    "a huge sequence": ("channel", in_last_move(sequence=2**60), 3),
    "a sequence that is text": ("channel", in_last_move(sequence="2"), 3),
    "a version that climbs out": ("channel", in_last_move(version="../../x"), 3),
    "a version that is not there": ("channel", in_last_move(version="v3"), 3),
    "another record's digest": ("channel", in_last_move(version_sha256="0" * 64), 3),
    "a reason of its own": ("channel", in_last_move(reason="none"), 3),
    "terminal codes": ("channel", in_last_move(moved="\x1b[2J"), 3),
    "a signer of terminal codes": (
        "channel",
        lambda held: {**held, "signatures": [{"algorithm": "ed25519", "key_id": "\x1b[2J", "signature": ""}]},
        3,
    ),
}


@pytest.mark.parametrize("name", RECORDS)
def test_every_record_that_was_tampered_with_is_refused_and_no_key_vouches_for_it(
    pull: Pull, worlds: dict[str, World], name: str, keys: dict[str, Path]
) -> None:
    record, change, code = RECORDS[name]
    harm: Harm = lambda world: change_json(getattr(world, record), change)  # noqa: E731
    assert pull(worlds["nobody"], harm) == code
    assert pull(worlds["ours"], harm, "--key", str(keys["ours.pub"])) in (3, 5)
    if record == "version":
        assert pull(worlds["ours"], harm, "--key", str(keys["ours.pub"]), at="@v2") in (3, 5)


TEXTS = ('{"a": 1, "a": 2}', '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', "[" * 100_000, "[]", "\xff", "")


def test_a_record_that_is_no_json_is_refused(pull: Pull, worlds: dict[str, World]) -> None:
    for text in TEXTS:
        harm: Harm = lambda world, text=text: world.channel.write_bytes(text.encode("latin-1"))  # noqa: E731
        assert pull(worlds["nobody"], harm) == 3


@pytest.mark.parametrize("name", ["/etc/passwd", "../evil", "a\\b", "MODEL.ONNX", "manifest.json/x"])
def test_names_that_could_do_harm_are_refused_before_anything_is_made(
    pull: Pull, worlds: dict[str, World], name: str, tmp_path: Path
) -> None:
    def harm(world: World) -> None:
        evil = {"path": name, "size_bytes": 4, "sha256": hashlib.sha256(b"evil").hexdigest()}
        path = world.store / "objects" / evil["sha256"][:2] / evil["sha256"]
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"evil")
        change_json(world.version, in_body(lambda body: {**body, "files": [*body["files"], evil]}))
        body = json.loads(world.version.read_bytes())["body"]
        change_json(world.channel, in_last_move(version_sha256=hashlib.sha256(puller.canonical(body)).hexdigest()))

    assert pull(worlds["nobody"], harm) == 3
    assert not list(tmp_path.rglob("evil"))


def test_a_manifest_that_lists_other_files_than_the_record_is_refused(pull: Pull, worlds: dict[str, World]) -> None:
    def harm(world: World) -> None:
        change_json(world.version, in_body(lambda body: {**body, "files": body["files"][1:]}))
        body = json.loads(world.version.read_bytes())["body"]
        change_json(world.channel, in_last_move(version_sha256=hashlib.sha256(puller.canonical(body)).hexdigest()))

    assert pull(worlds["nobody"], harm) == 3


def test_signatures_are_believed_and_refused_by_both_alike(
    pull: Pull, worlds: dict[str, World], keys: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = ("--key", str(keys["ours.pub"])), ("--key", str(keys["theirs.pub"]))
    both = partial(pull, both=True)
    assert both(worlds["ours"], nothing, *ours) == 0
    assert both(worlds["ours"], nothing, *theirs, *ours) == 0
    assert both(worlds["ours"], nothing) == 0
    assert both(worlds["theirs"], nothing, *ours) == 5
    assert both(worlds["nobody"], nothing, *ours) == 5
    assert both(worlds["ours"], nothing, "--key", str(tmp_path / "absent.pub")) == 3
    assert both(worlds["ours"], nothing, "--key", str(keys["ours"])) == 3, "a private key is no public one"
    for record in ("version", "channel"):
        unsigned: Harm = lambda world, record=record: change_json(  # noqa: E731
            getattr(world, record), lambda held: {**held, "signatures": []}
        )
        false: Harm = lambda world, record=record: change_json(  # noqa: E731
            getattr(world, record),
            lambda held: {**held, "signatures": [{**held["signatures"][0], "signature": "AAAA" * 22}]},
        )
        swapped: Harm = lambda world, record=record: shutil.copy(  # noqa: E731
            worlds["theirs"].store / getattr(world, record).relative_to(world.store), getattr(world, record)
        )
        for harm in (unsigned, false, swapped):
            assert pull(worlds["ours"], harm, *ours) == 5
    for text in (keys["ours.pub"].read_text(), str(keys["ours.pub"])):
        monkeypatch.setenv("RELABEL_TRUST_KEY", text)
        assert both(worlds["ours"], nothing) == 0
        assert both(worlds["theirs"], nothing) == 5


def make_bad_part(world: World) -> None:
    """What a download under way may have become on a bad disk."""
    (world.dest / ".partial").mkdir()
    part = world.file("model.onnx")
    (world.dest / ".partial" / part.name).write_bytes(b"bad" * 100)


def make_good_part(world: World) -> None:
    (world.dest / ".partial").mkdir()
    part = world.file("model.onnx")
    (world.dest / ".partial" / part.name).write_bytes(part.read_bytes()[:1234])


def make_strangers(world: World) -> None:
    """Links and files in the folder that a killed pull left."""
    body = json.loads(world.version.read_bytes())["body"]
    building = world.dest / ".versions" / f".new-{hashlib.sha256(puller.canonical(body)).hexdigest()[:16]}"
    building.mkdir()
    (building / "model.onnx").symlink_to(world.store / "victim")
    (building / "more").write_text("more")
    (building / "README.md").mkdir()
    (building / "README.md" / "inside").write_text("more")


def link_away(version: Path) -> None:
    """A folder that lies elsewhere now."""
    version.symlink_to(version.rename(version.parents[1] / "elsewhere"))


def swap(path: Path, make: Callable[[Path], Any]) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    make(path)


STATES: dict[str, tuple[Harm, int]] = {
    "nothing": (nothing, 0),
    "a first pull": (lambda world: shutil.rmtree(world.dest), 0),
    "the folder is a file": (lambda world: swap(world.dest, Path.touch), 3),
    "the link is a file": (lambda world: swap(world.dest / "current", Path.touch), 3),
    "the link is a folder": (lambda world: swap(world.dest / "current", Path.mkdir), 3),
    "the link is gone": (lambda world: (world.dest / "current").unlink(), 0),
    "the link leads away": (lambda world: swap(world.dest / "current", lambda path: path.symlink_to("/nowhere")), 0),
    "the link leads to a version that nobody pulled": (
        lambda world: (
            shutil.copytree(world.dest / ".versions/v1", world.dest / ".versions/v9"),
            swap(world.dest / "current", lambda path: path.symlink_to(".versions/v9")),
        ),
        0,
    ),
    "the version is gone": (lambda world: shutil.rmtree(world.dest / ".versions/v1"), 0),
    "the versions are gone": (lambda world: shutil.rmtree(world.dest / ".versions"), 0),
    "the version is a link": (lambda world: link_away(world.dest / ".versions/v1"), 0),
    "the version is a file": (lambda world: swap(world.dest / ".versions/v1", Path.touch), 0),
    "the version has no mode": (lambda world: (world.dest / ".versions/v1").chmod(0), 0),
    "more in the version": (lambda world: (world.dest / ".versions/v1/more").mkdir(), 0),
    "the versions are a link to nothing": (
        lambda world: swap(world.dest / ".versions", lambda path: path.symlink_to("/nowhere/else")),
        3,
    ),
    "no state": (lambda world: (world.dest / ".pull.json").unlink(), 0),
    "a pipe for a state": (lambda world: swap(world.dest / ".pull.json", os.mkfifo), 3),
    **{
        f"the state {text!r}": (lambda world, text=text: (world.dest / ".pull.json").write_text(text), 3)
        for text in ("", "{", "[]", '{"format": 9}', '{"format": 1}', '{"format": 1, "name": 3}')
    },
    **{
        f"a damaged state: {key} {value!r}": (
            lambda world, key=key, value=value: change_json(
                world.dest / ".pull.json", lambda held: {**held, key: value}
            ),
            3,
        )
        for key, value in (
            ("name", "a/b"),
            ("seen", 0),
            ("seen", {"stable": {"sequence": -1, "version_sha256": "0" * 64}}),
            ("seen", {"stable": {"sequence": 1, "version_sha256": "0" * 63 + "g"}}),
            ("held", ""),
            ("held", {"stable": 2**53}),
            ("left", None),
            ("left", {"stable": ["0" * 65]}),
            ("served", ""),
        )
    },
    **{
        f"a damaged state: the active version, {key} {value!r}": (
            lambda world, key=key, value=value: change_json(
                world.dest / ".pull.json",
                lambda held: {**held, "served": [{**held["served"][0], key: value}]},
            ),
            3,
        )
        for key, value in (
            ("folder", "../v1"),
            ("version", "v 1"),
            ("version_sha256", "g" * 64),
            ("manifest_sha256", ""),
            ("channel", "é"),
            ("sequence", "1"),
            ("more", 1),
        )
    },
    "the state of another bundle": (
        lambda world: change_json(world.dest / ".pull.json", lambda held: {**held, "name": "other"}),
        3,
    ),
    "a newer sequence was seen": (
        lambda world: change_json(
            world.dest / ".pull.json",
            lambda held: {**held, "seen": {"stable": {"sequence": 3, "version_sha256": "0" * 64}}},
        ),
        5,
    ),
    "another version of this sequence was seen": (
        lambda world: change_json(
            world.dest / ".pull.json",
            lambda held: {**held, "seen": {"stable": {"sequence": 2, "version_sha256": "0" * 64}}},
        ),
        5,
    ),
    "it was rolled back from here": (
        lambda world: change_json(world.dest / ".pull.json", lambda held: {**held, "held": {"stable": 2}}),
        10,
    ),
    "it was rolled back from an earlier move": (
        lambda world: change_json(world.dest / ".pull.json", lambda held: {**held, "held": {"stable": 1, "b": 4}}),
        0,
    ),
    "a download is half way": (make_good_part, 0),
    "a download that went bad": (make_bad_part, 0),
    "strangers in the unpacking folder": (make_strangers, 0),
    "leavings of killed pulls": (
        lambda world: [
            (world.dest / name).mkdir(parents=True)
            for name in (".trash-1", ".versions/.trash-2", ".versions/.new-0", ".versions/v0")
        ],
        0,
    ),
    "it is the active version": (lambda world: (world.dest / MANIFEST_NAME).write_text("{}"), 3),
    "it is a store": (lambda world: (world.dest / OBJECTS).mkdir(), 3),
    "a damaged folder under the new version's name": (lambda world: (world.dest / ".versions/v2").mkdir(), 0),
}


@pytest.mark.parametrize("name", STATES)
def test_every_state_of_the_folder_is_repaired_or_refused(pull: Pull, worlds: dict[str, World], name: str) -> None:
    harm, code = STATES[name]
    assert pull(worlds["nobody"], harm) == code


def test_options_and_addresses_mean_the_same_to_both(
    pull: Pull, worlds: dict[str, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, both = worlds["nobody"], partial(pull, both=True)
    assert both(world, nothing, at="") == 0
    assert pull(world, nothing, at="@v2") == 0
    assert pull(world, nothing, at="@v1") == 10
    assert pull(world, nothing, at="@absent") == 3
    assert both(world, nothing, at="@x y") == 2
    assert pull(world, nothing, "--keep", "1") == 0
    assert both(world, nothing, "--keep", "0") == 2
    held: Harm = lambda world: change_json(  # noqa: E731
        world.dest / ".pull.json", lambda state: {**state, "held": {"stable": 2}}
    )
    assert pull(world, held, "--unhold") == 0
    damaged: Harm = lambda world: (held(world), flip(world.dest / "current/model.onnx"))  # noqa: E731
    assert pull(world, damaged) == 0, "what is held is repaired as what it is"
    assert both(world, nothing, "--rollback") == 3, "there is nothing to go back to"

    def pulled(world: World) -> None:
        pull_from(open_bundle_store(str(world.store), Storage()), world.dest)

    def left(world: World) -> None:
        bundle_store = open_bundle_store(str(world.store), Storage())
        pulled(world)
        roll_back(bundle_store, "ecom", "stable", None)
        pull_from(bundle_store, world.dest)

    assert both(world, pulled, "--rollback") == 0
    with pytest.raises(SystemExit) as ended:
        puller.main(["--rollback", str(world.dest), "--check-parity"])
    assert ended.value.code == 2
    assert pull(world, pulled, "--rollback", "--to", "v1") == 0
    assert both(world, pulled, "--rollback", "--to", "v2") == 10
    assert pull(world, pulled, "--rollback", "--to", "v3") == 3
    assert pull(world, left, "--rollback") == 3, "the channel left v2 by a rollback"
    assert both(world, left, "--rollback", "--to", "v2") == 0
    rotten: Harm = lambda world: (pulled(world), flip(world.dest / ".versions/v1/model.onnx"))  # noqa: E731
    assert pull(world, rotten, "--rollback") == 3
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10})())
    assert both(world, nothing) == 20


def test_an_empty_place_is_refused(
    relabel: Relabel,
    worlds: dict[str, World],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An empty place is a variable of a script that nobody set: the working directory is not what was meant."""
    monkeypatch.chdir(tmp_path)
    address = f"{worlds['nobody'].store}/ecom"
    for start in (address, "--rollback"):
        assert puller.main([start, ""]) == 2
        assert "DEST is empty" in capsys.readouterr().err
        relabel("pull", start, "").refused(2, "DEST is")
    assert not list(tmp_path.iterdir())


def test_of_two_pulls_the_second_ends_in_75(pull: Pull, worlds: dict[str, World]) -> None:
    with contextlib.ExitStack() as locks:

        def lock(world: World) -> None:
            file = locks.enter_context((world.dest / ".locks/pull.lock").open("r+b"))
            fcntl.flock(file, fcntl.LOCK_EX)

        assert pull(worlds["nobody"], lock, both=True) == 75


def test_the_script_is_not_written_over_another_file(relabel: Relabel, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: mine")
    relabel("pull", "--script", str(tmp_path / "job.yaml")).refused(2, "job.yaml: is there and is no pull.py")
    assert (tmp_path / "job.yaml").read_text() == "name: mine"
    relabel("pull", "--script", str(tmp_path)).refused(2, "is a folder")
    relabel("pull", "--script", str(tmp_path / "pull.py"), "--unhold").refused(2, "--script takes no other option")
    assert not (tmp_path / "pull.py").exists()


def test_it_runs_where_nothing_is_installed_and_without_cryptography_pulls_nothing_that_should_be_signed(
    relabel: Relabel, worlds: dict[str, World], keys: dict[str, Path], tmp_path: Path
) -> None:
    world = copied(worlds["ours"], tmp_path / "world")
    assert relabel("pull", "--script", str(tmp_path / "pull.py")).code == 0
    assert (tmp_path / "pull.py").read_bytes() == SCRIPT.read_bytes()
    assert relabel("pull", "--script", str(tmp_path / "pull.py")).code == 0, "over an earlier one"

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        # without a site-packages folder: nothing that was installed can be imported
        command = [sys.executable, "-I", "-S", str(tmp_path / "pull.py"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=variables, cwd=tmp_path, check=False)

    before = left_in(world.dest)
    by_option = run(f"{world.store}/ecom", str(world.dest), "--key", str(keys["ours.pub"]))
    by_variable = run(f"file://{world.store}/ecom", str(world.dest), RELABEL_TRUST_KEY=str(keys["ours.pub"]))
    for done in (by_option, by_variable):
        assert done.returncode == 4
        assert "cryptography" in done.stderr
    assert left_in(world.dest) == before
    done = run(f"file://{world.store}/ecom", str(world.dest))
    assert done.returncode == 0
    assert done.stdout.startswith(f"{world.dest}: serves v2 (stable, sequence 2), ")
    assert run(f"file://{world.store}/ecom", str(world.dest)).returncode == 10
    assert run("--rollback", str(world.dest)).returncode == 0
    assert served_text(world.dest) == "one"
    assert run("--help").returncode == 0
    assert run(str(world.dest)).returncode == 2


class Ranges(SimpleHTTPRequestHandler):
    """A folder over HTTP; knows ranges or not, and breaks off where a test says so."""

    asked: list[str]
    knows_ranges = True
    cuts: list[int]

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            return self.send_error(404)
        data, start = path.read_bytes(), 0
        if self.knows_ranges and self.headers["Range"]:
            start = int(re.fullmatch(r"bytes=(\d+)-", self.headers["Range"])[1])  # type: ignore[index]
        self.asked.append(f"{path.name[:8]} {start}")
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        length = self.cuts.pop() if len(data) > 4000 and self.cuts else len(data)
        self.wfile.write(data[start : start + length])
        return None


@contextlib.contextmanager
def serving(folder: Path, *, knows_ranges: bool, cuts: tuple[int, ...]) -> Iterator[Any]:
    """A server of its own handler class, and the port that it listens at."""
    handler = type("Handler", (Ranges,), {"asked": [], "knows_ranges": knows_ranges, "cuts": list(cuts)})
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
    httpd.daemon_threads = True
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield httpd.server_address[1], handler
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()


@pytest.mark.parametrize("knows_ranges", [True, False], ids=["ranges", "no ranges"])
def test_plain_http_is_taken_with_a_key_alone_and_a_broken_reply_is_gone_on_with(
    worlds: dict[str, World], tmp_path: Path, keys: dict[str, Path], knows_ranges: bool
) -> None:
    world = copied(worlds["ours"], tmp_path / "world")
    with serving(world.store, knows_ranges=knows_ranges, cuts=(700, 600)) as (port, handler):
        address = f"http://localhost:{port}/ecom"
        assert puller.main([address, str(world.dest)]) == 2
        assert puller.main([address, str(world.dest), "--key", str(keys["theirs.pub"])]) == 5
        key = ("--key", str(keys["ours.pub"]))
        assert puller.main([address, str(world.dest), *key]) == 0
        assert puller.main([address, str(world.dest), *key]) == 10
        assert puller.main([f"{address}@absent", str(world.dest), *key]) == 3
    assert served_text(world.dest) == "two"
    model = [asked for asked in handler.asked if asked.startswith(world.file("model.onnx").name[:8])]
    assert [int(asked.split()[1]) for asked in model] == ([0, 600, 1300] if knows_ranges else [0, 0, 0])


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("", 3, "the server's certificate is not trusted (SSL_CERT_FILE)"),
        ("<Code>RequestTimeout</Code>", 20, "no good answer (400 RequestTimeout)"),
        ("<Code>ExpiredToken</Code>", 3, "refused (400 ExpiredToken)"),
    ],
)
def test_what_a_server_does_is_named_and_tried_again_where_it_may_pass(
    body: str, code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(*_: Any, **__: Any) -> None:
        if not body:
            raise urllib.error.URLError(ssl.SSLCertVerificationError("self-signed"))
        raise urllib.error.HTTPError("", 400, "Bad Request", Message(), io.BytesIO(body.encode()))

    monkeypatch.setattr(urllib.request.OpenerDirector, "open", ask)
    monkeypatch.setattr(puller.time, "sleep", lambda _: None)
    assert puller.main(["https://store.example/ecom", str(tmp_path / "dest")]) == code
    assert said in capsys.readouterr().err


VERDICTS = {
    "pass": 0,
    "every third 503": 0,
    "every third drop": 0,
    "every third cut": 0,
    "503": 20,
    "refuse": 20,
    "flip": 3,
}


@pytest.mark.s3
def test_over_every_fault_of_an_s3_server_both_end_alike(
    relabel: Relabel,
    s3_server: seaweed.Server,
    worlds: dict[str, World],
    bundles: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seaweed.lead_to(s3_server.environment, monkeypatch)
    url = f"s3://{seaweed.BUCKET}/{tmp_path.name}/a b+c"
    bundle_store = open_bundle_store(url, Storage())
    publish_to(bundle_store, bundles["one"], version="v1")
    publish_to(bundle_store, bundles["two"], version="v2")
    for module in (objects, puller):
        monkeypatch.setattr(module.time, "sleep", lambda _: None)
    tools: dict[str, Callable[..., int]] = {
        "relabel": lambda *arguments: int(relabel("pull", *arguments).code),
        "pull.py": lambda *arguments: puller.main(arguments),
    }

    def run(what: str, url: str) -> int:
        ended = []
        for tool, call in tools.items():
            world = copied(worlds["nobody"], tmp_path / what / tool)
            ended.append((call(f"{url}/ecom", str(world.dest)), left_in(world.dest)))
        assert ended[0] == ended[1], what
        return ended[0][0]

    with seaweed.proxying(s3_server) as proxy:
        seaweed.lead_to(proxy.environment, monkeypatch)
        for verdict, code in VERDICTS.items():
            start = len(proxy.seen)

            def decide(exchange: seaweed.Exchange, verdict: str = verdict, start: int = start) -> str:
                is_every = verdict.startswith("every third ")
                is_hit = (len(proxy.seen) - start) % 3 == 2 if is_every else "/objects/" in exchange.path
                return verdict.removeprefix("every third ") if is_hit or verdict in ("503", "refuse") else "pass"

            proxy.decide = decide
            assert run(verdict, url) == code, verdict
        proxy.decide = lambda exchange: "pass"
        assert run("bucket", f"s3://no-such-bucket-{seaweed.BUCKET}/x") == 3
        seaweed.lead_to(seaweed.environment(proxy.url, secret="wrong"), monkeypatch)
        assert run("secret", url) == 3
