"""Figures of the code itself, by room: statements, and subscripts whose key is written out (`held["rows"]`). Below the
sums stands how long a file is.

    python benchmarks/house.py [--files]

Such a key is a field that a typed record would name. Both are counted in the syntax tree, so that formatting moves
neither. Tests and docstrings are left out; benchmarks/ has a line of its own below the sum. `house_2026-11-22.md` and
`house_2026-11-23.md` hold the figures that later ones are compared with.
"""

from __future__ import annotations

import argparse
import ast
import functools
import statistics
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="also each file with a literal-key subscript, most first")
    show_files = parser.parse_args().files
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
    for name, size in sorted(files.items(), key=lambda item: -item[1].subscripts) if show_files else ():
        if size.subscripts:
            print(f"{size.subscripts:5} {name}")


if __name__ == "__main__":
    main()
