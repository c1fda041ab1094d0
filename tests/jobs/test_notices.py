"""Grades that stop varying and mass outside the grades: what is warned of, what is not, and where it is shown."""

import itertools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relabel.jobs.run.notices import Graded, GradeJump, GradeWatch
from relabel.labelers.engines.fake import Fake
from relabel.manifests.asks import Answer, Distribution
from relabel.manifests.errors import ServerGoneError

CHUNK = 32


def jumps(rows: list[Graded]) -> list[GradeJump]:
    """What a watch says of rows, in chunks."""
    watch = GradeWatch()
    found = [watch.add(rows[first : first + CHUNK]) for first in range(0, len(rows), CHUNK)]
    return [jump for jump in found if jump is not None]


def rows_of(grades: list[int], *, each: int) -> list[Graded]:
    """So many rows of a query."""
    return [Graded(number, f"q{number // each}", grade) for number, grade in enumerate(grades)]


def varied(count: int, seed: int, weights: tuple[float, ...] = (1, 1, 1)) -> list[int]:
    return random.Random(seed).choices(range(len(weights)), weights, k=count)


@pytest.mark.parametrize("each", [1, 2, 5, 10])
@pytest.mark.parametrize("weights", [(1, 1, 1), (6, 3, 1)])
@pytest.mark.parametrize("before", [40, 200, 2000])
def test_grades_that_varied_and_are_all_the_same_are_warned_of_once(
    before: int, weights: tuple[float, ...], each: int
) -> None:
    for seed in range(20):
        (jump,) = jumps(rows_of([*varied(before, seed, weights), *[0] * 400], each=each))
        assert jump.grade == 0
        assert jump.rows >= 390
        assert before - 40 < jump.first_row <= before
        assert sum(jump.before.values()) == jump.first_row


def sorted_by_grade(seed: int) -> list[int]:
    return sorted(varied(3000, seed))


def nearly_all_zero(seed: int) -> list[int]:
    return varied(3000, seed, (97, 2, 1))


def few_then_the_rest(seed: int) -> list[int]:
    return [*[2] * 100, *[1] * 300, *[0] * 2600]


def half_the_queries_have_none(seed: int) -> list[int]:
    chance = random.Random(seed)
    by_query = [[0] * 10 if chance.random() < 0.5 else chance.choices(range(3), k=10) for _ in range(300)]
    return list(itertools.chain.from_iterable(by_query))


@pytest.mark.parametrize("each", [1, 10])
@pytest.mark.parametrize("grades", [varied, sorted_by_grade, nearly_all_zero, few_then_the_rest])
def test_innocent_sets_are_not(grades: Callable[..., list[int]], each: int) -> None:
    for seed in range(40):
        given = varied(3000, seed) if grades is varied else grades(seed)
        assert jumps(rows_of(given, each=each)) == []


def test_queries_without_a_hit_are_not() -> None:
    for seed in range(100):
        assert jumps(rows_of(half_the_queries_have_none(seed), each=10)) == []


def test_a_short_stretch_is_not() -> None:
    for seed in range(20):
        assert jumps(rows_of([*varied(400, seed), *[0] * 90, *varied(400, seed + 1)], each=1)) == []


def test_one_query_of_which_no_document_is_of_use_is_not() -> None:
    rows = rows_of(varied(400, 1), each=10)
    assert jumps([*rows, *(Graded(400 + number, "one", 0) for number in range(500))]) == []


class Turning(Fake):
    """The fake engine: after some answers it is sure of one grade; or its mass lies elsewhere; or it is gone."""

    after = 120
    outside = 0.01
    is_gone = False

    def poll(self) -> list[Answer]:
        answers = super().poll()
        self.given = getattr(self, "given", 0) + len(answers)
        if self.is_gone and self.given > self.after:
            raise ServerGoneError("the server\x1b[2J is gone; key sk-none")
        for answer in answers:
            for name, one in answer.distributions.items():
                probs = one.probs if self.given <= self.after else (1.0, *[0.0] * (len(one.probs) - 1))
                answer.distributions[name] = Distribution(probs, self.outside)
        return answers


