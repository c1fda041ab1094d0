"""Merging: what comes out is what went in, under one name only where it was made in one way."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from relabel.distill.students.examples import load_examples, load_labels
from relabel.distill.students.spec import DistillSpec, LabelSource
from relabel.jobs.cli import relabel
from relabel.labelers.engines.fake import Fake
from relabel.manifests.cascade import audit_of_rows, certified_threshold
from relabel.manifests.errors import ConfigError, InputError
from relabel.manifests.files import Storage
from relabel.manifests.run_manifest import CascadeAudit
from tests.reuse.conftest import Days, Row, rows_of, said

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


def test_a_merged_output_is_called_as_all_of_its_runs_or_after_its_folder(days: Days) -> None:
    rows = rows_of(6, 4)
    days.run("monday", rows[:12], name="monday")
    days.run("tuesday", rows[12:], name="tuesday")
    days.run("wednesday", rows[12:], name="monday")

    def merged(to: str, *more: str, other: str = "tuesday") -> str:
        code, result = days.call("merge", days.out("monday"), days.out(other), "--to", f"{days.out(to)}/", *more)
        assert code == 0, result
        assert days.manifest(to)["name"] == result["name"]
        return str(result["name"])

    assert merged("week 47") == "week-47"
    assert merged("other", "--name", "spring") == "spring"
    assert merged("same", other="wednesday") == "monday"
    arguments = ["merge", str(days.out("monday")), str(days.out("tuesday")), "--to", str(days.out("shown"))]
    shown = CliRunner().invoke(relabel, arguments, standalone_mode=False, catch_exceptions=False)
    lines = shown.stdout.splitlines()
    assert lines[0] == f"shown: merged, every row accounted for, {days.out('shown')}"
    assert [line.split()[0] for line in lines[1:]] == ["outputs", "rows", "labelled", "files", "fingerprint"]


def test_pairs_that_two_outputs_have_are_counted(days: Days) -> None:
    rows = rows_of(6, 4)
    days.run("monday", rows[:12])
    days.run("tuesday", rows[9:])
    code, result = days.call("merge", days.out("monday"), days.out("tuesday"), "--to", days.out("week"))
    assert (code, result["repeated_labels"]) == (0, 3)
    days.run("later", rows[12:])
    code, result = days.call("merge", days.out("monday"), days.out("later"), "--to", days.out("both"))
    assert (code, result["repeated_labels"]) == (0, 0)


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


@pytest.mark.parametrize(
    ("other", "to", "why"),
    [
        ("tuesday", "monday/", "lies inside"),
        ("tuesday", "monday/labels/merged", "lies inside"),
        ("again", "week", "the same file"),
    ],
)
def test_outputs_that_make_no_one_output_are_refused_and_left_as_they_were(
    days: Days, other: str, to: str, why: str
) -> None:
    rows = rows_of(4, 3)
    days.run("monday", rows)
    days.run(other, rows if other == "again" else rows_of(2, 3), run={"chunk_rows": 5})
    before = sorted(days.out("monday").rglob("*"))
    code, message = days.call("merge", days.out("monday"), days.out(other), "--to", f"{days.out('')}/{to}")
    assert (code, why in message) == (3, True)
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


# Cheap judges before the teacher: the bound that holds, who labelled which row, and what is refused.


GRADES = 4
CALIBRATED = 30
ALPHA = 0.1


def simulated(rng: np.random.Generator, num_queries: int, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Confidence and loss [Q, N] of a judge that is overconfident on some queries, whose rows err together."""
    confidence_QN = rng.uniform(0.5, 1.0, (num_queries, num_rows))
    hard_Q1 = rng.random((num_queries, 1)) < 0.2
    error_QN = np.where(hard_Q1, 0.6, 0.9 * (1 - confidence_QN))
    return confidence_QN, (rng.random((num_queries, num_rows)) < error_QN).astype(float)


def naive_threshold(confidence_N: np.ndarray, loss_N: np.ndarray, alpha: float) -> float:
    """The least threshold whose loss was at most alpha on the calibration."""
    order = np.argsort(-confidence_N)
    above = np.flatnonzero(np.cumsum(loss_N[order]) / len(order) > alpha)
    return float(confidence_N[order][above[0]]) if len(above) else 0.0


