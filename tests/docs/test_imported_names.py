"""Whatever tests and benchmarks import from our packages is there: some of them run in environments of their own, or on
a GPU alone, where a name that is gone would be seen late.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = ("relabel", "tests", "benchmarks")


def source_of(module: str) -> Path | None:
    """The file of a module; None where there is none."""
    path = ROOT.joinpath(*module.removeprefix("relabel.").split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


@cache
def names_in(file: Path) -> frozenset[str]:
    """What a module binds at its top, at any depth of `if` and `try` too."""
    found: set[str] = set()
    waiting = list(ast.parse(file.read_text(encoding="utf-8")).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(one.asname or one.name).partition(".")[0] for one in node.names}
        found |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
        waiting += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.ExceptHandler)]
    return frozenset(found)


def imports(file: Path) -> Iterator[tuple[int, str, str]]:
    """Line, module and name of each `from … import …` of ours."""
    package = file.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            module = (
                ".".join([*package[: -node.level], *filter(None, [node.module])]) if node.level else str(node.module)
            )
            if module.partition(".")[0] in OURS:
                yield from ((node.lineno, module, one.name) for one in node.names)


def test_what_tests_and_benchmarks_import_is_there() -> None:
    files = [*sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "benchmarks").rglob("*.py"))]
    found, missing = 0, []
    for file in files:
        for line, module, name in imports(file):
            source = source_of(module)
            is_there = source_of(f"{module}.{name}") is not None or (ROOT / module.replace(".", "/") / name).is_dir()
            if not is_there and (source is None or name not in names_in(source)):
                missing.append(f"{file.relative_to(ROOT)}:{line}: {name} of {module}")
            found += 1
    assert found > 1000
    assert missing == []