@pytest.fixture
def turning(monkeypatch: pytest.MonkeyPatch, write_pairs: Callable[..., Path]) -> type[Turning]:
    words = ("red", "shoe", "for", "running", "in", "rain")
    chance = random.Random(3)
    write_pairs(
        [
            {
                "query_id": f"q{number // 4}",
                "query": " ".join(words),
                "doc_id": f"d{number}",
                "title": " ".join(chance.sample(words, chance.randrange(6))),
                "body": f"{number}",
            }
            for number in range(800)
        ]
    )
    monkeypatch.setattr("relabel.labelers.engines.fake.Fake", Turning)
    for name, value in (("after", 120), ("outside", 0.01), ("is_gone", False)):
        monkeypatch.setattr(Turning, name, value)
    return Turning


JOB: dict[str, Any] = {
    "input": {"limit": None},
    "labeler": {"name": "direct"},
    "engine": {"args": {"capacity": 16, "batch": 8}},
}


@pytest.mark.usefixtures("turning")
def test_a_jump_is_in_the_message_the_status_the_metrics_and_the_report(write_job: Any, relabel: Any) -> None:
    done = relabel("run", write_job(JOB), "--metrics", "run.prom", "--output", "json")
    assert done.code == 0
    (text,) = done.json["warnings"]
    assert "have grade 0; before them were" in text
    assert "the grades have changed abruptly" in done.err
    assert relabel("status", "out/ecom", "--output", "json").json["warnings"] == [text]
    assert f"  {text}" in relabel("status", "out/ecom").out
    assert 'relabel_run_grade_jumps{job="ecom",shard="all"} 1.0' in Path("run.prom").read_text()
    assert relabel("report", "out/ecom", "--to", "report.html").code == 0
    assert "have grade 0; before them were" in Path("report.html").read_text()


def test_a_jump_between_two_executions_is_seen(turning: type[Turning], write_job: Any, relabel: Any) -> None:
    turning.is_gone = True
    turning.after = 200
    assert relabel("run", write_job(JOB)).code == 20
    assert relabel("status", "out/ecom", "--output", "json").json["warnings"] == []
    turning.is_gone = False
    turning.after = 0
    (text,) = relabel("run", write_job(JOB), "--output", "json").json["warnings"]
    assert "have grade 0" in text


def test_much_mass_outside_the_grades_is_warned_of(turning: type[Turning], write_job: Any, relabel: Any) -> None:
    turning.after = 10_000
    turning.outside = 0.64
    done = relabel("run", write_job(JOB))
    assert done.code == 0
    for shown in (done, relabel("status", "out/ecom")):
        assert "on average 0.64 of the model's probability was outside the grades (800 labels)" in shown.out
    turning.outside = 0.3
    assert relabel("run", write_job({**JOB, "output": "out/less"}), "--output", "json").json["warnings"] == []


def test_a_report_counts_the_mass_of_all_labels(turning: type[Turning], write_job: Any, relabel: Any) -> None:
    """Those too of an execution that was killed and noted nothing."""
    turning.is_gone = True
    turning.after = 200
    turning.outside = 0.64
    assert relabel("run", write_job(JOB)).code == 20
    shutil.rmtree("out/ecom/notices")
    turning.is_gone = False
    turning.after = 10_000
    assert "(800 labels)" not in relabel("run", write_job(JOB)).out
    assert relabel("report", "out/ecom", "--to", "report.html").code == 0
    assert "probability was outside the grades (800 labels)" in Path("report.html").read_text()


def test_why_a_run_was_stopped_is_in_its_status_until_it_goes_on(
    turning: type[Turning], write_job: Any, relabel: Any
) -> None:
    turning.is_gone = True
    job = write_job(JOB)
    assert relabel("run", job, "--metrics", "run.prom").code == 20
    assert 'reason="ServerGoneError"} 20' in Path("run.prom").read_text()
    stopped = relabel("status", "out/ecom", "--output", "json").json["stopped"]
    assert stopped["error"] == "ServerGoneError"
    assert "is gone" in stopped["message"]
    turning.is_gone = False
    turning.after = 10_000
    assert relabel("run", job).code == 0
    assert relabel("status", "out/ecom", "--output", "json").json["stopped"] is None
    assert relabel("verify", job).code == 0
    assert not Path("out/ecom/stopped.json").exists()
    assert json.loads(Path("out/ecom/manifest.json").read_bytes())["rows"]
