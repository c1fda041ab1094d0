"""A labeler from elsewhere with columns of its own: they lie in the label files as declared. A key that it does not
declare, or a value that its column can't hold, is refused at its first label, and nothing is dropped or cut.
"""

import json
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

from relabel.jobs.run.chunks import check_columns
from relabel.labelers.registry import LABELERS, Labeler
from relabel.manifests.asks import Answer, Ask, Decision, Message
from relabel.manifests.errors import ConfigError
from relabel.manifests.labels import KINDS, LABELS, Label, LabelColumn, Pair
from relabel.manifests.specs import LabelerOptions


class TheirOptions(LabelerOptions):
    name: str = "third-party"


SAID: list[Any] = [{}]
"""What the labeler returns: set by each test, since no job file can say all that code can return."""
TONE = LabelColumn("tone", "string", "How the document speaks.")
SHARES = LabelColumn("shares", "list<float32>", "Of the document, by topic.")
PARTS = LabelColumn("parts", "int8", "How many parts it has.")


class ThirdParty(Labeler):
    """Grades by the distribution alone, and returns the columns that the test set."""

    Options: ClassVar[type[LabelerOptions]] = TheirOptions
    columns: tuple[LabelColumn, ...] = (TONE, SHARES, PARTS)

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        answer = yield self._ask(pair)
        return Label(0, answer.distributions.get("score"), SAID[0])

    def probe(self) -> list[Ask]:
        return [self._ask(Pair(0, "q", "query", "d", "document"))]

    def _ask(self, pair: Pair) -> Ask:
        turn = Message("user", ("Query ", pair.query, ", document ", pair.document, ""), ("query", "document"))
        return Ask("score", (turn,), None, 0, (Decision("score", "<score>", ("0", "1", "2")),), "<score>")


