"""A labeler from elsewhere whose label holds nodes that no column is declared for: refused at its first label, and nothing is dropped."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from labelers.registry import LABELERS
from manifests.asks import Answer, Ask, Decision, Message
from manifests.labels import Label, Pair
from manifests.specs import LabelerOptions


class NodesOptions(LabelerOptions):
    name: str = "third-party"
    nodes: dict[str, Any] | None = None


class ThirdParty:
    """Grades by the distribution alone, and returns the nodes that its options name."""

    Options: ClassVar[type[LabelerOptions]] = NodesOptions
    uses_context = False
    template_digests: ClassVar[dict[str, str]] = {}

    def __init__(self, options: NodesOptions) -> None:
        self._nodes = options.nodes

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        answer = yield self._ask(pair)
        return Label(0, answer.distributions.get("score"), self._nodes)

    def probe(self) -> list[Ask]:
        return [self._ask(Pair(0, "q", "query", "d", "document"))]

    def _ask(self, pair: Pair) -> Ask:
        turn = Message("user", ("Query ", pair.query, ", document ", pair.document, ""), ("query", "document"))
        return Ask("score", (turn,), None, 0, (Decision("score", "<score>", ("0", "1", "2")),), "<score>")


@pytest.fixture
def label(folder: Path, relabel: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any] | None], Any]:
    monkeypatch.setitem(LABELERS, "third-party", f"{__name__}:ThirdParty")
    rows = [{"query_id": "q1", "query": "socks", "doc_id": f"d{i}", "document": f"wool {i}"} for i in range(6)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "pairs.parquet")

    def run(nodes: dict[str, Any] | None) -> Any:
        job = {
            "name": "n",
            "input": {"path": "pairs.parquet"},
            "labeler": {"name": "third-party", "nodes": nodes},
            "engine": {"name": "fake"},
            "output": "out",
        }
        (folder / "job.yaml").write_text(yaml.safe_dump(job))
        return relabel("run", "job.yaml")

    return run


def test_an_undeclared_node_ends_the_run_at_once_and_names_labeler_and_keys(label: Callable[..., Any], folder: Path) -> None:
    done = label({"subject": 2, "tone": "dry", "brand": None})
    done.refused(3, "labeler third-party: `Label.nodes` holds brand, tone, for which label files have no field")
    assert "query_subject" in done.err
    assert not list((folder / "out").glob("labels/**/*.parquet"))


@pytest.mark.parametrize("nodes", [None, {}, {"subject": 2, "phi_agrees": True}])
def test_declared_nodes_some_or_none_are_kept(label: Callable[..., Any], folder: Path, nodes: dict[str, Any] | None) -> None:
    assert label(nodes).code == 0
    (file,) = (folder / "out").glob("labels/**/*.parquet")
    for row in pq.read_table(file).to_pylist():
        assert (row["nodes"] is None) == (nodes is None)
        assert {name: row["nodes"][name] for name in nodes or ()} == (nodes or {})
