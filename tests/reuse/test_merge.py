"""Merging: what comes out is what went in, under one name only where it was made in one way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from relabel.distill.students.labels import load_labels
from relabel.distill.students.spec import LabelSource
from relabel.jobs.cli import relabel
from relabel.labelers.engines.fake import Fake
from relabel.manifests.files import Storage
from tests.reuse.conftest import Days, rows_of, said

SUMS = ("labelled", "reused", "quarantined")


def test_two_days_become_one_output_that_reads_like_any_other(days: Days) -> None:
    rows = rows_of(10, 4)
    args: dict[str, Any] = {
        "engine": {"args": {"p_garbage": 0.3}},
        "labeler": {"attempts": 1},
        "run": {"max_failed_fraction": 1.0},
    }
    days.run("monday", rows[:24], **args)
    days.run("tuesday", rows[20:], reuse=["monday"], **{**args, "input": {"limit": 18}})
    code, result = days.call("merge", days.out("monday"), days.out("tuesday"), "--to", days.out("week"))
    assert code == 0, result
    week = days.manifest("week")
    parts = [days.manifest(day)["rows"] for day in ("monday", "tuesday")]
    assert week["rows"]["in"] == 24 + 18
    assert {key: week["rows"][key] for key in SUMS} == {key: sum(part[key] for part in parts) for key in SUMS}
    assert min(week["rows"][key] for key in SUMS) > 0
    assert days.call("verify", days.out("week"))[0] == 0
    assert days.call("status", days.out("week"))[1]["is_finished"]
    labels = days.labels("week")
    assert said(labels) == said([*days.labels("monday"), *days.labels("tuesday")])
    # a row id is the row's place in the list of inputs, whatever comes between
    texts = [row for file in week["inputs"] for row in pq.read_table(file["path"]).to_pylist()]
    assert all(
        (texts[row["row_id"]]["query_id"], texts[row["row_id"]]["doc_id"]) == (row["query_id"], row["doc_id"])
        for row in labels
    )
    monday, tuesday = (days.manifest(day)["fingerprint"] for day in ("monday", "tuesday"))
    assert {row["origin"] for row in labels} == {monday, tuesday}
    assert [source["first_row_id"] for source in week["merged_from"]] == [0, 24]
    assert days.call("merge", days.out("monday"), days.out("tuesday"), "--to", days.out("week"))[0] == 10


def test_a_merged_output_can_be_judged_learned_from_and_reused(days: Days, no_engine: Any) -> None:
    rows = rows_of(6, 4)
    graded = [{**row, "grade": number % 3} for number, row in enumerate(rows)]
    days.run("monday", graded[:12])
    days.run("tuesday", graded[12:])
    assert days.call("merge", days.out("monday"), days.out("tuesday"), "--to", days.out("week"))[0] == 0
    qrels = days.folder / "qrels.parquet"
    pq.write_table(pq.ParquetDataset([days.folder / "monday.parquet", days.folder / "tuesday.parquet"]).read(), qrels)
    code, judged = days.call("evaluate", days.out("week"), "--qrels", qrels)
    assert code == 0, judged
    assert judged["counts"]["judged"] == 24
    table = load_labels(LabelSource(path=str(days.out("week"))), Storage(), allow_over_limit=False)
    assert [(pair.doc_id, pair.document) for pair in table.pairs] == [(row["doc_id"], row["document"]) for row in rows]
    no_engine()
    days.run("again", rows, reuse=["week"])
    assert {row["origin"] for row in days.labels("again")} == {
        days.manifest(day)["fingerprint"] for day in ("monday", "tuesday")
    }


def test_shards_of_one_run_that_were_done_in_two_places_come_together(days: Days) -> None:
    rows = rows_of(8, 5)
    job = days.job("whole", rows)
    assert days.call("run", job)[0] == 0
    parts = []
    for number in (0, 1):
        part = days.folder / f"node-{number}"
        assert days.call("run", job, "--shard", f"{number}/2", "--set", f"output={part}")[0] == 0
        parts.append(part)
    code, message = days.call("merge", parts[0], "--to", days.out("half"))
    assert (code, "not finished" in message) == (3, True)
    code, message = days.call("merge", *parts, "--to", days.out("merged"))
    assert code == 0, message
    assert said(days.labels("merged")) == said(days.labels("whole"))
    assert days.call("verify", days.out("merged"))[0] == 0


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"labeler": {"max_text_tokens": 99}}, "max_text_tokens"),
        ({"engine": {"args": {"p_garbage": 0.01}}}, "args"),
    ],
    ids=str,
)
def test_outputs_made_in_two_ways_are_refused_with_what_differs(days: Days, change: dict[str, Any], what: str) -> None:
    rows = rows_of(6, 4)
    days.run("monday", rows[:12])
    days.run("tuesday", rows[12:], **change)
    merge = ("merge", days.out("monday"), days.out("tuesday"), "--to", days.out("week"))
    code, message = days.call(*merge)
    assert code == 5
    assert what in message
    assert not days.out("week").exists()
    assert days.call(*merge, "--allow-mixed")[0] == 0
    assert what in str(days.manifest("week")["mixed"])
    assert days.manifest("week")["mixed"]["allowed"] is True
    # rows of both ways are found again by what made each
    days.run("again", rows, reuse=["week"], **change)
    assert days.manifest("again")["rows"]["reused"] == 12


def test_the_engine_after_rows_that_were_taken_over_keeps_outputs_apart(
    days: Days, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two teachers would come under one name by way of an output that asked nobody."""
    rows = rows_of(6, 4)
    days.run("monday", rows[:12])
    days.run("again", list(reversed(rows[:12])), reuse=["monday"])
    assert days.manifest("again")["engines_asked"] == []
    facts = Fake.facts

    def newer(self: Fake) -> Any:
        found = facts(self)
        found.version = "99"
        return found

    monkeypatch.setattr(Fake, "facts", newer)
    days.run("tuesday", rows[12:])
    merge = ("merge", days.out("again"), days.out("tuesday"), "--to", days.out("week"))
    code, message = days.call(*merge)
    assert (code, "engine version: " in message) == (5, True)
    assert days.call(*merge, "--allow-mixed")[0] == 0
    assert days.manifest("week")["mixed"]["differences"]
    # a run that takes labels of the old engine over and asks the new one next to it says what it is, too
    days.run("alongside", [*rows[:12], {**rows[0], "document": "Something new."}], reuse=["monday"])
    assert "version" in str(days.manifest("alongside")["mixed"]["differences"])
    assert days.call("run", days.folder / "alongside.yaml")[0] == 10


