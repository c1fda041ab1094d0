"""A page says of what only the repository holds that it is in a clone: who installs the wheel has neither."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, blocks

ONLY_IN_A_CLONE = re.compile(r"`(?:benchmarks|tests|docs)/[^`]*`|(?:^|`)make [a-z-]+", re.MULTILINE)
FOR_CONTRIBUTORS = {"architecture.md"}
SITE = [page for page in sorted(DOCS.rglob("*.md")) if page.name not in FOR_CONTRIBUTORS]


def paragraphs(page: Path) -> list[str]:
    """Parts between blank lines; a block belongs to the one before it."""
    inside = {number for block in blocks(page) for number in range(block.line - 1, block.line + len(block.lines) + 1)}
    parts = [""]
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() and number not in inside and number + 1 not in inside:
            parts.append("")
        parts[-1] += f"{line}\n"
    return parts


@pytest.mark.parametrize("page", SITE, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_the_wheel_lacks_is_said_to_be_in_a_clone(page: Path) -> None:
    named = [part for part in paragraphs(page) if ONLY_IN_A_CLONE.search(part)]
    assert [part for part in named if "a clone" not in part] == []


def test_the_search_finds_what_it_is_for() -> None:
    texts = ["see `benchmarks/run_loop.py`", "`make release` writes it", "make faults    # minutes"]
    assert all(ONLY_IN_A_CLONE.search(text) for text in texts)
    assert not ONLY_IN_A_CLONE.search("to make labels of [docs](docs/train.md)")
