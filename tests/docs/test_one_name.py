"""Each word has one meaning, in code as in docs/glossary.md: no two public classes have one name."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.docs.pages import ROOT

ROOMS = ("manifests", "labelers", "distill", "export", "jobs")


def test_no_two_public_classes_have_one_name() -> None:
    places = defaultdict(list)
    for room in ROOMS:
        for file in (ROOT / room).rglob("*.py"):
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert len(places) > 300
    assert {name: sorted(held) for name, held in places.items() if len(held) > 1} == {}
