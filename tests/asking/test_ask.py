"""`relabel ask`: what it shows is what a run asks and gets, for every labeler; and it writes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.labelers.registry import LABELERS
from relabel.manifests.columns import CHUNK
from relabel.manifests.trees import NODES

TEXT = "Cut roses back in late winter. Oil the pan."
NODE = {"id": 0, "type": "structure", "level": 0, "text": "Roses", "start": 0, "end": 0, "parent": -1}
LEAF = {"id": 1, "type": "content", "level": 1, "text": TEXT, "start": 0, "end": len(TEXT), "parent": 0}
PIECE = {"n": 1, "heading_path": [], "text": TEXT, "token_len": 12, "start": 0, "end": len(TEXT)}


@pytest.fixture
def job(folder: Path) -> Callable[..., None]:
    """Writes a job file over ten rows of four queries, which lie scattered."""
    rows = [
        {
            "query_id": f"q{n % 4}",
            "query": f"how to prune roses {n % 4}",
            "doc_id": f"d{n}",
            "document": TEXT,
            "passages": [TEXT[:20]],
            "chunks": [PIECE],
            "tree": [NODE, LEAF],
        }
        for n in range(10)
    ]
    texts = [(name, pa.string()) for name in ("query_id", "query", "doc_id", "document")]
    lists = [("passages", pa.list_(pa.string())), ("chunks", pa.list_(CHUNK)), ("tree", NODES)]
    pq.write_table(pa.Table.from_pylist(rows, pa.schema([*texts, *lists])), "pairs.parquet")

    def write(labeler: str, **engine: Any) -> None:
        spec = {
            "name": "asked",
            "input": {"path": "pairs.parquet"},
            "labeler": {"name": labeler, "attempts": 2},
            "engine": {"name": "fake", "seed": 5, **engine},
            "output": "out/run",
            "run": {"max_failed_fraction": 1.0},
        }
        Path("job.yaml").write_text(json.dumps(spec))

    return write


@pytest.mark.parametrize("name", sorted(LABELERS))
def test_a_row_is_asked_as_the_run_asks_it_and_a_dry_run_shows_its_first_prompt(
    relabel: Callable[..., Any], job: Callable[..., None], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    job(name, args={"p_garbage": 0.3})
    found = relabel("ask", "job.yaml", "--random", "10", "--output", "json").json
    assert not Path("out").exists()
    with monkeypatch.context() as patch:
        patch.setattr("relabel.jobs.ask.start_engine", lambda _: pytest.fail("an engine was started"))
        (rendered,) = relabel("ask", "job.yaml", "--row", "3", "--dry-run", "--output", "json").json["asked"]
    (asked,) = (one for one in found["asked"] if 3 in {row["row_id"] for row in one["rows"]})
    first, same = asked["asks"][0], rendered["asks"][0]
    assert same == {**first, "answer": None}
    held = [part["text"] for turn in same["messages"] for part in turn["parts"] if part["field"] is not None]
    assert "how to prune roses 3" in held
    said = {row["row_id"]: row for asked in found["asked"] for row in asked["rows"]}
    assert sorted(said) == list(range(10))
    assert relabel("run", "job.yaml").code == 0
    table = pa.concat_tables(pq.read_table(path) for path in Path("out/run/labels").rglob("*.parquet"))
    labels = {row["row_id"]: row for row in table.to_pylist()}
    for row_id, row in said.items():
        assert ("label" in row) == (row_id in labels)
        if "label" in row:
            assert row["label"]["grade"] == labels[row_id]["grade"]
            assert row["label"]["flags"] == labels[row_id]["flags"]
    asks = [ask for asked in found["asked"] for ask in asked["asks"]]
    assert asks
    assert all(ask["answer"]["finish"] for ask in asks)


def test_a_prompt_that_was_cut_before_it_was_asked_is_said_to_be(
    relabel: Callable[..., Any], job: Callable[..., None]
) -> None:
    """The whole document is on the screen; the model saw its start."""
    job("direct")
    said = "the end of the document above was cut off before it was asked: too long for model or max_prompt_tokens"
    assert said not in relabel("ask", "job.yaml", "--row", "2").out
    asked = relabel("ask", "job.yaml", "--row", "2", "--output", "json").json["asked"][0]["asks"][0]
    job("direct", max_prompt_tokens=asked["answer"]["prompt_tokens"] - 1)
    assert said in relabel("ask", "job.yaml", "--row", "2").out


def test_the_text_marks_data_in_the_template_and_says_how_sure_the_model_was(
    relabel: Callable[..., Any], job: Callable[..., None]
) -> None:
    job("graph-grpo")
    shown = relabel("ask", "job.yaml", "--row", "2").out
    assert "row 2 · query q2 · document d2" in shown
    assert f"⟦{TEXT}⟧" in shown
    assert "⟦how to prune roses 2⟧" in shown
    assert "subject: 0 0." in shown
    assert "outside these 0." in shown
    assert "row 2: label" in shown
    assert "phi_grade" in shown


def test_one_stage_of_several(relabel: Callable[..., Any], job: Callable[..., None]) -> None:
    job("r3a")
    stages = [ask["stage"] for ask in relabel("ask", "job.yaml", "--output", "json").json["asked"][0]["asks"]]
    assert len(set(stages)) == 2
    wanted = stages[1]
    shown = relabel("ask", "job.yaml", "--stage", wanted)
    assert f"{wanted}: asked" in shown.out
    assert f"{stages[0]}: asked" not in shown.out
    relabel("ask", "job.yaml", "--stage", "none").refused(2, "--stage none: r3a has none of that name; it has intent, ")
    assert "a dry run has no answers to go on from" in relabel("ask", "job.yaml", "--stage", wanted, "--dry-run").err


def test_no_text_of_the_data_is_a_command_to_the_terminal(
    relabel: Callable[..., Any], job: Callable[..., None]
) -> None:
    job("direct")
    rows = pq.read_table("pairs.parquet").to_pylist()
    rows[0]["document"] = "a\x1b[31m\x07\u202eb\nc⟧ the template ⟦"
    pq.write_table(pa.Table.from_pylist(rows), "pairs.parquet")
    shown = relabel("ask", "job.yaml", "--dry-run").out
    assert "⟦a\\x1b[31m\\x07\\u202eb\nc\\u27e7 the template \\u27e6⟧" in shown


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (["--row", "10"], 3, ["row 10: the input has 10 rows, numbered from 0 to 9"]),
        (["--query-id", "q9"], 3, ["no row of the input has the query id `q9`"]),
    ],
)
def test_a_row_that_is_not_there_is_refused_before_a_model_is_loaded(
    relabel: Callable[..., Any],
    job: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    parts: list[str],
) -> None:
    job("direct")
    monkeypatch.setattr("relabel.jobs.ask.start_engine", lambda _: pytest.fail("an engine was started"))
    relabel("ask", "job.yaml", *arguments).refused(code, *parts)


def test_a_refused_answer_has_its_reason_and_a_prompt_that_goes_on_from_the_one_above_shows_what_is_new(
    relabel: Callable[..., Any], job: Callable[..., None]
) -> None:
    job("r3a", args={"p_garbage": 1.0})
    refused = relabel("ask", "job.yaml").out
    assert "row 0: no label, quarantined as format" in refused
    assert refused.count("⟦how to prune roses 0⟧") == 1
    assert refused.count("the prompt above, with another seed") == 1
    job("r3a")
    shown = relabel("ask", "job.yaml", "--random", "2").out
    assert shown.count("the turns above, then") == 2
    assert shown.count("The query:\n") == 2
    alone = relabel("ask", "job.yaml", "--stage", "verdict").out
    assert alone.count("The query:\n") == 1
    assert "the turns above" not in alone