def test_an_output_is_not_merged_into_itself_and_left_as_it_was(days: Days) -> None:
    days.run("monday", rows_of(2, 3))
    days.run("tuesday", rows_of(3, 2))
    before = sorted(path for path in days.out("monday").rglob("*"))
    code, message = days.call("merge", days.out("monday"), days.out("tuesday"), "--to", f"{days.out('monday')}/")
    assert (code, "is one of the outputs" in message) == (3, True)
    assert sorted(path for path in days.out("monday").rglob("*")) == before


def test_a_file_that_is_in_both_is_refused(days: Days) -> None:
    rows = rows_of(4, 3)
    days.run("monday", rows)
    days.run("again", rows, run={"chunk_rows": 5})
    code, message = days.call("merge", days.out("monday"), days.out("again"), "--to", days.out("week"))
    assert (code, "the same file" in message) == (3, True)


def test_a_merged_output_inside_one_that_is_merged_is_refused(days: Days) -> None:
    """Its files would be among the receipts or labels of the other."""
    days.run("monday", rows_of(2, 3))
    before = sorted(days.out("monday").rglob("*"))
    code, message = days.call("merge", days.out("monday"), "--to", days.out("monday") / "labels/merged")
    assert (code, "lies inside" in message) == (3, True)
    assert sorted(days.out("monday").rglob("*")) == before


def test_a_merge_over_the_limit_of_quarantined_rows_says_so(days: Days) -> None:
    args: dict[str, Any] = {"engine": {"args": {"p_garbage": 0.5}}, "labeler": {"attempts": 1}}
    job = days.job("monday", rows_of(4, 5), **args)
    assert days.call("run", job)[0] == 30
    for again in range(2):
        said = CliRunner().invoke(
            relabel, ["merge", str(days.out("monday")), "--to", str(days.out("week"))], standalone_mode=False
        )
        assert said.return_value == 30
        assert "of rows are quarantined, over the limit of 5.0%; everything is kept" in said.stdout, again


@pytest.fixture
def parts(days: Days, spoil: Callable[..., None]) -> Path:
    """A job of which the outputs `one` and `two` were merged into `week` while each had rows in quarantine, other ones
    each; what becomes of merges as their sources go on is swept in tests/faults/test_merges.py.
    """
    job = days.job("job", rows_of(12, 5), labeler={"attempts": 1}, run={"max_failed_fraction": 1.0})
    for name, spoilt in (("one", ["kind 0"]), ("two", ["kind 1", "kind 2"])):
        spoil(*spoilt)
        assert days.call("run", job, "--set", f"output={days.out(name)}")[0] == 0
    spoil()
    assert days.call("merge", days.out("one"), days.out("two"), "--to", days.out("week"))[0] == 0
    return job


def test_a_source_that_was_retried_is_followed(days: Days, parts: Path) -> None:
    """The fault that lost 102 rows of 120 under exit code 0: the retry's receipts of one source after the first ones of
    another.
    """
    assert days.call("retry", parts, "--set", f"output={days.out('two')}")[0] == 0
    for name, code in (("week", 0), ("week", 10), ("new", 0)):
        assert days.call("merge", days.out("one"), days.out("two"), "--to", days.out(name))[0] == code
    assert days.call("verify", days.out("week"))[0] == 0
    assert days.labels("week") == days.labels("new")
    assert [row["row_id"] for row in days.labels("week")] == list(range(60))
    assert days.manifest("week")["rows"] == {"in": 60, "labelled": 60, "reused": 0, "quarantined": 0}


def test_a_merge_of_fewer_parts_than_before_is_refused_and_leaves_what_was_there(days: Days, parts: Path) -> None:
    """Labels that only the part that is not named has would be gone."""
    before = digests(days.out("week"))
    code, message = days.call("merge", days.out("two"), "--to", days.out("week"))
    assert (code, str(days.out("one")) in message) == (3, True)
    days.run("other", rows_of(2, 2))
    code, message = days.call("merge", days.out("other"), "--to", days.out("week"))
    assert (code, "holds another run's output" in message) == (3, True)
    for name in ("one", "two"):
        (days.out(name) / "receipts/shard-00000/chunk-000001.json").unlink()
    code, message = days.call("merge", days.out("one"), days.out("two"), "--to", days.out("week"))
    assert (code, "not finished" in message) == (3, True)
    assert digests(days.out("week")) == before


def digests(out: Path) -> dict[str, bytes]:
    """What readers go by."""
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*.json")}
