"""Servers that are busy, broken, slow, wrong or gone: what is tried again, how long it waits, and what becomes of row
and run.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import pytest

from manifests.asks import Engine
from manifests.errors import EngineCrashError, ModelError

from .conftest import GOOD, Waits, ask_for, echo, requests_for, run_all
from .scripted_server import Call, Hang, Json, Raw, Reset, chat, error


def after(count: int, fault: Any, good: Callable[[Call], Json] = echo) -> Callable[[Call], Any]:
    """A script: each body gets `fault` the first `count` times it is sent, and an answer then."""
    seen: Counter[bytes] = Counter()

    def script(call: Call) -> Any:
        seen[call.raw] += 1
        return fault if seen[call.raw] <= count else good(call)

    return script


FAULTS = {
    "429": error(429, "slow down"),
    "500": error(500, "oops"),
    "503 with a page": Raw(b"<html>busy</html>"),
    "time-out": Hang(),
    "reset": Reset(),
    "truncated body": Raw(b'{"choices": [', missing=100),
    "truncated JSON": Raw(b'{"choices": ['),
    "another schema": Json({"answer": GOOD}),
    "a list": Json([GOOD]),
    "no choices": Json({"choices": []}),
    "two choices": Json({"choices": chat(GOOD).payload["choices"] * 2}),
    "no message": Json({"choices": [{"index": 0, "finish_reason": "stop"}]}),
    "content of parts": Json({"choices": [{"message": {"content": [GOOD]}, "finish_reason": "stop"}]}),
    "no finish_reason": chat(GOOD, finish=None),
    "aborted": chat(GOOD, finish="abort"),
}


def timeout_s(name: str) -> float:
    """Seconds before a request is given up: short only where that is the fault, since a busy
    machine may answer late.
    """
    return 2.0 if name == "time-out" else 20.0


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_passes_costs_a_try_and_no_row(name: str, serve: Any, connect: Any, waits: Waits) -> None:
    server = serve(after(1, FAULTS[name]))
    engine = connect(server, timeout_s=timeout_s(name))
    answers = run_all(engine, requests_for(4))
    assert [answer.text for answer in answers] == [f"<think>{n}</think><score>{n % 3}</score>" for n in range(4)]
    assert {answer.finish for answer in answers} == {"stop"}
    assert len(server.calls) == 8
    assert len(waits) == 4
    costs = engine.costs()
    assert (costs["retries"], costs["given_up"]) == (4, 0)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_stays_ends_that_ask_alone_as_an_error(name: str, serve: Any, connect: Any) -> None:
    def script(call: Call) -> Any:
        return FAULTS[name] if "document 1" in call.raw.decode() else echo(call)

    server = serve(script)
    engine = connect(server, max_tries=3, timeout_s=timeout_s(name))
    good, bad, last = run_all(engine, requests_for(3))
    assert (good.finish, last.finish) == ("stop", "stop")
    assert (bad.finish, bad.text) == ("error", "")
    assert "no usable reply in 3 tries" in bad.detail
    assert len(server.calls) == 2 + 3
    assert engine.costs()["given_up"] == 1


def test_waits_grow_twofold_up_to_their_bound_and_are_drawn_below_it(serve: Any, connect: Any, waits: Waits) -> None:
    bounds = [1, 2, 4, 8, 10, 10, 10]
    seen: list[list[float]] = []
    for _ in range(12):
        waits.clear()
        engine = connect(serve(after(7, error(500))), max_tries=8, backoff_s=1.0, max_backoff_s=10.0)
        assert run_all(engine, requests_for(1))[0].finish == "stop"
        assert all(0 <= wait <= bound for wait, bound in zip(waits, bounds, strict=True))
        seen.append(list(waits))
    assert len({tuple(one) for one in seen}) == 12, "no jitter"
    assert max(one[3] for one in seen) > 4 > min(one[3] for one in seen), "jitter is not drawn from the whole range"
    assert engine.costs()["waited_s"] == pytest.approx(sum(waits), abs=1e-3)


@pytest.mark.parametrize(
    ("headers", "least"),
    [
        ({"retry_after": "7"}, 7),
        ({"retry_after_ms": "1500", "retry_after": "9"}, 1.5),
        ({"retry_after": "soon"}, 0),
        ({"retry_after": "-3"}, 0),
    ],
)
def test_retry_after_is_heeded_with_jitter_on_top(
    headers: dict[str, str], least: float, serve: Any, connect: Any, waits: Waits
) -> None:
    engine = connect(serve(after(1, error(429, **headers))), backoff_s=0.5)
    assert run_all(engine, requests_for(1))[0].finish == "stop"
    assert len(waits) == 1
    assert least <= waits[0] <= least + 0.5


def test_retry_after_may_be_a_date(serve: Any, connect: Any, waits: Waits) -> None:
    engine = connect(serve(after(1, error(503, retry_after=formatdate(time.time() + 30, usegmt=True)))), backoff_s=0.0)
    assert run_all(engine, requests_for(1))[0].finish == "stop"
    assert 25 < waits[0] <= 30


def test_a_retry_after_beyond_the_limit_ends_the_run_for_now(serve: Any, connect: Any, waits: Waits) -> None:
    engine = connect(serve(lambda _: error(429, retry_after="86400")))
    with pytest.raises(EngineCrashError, match=r"wants no request for 86400 s.*max_wait_s = 600"):
        run_all(engine, requests_for(3))
    assert not waits


def test_an_exhausted_quota_ends_the_run_for_now(serve: Any, connect: Any, waits: Waits) -> None:
    engine = connect(serve(lambda _: error(429, "You exceeded your current quota", "insufficient_quota")))
    with pytest.raises(EngineCrashError, match="quota"):
        run_all(engine, requests_for(3))
    assert not waits


def test_requests_in_flight_are_bounded(serve: Any, connect: Any) -> None:
    def script(call: Call) -> Json:
        reply = echo(call)
        reply.after_s = 0.03
        return reply

    server = serve(script)
    engine = connect(server, concurrency=3)
    assert engine.capacity == 6
    run_all(engine, requests_for(18))
    assert server.most_in_flight == 3
    assert engine.capacity == 6


def test_submit_never_waits_for_the_server(serve: Any, connect: Any) -> None:
    engine = connect(serve(lambda _: Hang()), concurrency=2)
    started = time.monotonic()
    for request in requests_for(4):
        engine.submit(request)
    assert time.monotonic() - started < 0.5
    assert engine.capacity == 0
    started = time.monotonic()
    assert engine.poll() == []  # gives the caller a chance to heed a stop
    assert 0.5 < time.monotonic() - started < 3
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < 2, "closing waits for a server that hangs"


def test_answers_do_not_depend_on_the_order_in_which_they_come(serve: Any, connect: Any) -> None:
    def script(call: Call) -> Json:
        reply = echo(call)
        reply.after_s = 0.0 if call.number % 2 else 0.05
        return reply

    server = serve(script)
    requests = requests_for(8)
    there = run_all(connect(server), requests)
    back = run_all(connect(server, concurrency=1), requests[::-1])[::-1]
    assert [(a.request_id, a.text) for a in there] == [(a.request_id, a.text) for a in back]
    seeds = {call.body["messages"][-1]["content"]: call.body["seed"] for call in server.calls}
    assert len(set(seeds.values())) == 8
    assert len({call.raw for call in server.calls}) == 8, "the same ask and seed are not the same request"


@pytest.mark.parametrize(
    ("finish", "becomes"), [("length", "length"), ("content_filter", "refused"), ("tool_calls", "error")]
)
def test_finish_reasons(finish: str, becomes: str, serve: Any, connect: Any) -> None:
    answer = run_all(connect(serve(lambda _: chat("<think>hm", finish=finish))), requests_for(1))[0]
    assert answer.finish == becomes
    assert becomes == "length" or answer.detail


def test_a_refusal_is_refused_and_its_words_are_the_reason(serve: Any, connect: Any) -> None:
    answer = run_all(connect(serve(lambda _: chat(None, refusal="I can't judge\nthis."))), requests_for(1))[0]
    assert (answer.finish, answer.text) == ("refused", "")
    assert "I can't judge this." in answer.detail


@pytest.mark.parametrize(
    ("reply", "finish"),
    [
        (error(400, "This model's maximum context length is 4096 tokens", "context_length_exceeded"), "overlong"),
        (error(400, "maximum model length is 2048"), "overlong"),
        (error(413, "too much"), "overlong"),
        (error(400, "filtered", "content_filter"), "refused"),
        (error(400, "bad \x1b[31mfield"), "error"),
        (error(422, "bad field"), "error"),
        (error(501, "bad field"), "error"),
    ],
)
def test_a_request_that_the_server_does_not_like_is_not_repeated(
    reply: Json, finish: str, serve: Any, connect: Any
) -> None:
    server = serve(lambda call: reply if "document 0" in call.raw.decode() else echo(call))
    bad, good = run_all(connect(server), requests_for(2))
    assert (bad.finish, good.finish) == (finish, "stop")
    assert len(server.calls) == 2
    assert "\x1b" not in bad.detail


def test_one_forbidden_request_is_a_refusal_while_the_key_still_opens_the_rest(serve: Any, connect: Any) -> None:
    server = serve(
        lambda call: error(403, "flagged by moderation") if "document 1" in call.raw.decode() else echo(call)
    )
    engine = connect(server, concurrency=1)
    assert [answer.finish for answer in run_all(engine, requests_for(3))] == ["stop", "refused", "stop"]


def test_a_forbidden_request_that_is_first_to_be_answered_is_a_refusal_too(serve: Any, connect: Any) -> None:
    was_refused = threading.Event()

    def script(call: Call) -> Json:
        if "document 1" in call.raw.decode():
            was_refused.set()
            return error(403, "flagged by moderation")
        assert was_refused.wait(20)
        time.sleep(0.2)  # for the refusal to arrive
        return echo(call)

    engine = connect(serve(script), concurrency=2)
    assert [answer.finish for answer in run_all(engine, requests_for(3))] == ["stop", "refused", "stop"]


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_that_is_refused_ends_the_run_with_what_to_do(status: int, serve: Any, connect: Any) -> None:
    engine = connect(
        serve(lambda _: error(status, "Incorrect API key provided: sk-test-0123456789abcdef")),
        key="sk-test-0123456789abcdef",
    )
    with pytest.raises(ModelError, match=rf"key in OPENAI_API_KEY \(HTTP {status}\)") as caught:
        run_all(engine, requests_for(3))
    assert "sk-test" not in str(caught.value)
    with pytest.raises(ModelError):
        engine.poll()


def test_a_missing_key_says_which_variable_to_set(serve: Any, connect: Any) -> None:
    engine = connect(serve(lambda _: error(401)), key=None)
    with pytest.raises(ModelError, match=r"no key \(OPENAI_API_KEY is not set"):
        engine.prepare([ask_for("q", "d")])


def test_an_unknown_model_is_named_with_those_that_are_served(serve: Any, connect: Any) -> None:
    server = serve(echo)
    with pytest.raises(ModelError, match="no model 'gpt-9'; it serves teacher"):
        connect(server, served_model="gpt-9")
    server.models = None  # a server without a list says it at the first request
    server.script = lambda _: error(404, "The model `gpt-9` does not exist", "model_not_found")
    with pytest.raises(ModelError, match=r"no model 'gpt-9'.*served_model"):
        connect(server, served_model="gpt-9").prepare([ask_for("q", "d")])


def test_a_server_that_is_gone_ends_the_run_for_now_whenever_it_goes(serve: Any, connect: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
    with pytest.raises(EngineCrashError, match=r"no server answers at engine\.args\.base_url, after 3 tries"):
        connect(url, max_tries=3)
    server = serve(echo)
    engine = connect(server, max_tries=3)
    run_all(engine, requests_for(2))
    server.close()
    with pytest.raises(EngineCrashError, match="no server answers"):
        run_all(engine, requests_for(2))


def test_a_server_that_fails_every_request_ends_the_run_before_it_quarantines_everything(
    serve: Any, connect: Any
) -> None:
    server = serve(lambda _: error(503, "no capacity"))
    engine = connect(server, max_tries=2, concurrency=4)
    with pytest.raises(EngineCrashError, match=r"none of the last 32 requests.*HTTP 503: no capacity"):
        run_all(engine, requests_for(400))
    assert len(server.calls) < 2 * (32 + 2 * 8)


def test_a_redirect_is_not_followed(serve: Any, connect: Any) -> None:
    elsewhere = serve(echo)
    server = serve(lambda _: Json({}, 307, {"location": elsewhere.url + "/chat/completions"}))
    with pytest.raises(ModelError, match="sends us elsewhere"):
        run_all(connect(server), requests_for(1))
    assert not elsewhere.calls


def test_tokens_and_cost_are_the_servers_count(serve: Any, connect: Any) -> None:
    server = serve(lambda _: chat(GOOD, prompt=1000, output=200, cached=600))
    engine = connect(server, price_per_million_input=2.0, price_per_million_output=10.0)
    assert isinstance(engine, Engine)
    assert engine.prepare([ask_for("q", "d")]) == []
    answer = run_all(engine, requests_for(3))[0]
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (1000, 600, 200)
    costs = engine.costs()
    assert (costs["http_requests"], costs["prompt_tokens"], costs["cached_tokens"], costs["output_tokens"]) == (
        5,
        4000,
        2400,
        800,
    )
    assert costs["cost"] == pytest.approx((4000 * 2 + 800 * 10) / 1e6)
    assert connect(server).costs()["cost"] is None
    assert engine.facts().details["price_per_million"] == {"input": 2.0, "output": 10.0}


@pytest.mark.parametrize(
    "usage", [None, {}, {"prompt_tokens": "many"}, {"prompt_tokens": -1, "prompt_tokens_details": None}]
)
def test_a_server_that_counts_no_tokens_is_believed_to_have_used_none(usage: Any, serve: Any, connect: Any) -> None:
    reply = chat(GOOD)
    reply.payload["usage"] = usage
    answer = run_all(connect(serve(lambda _: reply)), requests_for(1))[0]
    assert (answer.finish, answer.prompt_tokens, answer.output_tokens) == ("stop", 0, 0)


def test_a_fault_of_our_own_is_raised_and_not_waited_for(
    serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = connect(serve(echo))

    async def broken(work: Any) -> Any:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(engine._mode, "answer", broken)
    engine.submit(requests_for(1)[0])
    with pytest.raises(ZeroDivisionError):
        engine.poll()


def test_close_may_come_twice_and_ends_the_engine(serve: Any, connect: Any) -> None:
    engine = connect(serve(echo))
    engine.close()
    engine.close()
    with pytest.raises(EngineCrashError, match="closed"):
        engine.submit(requests_for(1)[0])


def test_a_server_that_does_not_answer_the_start_is_no_fault_of_the_job(serve: Any, connect: Any) -> None:
    with pytest.raises(EngineCrashError, match=r"stage 'verdict'.*HTTP 500"):
        connect(serve(lambda _: error(500)), max_tries=2).prepare([ask_for("q", "d")])