def test_over_200_splits_the_mean_loss_of_new_queries_is_within_alpha_and_a_naive_threshold_is_not() -> None:
    rng, alpha = np.random.default_rng(3), 0.05
    certified, naive = [], []
    for _ in range(200):
        confidence_QN, loss_QN = simulated(rng, 25 + 500, 20)
        query_N = np.repeat(np.arange(25), 20)
        seen_N, lost_N = confidence_QN[:25].ravel(), loss_QN[:25].ravel()
        threshold = certified_threshold(query_N, seen_N, lost_N, alpha=alpha, highest=1.0)
        for found, one in ((certified, threshold), (naive, naive_threshold(seen_N, lost_N, alpha))):
            found.append((loss_QN[25:] * (confidence_QN[25:] > one)).mean())
    assert 0.0 < np.mean(certified) <= alpha
    assert np.mean(naive) > alpha * 1.02


def test_a_query_counts_once_however_many_rows_it_has() -> None:
    query_N = np.repeat(np.arange(20), [81, *[1] * 19])
    confidence_N = np.where(query_N == 0, 0.9, 0.8)
    loss_N = (query_N == 0).astype(float)  # the one query errs everywhere
    threshold = certified_threshold(query_N, confidence_N, loss_N, alpha=0.1, highest=1.0)
    assert threshold == 0.0  # (20 * 1/20 + 1) / 21 = 0.095, while 81 of 100 rows are wrong
    assert certified_threshold(query_N, confidence_N, loss_N, alpha=0.09, highest=1.0) == 0.9


@pytest.mark.parametrize(("alpha", "highest", "needed"), [(0.02, 1.0, 49), (0.05, 1.0, 19), (0.3, 3.0, 9)])
def test_an_alpha_that_so_few_queries_cannot_certify_is_refused_with_the_number_that_can(
    alpha: float, highest: float, needed: int
) -> None:
    few, zeros = np.arange(needed - 1), np.zeros(needed)
    with pytest.raises(ConfigError, match=f"at least {needed} "):
        certified_threshold(few, zeros[1:], zeros[1:], alpha=alpha, highest=highest)
    assert certified_threshold(np.arange(needed), zeros + 0.5, zeros, alpha=alpha, highest=highest) == 0.0


def test_the_audit_sees_a_judge_that_went_wrong_and_weighs_queries_alike() -> None:
    held = {"alpha": 0.05, "threshold": 0.5, "queries": 40, "loss": (1 - np.eye(2)).tolist()}

    def rows(wrong: float) -> pa.Table:
        found = [
            {"query_id": f"q{query}", "grade": int(doc < wrong * 10), "answered_by": by, "cheap_grade": 0}
            for query in range(40)
            for by in ("cheap", "audit")
            for doc in range(10)
        ]
        known = [{"query_id": "known", "grade": 1, "answered_by": "calibration", "cheap_grade": 0}] * 5
        return pa.Table.from_pylist(found + known)

    good, bad = audit_of_rows(rows(0.0), held), audit_of_rows(rows(0.3), held)
    assert (good.loss, good.is_alarm, good.cheap, good.audited, good.calibration) == (0.0, False, 400, 400, 5)
    one = audit_of_rows(rows(0.0).slice(19, 1), held)  # of one query nothing can be said
    assert (one.audited, one.loss, one.low) == (1, None, None)
    assert "too few pairs" in one.text
    assert bad.loss == pytest.approx(0.3)
    assert bad.is_alarm
    assert good.text.endswith("audited pairs, alpha 0.05: within it")
    assert bad.text.endswith("audited pairs, alpha 0.05: ABOVE THE BOUND")
    chance = replace(good, loss=0.0667, low=0.01, high=0.12)
    assert (chance.is_alarm, "alpha 0.05: above it by no more than the draw" in chance.text) == (False, True)


# ------------------------------------------------------------------------------
# A run.


