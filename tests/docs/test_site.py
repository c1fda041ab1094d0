"""The site of docs/ builds with every link alive, and asks nobody for anything when it is read."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
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


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and says nothing."""

    def log_message(self, *_: object) -> None:
        """Not a word."""


@pytest.fixture
def served(site: Path) -> Iterator[str]:
    """The site's address on a server of files."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("width", [400, 1400])
def test_a_reader_finds_a_word_without_a_request_to_elsewhere_or_a_word_of_complaint(
    chromium: Any,  # noqa: F811
    served: str,
    width: int,
) -> None:
    context = chromium.new_context(viewport={"width": width, "height": 900})
    page = context.new_page()
    asked: list[str] = []
    said: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(f"{served}/architecture.html")
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page is wider than the window"
    page.keyboard.press("/")
    page.keyboard.type("quarantined rows")
    page.wait_for_selector(".md-search-result__item", timeout=60_000)
    assert [url for url in asked if not url.startswith((served, "data:", "blob:"))] == []
    assert said == []
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["getting-started", "label-my-pairs", "deploy", "reference/job"])
def test_axe_finds_no_violation_of_wcag_aa(chromium: Any, site: Path, name: str, scheme: str) -> None:  # noqa: F811
    """Pages that hold all there is between them: tables, lists, links, an image, and blocks of every language."""
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


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("[x](absent.md)", "absent.md"),
        ("[x](jobs.md#absent)", "#absent"),
        ("[x](students/)", "students/"),
        ("![x](images/absent.png)", "images/absent.png"),
        (None, "stray.md"),
    ],
    ids=["page", "anchor", "folder", "image", "menu"],
)
def test_what_leads_nowhere_fails_the_build(pages: Path, tmp_path: Path, fault: str | None, message: str) -> None:
    """The last: a page that is in no menu."""
    docs = tmp_path / "docs"
    shutil.copytree(pages, docs)
    target = docs / ("stray.md" if fault is None else "index.md")
    with target.open("a", encoding="utf-8") as page:
        page.write(f"\n{fault or 'A page.'}\n")
    done = build(docs, tmp_path / "site")
    assert done.returncode != 0
    assert message in done.stderr


def test_links_of_the_readme_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text) + re.findall(r'src="([^"]+)"', text)
    assert len(links) > 5
    assert [link for link in links if not re.match(r"https?:", link) and not (ROOT / link).exists()] == []
