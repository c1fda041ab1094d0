"""Budgets over a server: what it counted, start-up and lost replies included, is never more than what counts as
spent.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import GOOD, ask_for, requests_for, run_all
from .scripted_server import Call, Json, ScriptedServer, chat
from .test_run import r3a, relabel, write_job

__all__ = ["write_job"]
PRICES = {"price_per_million_input": 2.0, "price_per_million_output": 8.0}


class Till:
    """What the server charged: the usage of all replies that it made, anyone who read them."""

    def __init__(self, script: Callable[[Call], Json]) -> None:
        self.prompt = self.output = 0
        self._script = script
        self._guard = threading.Lock()

    def __call__(self, call: Call) -> Json:
        reply = self._script(call)
        usage = reply.payload.get("usage", {"prompt_tokens": 0, "completion_tokens": 0})
        with self._guard:
            self.prompt += usage["prompt_tokens"]
            self.output += usage["completion_tokens"]
        return reply

    @property
    def tokens(self) -> int:
        return self.prompt + self.output

    @property
    def money(self) -> float:
        return (2.0 * self.prompt + 8.0 * self.output) / 1e6


def run(job: str, *more: str, capsys: Any) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = relabel("run", job, "--output", "json", *more)
    return code, json.loads(capsys.readouterr().out)


def priced(server: ScriptedServer, write_job: Any, **run: Any) -> str:
    args = {"served_model": "teacher", "backoff_s": 0.001, "concurrency": 4, "base_url": server.url, **PRICES}
    return str(write_job(server, engine={"args": args}, run={"chunk_rows": 2, "max_failed_fraction": 0.5, **run}))


def dear(call: Call) -> Json:
    """As `r3a`, with ten times the tokens."""
    reply = r3a(call)
    reply.payload["usage"] = {
        name: 10 * reply.payload["usage"][name] for name in ("prompt_tokens", "completion_tokens")
    }
    return reply


def test_a_run_keeps_to_its_money_start_up_included(serve: Any, write_job: Any, capsys: Any) -> None:
    till = Till(dear)
    server = serve(till)
    job = priced(server, write_job, max_cost=0.08)
    code, ended = run(job, capsys=capsys)
    assert code == 5
    assert 0.0 < ended["budget"]["spent_cost"] <= till.money <= 0.08
    calls = len(server.calls), server.lists
    assert run(job, capsys=capsys)[0] == 5
    assert (len(server.calls), server.lists) == calls, "the next call asks the server nothing at all"
    code, ended = run(job, "--set", "run.max_cost=1.0", capsys=capsys)
    assert code == 0
    assert 0.8 * till.money <= ended["budget"]["spent_cost"] <= till.money, "all but trials"


def test_tokens_are_counted_here_where_the_server_counts_none(serve: Any, connect: Any) -> None:
    def silent(call: Call) -> Json:
        return Json({**chat(GOOD).payload, "usage": None})

    server = serve(silent)
    engine = connect(server)
    assert any("counts no tokens" in remark for remark in engine.prepare([requests_for(1)[0].ask]))
    before = engine.charged().tokens
    answers = run_all(engine, requests_for(3))
    prompts = ["".join(turn["content"] for turn in call.body["messages"]) for call in server.calls[1:]]
    assert [answer.prompt_tokens for answer in answers] == [-(-len(prompt) // 4) for prompt in prompts]
    assert {answer.output_tokens for answer in answers} == {-(-len(GOOD) // 4)}
    assert engine.charged().tokens - before == sum(one.prompt_tokens + one.output_tokens for one in answers)


def test_an_answer_without_a_limit_is_refused_where_there_is_a_budget(serve: Any, write_job: Any, capsys: Any) -> None:
    server = serve(r3a)
    args = {"served_model": "teacher", "base_url": server.url, "extra_body": {"max_tokens": None}}
    job = write_job(server, engine={"args": args}, run={"max_tokens": 10**6})
    assert relabel("run", job) == 3
    assert "takes max_tokens away" in capsys.readouterr().err


def test_the_most_of_an_ask_is_priced_and_holds_its_answer(serve: Any, connect: Any) -> None:
    engine = connect(serve(lambda call: chat(GOOD)), **PRICES)
    ask = ask_for("q", "é" * 1000)
    most = engine.most(ask)
    assert most.tokens >= 2000 + 96
    assert most.cost == pytest.approx((2.0 * (most.tokens - 96) + 8.0 * 96) / 1e6)


def status(target: str, capsys: Any, *more: str) -> Any:
    capsys.readouterr()
    assert relabel("status", target, *more) == 0
    out = capsys.readouterr().out
    return json.loads(out) if more else out


def test_status_says_what_calls_without_a_budget_have_cost(serve: Any, write_job: Any, capsys: Any) -> None:
    """Only where a job had `run.max_cost` did it say anything of money."""
    till = Till(r3a)
    job = priced(serve(till), write_job)
    assert relabel("plan", job) == 0
    assert status(job, capsys, "--output", "json")["cost"] == 0.0
    assert run(job, capsys=capsys)[0] == 0
    cost = status(job, capsys, "--output", "json")["cost"]
    tokens = status(job, capsys, "--output", "json")["stages"].values()
    assert cost == pytest.approx(sum(2.0 * one["prompt_tokens"] + 8.0 * one["output_tokens"] for one in tokens) / 1e6)
    assert 0.8 * till.money < cost <= till.money, "all but what the engine asked at its start"
    assert f"  {cost:,.4f} in money for the tokens of what is committed" in status(job, capsys)
    assert status("out", capsys, "--output", "json")["cost"] == cost, "a finished output names the prices itself"