def cheap_file(days: Days, labels: list[Row], *, wrong: int, name: str = "cheap") -> str:
    """A judge that knows the teacher's grades, is unsure of each fifth row and wrong about it, and sure of each
    `wrong`-th of the others and wrong.
    """
    rows = []
    for label in labels:
        is_unsure = label["row_id"] % 5 == 0
        grade = (label["grade"] + (is_unsure or label["row_id"] % wrong == 1)) % GRADES
        probs = np.full(GRADES, 0.15 if is_unsure else 0.01)
        probs[grade] = 1 - probs[0] * (GRADES - 1)
        rows.append({**{name: label[name] for name in ("query_id", "doc_id")}, "grade": grade, "probs": probs.tolist()})
    path = days.folder / f"{name}.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def cascade(days: Days, cheap: str | list[str], **changes: Any) -> dict[str, Any]:
    return {"cheap": cheap, "calibration": str(days.out("calibration")), "alpha": ALPHA, "audit_pairs": 40, **changes}


class Asked(NamedTuple):
    days: Days
    rows: list[Row]
    truth: list[Row]
    cheap: str
    result: dict[str, Any]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """The rows of 80 queries and the teacher's labels of all; `calibration` is a run over 30 of the queries, `cascade`
    one over all with a cheap judge before the teacher, and its result. Tests add days of other names.
    """
    days, rows = Days(tmp_path_factory.mktemp("asked")), rows_of(80, 10)
    days.run("truth", rows, labeler={"name": "direct"})
    drawn = {f"q{query}" for query in np.random.default_rng(5).permutation(80)[:CALIBRATED]}
    days.run("calibration", [row for row in rows if row["query_id"] in drawn], labeler={"name": "direct"})
    truth = days.labels("truth")
    cheap = cheap_file(days, truth, wrong=97)
    result = days.run("cascade", rows, labeler={"name": "direct"}, cascade=cascade(days, cheap))
    return Asked(days, rows, truth, cheap, result)


def test_the_teacher_is_asked_what_the_cheap_judge_is_unsure_of_and_the_audit(asked: Asked) -> None:
    days, _, truth, _, result = asked
    labels = days.labels("cascade")
    by = [label["answered_by"] for label in labels]
    assert days.asks("cascade") == {"score": by.count("teacher") + by.count("audit")}
    assert by.count("calibration") == CALIBRATED * 10
    assert by.count("teacher") == 50 * 2
    assert 15 <= by.count("audit") <= 90
    for label, true in zip(labels, truth, strict=True):
        if label["answered_by"] == "cheap":
            assert (label["grade"], label["key"], label["prompt_tokens"]) == (label["cheap_grade"], None, 0)
        else:
            assert (label["grade"], label["probs"], label["key"]) == (true["grade"], true["probs"], true["key"])
    found, manifest = result["cascade"], days.manifest("cascade")
    assert found == manifest["cascade"]
    assert (found["cheap"], found["audited"], found["queries"]) == (by.count("cheap"), by.count("audit"), CALIBRATED)
    assert 0.0 <= found["low"] <= found["loss"] < ALPHA
    certificate = manifest["provenance"]["cascade"]
    assert (certificate["alpha"], certificate["queries"]) == (ALPHA, CALIBRATED)
    assert days.call("status", days.folder / "cascade.yaml")[1]["cascade"] == found
    code, again = days.call("run", days.folder / "cascade.yaml")
    assert (code, again["cascade"]) == (10, found)


def test_the_audit_of_a_small_file_leaves_most_of_what_is_saved(asked: Asked) -> None:
    days, rows, _, cheap, _ = asked
    labeler = {"name": "direct"}
    small = days.run("small", rows, labeler=labeler, cascade=cascade(days, cheap, audit_pairs=200))["cascade"]
    share = days.manifest("small")["provenance"]["cascade"]["audit"]
    assert share == 0.2
    assert small["cheap"] > 3 * small["audited"] > 0
    wanted = cascade(days, cheap, audit_pairs=200, audit=0.5)
    days.run("wanted", rows, labeler=labeler, cascade=wanted)
    assert days.manifest("wanted")["provenance"]["cascade"]["audit"] == 0.5
    plan = days.call("plan", days.folder / "small.yaml")[1]
    assert "of such pairs the teacher is asked about 20.0% all the same, as an audit" in str(plan)


