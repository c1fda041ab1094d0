"""A labeler from elsewhere whose label holds nodes that no column is declared for, or a value that its column can't hold: refused at its
first label, and nothing is dropped or cut."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from jobs.running.node_values import check_nodes
from labelers.registry import LABELERS
from manifests.asks import Answer, Ask, Decision, Message
from manifests.errors import ConfigError
from manifests.labels import Label, Pair
from manifests.schemas import NODES as LABEL_NODES
from manifests.specs import LabelerOptions


class NodesOptions(LabelerOptions):
    name: str = "third-party"


NODES: list[Any] = [None]
"""What the labeler returns: set by each test, since no job file can say all that code can return."""


class ThirdParty:
    """Grades by the distribution alone, and returns the nodes that the test set."""

    Options: ClassVar[type[LabelerOptions]] = NodesOptions
    uses_context = False
    template_digests: ClassVar[dict[str, str]] = {}

    def __init__(self, options: NodesOptions) -> None:
        """Takes no option of its own."""

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        answer = yield self._ask(pair)
        return Label(0, answer.distributions.get("score"), NODES[0])

    def probe(self) -> list[Ask]:
        return [self._ask(Pair(0, "q", "query", "d", "document"))]

    def _ask(self, pair: Pair) -> Ask:
        turn = Message("user", ("Query ", pair.query, ", document ", pair.document, ""), ("query", "document"))
        return Ask("score", (turn,), None, 0, (Decision("score", "<score>", ("0", "1", "2")),), "<score>")


@pytest.fixture
def label(folder: Path, relabel: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    monkeypatch.setitem(LABELERS, "third-party", f"{__name__}:ThirdParty")
    rows = [{"query_id": "q1", "query": "socks", "doc_id": f"d{i}", "document": f"wool {i}"} for i in range(6)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "pairs.parquet")

    def run(nodes: Any) -> Any:
        NODES[0] = nodes
        job = {
            "name": "n",
            "input": {"path": "pairs.parquet"},
            "labeler": {"name": "third-party"},
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


WRONG = {
    "int8": ["2", True, 2.0, 2.5, math.nan, math.inf, 128, -129, 10**30, [1], {}, b"2", object(), np.float32(2), np.bool_(True)],
    "float": ["0.5", True, math.nan, -math.inf, 10**400, 1e39, [0.5], b"", np.float64(math.nan)],
    "list<item: float>": [0.5, "0.5", {0.5}, {0: 0.5}, [None], [0.5, "x"], [True], [math.nan], [[0.5]], np.ones((2, 2)), iter([0.5])],
    "string": [5, b"shoe", ["shoe"], "\ud800", True, Path("shoe")],
    "bool": [1, 0.0, "true", [True], math.nan],
}
"""By the Arrow type of a node's column: what it can't hold as it is. Arrow would cut 2.5 to 2 and take a set in any order."""
WRONG_CASES = [(field.name, value) for field in LABEL_NODES for value in WRONG[str(field.type)]]


@pytest.mark.parametrize(("node", "value"), WRONG_CASES, ids=lambda one: "object" if type(one) is object else repr(one)[:24])
def test_a_value_that_a_nodes_column_cannot_hold_is_named_with_its_type(node: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"labeler theirs: `Label.nodes[{node!r}]` is {type(value).__name__}")):
        check_nodes(Label(0, None, {"phi_agrees": True} | {node: value}), labeler="theirs")


@pytest.mark.parametrize("nodes", [["subject"], "subject", 5, True])
def test_nodes_that_are_no_dictionary_are_named_with_their_type(nodes: Any) -> None:
    with pytest.raises(ConfigError, match=f"labeler theirs: `Label.nodes` is {type(nodes).__name__}"):
        check_nodes(Label(0, None, nodes), labeler="theirs")


def test_what_passes_the_check_is_what_arrow_keeps_to_the_last_bit() -> None:
    """So that no column of nodes is forgotten by the check, nor refused what it holds."""
    right = {
        "int8": [2, -128, 127, np.int64(3)],
        "float": [0.5, 1, np.float32(0.25)],
        "list<item: float>": [[], (0.5, 0.25), np.array([0.5, 1], np.float32), [1]],
        "string": ["", "Füße 鞋"],
        "bool": [True, np.bool_(False)],
    }
    for field in LABEL_NODES:
        for value in [None, *right[str(field.type)]]:
            check_nodes(Label(0, None, {field.name: value}), labeler="theirs")
            (kept,) = pa.array([{field.name: value}], LABEL_NODES).to_pylist()
            assert kept[field.name] == (value if value is None or not isinstance(value, tuple | np.ndarray) else list(value))


@pytest.mark.parametrize("value", ["two", [2], math.nan, 10**30])
def test_a_wrong_value_ends_the_run_at_the_first_label(label: Callable[..., Any], folder: Path, value: Any) -> None:
    done = label({"subject": value})
    done.refused(3, f"labeler third-party: `Label.nodes['subject']` is {type(value).__name__}", "whole number from -128 to 127")
    assert not list((folder / "out").glob("labels/**/*.parquet"))


@pytest.mark.parametrize("nodes", [None, {}, {"subject": 2, "phi_agrees": True}, {"subject": None}])
def test_declared_nodes_some_or_none_are_kept(label: Callable[..., Any], folder: Path, nodes: dict[str, Any] | None) -> None:
    assert label(nodes).code == 0
    (file,) = (folder / "out").glob("labels/**/*.parquet")
    for row in pq.read_table(file).to_pylist():
        assert (row["nodes"] is None) == (nodes is None)
        assert {name: row["nodes"][name] for name in nodes or ()} == (nodes or {})
