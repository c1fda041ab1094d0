"""Code, pages and messages use plain technical English: the words below are not used, whatever their sense."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

BANNED = {
    "told": "reported, printed",
    "tells": "reports, says",
    "stands": "is, occurs",
    "behind": "after",
    "beside": "next to, with",
    "comes to": "amounts to, is",
    "held against": "compared with, checked against",
    "in vain": "discarded, to no effect",
    "whoever": "anyone who",
    "that is none": "invalid, no",
    "anew": "again",
    "what serves": "the active version",
    "at work": "running",
    "is said": "is reported",
}
SEARCHED = (
    *(f"{room}/**/*.py" for room in ("manifests", "labelers", "distill", "export", "jobs", "tests", "benchmarks")),
    "docs/**/*.md",
    "*.md",
    "jobs/**/*.yaml",
    "jobs/**/*.html",
    "Makefile",
    "pyproject.toml",
)
"""Prompts (`labelers/templates`) and goldens are not searched: their bytes are part of fingerprints."""
PATTERN = re.compile(rf"(?<![a-zA-Z])({'|'.join(BANNED)})(?![a-zA-Z])", re.IGNORECASE)
QUOTED = re.compile(r"beside the point|before behind below beside by")
"""The UMBRELA prompt and the fake engine's texts, and the prepositions that a student counts: bytes that must stay."""


def files() -> list[Path]:
    found = (path for pattern in SEARCHED for path in ROOT.glob(pattern))
    return sorted(path for path in found if path != Path(__file__).resolve() and "golden" not in path.parts)


@pytest.mark.parametrize("folder", sorted({path.relative_to(ROOT).parts[0] for path in files()}))
def test_no_banned_word_is_used(folder: str) -> None:
    used = [
        f"{path.relative_to(ROOT)}:{number}: {found[0]}: write {BANNED[found[0].lower()]}"
        for path in files()
        if path.relative_to(ROOT).parts[0] == folder
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for found in PATTERN.finditer(QUOTED.sub("", line))
    ]
    assert not used, "\n".join(used)
