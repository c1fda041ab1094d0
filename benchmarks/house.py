"""Figures of the code itself, by room: statements, and subscripts whose key is written out (`held["rows"]`). Below the
sums stands how long a file is.

    python benchmarks/house.py [--files | --since COMMIT]

Such a key is a field that a typed record would name. Both are counted in the syntax tree, so that formatting moves
neither. Tests and docstrings are left out; benchmarks/ has a line of its own below the sum. `house_2026-11-22.md` and
`house_2026-11-23.md` hold the figures that later ones are compared with. `--since` says instead what each commit
changed: statements in all, import statements, declarations (classes, functions, annotated fields), others.
"""

from __future__ import annotations

import argparse
import ast
import functools
import statistics
import subprocess
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FLOORS = ("manifests", "labelers", "distill", "export", "jobs")


class Size(NamedTuple):
    """Statements without docstrings, and subscripts with a literal text as their key, read or written."""

    statements: int = 0
    subscripts: int = 0

    def plus(self, other: Size) -> Size:
        return Size(self.statements + other.statements, self.subscripts + other.subscripts)


def size_of(source: str) -> Size:
    """Count one file's source text.

    Raises:
        SyntaxError: it is not Python.
    """
    nodes = list(ast.walk(ast.parse(source)))
    statements = sum(isinstance(node, ast.stmt) and not _is_text(node) for node in nodes)
    keys = (node.slice for node in nodes if isinstance(node, ast.Subscript))
    return Size(statements, sum(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in keys))


def _is_text(node: ast.AST) -> bool:
    """A docstring, of whatever it is."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def sizes(folder: Path) -> dict[str, Size]:
    """The size of each Python file below a folder, by its path from the repository's root."""
    return {path.relative_to(ROOT).as_posix(): size_of(path.read_text()) for path in sorted(folder.rglob("*.py"))}


class Kinds(NamedTuple):
    """Statements by what they are for."""

    all: int = 0
    imports: int = 0
    declarations: int = 0

    def less(self, other: Kinds) -> Kinds:
        return Kinds(*(own - its for own, its in zip(self, other, strict=True)))

    def plus(self, other: Kinds) -> Kinds:
        return Kinds(*(own + its for own, its in zip(self, other, strict=True)))

    def __str__(self) -> str:
        return f"{self.all:6} {self.imports:6} {self.declarations:6} {self.all - self.imports - self.declarations:6}"


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True).stdout


@functools.cache
def kinds_of(blob: str) -> Kinds:
    """Of a file's text as git holds it; of none, where there is no file."""
    if not blob.strip("0"):
        return Kinds()
    found = [one for one in ast.walk(ast.parse(git("cat-file", "blob", blob))) if isinstance(one, ast.stmt)]
    found = [one for one in found if not _is_text(one)]
    fields = sum(
        isinstance(one, ast.AnnAssign) for kind in found if isinstance(kind, ast.ClassDef) for one in kind.body
    )
    named = sum(isinstance(one, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) for one in found)
    return Kinds(len(found), sum(isinstance(one, ast.Import | ast.ImportFrom) for one in found), named + fields)


def show_commits(since: str) -> None:
    """What each commit changed, and all of them."""
    total = Kinds()
    print("   all imports declarations others")
    for line in git("log", "--reverse", "--no-merges", "--format=%h %s", f"{since}..HEAD").splitlines():
        change = Kinds()
        for entry in git("diff-tree", "-r", "--no-commit-id", line.split()[0], "--", *FLOORS).splitlines():
            meta, _, path = entry.partition("\t")
            if path.endswith(".py"):
                before, after = meta.split()[2:4]
                change = change.plus(kinds_of(after).less(kinds_of(before)))
        if any(change):
            print(change, line)
        total = total.plus(change)
    print(total, "sum")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="also each file with a literal-key subscript, most first")
    parser.add_argument("--since", metavar="COMMIT", help="what each commit since this one changed")
    asked = parser.parse_args()
    if asked.since:
        show_commits(asked.since)
        return
    files = {name: size for floor in FLOORS for name, size in sizes(ROOT / floor).items()}
    rooms: Counter[str] = Counter()
    by_room: dict[str, Size] = {}
    for name, size in files.items():
        room = name.rpartition("/")[0]
        rooms[room] += 1
        by_room[room] = by_room.get(room, Size()).plus(size)
    total = functools.reduce(Size.plus, files.values(), Size())
    print("| room | files | statements | literal-key subscripts |\n|---|---|---|---|")
    for room in sorted(rooms):
        print(f"| {room} | {rooms[room]} | {by_room[room].statements:,} | {by_room[room].subscripts:,} |")
    print(f"| **sum** | {len(files)} | **{total.statements:,}** | **{total.subscripts:,}** |")
    beside = sizes(ROOT / "benchmarks").values()
    own = functools.reduce(Size.plus, beside, Size())
    print(f"| benchmarks | {len(beside)} | {own.statements:,} | {own.subscripts:,} |")
    lines = [len((ROOT / name).read_text().splitlines()) for name in files]
    deciles = statistics.quantiles(lines, n=10, method="inclusive")
    print(f"\nlines of a file: median {statistics.median(lines):.0f}, 90th percentile {deciles[8]:.0f}")
    for name, size in sorted(files.items(), key=lambda item: -item[1].subscripts) if asked.files else ():
        if size.subscripts:
            print(f"{size.subscripts:5} {name}")


if __name__ == "__main__":
    main()
