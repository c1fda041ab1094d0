"""A run with a budget: it ends at it with exit code 5, the next call too, without an engine; raised, it goes on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relabel.jobs.job import load_job, open_run
from relabel.jobs.run.allowance import open_allowance
from relabel.jobs.run.stop import Stop
from relabel.labelers.engines.fake import Fake
from relabel.manifests.asks import Answer, Request, most_output_tokens, most_prompt_tokens
from tests.jobs.conftest import Outcome

Call = Callable[..., Outcome]
R3A = {"labeler": {"name": "r3a"}, "run": {"chunk_rows": 2}}
ENDED = "ended at its budget"


@pytest.fixture(autouse=True)
def _pairs(write_pairs: Callable[..., Path]) -> None:
    write_pairs()


class Spent:
    """What the engine itself was asked to write, whatever became of it."""

    def __init__(self) -> None:
        self.tokens = 0
        self.starts = 0


@pytest.fixture
def spent(monkeypatch: pytest.MonkeyPatch) -> Spent:
    """Counts at the engine, and sees that no ask is more than it may be at most."""
    found = Spent()
    begin, submit = Fake.__init__, Fake.submit

    def counted_start(self: Fake, *args: Any, **options: Any) -> None:
        found.starts += type(self) is Fake  # a plan's sample is asked of a kind of its own
        begin(self, *args, **options)

    def counted(self: Fake, request: Request) -> None:
        if type(self) is not Fake:
            return submit(self, request)
        answer: Answer = self._answer(request, self._draw(request))
        tokens = answer.prompt_tokens + answer.output_tokens
        assert tokens <= most_prompt_tokens(request.ask) + most_output_tokens(request.ask)
        found.tokens += tokens
        return submit(self, request)

    monkeypatch.setattr(Fake, "__init__", counted_start)
    monkeypatch.setattr(Fake, "submit", counted)
    return found


def test_a_run_ends_at_its_budget_and_so_does_the_next_before_an_engine_is_started(
    relabel: Call, write_job: Callable[..., str], spent: Spent
) -> None:
    job = write_job({**R3A, "run": {"chunk_rows": 2, "max_tokens": 9_000}})
    first = relabel("run", job)
    assert first.code == 5
    assert ENDED in first.out
    assert "raise run.max_tokens or run.max_cost in job.yaml or its --set" in first.err
    assert " of 9,000 tokens spent\n" in first.out
    assert 4_000 < spent.tokens <= 9_000
    assert spent.starts == 1
    again = relabel("run", job, "--output", "json")
    assert again.code == 5
    assert again.json["budget"]["spent_tokens"] <= spent.tokens, "what was committed"
    assert again.json["labelled"] > 0
    assert spent.starts == 1


def test_every_stop_of_a_run_that_is_raised_bit_by_bit_is_within_its_budget_and_it_ends_as_one_without(
    relabel: Call, write_job: Callable[..., str], committed: Callable[..., dict[int, Any]], spent: Spent
) -> None:
    faults = {"p_garbage": 0.3, "p_truncated": 0.1, "capacity": 4}
    free = {**R3A, "engine": {"args": faults}, "run": {"chunk_rows": 2, "max_failed_fraction": 1.0}}
    job = write_job(free)
    for limit in range(6_000, 200_000, 6_000):
        before = spent.tokens
        code = relabel("run", job, "--set", f"run.max_tokens={limit}").code
        assert spent.tokens - before <= limit
        if code == 0:
            break
    assert code == 0
    assert relabel("run", write_job({**free, "output": "out/free"}, path="free.yaml")).code == 0
    assert committed() == committed(output="out/free")


def test_retries_and_what_ends_in_quarantine_count(relabel: Call, write_job: Callable[..., str], spent: Spent) -> None:
    faults = {"engine": {"args": {"p_garbage": 0.7}}, "labeler": {"name": "r3a", "attempts": 2}}
    job = write_job({**faults, "run": {"max_failed_fraction": 1.0, "max_tokens": 10**6}})
    assert relabel("run", job).code == 0
    of_the_run = spent.tokens
    limit = of_the_run + 3_000
    for _ in range(2):
        assert relabel("retry", job, "--set", f"run.max_tokens={limit}").code == 5
        assert of_the_run < spent.tokens <= limit


def test_a_worker_learns_what_others_committed(
    relabel: Call, write_job: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relabel.jobs.run.allowance.READ_EVERY_S", 0.0)
    opened = open_run(load_job(write_job({**R3A, "run": {"chunk_rows": 2, "max_tokens": 9_000}})))
    allowance = open_allowance(opened, "one", Stop())
    assert allowance.begin()
    ask = opened.job.labeler.probe()[0]
    assert allowance.takes(Request(1, ask, 0), is_idle=True)
    assert relabel("run", "job.yaml", "--set", "run.max_tokens=1000000").code == 0
    assert not allowance.takes(Request(2, ask, 0), is_idle=False)
    assert not allowance.is_spent, "an answer may make room"
    assert not allowance.takes(Request(2, ask, 0), is_idle=True)
    assert allowance.is_spent


def test_status_plan_and_manifest_say_what_is_gone(
    relabel: Call, write_job: Callable[..., str], folder: Path, spent: Spent
) -> None:
    job = write_job({**R3A, "run": {"chunk_rows": 2, "max_tokens": 100_000}})
    assert " 0 of 100,000 tokens spent\n" in relabel("plan", job).out
    assert relabel("run", job).code == 0
    said = f"{spent.tokens:,} of 100,000 tokens spent"
    assert said in relabel("status", "out/ecom").out
    assert said in relabel("plan", job).out
    manifest = json.loads((folder / "out/ecom/manifest.json").read_bytes())
    assert manifest["budget"] == relabel("status", "out/ecom", "--output", "json").json["budget"]
    assert manifest["budget"]["spent_tokens"] == spent.tokens
    assert relabel("verify", "out/ecom").code == 0


@pytest.mark.parametrize(
    ("run", "parts"),
    [
        ({"max_cost": 5.0}, ("`run.max_cost` = 5: what an ask costs is known of an engine that is paid by the token",)),
        ({"max_cost": 0}, ("`run.max_cost` = 0", "greater than 0")),
    ],
)
def test_a_limit_that_nothing_can_be_held_against_is_refused(
    run: dict[str, Any], parts: tuple[str, ...], relabel: Call, write_job: Callable[..., str]
) -> None:
    relabel("run", write_job({"run": run})).refused(3, "job.yaml", *parts)


def test_what_an_output_spent_without_a_budget_counts_once_it_has_one(
    relabel: Call, write_job: Callable[..., str], spent: Spent
) -> None:
    without = write_job(R3A)
    assert relabel("run", without, "--shard", "0/2").code == 0
    before = spent.tokens
    assert before > 2_000
    budget = {"chunk_rows": 2, "max_tokens": before + 100}
    assert (
        relabel("plan", write_job({**R3A, "run": budget}), "--output", "json").json["budget"]["spent_tokens"] == before
    )
    refused = relabel("run", write_job({**R3A, "run": budget}), "--output", "json")
    assert (refused.code, spent.tokens, spent.starts) == (5, before, 1)
    assert refused.json["budget"]["spent_tokens"] == before
    raised = write_job({**R3A, "run": {**budget, "max_tokens": before + 6_000}})
    assert relabel("run", raised).code == 5
    assert before < spent.tokens <= before + 6_000
    assert relabel("run", write_job(R3A)).code == 0, "a call without a budget, in between"
    raised = write_job({**R3A, "run": {**budget, "max_tokens": before + 6_000}})
    status = relabel("status", raised, "--output", "json")
    assert status.json["budget"]["spent_tokens"] <= spent.tokens
