"""The first page of docs/ leads to every other."""

import re

from tests.docs.pages import DOCS


def test_every_page_is_on_the_index() -> None:
    linked = set(re.findall(r"\]\(([^)#]+)", (DOCS / "index.md").read_text(encoding="utf-8")))
    pages = {path.relative_to(DOCS).as_posix() for path in [*DOCS.glob("*.md"), *DOCS.glob("how-to/*.md")]}
    assert sorted(pages - linked - {"index.md"}) == []
    assert "how-to/resume-a-labeling-run.md" in linked