def test_a_run_whose_audit_would_be_smaller_now_says_how_it_goes_on(asked: Asked) -> None:
    """As of an output for which relabel itself found a larger share, before it left a small file some savings."""
    days, rows, _, cheap, _ = asked
    labeler = {"name": "direct"}
    days.run("larger", rows, labeler=labeler, cascade=cascade(days, cheap, audit_pairs=200, audit=0.5))
    derived = cascade(days, cheap, audit_pairs=200)
    code, refused = days.call("run", days.job("larger", rows, labeler=labeler, cascade=derived))
    assert code == 3
    assert "cascade.audit: was 0.5, is 0.2" in str(refused)
    assert "`cascade.audit: 0.5` in the job restores the audit" in str(refused)
    restored = cascade(days, cheap, audit_pairs=200, audit=0.5)
    assert days.call("run", days.job("larger", rows, labeler=labeler, cascade=restored))[0] == 10


def test_a_plan_says_how_many_rows_do_without_the_teacher_in_the_words_of_the_run(asked: Asked) -> None:
    days, rows, _, cheap, _ = asked
    job = days.job("saved", rows, labeler={"name": "direct"}, cascade=cascade(days, cheap))
    plan = days.call("plan", job)[1]
    found = days.run("saved", rows, labeler={"name": "direct"}, cascade=cascade(days, cheap))["cascade"]
    saved = f"{found['cheap']} of 800 rows ({found['cheap'] / 800:.0%}) without the teacher"
    assert f"cascade: {saved}" in plan["estimate"]["reuse"]
    assert CascadeAudit(**found).text.startswith(f"{saved};")


def test_a_plan_says_that_nothing_is_saved_where_no_cheap_label_is_sure_enough(asked: Asked) -> None:
    days, rows, truth, _, _ = asked
    wrong = [{**label, "grade": (label["grade"] + 1) % GRADES} for label in truth]
    spec = cascade(days, cheap_file(days, wrong, wrong=1000, name="wrong"))
    days.run("nothing", rows, labeler={"name": "direct"}, cascade=spec)
    assert {label["answered_by"] for label in days.labels("nothing")} == {"teacher", "calibration"}
    plan = days.call("plan", days.folder / "nothing.yaml")[1]
    assert "the teacher is asked about all rows" in str(plan)


def test_a_plan_says_where_the_calibration_holds_every_query_that_is_left(asked: Asked) -> None:
    days, rows, _, cheap, _ = asked
    drawn = {label["query_id"] for label in days.labels("calibration")}
    said = "the calibration holds every query of the open rows"
    for name, part in {
        "all": [row for row in rows if row["query_id"] in drawn],
        "more": [row for row in rows if row["query_id"] in {*drawn, min({row["query_id"] for row in rows} - drawn)}],
    }.items():
        job = days.job(name, part, labeler={"name": "direct"}, cascade=cascade(days, cheap))
        assert (said in str(days.call("plan", job)[1])) == (name == "all")


def test_no_later_run_takes_a_cheap_label_for_the_teachers(asked: Asked) -> None:
    days, rows, truth, _, _ = asked
    cheap = sum(label["answered_by"] == "cheap" for label in days.labels("cascade"))
    days.run("after", rows, labeler={"name": "direct"}, reuse=["cascade"])
    assert days.asks("after") == {"score": cheap}
    assert [row["grade"] for row in days.labels("after")] == [row["grade"] for row in truth]
    spec = cascade(days, str(days.out("truth")), calibration=str(days.out("cascade")))
    code, error = days.call("run", days.job("again", rows, labeler={"name": "direct"}, cascade=spec))
    assert code == 3
    assert "is a cascade itself" in error


def test_shards_and_chunks_do_not_matter_to_who_labels_a_row(asked: Asked) -> None:
    days, rows, _, cheap, _ = asked
    spec = cascade(days, cheap)
    days.run("many", rows, labeler={"name": "direct"}, cascade=spec, shards=7, run={"chunk_rows": 23})
    assert days.labels("many") == days.labels("cascade")


def test_a_judge_that_is_worse_on_the_run_than_on_the_calibration_ends_in_an_alarm(asked: Asked) -> None:
    days, rows, truth, _, _ = asked
    known = {label["query_id"] for label in days.labels("calibration")}
    spoilt = [{**label, "grade": (label["grade"] + (label["query_id"] not in known)) % GRADES} for label in truth]
    spec = cascade(days, cheap_file(days, spoilt, wrong=1000, name="worse"), audit=0.2)
    code, result = days.call("run", days.job("alarm", rows, labeler={"name": "direct"}, cascade=spec))
    assert (code, result["rows_open"]) == (5, 0)
    assert result["cascade"]["low"] > ALPHA


