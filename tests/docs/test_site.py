"""The site of docs/ builds with every link alive, and asks nobody for anything when it is read."""

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from relabel.jobs.cli import COMMANDS
from tests.docs.pages import DOCS, ROOT
from tests.report.conftest import chromium  # noqa: F401

FETCHED = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}
"""Elements whose address a browser fetches by itself; a link that the reader follows is another matter."""


def build(docs: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """mkdocs, strict (not --quiet, which stops it from counting warnings), configured to read this folder."""
    config = (ROOT / "mkdocs.yml").read_text().replace("docs_dir: build/pages", f"docs_dir: {docs}")
    (site.parent / "mkdocs.yml").write_text(config)
    arguments = ["--strict", "--config-file", str(site.parent / "mkdocs.yml"), "--site-dir", str(site)]
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", *arguments],
        capture_output=True, text=True, check=False, timeout=300, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages of docs/ with the reference."""
    folder = tmp_path_factory.mktemp("docs") / "pages"
    subprocess.run([sys.executable, ROOT / ".ci/reference.py", DOCS, folder], check=True, timeout=300)
    return folder


@pytest.fixture(scope="module")
def site(pages: Path) -> Path:
    folder = pages.parent / "site"
    done = build(pages, folder)
    assert done.returncode == 0, done.stderr
    return folder


class Addresses(HTMLParser):
    """What a page makes a browser fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        wanted = FETCHED.get(tag)
        if tag == "link" and dict(attrs).get("rel") in {"canonical", "prev", "next"}:
            return
        self.found += [value for name, value in attrs if name == wanted and value]


def test_make_docs_builds_what_these_tests_build() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    assert "\t$(BIN)/python .ci/reference.py docs build/pages" in lines
    line = next(line for line in lines if "mkdocs build" in line)
    assert line.split()[-2:] == ["build", "--strict"], "--quiet would let dead links pass"


def test_the_site_builds_and_has_a_page_for_each_page(pages: Path, site: Path) -> None:
    names = {path.relative_to(pages).with_suffix(".html") for path in pages.rglob("*.md")}
    assert len(names) > 30
    assert all((site / name).is_file() for name in names)


def test_the_reference_has_every_command_and_the_keys_of_every_spec(pages: Path) -> None:
    reference = {path.stem: path.read_text(encoding="utf-8") for path in (pages / "reference").glob("*.md")}
    assert all(f"## relabel {name}\n" in reference["options"] for name in COMMANDS)
    assert "- **`args.tensor_parallel_size`** (integer; default `1`): GPUs" in reference["job"]
    assert "- **`learning_rate`** (number; default `5e-07`): Peak" in reference["teacher"]
    assert "| accuracy | `accuracy` | share of rows" in reference["metrics"]


def test_a_page_of_the_site_fetches_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        addresses = Addresses()
        addresses.feed(page.read_text(encoding="utf-8"))
        assert addresses.found
        assert [address for address in addresses.found if re.match(r"(?:[a-z]+:)?//", address)] == [], page.name


@pytest.mark.parametrize(("name", "scheme"), [("label-my-pairs", "light"), ("reference/job", "dark")])
def test_axe_finds_no_violation_of_wcag_aa(chromium: Any, site: Path, name: str, scheme: str) -> None:  # noqa: F811
    script = Path(pytest.importorskip("axe_playwright_python").__file__).parent / "axe.min.js"
    context = chromium.new_context(color_scheme=scheme)
    page = context.new_page()
    page.goto((site / f"{name}.html").as_uri())
    page.evaluate(script.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run({runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa']})")
    assert [
        (one["id"], one["nodes"][0]["html"], one["nodes"][0]["failureSummary"]) for one in found["violations"]
    ] == []
    context.close()


def test_what_leads_nowhere_fails_the_build(pages: Path, tmp_path: Path) -> None:
    """And a page that is in no menu."""
    docs = tmp_path / "docs"
    shutil.copytree(pages, docs)
    with (docs / "index.md").open("a", encoding="utf-8") as page:
        page.write("\n[x](absent.md) [x](jobs.md#absent) [x](students/) ![x](images/absent.png)\n")
    (docs / "stray.md").write_text("A page.")
    done = build(docs, tmp_path / "site")
    assert done.returncode != 0
    for message in ("'absent.md'", "#absent", "students/", "images/absent.png", "stray.md"):
        assert message in done.stderr


def test_links_of_the_readme_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text) + re.findall(r'src="([^"]+)"', text)
    assert len(links) > 5
    assert [link for link in links if not re.match(r"https?:", link) and not (ROOT / link).exists()] == []
