"""Counts the product's statements and files by room, and fails above .ci/budget.txt. Part of `make check`.

A statement is a node of Python's syntax tree, docstrings left out; a file of definitions alone counts as any other.
Anyone who raises a line writes why in its last column: code that grows without a new capability is a defect.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def statements(source: str) -> int:
    """Statements of a module without its docstrings."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    return sum(not (isinstance(one, ast.Expr) and isinstance(getattr(one.value, "value", None), str)) for one in nodes)


def main() -> int:
    """The exit code: 1 where a room is over its line, or has none."""
    limits = {}
    for line in (ROOT / ".ci" / "budget.txt").read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            room, most, files, *_ = line.split(maxsplit=3)
            limits[room] = int(most), int(files)
    found, files = Counter[str](), Counter[str]()
    for room in limits:
        for path in (ROOT / room).rglob("*.py"):
            found[room] += statements(path.read_text(encoding="utf-8"))
            files[room] += 1
    over = [room for room, (most, many) in limits.items() if found[room] > most or files[room] > many]
    for room, (most, many) in limits.items():
        mark = "  over: delete, or raise the line in .ci/budget.txt and say why" if room in over else ""
        print(f"{room:12} {found[room]:6,} of {most:6,} statements, {files[room]:3} of {many:3} files{mark}")
    product = sum(count for room, count in found.items() if room not in ("tests", "benchmarks"))
    print(f"{'product':12} {product:6,}")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