@pytest.fixture
def label(folder: Path, relabel: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setitem(LABELERS, "third-party", f"{__name__}:ThirdParty")
    rows = [{"query_id": "q1", "query": "socks", "doc_id": f"d{i}", "document": f"wool {i}"} for i in range(6)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "pairs.parquet")

    def run(said: Any, output: str = "out", **changes: Any) -> Any:
        SAID[0] = said
        job = {
            "name": "n",
            "input": {"path": "pairs.parquet"},
            "labeler": {"name": "third-party"},
            "engine": {"name": "fake"},
            "output": output,
            **changes,
        }
        (folder / "job.yaml").write_text(yaml.safe_dump(job))
        return relabel("run", "job.yaml")

    return run


def rows_in(folder: Path) -> list[dict[str, Any]]:
    (file,) = folder.glob("labels/**/*.parquet")
    return list(pq.read_table(file).to_pylist())


@pytest.mark.parametrize("said", [{}, {"tone": "dry", "shares": [0.5, 0.25]}])
def test_declared_columns_some_or_none_lie_after_the_others_and_the_plan_names_them(
    label: Callable[..., Any], folder: Path, relabel: Callable[..., Any], said: dict[str, Any]
) -> None:
    assert label(said).code == 0
    for row in rows_in(folder / "out"):
        assert list(row) == [*LABELS.names, "tone", "shares", "parts"]
        assert {name: row[name] for name in ("tone", "shares", "parts")} == {
            "tone": None,
            "shares": None,
            "parts": None,
        } | said
    plan = json.loads((folder / "out/plan.json").read_bytes())
    assert plan["parts"]["label_columns"] == [["tone", "string"], ["shares", "list<float32>"], ["parts", "int8"]]
    assert relabel("verify", "out").code == 0
    shown = relabel("schema", "labels", "--labeler", "third-party", "--output", "json").json["columns"]
    assert shown[-1] == {"name": "parts", "type": "int8", "about": "How many parts it has."}


def test_labels_without_a_column_that_is_wanted_now_are_not_taken_over_and_with_one_more_they_are(
    label: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert label({"tone": "dry"}).code == 0
    monkeypatch.setattr(ThirdParty, "columns", (TONE, LabelColumn("mood", "string", "Whether it smiles.")))
    assert label({"tone": "wet", "mood": "sad"}, "more", reuse=["out"]).code == 0
    assert {(row["tone"], row["reused"]) for row in rows_in(folder / "more")} == {("wet", False)}
    monkeypatch.setattr(ThirdParty, "columns", (TONE,))
    assert label({}, "less", reuse=["more"]).code == 0
    assert {(row["tone"], row["reused"], "mood" in row) for row in rows_in(folder / "less")} == {("wet", True, False)}


def test_outputs_with_other_columns_merge_with_nulls_unless_a_name_means_two_kinds(
    label: Callable[..., Any], folder: Path, relabel: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def more(kind: str, number: int) -> str:
        rows = [{"query_id": f"q{number}", "query": "hats", "doc_id": "d", "document": f"felt {number}"}]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"pairs{number}.parquet")
        monkeypatch.setattr(ThirdParty, "columns", (PARTS, LabelColumn("mood", kind, "Whether it smiles.")))
        assert label({"parts": number}, f"out{number}", input={"path": f"pairs{number}.parquet"}).code == 0
        return f"out{number}"

    assert label({"tone": "dry"}).code == 0
    assert relabel("merge", "out", more("string", 2), "--to", "both").code == 0
    assert relabel("verify", "both").code == 0
    manifest = json.loads((folder / "both/manifest.json").read_bytes())
    rows = [row for file in manifest["labels"] for row in pq.read_table(folder / "both" / file["path"]).to_pylist()]
    assert [(row["tone"], row["parts"], row["mood"]) for row in rows] == [("dry", None, None)] * 6 + [(None, 2, None)]
    relabel("merge", "both", more("bool", 3), "--to", "all").refused(
        3, "its column `mood` holds bool, that of an output named before it"
    )


@pytest.mark.parametrize(
    "column",
    [
        LabelColumn("grade", "int8", "."),
        LabelColumn("nodes", "int8", "."),
        TONE,
        LabelColumn("Tone of it", "string", "."),
        LabelColumn("mood", "text", "."),
    ],
    ids=lambda one: one.name,
)
def test_a_column_that_no_label_file_can_have_is_refused_where_it_is_declared(column: LabelColumn) -> None:
    with pytest.raises(ConfigError, match=f"labeler Theirs: column '{column.name}' of kind '{column.kind}'"):
        type("Theirs", (ThirdParty,), {"columns": (TONE, column)})


def test_texts_do_not_hide_a_column_of_their_name(
    label: Callable[..., Any], relabel: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ThirdParty, "columns", (LabelColumn("query", "string", "Theirs."),))
    assert label({"query": "own"}).code == 0
    relabel("convert", "out", "x.parquet", "--texts").refused(3, "have a column `query` of their own")
    assert relabel("convert", "out", "x.parquet").code == 0


def test_an_undeclared_column_ends_the_run_at_once_and_names_labeler_and_keys(
    label: Callable[..., Any], folder: Path
) -> None:
    done = label({"tone": "dry", "subject": 2, "brand": None})
    done.refused(
        3,
        "labeler third-party: `Label.columns` holds brand, subject, for which it declares no column",
        "tone, shares, parts",
    )
    assert not list((folder / "out").glob("labels/**/*.parquet"))


WRONG = {
    "int8": [
        "2",
        True,
        2.5,
        math.nan,
        math.inf,
        128,
        -129,
        10**30,
        [1],
        {},
        b"2",
        object(),
        np.bool_(True),
    ],
    "int32": ["2", 2.5, 2**31, -(2**31) - 1],
    "int64": ["2", 2.5, 2**63, -(2**63) - 1],
    "float32": ["0.5", True, math.nan, -math.inf, 10**400, 1e39, [0.5], b"", np.float64(math.nan)],
    "list<float32>": [
        0.5,
        "0.5",
        {0.5},
        {0: 0.5},
        [None],
        [0.5, "x"],
        [True],
        [math.nan],
        [[0.5]],
        np.ones((2, 2)),
        iter([0.5]),
    ],
    "list<int16>": [1, [1.5], [None], [True], [32768], ["1"], {1}],
    "list<int32>": [1, [1.5], [None], [True], [2**31], ["1"], {1}],
    "string": [5, b"shoe", ["shoe"], "\ud800", True, Path("shoe")],
    "list<string>": ["shoe", [5], [None], {"shoe"}, ["\ud800"]],
    "bool": [1, 0.0, "true", [True], math.nan],
}
"""By kind of column: what it can't hold as it is. Arrow would cut 2.5 to 2 and take a set in any order."""
RIGHT = {
    "int8": [2, -128, 127, np.int64(3)],
    "int32": [2, -(2**31), 2**31 - 1],
    "int64": [2, -(2**63), 2**63 - 1],
    "float32": [0.5, 1, np.float32(0.25)],
    "list<float32>": [[], (0.5, 0.25), np.array([0.5, 1], np.float32), [1]],
    "list<int16>": [[], (1, 2), [-32768, 32767]],
    "list<int32>": [[], (1, 2), [-(2**31), 2**31 - 1]],
    "string": ["", "Füße 鞋"],
    "list<string>": [[], ["a", "鞋"], ("b",)],
    "bool": [True, np.bool_(False)],
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_that_a_column_cannot_hold_is_named_with_its_type(kind: str) -> None:
    for value in WRONG[kind]:
        said = re.escape(f"labeler theirs: `Label.columns['mine']` is {type(value).__name__}")
        label = Label(0, None, {"other": True, "mine": value})
        with pytest.raises(ConfigError, match=said):
            check_columns(label, {"other": "bool", "mine": kind}, labeler="theirs")


@pytest.mark.parametrize("kind", KINDS)
def test_what_passes_the_check_is_what_arrow_keeps_to_the_last_bit(kind: str) -> None:
    """So that no kind is forgotten by the check, nor refused what it holds."""
    for value in [None, *RIGHT[kind]]:
        check_columns(Label(0, None, {"mine": value}), {"mine": kind}, labeler="theirs")
        (kept,) = pa.array([value], KINDS[kind]).to_pylist()
        assert kept == (value if value is None or not isinstance(value, tuple | np.ndarray) else list(value))
