"""What the page shows of a run of `route`: a few documents' trees, step by step, whatever is in them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.jobs.report.routes import DOCUMENTS
from relabel.manifests.trees import CONTENT, NO_PARENT, NODES, STRUCTURE, Node, Tree, read_tree
from tests.report.conftest import BAITS


def page_tree(texts: list[str], *, headings: int = 3, deep: bool = False) -> tuple[str, Tree]:
    """A document of texts, a line each, by turns under some headings, which are in each other if `deep`."""
    nodes = [Node(0, STRUCTURE, 0, f"Page {BAITS[0]}", 0, 0, NO_PARENT)]
    document = ""

    def add(kind: str, text: str, parent: int) -> int:
        nonlocal document
        text = " ".join(text.split())
        place = len(nodes), len(document), len(document) + len(text)
        nodes.append(Node(place[0], kind, nodes[parent].level + 1, text, place[1], place[2], parent))
        document += text + "\n"
        return place[0]

    parent = 0
    for number in range(headings):
        parent = add(STRUCTURE, f"Heading {number} {BAITS[number % len(BAITS)]}", parent if deep else 0)
        for text in texts[number::headings]:
            add(CONTENT, text, parent)
    return document, read_tree([node._asdict() for node in nodes], document)


@pytest.fixture
def routed(folder: Path, relabel: Callable[..., Any], write_job: Callable[..., str]) -> Path:
    """A run over six documents whose every text tries to run."""
    rows = []
    for number in range(6):
        texts = [f"text {place} {BAITS[(number + place) % len(BAITS)]}" for place in range(6)]
        document, tree = page_tree(texts, deep=number % 2 == 1)
        ids = {"query_id": f"q {BAITS[1]}", "query": f"query {BAITS[2]}", "doc_id": f"d{number} {BAITS[0]}"}
        passage = next(node.text for node in tree.nodes if node.is_content)
        rows.append({**ids, "document": document, "tree": tree.values(), "passages": [passage]})
    schema = pa.schema(
        [(name, pa.string()) for name in ("query_id", "query", "doc_id", "document")]
        + [("tree", NODES), ("passages", pa.list_(pa.string()))]
    )
    pq.write_table(pa.Table.from_pylist(rows, schema), folder / "pairs.parquet")
    changes = {"labeler": {"name": "route"}, "input": {"columns": {"document": ["document"]}}, "name": "routed"}
    assert relabel("run", write_job(changes)).code == 0
    return folder / "out/ecom"


def test_hostile_trees_are_text(routed: Path, relabel: Callable[..., Any], open_page: Callable[..., Any]) -> None:
    done = relabel("report", "out/ecom", "--to", "report.html", "--output", "json")
    assert "routes" in done.json["sections"]
    page, seen = open_page(Path("report.html"))
    assert page.locator("#routes details").count() == DOCUMENTS
    for fold in page.locator("#routes details").all():
        fold.evaluate("one => one.open = true")
    page.wait_for_timeout(100)
    assert page.evaluate("'pwned' in window") is False
    assert seen.all == []
    assert page.locator("#routes script, #routes img, #routes svg, #routes style, #routes [style]").count() == 0
    shown = page.locator("#routes").inner_text()
    assert f"query {BAITS[2]}" in shown
    assert "Heading 1 " + BAITS[1] in shown
    labels = {row["doc_id"]: row for row in _labels(routed)}
    for fold in page.locator("#routes details").all():
        label = next(row for doc, row in labels.items() if doc.split()[0] in fold.locator("summary").inner_text())
        steps = [json.loads(step) for step in label["steps"]]
        assert fold.locator("pre").count() == len(steps)
        for step, outline in zip(steps, fold.locator("pre").all(), strict=True):
            lines = outline.inner_text().splitlines()[1:]
            assert sum(line.lstrip().startswith("·") for line in lines) == len(step["lit"])
            assert sum("[answers]" in line for line in lines) == len(step["answers"])
            assert sum("[to be unfolded]" in line for line in lines) == len(step["expands"])


def _labels(output: Path) -> list[dict[str, Any]]:
    files = json.loads((output / "manifest.json").read_bytes())["labels"]
    return [row for file in files for row in pq.read_table(output / file["path"]).to_pylist()]


def test_it_is_left_out_where_no_rows_are_shown_or_none_can_be_read(routed: Path, relabel: Callable[..., Any]) -> None:
    without = relabel("report", "out/ecom", "--to", "none.html", "--max-rows", "0", "--output", "json").json
    assert "routes" not in without["sections"]
    assert "Heading 1" not in Path("none.html").read_text(encoding="utf-8")
    Path("pairs.parquet").unlink()
    assert relabel("report", "out/ecom", "--to", "gone.html").code == 0
    assert "trees can&#39;t be read again" in Path("gone.html").read_text(encoding="utf-8")
