"""Asks as batches: the same labels at half the price, and no ask is paid for twice, whatever ends the run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from relabel.manifests.failpoints import BATCH_FAILPOINTS
from tests.faults import forks
from tests.faults.command_lines import inside

from .batch_server import BatchServer, Fate
from .scripted_server import Call, Json, ScriptedServer
from .test_run import committed, r3a, relabel, write_job

__all__ = ["write_job"]
ARGS = {
    "served_model": "teacher",
    "mode": "chat",
    "batch": True,
    "batch_poll_s": 0.02,
    "backoff_s": 0.001,
    "price_per_million_input": 2.0,
    "price_per_million_output": 8.0,
}


def start(serve: Any, provider: BatchServer) -> ScriptedServer:
    server: ScriptedServer = serve(provider)
    server.gets = provider.get
    return server


def job_of(write_job: Any, server: ScriptedServer, *, run: dict[str, Any] | None = None, **args: Any) -> str:
    path = write_job(server, engine={"args": {**ARGS, "base_url": server.url, **args}}, run=run or {})
    return str(path)


def run(job: str, *more: str, capsys: Any) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = relabel("run", job, "--output", "json", *more)
    out, err = capsys.readouterr()
    assert out, err
    return code, json.loads(out)


def grades() -> dict[int, Any]:
    return {row: label["grade"] for row, label in committed("labels").items()}


WANTED = {row: row % 3 for row in range(20) if row != 7}
"""What `r3a` answers; row 7 holds a control token."""


def test_two_stages_are_two_batches_and_cost_half(serve: Any, write_job: Any, capsys: Any) -> None:
    provider = BatchServer(r3a)
    server = start(serve, provider)
    code, ended = run(job_of(write_job, server), capsys=capsys)
    assert code == 0
    assert grades() == WANTED
    assert len(provider.batches) == 2
    assert set(provider.paid.values()) == {1}
    alone = server.posts("/chat/completions")
    assert len(alone) == 2, "each stage is tried once at the start"
    batched = 4 * (100 * 2 + 20 * 8) + 19 * (200 * 2 + 30 * 8)
    tried = (100 * 2 + 20 * 8) + (200 * 2 + 30 * 8)
    assert ended["this_run"]["costs"]["cost"] == pytest.approx((batched / 2 + tried) / 1e6)
    assert not list(Path("out/batches").iterdir())


def test_a_stop_while_a_batch_is_out_waits_for_none_and_the_next_run_takes_it_up(
    serve: Any, write_job: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relabel.jobs.run.stop.DRAIN_S", 1e6)  # a drain that waited would never end
    provider = BatchServer(r3a, lambda nth: "held")
    provider.on_look = lambda: os.kill(os.getpid(), signal.SIGTERM) if provider.looks == 3 else None
    job = job_of(write_job, start(serve, provider))
    assert run(job, capsys=capsys)[0] == 20
    provider.is_held = False
    assert run(job, capsys=capsys)[0] == 0
    assert grades() == WANTED
    assert set(provider.paid.values()) == {1}
    assert len(provider.batches) == 2


@pytest.mark.parametrize("place", BATCH_FAILPOINTS)
def test_a_run_killed_around_the_handing_over_pays_for_no_ask_twice(
    place: str, serve: Any, write_job: Any, capsys: Any
) -> None:
    provider = BatchServer(r3a)
    job = job_of(write_job, start(serve, provider))
    killed = forks.call(["run", job], setup=inside(Path.cwd(), "arm", place))
    assert killed.code == -signal.SIGKILL, killed
    assert run(job, capsys=capsys)[0] == 0
    assert grades() == WANTED
    assert set(provider.paid.values()) == {1}


def test_a_reply_that_is_lost_hands_nothing_over_twice(serve: Any, write_job: Any, capsys: Any) -> None:
    provider = BatchServer(r3a)
    provider.loses_reply = True
    assert run(job_of(write_job, start(serve, provider)), capsys=capsys)[0] == 0
    assert grades() == WANTED
    assert set(provider.paid.values()) == {1}
    assert len(provider.batches) == 2


@pytest.mark.parametrize("fate", ["failed", "expired", "gone"])
def test_what_a_batch_leaves_unanswered_goes_into_another(fate: Fate, serve: Any, write_job: Any, capsys: Any) -> None:
    provider = BatchServer(r3a, lambda nth: fate if nth == 0 else "completed")
    assert run(job_of(write_job, start(serve, provider)), capsys=capsys)[0] == 0
    assert grades() == WANTED
    first, *others = [[line["custom_id"] for line in batch["lines"]] for batch in provider.batches.values()]
    again = sorted(ask for asks in others for ask in asks if ask in first)
    left = first[::-1][1::2] if fate == "expired" else first
    assert again == sorted(left), "what was answered is not asked again, and the rest once"


def test_lines_of_a_batch_are_read_as_answers_that_come_alone(serve: Any, write_job: Any, capsys: Any) -> None:
    """Thoughts kept apart, errors in good replies, and credit that ends: what the batch answered is kept."""
    has_credit = False

    def answers(call: Call) -> Json:
        reply = r3a(call)
        if "of kind 3" in call.raw.decode() and not has_credit:
            return Json({"error": {"code": "insufficient_quota", "message": "pay first"}})
        if "of kind 4" in call.raw.decode():
            return Json({"error": {"code": 400, "message": "prompt is too long: 9 > 8"}})
        thought, _, rest = reply.payload["choices"][0]["message"]["content"].partition("</think>")
        message = {"content": [{"type": "text", "text": rest}], "reasoning": thought.removeprefix("<think>")}
        reply.payload["choices"][0]["message"] = message
        return reply

    provider = BatchServer(answers)
    job = job_of(write_job, start(serve, provider))
    assert run(job, capsys=capsys)[0] == 20
    num_asked = len(provider.paid)
    has_credit = True
    assert run(job, capsys=capsys)[0] == 0
    assert grades() == {row: grade for row, grade in WANTED.items() if row != 4}
    assert len(provider.paid) == num_asked, "what a batch had answered was asked again"


def test_lines_that_the_provider_refuses_are_their_rows_fate(serve: Any, write_job: Any, capsys: Any) -> None:
    provider = BatchServer(r3a, lambda nth: "errors" if nth == 1 else "completed")
    assert run(job_of(write_job, start(serve, provider), run={"max_failed_fraction": 1.0}), capsys=capsys)[0] == 0
    found = committed("quarantine")
    assert {row["status"] for number, row in found.items() if number != 7} == {"overlong"}
    assert len(found) == 1 + 19 // 2


def test_a_budget_counts_half_and_a_batch_once_over_any_number_of_runs(serve: Any, write_job: Any, capsys: Any) -> None:
    provider = BatchServer(r3a, lambda nth: "held")
    job = job_of(write_job, start(serve, provider), run={"max_cost": 10.0})
    stop_at = [2]

    def look() -> None:
        if provider.looks == stop_at[0]:
            os.kill(os.getpid(), signal.SIGTERM)

    provider.on_look = look
    assert run(job, capsys=capsys)[0] == 20
    for _ in range(2):  # ticks while the first batch is out
        stop_at[0] = provider.looks + 2
        assert run(job, capsys=capsys)[0] == 20
    stop_at[0], provider.is_held = -1, False
    code, ended = run(job, capsys=capsys)
    assert code == 0
    verdicts = 19 * (200 * 2 + 30 * 8) / 2 / 1e6
    intents = 4 * (100 * 2 + 20 * 8) / 2 / 1e6
    assert ended["budget"]["spent_cost"] == pytest.approx(intents + verdicts)


def test_batches_are_chat(write_job: Any, serve: Any, capsys: Any) -> None:
    assert relabel("run", job_of(write_job, serve(r3a), mode="auto")) == 3
    assert "batches hold chat requests: write mode: chat" in capsys.readouterr().err
