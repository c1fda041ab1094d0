"""What packages of others may import: tests/golden/public_names.txt says it, and holds every name to its signature and
members.

A name that is taken up is written there as a line of its own below its module; `--update-golden` fills in the rest.
Everything that is not there may change from one version to the next.
"""

import ast
import importlib
import inspect
import re
import tomllib
from collections.abc import Callable, Iterator
from typing import Any, Protocol, get_args

from pydantic import BaseModel

from tests.docs.pages import DOCS, PAGES, ROOT, blocks

GOLDEN = ROOT / "tests" / "golden" / "public_names.txt"
PORTS = (
    "relabel.labelers.registry.Labeler",
    "relabel.manifests.asks.Engine",
)
"""The interfaces that entry points implement."""


def declared() -> Iterator[tuple[str, list[str]]]:
    """Each module of the golden with its names: lines without indentation, and those that four spaces indent."""
    for part in GOLDEN.read_text(encoding="utf-8").split("\n\n"):
        module, *lines = part.strip().splitlines()
        yield module, [re.split(r"\W", line.strip())[0] for line in lines if re.match(r" {4}\w", line)]


def shown(name: str, value: Any) -> list[str]:
    """A public name's lines: its signature, and of a class the public members that code of ours gave it."""
    if get_args(value):
        return [f"    {name} = {value}"]
    if not inspect.isclass(value):
        return [f"    {name}{_signature(value)}"]
    bases = ", ".join(base.__name__ for base in value.__bases__ if base not in (object, Protocol))
    head = f"    {name}{_signature(value)}" + (f" of {bases}" if bases else "")
    return [head, *(f"        .{member}" for member in sorted(_members(value)))]


def _members(value: type) -> Iterator[str]:
    ours = [kind for kind in value.__mro__ if kind.__module__.partition(".")[0] == "relabel"]
    for member in {name: None for kind in ours for name in (*vars(kind), *inspect.get_annotations(kind))}:
        held = inspect.getattr_static(value, member, None)
        held = held.__func__ if isinstance(held, staticmethod | classmethod) else held
        if member == "__call__" or (not member.startswith("_") and member != "model_config"):
            yield member + (_signature(held) if inspect.isfunction(held) else "")


def _signature(value: Any) -> str:
    """Parameters as they are written: names, annotations, defaults. Nothing of protocols and errors, which have no
    constructor.
    """
    if inspect.isclass(value) and (getattr(value, "_is_protocol", False) or issubclass(value, BaseException)):
        return ""
    found = inspect.signature(value)
    of_fields: dict[str, Any] = {}
    if inspect.isclass(value) and issubclass(value, BaseModel):
        # whose own signature words a bound as pydantic's version does
        of_fields = {
            name: kind for base in reversed(value.__mro__) for name, kind in inspect.get_annotations(base).items()
        }
    written: list[str] = []
    for one in found.parameters.values():
        if one.kind is one.KEYWORD_ONLY and "*" not in written:
            written.append("*")
        kind = of_fields.get(one.name, one.annotation)
        name = one.name if kind is one.empty else f"{one.name}: {_annotation(kind)}"
        default = "" if one.default is one.empty else f" = {one.default!r}"
        written.append(name + (" = …" if re.search("factory|object at 0x", default) else default))
    returned = (
        "" if found.return_annotation in (found.empty, None, "None") else f" -> {_annotation(found.return_annotation)}"
    )
    return f"({', '.join(written)}){returned}"


def _annotation(value: Any) -> str:
    """As it is written; of one that Python has evaluated, without the modules of its names."""
    written = value if isinstance(value, str) else getattr(value, "__forward_arg__", None)
    return written or re.sub(r"\b(?:\w+\.)+(?=\w)", "", inspect.formatannotation(value))


def public_names() -> str:
    parts = []
    for module, names in declared():
        held = importlib.import_module(module)
        parts.append("\n".join([module, *(line for name in names for line in shown(name, getattr(held, name)))]))
    return "\n\n".join(parts) + "\n"


def test_no_public_name_is_gone_and_none_takes_other_arguments(golden: Callable[[str, str], None]) -> None:
    golden("public_names.txt", public_names())


def test_what_the_pages_import_and_what_entry_points_answer_to_is_public() -> None:
    known = {f"{module}.{name}" for module, names in declared() for name in names}
    shown = [block.text for page in PAGES for block in blocks(page) if block.language == "python"]
    shown += [file.read_text(encoding="utf-8") for file in (DOCS / "examples").rglob("*.py")]
    shown_in_pages = {
        f"{node.module}.{name.name}"
        for text in shown
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "relabel"
        for name in node.names
    }
    assert len(shown_in_pages) > 10
    assert sorted((shown_in_pages | set(PORTS)) - known) == []


def test_every_error_that_may_be_caught_is_public() -> None:
    errors = importlib.import_module("relabel.manifests.errors")
    tree = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.RelabelError)
    }
    assert tree == set(dict(declared())["relabel.manifests.errors"])


def test_the_package_says_that_it_is_typed() -> None:
    packaged = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert (ROOT / "relabel" / "py.typed").is_file()
    assert re.search(r'^relabel = \[.*"py\.typed"', packaged, re.MULTILINE)


def test_examples_need_the_project_by_its_own_name_since_relabel_on_the_index_is_somebody_elses() -> None:
    own = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]
    examples = sorted((DOCS / "examples").glob("*/pyproject.toml"))
    assert len(examples) > 1
    for example in examples:
        needed = tomllib.loads(example.read_text(encoding="utf-8"))["project"]["dependencies"]
        assert needed == [own], example
