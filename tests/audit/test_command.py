"""`relabel audit`: judges whose weakness is known fail where they are weak and pass elsewhere; gates, files, and a
second call.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from relabel.jobs.cli import main
from relabel.jobs.probes import PROBES
from tests.killing import killed

Relabel = Callable[..., Any]
JudgedBy = Callable[..., str]

WITHOUT_ORDER = [probe.name for probe in PROBES if probe.name != "document-order"]


def by_probe(outcome: Any) -> dict[str, dict[str, Any]]:
    return {probe["probe"]: probe for probe in outcome.json["probes"]}


def test_a_judge_that_counts_words_fails_stuffing_and_passes_length(relabel: Relabel, judged_by: JudgedBy) -> None:
    job = judged_by("CountsWords")
    assert relabel("audit", job, "--require", "padded<=0", "--require", "repeated<=0").code == 0
    outcome = relabel("audit", job, "--require", "stuffing<=0.05", "--output", "json")
    assert outcome.code == outcome.json["exit_code"] == 5
    low, high = (by_probe(outcome)["stuffing"]["moved"][end] for end in ("low", "high"))
    said = f"stuffing<=0.05: refused, stuffing is 0.8333 ({low:.4f} to {high:.4f}), the bound 0.0500"
    assert said in outcome.err
    assert outcome.json["gates"][0]["interval"] == [low, high]
    probes = by_probe(outcome)
    assert list(probes) == WITHOUT_ORDER
    # 20 of 24 documents lack the number, one word of the three of the query
    for name, moved, grades in (("stuffing", 20 / 24, 20 / 24), ("lorem", 1, 3), ("padded", 0, 0), ("again", 0, 0)):
        assert probes[name]["moved"]["value"] == pytest.approx(moved)
        assert probes[name]["moves"]["value"] == pytest.approx(grades)
        assert (probes[name]["rows"], probes[name]["unreadable"]) == (24, 0)
    worst = probes["stuffing"]["worst"][0]
    assert worst["document"].startswith(f"{worst['query']} {worst['query']}")
    assert (worst["before"], worst["after"]) == pytest.approx((2, 3))


def test_the_verdict_is_first_and_what_a_probe_changes_is_below_its_row(
    relabel: Relabel, judged_by: JudgedBy, folder: Path
) -> None:
    job = judged_by("CountsWords")
    outcome = relabel("audit", job)
    verdict = outcome.out.splitlines()[0]
    assert verdict.startswith(f"{job} can be fooled. Pairs that a probe moves the wrong way: stuffing 83% (")
    assert verdict.endswith("; 24 pairs of 6 queries.")
    about = outcome.out.index("stuffing: the query")
    assert outcome.out.index("stuffing  ") < about < outcome.out.index("the furthest")
    assert f"note: the audit is {folder}/out/measurements/ecom/audit/audit.json" in outcome.err


def test_a_judge_that_reads_gold_passes_every_probe(relabel: Relabel, judged_by: JudgedBy) -> None:
    job = judged_by("ReadsGold", {"audit": {"require": dict.fromkeys(WITHOUT_ORDER, 0.0)}})
    outcome = relabel("audit", job, "--output", "json")
    assert outcome.code == 0
    assert [verdict["has_passed"] for verdict in outcome.json["gates"]] == [True] * len(WITHOUT_ORDER)
    assert all(probe["moves"]["value"] == 0 for probe in outcome.json["probes"])


@pytest.mark.parametrize(
    ("judge", "weak"), [("ReadsTheBeginning", {"truncation"}), ("Obeys", {"instruction", "forged"})]
)
def test_each_weakness_is_found_by_its_probe_and_by_no_other(
    relabel: Relabel, judged_by: JudgedBy, judge: str, weak: set[str]
) -> None:
    outcome = relabel("audit", judged_by(judge), "--output", "json")
    assert {name for name, probe in by_probe(outcome).items() if probe["moved"]["value"] > 0.5} == weak


def test_a_gate_compares_the_share_itself_and_shows_its_interval(relabel: Relabel, judged_by: JudgedBy) -> None:
    """Not an end of the interval: few rows, whose interval is wide, would pass or fail whatever the judge does."""
    job = judged_by("CountsWords")
    assert relabel("audit", job, "--require", "stuffing<=0.84").code == 0
    outcome = relabel("audit", job, "--require", "stuffing<=0.83")
    assert outcome.code == 5
    assert "95 % interval" in outcome.out.splitlines()[-2]
    assert "refused" in outcome.out.splitlines()[-1]


def test_a_gate_of_the_job_is_the_exit_code(relabel: Relabel, judged_by: JudgedBy) -> None:
    job = judged_by("CountsWords", {"audit": {"rows": 10, "require": {"stuffing": 0.05}}})
    outcome = relabel("audit", job)
    assert outcome.code == 5
    assert "10 pairs of 6 queries" in outcome.out
    assert relabel("audit", job, "--set", "audit.require.stuffing=1.0").code == 0


def test_the_same_command_again_asks_nothing_and_gives_the_same_bytes(
    relabel: Relabel, judged_by: JudgedBy, folder: Path
) -> None:
    job = judged_by("CountsWords")
    first = relabel("audit", job, "--rows", "8")
    written = (folder / "out/measurements/ecom/audit/audit.json").read_bytes()
    again = relabel("audit", job, "--rows", "8")
    assert again.out == first.out
    assert (folder / "out/measurements/ecom/audit/audit.json").read_bytes() == written
    assert re.search(r"8 pairs as they are and changed, \d+ rows in all, and 8 once more", first.err)
    assert "direct asks" in first.err
    assert "direct asks" not in again.err
    elsewhere = relabel("audit", job, "--rows", "8", "--to", "elsewhere")
    assert elsewhere.out == first.out
    assert not (folder / "out/ecom").exists()  # the job's own output is not touched


@pytest.mark.parametrize("change", [3, 12, 40])
def test_a_killed_audit_goes_on(
    relabel: Relabel, judged_by: JudgedBy, folder: Path, change: int, capsys: pytest.CaptureFixture[str]
) -> None:
    job = judged_by("CountsWords")
    undisturbed = relabel("audit", job, "--rows", "8", "--to", "whole")
    assert killed(lambda: main(["audit", job, "--rows", "8", "--to", "cut"]), before_change=change)
    capsys.readouterr()
    assert relabel("audit", job, "--rows", "8", "--to", "cut").out == undisturbed.out
    assert (folder / "cut/audit.json").read_bytes() == (folder / "whole/audit.json").read_bytes()


def test_an_engine_that_goes_down_leaves_an_audit_to_go_on_with(relabel: Relabel, judged_by: JudgedBy) -> None:
    job = judged_by("CountsWords", {"run": {"chunk_rows": 4}})
    undisturbed = relabel("audit", job, "--rows", "8", "--to", "whole")
    crash = ("--set", "engine.args.p_crash=0.05", "--set", "engine.args.batch=4")
    outcome = relabel("audit", job, "--rows", "8", "--to", "cut", *crash)
    assert outcome.code == 20
    assert relabel("audit", job, "--rows", "8", "--to", "cut").out == undisturbed.out


def test_a_folder_belongs_to_one_audit(relabel: Relabel, judged_by: JudgedBy) -> None:
    job = judged_by("CountsWords")
    assert relabel("audit", job, "--rows", "8").code == 0
    relabel("audit", job, "--rows", "9").refused(3, "holds the pairs of another audit", "--to")


def test_what_can_not_be_audited_is_refused_before_anything_is_asked(
    relabel: Relabel, judged_by: JudgedBy, folder: Path
) -> None:
    job = judged_by("CountsWords")
    relabel("audit", job, "--require", "stufing<=0.05").refused(3, "stufing", "Did you mean `stuffing`?")
    relabel("audit", job, "--probe", "gold").refused(3, "no probe `gold`", "known are stuffing")
    relabel("audit", job, "--probe", "padded", "--require", "stuffing<=0.05").refused(3, "stuffing")
    relabel("audit", job, "--set", "labeler={name: variants}").refused(3, "variants", "grades no document")
    relabel("audit", job, "--precision", "int8").refused(2, "--precision", "is a job")
    relabel("audit", "absent", "--pairs", "pairs.parquet").refused(3, "absent")
    relabel("audit", "absent").refused(2, "--pairs")
    (folder / "made/labels").mkdir(parents=True)
    (folder / "made/labels/plan.json").write_text("{}")
    relabel("audit", "made/labels").refused(2, "made/labels: the output of a run. Name the job file")
    assert not (folder / "out").exists()


def test_some_probes_come_with_the_noise(relabel: Relabel, judged_by: JudgedBy) -> None:
    outcome = relabel("audit", judged_by("CountsWords"), "--probe", "padded", "--output", "json")
    assert list(by_probe(outcome)) == ["padded", "whitespace", "again"]


def test_a_judge_of_whole_queries_sees_all_documents_with_one_changed(
    relabel: Relabel, judged_by: JudgedBy, folder: Path
) -> None:
    job = judged_by("ReadsGold", {"labeler": {"name": "review"}, "engine": {"name": "fake"}})
    outcome = relabel("audit", job, "--output", "json")
    probes = by_probe(outcome)
    assert outcome.json["rows"] == outcome.json["queries"] == probes["document-order"]["rows"] == 6
    asked = pq.read_table(folder / "out/measurements/ecom/audit/pairs.parquet").to_pylist()
    queries: dict[str, list[dict[str, Any]]] = {}
    for row in asked:
        queries.setdefault(row["query_id"], []).append(row)
    assert {len(rows) for rows in queries.values()} == {4}
    original = {row["doc_id"]: row["document"] for row in queries["0.original"]}
    stuffed = {row["doc_id"]: row["document"] for row in queries["0.stuffing"]}
    assert sum(original[doc] != stuffed[doc] for doc in original) == 1
    assert [row["doc_id"] for row in queries["0.document-order"]] == list(original)[::-1]


def test_pairs_are_of_as_many_queries_as_there_are(relabel: Relabel, judged_by: JudgedBy, folder: Path) -> None:
    outcome = relabel("audit", judged_by("CountsWords"), "--rows", "6", "--to", "few", "--output", "json")
    assert (outcome.json["rows"], outcome.json["queries"]) == (6, 6)
    assert json.loads((folder / "few/audit.json").read_bytes())["rows"] == 6


def test_unreadable_answers_are_counted_and_no_grade(relabel: Relabel, judged_by: JudgedBy) -> None:
    changes = {"labeler": {"name": "umbrela", "attempts": 1}, "engine": {"name": "fake", "args": {"p_garbage": 0.3}}}
    outcome = relabel("audit", judged_by("ReadsGold", changes), "--output", "json")
    assert outcome.code == 0
    for probe in outcome.json["probes"]:
        assert probe["rows"] + probe["unreadable"] == 24
    assert sum(probe["unreadable"] for probe in outcome.json["probes"]) > 24
