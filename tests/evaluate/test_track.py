"""`evaluate --track`: a line a day in a CSV, a fall beyond chance in the exit code and in metrics."""

import csv
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

Relabel = Callable[..., Any]
WriteRows = Callable[..., str]
QUERIES = 60


def write_labels(write_rows: WriteRows, wrong: int) -> None:
    """Labels of 240 pairs next to gold; every query has pairs that are graded wrong, `wrong` of 240 in all."""
    rows = []
    for number in range(4 * QUERIES):
        gold = number % 3
        grade = (gold + 1) % 3 if number < wrong else gold
        rows.append({"query_id": f"q{number % QUERIES}", "doc_id": f"d{number}", "grade": grade, "gold": gold})
    write_rows(rows, "labels.jsonl")


@pytest.fixture
def look(relabel: Relabel, write_rows: WriteRows, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`look(day, wrong=40)`: judge labels on a day."""

    def call(day: int, wrong: int, *more: str) -> Any:
        class Clock(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:
                return datetime(2026, 11, 1, tzinfo=tz) + timedelta(days=day)

        monkeypatch.setattr("relabel.jobs.track.datetime", Clock)
        write_labels(write_rows, wrong)
        call = ("evaluate", "labels.jsonl", "--qrels", "labels.jsonl", "--grade", "gold", "--track", "track.csv")
        return relabel(*call, *more)

    return call


def lines() -> list[dict[str, str]]:
    with Path("track.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_line_a_day_with_agreement_and_the_share_of_each_grade(look: Callable[..., Any]) -> None:
    assert "the first look" in look(0, 40).out
    outcome = look(1, 44)
    assert outcome.code == 0
    assert "2 looks; agreement 0.8167 now, 0.8333 in the first look" in outcome.out
    first, second = lines()
    assert (first["date"], second["date"]) == ("2026-11-01", "2026-11-02")
    assert float(first["agreement"]) == pytest.approx(200 / 240, abs=1e-6)
    assert float(first["low"]) < float(first["agreement"]) < float(first["high"])
    assert sum(float(first[f"share_{grade}"]) for grade in range(3)) == pytest.approx(1, abs=1e-5)
    assert first["pairs"] == "240"


def test_two_label_files_of_one_day_are_two_looks(look: Callable[..., Any], relabel: Relabel) -> None:
    """And one that is looked at again takes the place of its line."""
    look(0, 40)
    Path("labels.jsonl").rename("other.jsonl")
    other = ("evaluate", "other.jsonl", "--qrels", "other.jsonl", "--grade", "gold", "--track", "track.csv")
    assert "2 looks" in relabel(*other).out
    assert len({line["fingerprint"] for line in lines()}) == len(lines()) == 2
    assert relabel(*other).code == 0
    assert len(lines()) == 2


def test_agreement_that_rose_is_no_fall(look: Callable[..., Any]) -> None:
    look(0, 44)
    outcome = look(1, 40)
    assert outcome.code == 0
    assert "It has not fallen" in outcome.out


def test_another_number_of_pairs_is_asked_about(look: Callable[..., Any], relabel: Relabel) -> None:
    look(0, 40)
    assert "at the look before" not in look(1, 44).out
    half = look(2, 44, "--where", "grade=0").out
    assert "pairs, and 240 at the look before: are they of the same file?" in half


def test_message_says_on_how_many_queries_the_bound_rests(look: Callable[..., Any]) -> None:
    """Pairs of few queries look like many, and a bound of few queries is wide."""
    look(0, 40)
    for wrong in (44, 200):
        outcome = look(1, wrong)
        assert f"The bound rests on {QUERIES} queries, not on their 240 pairs" in outcome.out + outcome.err
    assert "rests on" not in look(1, 38).out


def test_the_same_day_again_takes_the_place_of_its_line(look: Callable[..., Any]) -> None:
    look(0, 40)
    before = look(1, 44).out
    held = Path("track.csv").read_bytes()
    assert look(1, 44).out == before
    assert Path("track.csv").read_bytes() == held


def test_the_same_labels_are_no_second_look(look: Callable[..., Any]) -> None:
    look(0, 40)
    look(1, 44)
    held = Path("track.csv").read_bytes()
    again = look(2, 44)
    assert "these labels are the look of 2026-11-02 already, so none was added" in again.out
    assert (again.code, Path("track.csv").read_bytes()) == (0, held)
    assert look(2, 44, "--output", "json").json["track"]["is_repeated"] is True
    assert look(3, 40).code == 0, "nor those of an older look"
    assert Path("track.csv").read_bytes() == held
    assert look(4, 46, "--output", "json").json["track"]["is_repeated"] is False
    assert len(lines()) == 3


def test_the_labels_of_the_only_look_are_not_called_the_first_look_again(look: Callable[..., Any]) -> None:
    look(0, 40)
    again = look(1, 40).out
    assert "these labels are the look of 2026-11-01 already, so none was added" in again
    assert "the first look" not in again


def test_another_run_with_the_same_grades_is_a_look_of_its_own(run: Callable[..., None], relabel: Relabel) -> None:
    """A judge that answers alike every day is looked at every day."""
    for number in (1, 2):
        output = f"out/{number}"
        run({"output": output})
        call = ("evaluate", output, "--qrels", "pairs.parquet", "--track", "track.csv")
        relabel(*call, "--track-date", f"2026-11-0{number}")
        again = relabel(*call, "--track-date", f"2026-11-0{number + 2}")
        assert f"the look of 2026-11-0{number} already" in again.out
    first, second = lines()
    assert first["fingerprint"] == second["fingerprint"]
    assert (first["model"], second["model"]) == ("fake", "fake")


def test_a_history_is_given_with_its_days_oldest_first(look: Callable[..., Any]) -> None:
    look(20, 40, "--track-date", "2026-10-01")
    look(20, 42, "--track-date", "2026-10-02")
    look(20, 44)
    assert [line["date"] for line in lines()] == ["2026-10-01", "2026-10-02", "2026-11-21"]
    look(21, 46, "--track-date", "2026-11-20").refused(2, "2026-11-20", "2026-11-21", "oldest first")
    look(21, 46, "--track-date", "yesterday").refused(2, "--track-date")
    assert len(lines()) == 3


def test_a_file_of_before_goes_on(look: Callable[..., Any]) -> None:
    """Its columns stay where they are, and the new one comes last."""
    look(0, 40)
    table = [line.rpartition(",")[0] for line in Path("track.csv").read_text().splitlines()]
    Path("track.csv").write_text("\n".join(table) + "\n")
    assert "2 looks" in look(1, 44).out
    before = "date,model,fingerprint,agreement,low,high,pairs,share_0,share_1,share_2"
    assert Path("track.csv").read_text().splitlines()[0] == f"{before},labels"
    assert [bool(line["labels"]) for line in lines()] == [False, True]


def test_a_fall_beyond_chance_is_exit_5_and_in_the_metrics(look: Callable[..., Any]) -> None:
    for day, wrong in enumerate((40, 42, 38, 44)):
        assert look(day, wrong).code == 0
    outcome = look(4, 130, "--output", "json", "--metrics", "judge.prom")
    assert outcome.code == outcome.json["exit_code"] == 5
    assert outcome.json["track"]["is_beyond_chance"] is True
    assert outcome.json["track"]["since"] == 1
    assert "beyond chance" in outcome.err
    assert 'relabel_agreement_has_fallen{track="track.csv"} 1.0' in Path("judge.prom").read_text()


def test_what_can_not_be_tracked_is_refused(look: Callable[..., Any], relabel: Relabel) -> None:
    look(0, 40, "--resamples", "0").refused(2, "--track", "--resamples")
    Path("track.csv").write_text("date,score\n2026-11-01,3\n")
    look(0, 40).refused(3, "track.csv", "date, score")
    assert Path("track.csv").read_text().startswith("date,score")
    relabel("evaluate", "labels.jsonl", "--qrels", "labels.jsonl", "--metrics", "x.prom").refused(2, "--track")
    day = ("--track-date", "2026-11-01")
    relabel("evaluate", "labels.jsonl", "--qrels", "labels.jsonl", *day).refused(2, "--track-date")