def test_what_cannot_be_certified_is_refused(asked: Asked) -> None:
    days, rows, _, cheap, _ = asked

    def refused(*words: str, job: dict[str, Any] | None = None, cheap: str = cheap, **changes: Any) -> None:
        spec = {"labeler": {"name": "direct"}, **(job or {}), "cascade": cascade(days, cheap, **changes)}
        code, error = days.call("run", days.job("refused", rows, **spec))
        assert code == 3, error
        assert all(word in error for word in words), error
        assert not Path(days.out("refused")).exists()

    refused("30 calibration queries", "at least 49", alpha=0.02)
    refused("`cascade.alpha` is 5, and no label costs more than 1", "0.05", alpha=5)
    refused("labelled otherwise than this job labels: labeler (name). Label", job={"labeler": {"name": "umbrela"}})
    refused("4 grades", "labeler 3", job={"labeler": {"name": "r3a"}}, cheap=str(days.out("truth")))
    strangers = days.folder / "strangers.parquet"
    pq.write_table(pa.Table.from_pylist([{"query_id": "other", "doc_id": "d", "grade": 1}]), strangers)
    refused("0 calibration queries", cheap=str(strangers))
    refused("canary", job={"canary": 5})
    refused("review", job={"labeler": {"name": "review"}})


def test_cheap_answers_that_are_not_there_are_reported_by_their_key(asked: Asked) -> None:
    days, rows, *_ = asked
    spec = cascade(days, str(days.folder / "no-scores"))
    code, error = days.call("plan", days.job("absent", rows, labeler={"name": "direct"}, cascade=spec))
    assert code == 3
    assert "`cascade.cheap`" in error
    assert "no-scores" in error
    assert "`relabel score` writes the labels of a student" in error
    spec["calibration"] = str(days.folder / "no-teacher")
    spec["cheap"] = asked[3]
    code, error = days.call("plan", days.job("absent", rows, labeler={"name": "direct"}, cascade=spec))
    assert code == 3
    assert "no-teacher: no such file. Label a sample of the queries with the teacher" in error


def test_other_cheap_answers_are_another_job(asked: Asked) -> None:
    days, rows, truth, _, _ = asked
    spec = cascade(days, cheap_file(days, truth, wrong=97, name="changed"))
    days.run("day", rows, labeler={"name": "direct"}, cascade=spec)
    cheap_file(days, truth, wrong=53, name="changed")
    code, error = days.call("run", days.folder / "day.yaml")
    assert code == 3
    assert "cascade.cheap" in error


def test_several_judges_answer_by_the_mean_of_their_distributions(asked: Asked) -> None:
    days, rows, truth, cheap, _ = asked
    spec = cascade(days, [cheap, str(days.out("truth"))])
    days.run("several", rows, labeler={"name": "direct"}, cascade=spec)
    held = pq.read_table(cheap)["probs"].to_pylist()
    for label, one, other in zip(days.labels("several"), held, truth, strict=True):
        mean_K = (np.array(one) + np.array(other["probs"])) / 2
        assert label["cheap_grade"] == mean_K.argmax()
        assert label["cheap_confidence"] == pytest.approx(mean_K.max(), abs=1e-5)
    sources = {one["output"] for one in days.manifest("several")["reused_from"]}
    assert sources == {*spec["cheap"], spec["calibration"]}


def test_a_student_learns_from_a_cascade_with_weights_by_who_labelled_the_row(asked: Asked) -> None:
    days = asked.days
    by = [label["answered_by"] for label in days.labels("cascade")]
    source = {"path": str(days.out("cascade")), "weight": 2.0, "weights": {"cheap": 0.25, "audit": 0.0}}
    student = {"kind": "encoder", "model": "none"}
    spec = DistillSpec.model_validate(
        {"name": "s", "labels": [source], "student": student, "loss": {"weight_by": []}, "output": "o"}
    )
    weights = load_examples(spec, Storage()).row_weight
    assert weights.tolist() == [{"cheap": 0.5, "audit": 0.0}.get(one, 2.0) for one in by]
    plain = spec.model_copy(update={"labels": (LabelSource(path=str(days.out("truth")), weights={"cheap": 0.5}),)})
    with pytest.raises(InputError, match="cascade alone"):
        load_examples(plain, Storage())
