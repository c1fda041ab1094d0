"""Servers that are busy, broken, slow, wrong or gone: what is tried again, how long it waits, and what becomes of row
and run.
"""

import re
import socket
import time
from collections import Counter
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import pytest

from relabel.labelers.engines.openai_replies import MAX_COUNT
from relabel.manifests.asks import Answer, Engine, Message
from relabel.manifests.errors import ModelError, ServerGoneError
from tests.faults.conftest import some

from .conftest import GOOD, Waits, ask_for, echo, requests_for, run_all
from .mutations import mutations
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
    "two choices": Json({"choices": chat(GOOD).payload["choices"] * 2}),
    "no text and no finish_reason": chat(None, finish=None),
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


def test_a_fault_that_stays_ends_that_ask_alone_as_an_error(serve: Any, connect: Any) -> None:
    faults = list(FAULTS.values())

    def script(call: Call) -> Any:
        number = int(call.body["messages"][-1]["content"].split("document ")[1].split()[0])
        return echo(call) if number % 2 == 0 else faults[number // 2]

    server = serve(script)
    engine = connect(server, max_tries=3, timeout_s=2.0)
    answers = run_all(engine, requests_for(2 * len(faults)))
    assert {answer.finish for answer in answers[::2]} == {"stop"}
    for name, bad in zip(FAULTS, answers[1::2], strict=True):
        assert (bad.finish, bad.text) == ("error", ""), name
        assert "no usable reply in 3 tries" in bad.detail
    assert len(server.calls) == (1 + 3) * len(faults)
    assert engine.costs()["given_up"] == len(faults)


@pytest.mark.parametrize(
    ("headers", "least"),
    [
        ({"retry_after": "7"}, 7),
        ({"retry_after": "soon"}, 0),
    ],
)
def test_retry_after_is_heeded_with_jitter_on_top(
    headers: dict[str, str], least: float, serve: Any, connect: Any, waits: Waits
) -> None:
    engine = connect(serve(after(1, error(429, **headers))), backoff_s=0.5)
    assert run_all(engine, requests_for(1))[0].finish == "stop"
    assert len(waits) == 1
    assert least <= waits[0] <= least + 0.5
    date = formatdate(time.time() + 30, usegmt=True)
    assert run_all(connect(serve(after(1, error(503, retry_after=date))), backoff_s=0.0), requests_for(1))
    assert 5 < waits[1] <= 30


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


def test_requests_in_flight_are_bounded_and_their_order_changes_no_answer(serve: Any, connect: Any) -> None:
    def script(call: Call) -> Json:
        reply = echo(call)
        reply.after_s = 0.01 if call.number % 2 else 0.04
        return reply

    server, requests = serve(script), requests_for(12)
    engine = connect(server, concurrency=3)
    assert engine.capacity == 6
    there = run_all(engine, requests)
    assert (server.most_in_flight, engine.capacity) == (3, 6)
    back = run_all(connect(server, concurrency=1), requests[::-1])[::-1]
    assert [(a.request_id, a.text) for a in there] == [(a.request_id, a.text) for a in back]
    assert len({call.body["seed"] for call in server.calls}) == 12
    assert len({call.raw for call in server.calls}) == 12, "the same ask and seed are not the same request"


@pytest.mark.parametrize(
    ("finish", "becomes"),
    [
        *((reason, "stop") for reason in ("stop", "STOP", "eos_token", "end_turn", "tool_calls", "eos_found")),
        *((reason, "length") for reason in ("length", "MAX_TOKENS", "max_output_tokens", "model_length", None, "")),
        *((reason, "refused") for reason in ("content_filter", "SAFETY", "content_filter: RECITATION", "refusal")),
    ],
)
def test_finish_reasons(finish: str | None, becomes: str, serve: Any, connect: Any) -> None:
    """One that is not known leaves it to the reader whether the answer is whole."""
    (answer,) = run_all(connect(serve(lambda _: chat(GOOD, finish=finish))), requests_for(1))
    assert answer.finish == becomes
    is_unknown = finish in ("tool_calls", "eos_found", None, "")
    assert answer.flags == (("finish_unknown",) if is_unknown else ())
    assert bool(answer.detail) == (is_unknown or becomes == "refused")
    assert run_all(connect(serve(lambda _: chat(None, finish="tool_calls"))), requests_for(1))[0].finish == "error"
    words = run_all(connect(serve(lambda _: chat(None, refusal="I can't judge\nthis."))), requests_for(1))[0]
    assert (words.finish, "I can't judge this." in words.detail) == ("refused", True)


TOO_LONG: list[tuple[int, Any]] = [
    (400, {"error": {"message": "request (4390 tokens) exceeds the available context size (4096 tokens)"}}),
    (400, {"object": "error", "message": "The input (9 tokens) is longer than the model's context length (4 tokens)."}),
    (400, {"error": {"message": "max_tokens must be at least 1, got -294.", "type": "BadRequestError", "code": 400}}),
    (
        422,
        {"error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 2048. Given: 2001 `inputs`"},
    ),
    (500, {"error": "Prompt length (5000) exceeds maximum input length (4096)."}),
    (400, {"error": "The number of tokens to keep from the initial prompt is greater than the context length."}),
    (
        400,
        {"type": "error", "error": {"type": "invalid_request_error", "message": "prompt is too long: 21 tokens > 20"}},
    ),
    (400, {"object": "error", "message": "Prompt contains 40000 tokens, too large for model", "code": 3051}),
    (400, [{"error": {"code": 400, "message": "The input token count (12) exceeds the maximum number of tokens"}}]),
    (400, {"message": "default_max_tokens (-294) must be greater than 0, max_seq_len(4096) - len(prompt)(4390)"}),
    (400, {"error": {"message": "invalid", "code": "string_above_max_length"}}),
    (400, {"detail": "this prompt does not fit: 4390 of 4096"}),
    (413, {}),
    (
        429,
        {"error": {"message": "Request too large for m on tokens per min (TPM): Limit 6, Requested 8", "code": "rate"}},
    ),
    (200, {"error": {"message": "context window exceeds limit", "code": 2013}}),
]
CREDIT_ENDS: list[tuple[int, Any]] = [
    (402, {}),
    (402, {"error": {"message": "balance exhausted", "code": "invalid_request_error"}}),
    (429, {"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}}),
    (400, {"type": "error", "error": {"type": "invalid_request_error", "message": "Your credit balance is too low."}}),
    (403, {"code": 30001, "message": "Sorry, your account balance is insufficient", "data": None}),
    (403, {"error": "Your team has used all available credits or reached its monthly spending limit."}),
    (400, {"error": {"message": "Budget has been exceeded! Current cost: 1.0", "type": "budget_exceeded"}}),
    (200, {"error": {"message": "no more", "code": "insufficient_quota"}}),
    (200, {"error": {"message": "This request requires more credits", "code": 402}}),
    (200, {"base_resp": {"status_code": 1008, "status_msg": "insufficient balance"}}),
]
PASSES: list[tuple[int, Any]] = [
    (200, {"error": {"message": "daily limit of free requests reached", "code": 429}}),
    (200, {"error": {"message": "daily limit of free requests reached", "code": "rate_limit_exceeded"}}),
    (200, {"choices": [{"error": {"code": 502, "message": "daily limit of free requests reached"}}]}),
    (200, {"error": "daily limit of free requests reached"}),
    (429, {"error": {"message": "daily limit of free requests reached; check your plan and billing; retry in 4s"}}),
    (403, {"message": "rate limit: daily limit of free requests reached"}),
    (498, {"detail": "daily limit of free requests reached"}),
    (529, {"error": {"metadata": {"raw": "daily limit of free requests reached"}, "message": "upstream"}}),
]
NOT_LIKED: list[tuple[int, Any]] = [
    (400, {"error": {"message": "this one I do not like"}}),
    (422, {"detail": [{"loc": ["body", "x"], "msg": "this one I do not like \x1b[31m"}]}),
    (200, {"object": "error", "message": "this one I do not like", "code": 400}),
    (200, {"error": {"message": "this one I do not like", "type": "invalid_request_error"}}),
]


def test_what_a_server_complains_of_is_known_by_its_words_whatever_its_status(
    serve: Any, connect: Any, waits: Waits
) -> None:
    """The row alone, and asked once, where it is too long or not liked; asked again where that may help."""
    rows = [
        *((said, "overlong", 1, "") for said in TOO_LONG),
        *((said, "error", 3, "daily limit of free requests reached") for said in PASSES),
        *((said, "error", 1, "this one I do not like") for said in NOT_LIKED),
        ((200, {"choices": [{"message": "insufficient balance"}] * 2}), "error", 3, "not 2"),
        ((400, {"error": {"message": "filtered", "code": "content_filter"}}), "refused", 1, ""),
    ]
    seen = Counter[int]()

    def script(call: Call) -> Any:
        number = int(call.body["messages"][-1]["content"].split("document ")[1].split()[0])
        seen[number] += 1
        if number % 2 == 0:
            return echo(call)
        status, payload = rows[number // 2][0]
        return Json(payload, status)

    engine = connect(serve(script), max_tries=3, concurrency=2)
    answers = run_all(engine, requests_for(2 * len(rows)))
    for number, (said, finish, tries, words) in enumerate(rows):
        answer = answers[2 * number + 1]
        assert (answer.finish, words in answer.detail) == (finish, True), (said, answer)
        assert seen[2 * number + 1] == tries, said
        assert "\x1b" not in answer.detail
    assert max(waits) > 4


@pytest.mark.parametrize("said", CREDIT_ENDS)
def test_credit_that_ends_ends_the_run_at_once_with_the_servers_words(
    said: tuple[int, Any], serve: Any, connect: Any, waits: Waits
) -> None:
    server = serve(lambda call: echo(call) if call.number < 3 else Json(said[1], said[0]))
    engine = connect(server, concurrency=1)
    with pytest.raises(
        ServerGoneError, match=rf"{server.url} says that the credit or quota is used up.*HTTP {said[0]}"
    ):
        run_all(engine, requests_for(6))
    assert (len(server.calls) <= 5, list(waits)) == (True, [])


def test_a_server_that_wants_no_request_for_long_ends_the_run_for_now(serve: Any, connect: Any, waits: Waits) -> None:
    engine = connect(serve(lambda _: error(429, retry_after="86400")))
    with pytest.raises(ServerGoneError, match=r"wants no request for 86400 s.*max_wait_s = 600"):
        run_all(engine, requests_for(3))
    assert not waits


def test_a_server_that_refuses_every_row_ends_the_run_and_one_that_refuses_a_kind_of_row_does_not(
    serve: Any, connect: Any
) -> None:
    refuses = True

    def script(call: Call) -> Json:
        return error(400, "no {more}") if refuses or "document" in call.raw.decode() else echo(call)

    refuses = False
    server = serve(script)
    engine = connect(server, concurrency=2)
    assert engine.prepare([ask_for("q", "d", messages=(Message("user", ("7",)),))]) == []
    assert {answer.finish for answer in run_all(engine, requests_for(100))} == {"error"}
    refuses = True
    with pytest.raises(
        ServerGoneError, match=r"refused all of the last 32 requests, and that of the start:.*no \{more"
    ):
        run_all(engine, requests_for(100))


def test_a_field_that_the_server_refuses_is_shown_with_what_can_be_set(serve: Any, connect: Any) -> None:
    server = serve(lambda _: error(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."))
    with pytest.raises(
        ModelError, match=rf"{server.url} does not take stage 'verdict'.*'max_completion_tokens'.*max_tokens_field"
    ):
        connect(server).prepare([ask_for("q", "d")])


def test_one_forbidden_request_is_a_refusal_while_the_key_still_opens_the_rest(serve: Any, connect: Any) -> None:
    server = serve(lambda call: error(403, "not here") if "document 1" in call.raw.decode() else echo(call))
    engine = connect(server, concurrency=2)
    engine.prepare([ask_for("q", "7")])
    answers = run_all(engine, requests_for(3))
    assert [answer.finish for answer in answers] == ["stop", "refused", "stop"]
    assert answers[1].detail == "the server refused the request (HTTP 403: not here)"


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_that_is_refused_ends_the_run_with_what_to_do(status: int, serve: Any, connect: Any) -> None:
    engine = connect(
        serve(lambda _: error(status, "Incorrect API key provided: sk-test-0123456789abcdef")),
        key="sk-test-0123456789abcdef",
    )
    with pytest.raises(ModelError, match=rf"key in OPENAI_API_KEY \(HTTP {status}") as caught:
        run_all(engine, requests_for(3))
    assert "sk-test" not in str(caught.value)
    with pytest.raises(ModelError):
        engine.poll()


def test_an_unknown_model_is_named_with_those_that_are_served(serve: Any, connect: Any) -> None:
    server = serve(echo)
    assert any(
        "does not list 'gpt-9'; it lists teacher" in one for one in connect(server, served_model="gpt-9").prepare([])
    )
    server.script = lambda _: error(404, "The model `gpt-9` does not exist", "model_not_found")
    with pytest.raises(ModelError, match=r"no model 'gpt-9'.*it lists teacher.*served_model"):
        connect(server, served_model="gpt-9").prepare([ask_for("q", "d")])
    server.models = None
    with pytest.raises(ModelError, match=r"no model 'gpt-9'.*served_model"):
        connect(server, served_model="gpt-9").prepare([ask_for("q", "d")])


@pytest.mark.parametrize("status", [401, 404])
def test_a_list_of_models_that_is_not_for_this_key_leaves_it_to_the_trial(
    status: int, serve: Any, connect: Any
) -> None:
    server = serve(lambda call: error(403, "flagged") if "document 1" in call.raw.decode() else echo(call))
    server.models, server.no_models = None, status
    engine = connect(server)
    assert engine.prepare([ask_for("q", "7")]) == []
    assert [answer.finish for answer in run_all(engine, requests_for(3))] == ["stop", "refused", "stop"]


def test_a_server_that_is_gone_ends_the_run_for_now_whenever_it_goes(serve: Any, connect: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
    with pytest.raises(ServerGoneError, match=rf"no server answers at {url} .*after 3 tries"):
        connect(url, max_tries=3)
    server = serve(echo)
    engine = connect(server, max_tries=3)
    run_all(engine, requests_for(2))
    server.close()
    with pytest.raises(ServerGoneError, match="no server answers"):
        run_all(engine, requests_for(2))


def test_a_wait_for_a_server_that_is_not_there_is_said_at_the_first_try(
    connect: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
    with pytest.raises(ServerGoneError, match="after 6 tries"):
        connect(url)
    (said,) = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(rf"no server answers at {url} yet \(no connection .*\): trying for up to 31 s", said)
    caplog.clear()
    with pytest.raises(ServerGoneError, match="after 2 tries"):
        connect(url, max_tries=2)
    assert not caplog.records, "a second is no wait worth a message"


def test_a_server_that_fails_every_request_ends_the_run_before_it_quarantines_everything(
    serve: Any, connect: Any
) -> None:
    server = serve(lambda _: error(503, "no capacity"))
    engine = connect(server, max_tries=2, concurrency=4)
    with pytest.raises(ServerGoneError, match=r"none of the last 32 requests.*HTTP 503: no capacity"):
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


def test_a_server_that_does_not_answer_the_start_is_no_fault_of_the_job(serve: Any, connect: Any) -> None:
    with pytest.raises(ServerGoneError, match=r"stage 'verdict'.*HTTP 500"):
        connect(serve(lambda _: error(500)), max_tries=2).prepare([ask_for("q", "d")])


# A reply that is wrong anywhere is a bad reply, asked for again, or is read for what it says; never a traceback,
# never more memory.


RIGHT_KINDS = {
    "content": {"null", "absent", "text", "empty text", "digits", "NUL", "empty list"},
    "refusal": {"null", "absent", "text", "empty text", "digits", "NUL"},
    "finish_reason": {"null", "absent", "text", "empty text", "digits", "NUL"},
}
"""What may be in the fields that are read as they are. Elsewhere a value is not checked, or counts tokens, or
makes a bad reply.
"""
NO_JSON = {"5,000 digits", "NaN", "Infinity", "-Infinity", "100,000 deep"}


def check_form(answer: Answer) -> None:
    """It can be stored: text that is text, counts that fit."""
    answer.text.encode()
    answer.detail.encode()
    assert 0 <= answer.prompt_tokens <= MAX_COUNT
    assert 0 <= answer.output_tokens <= MAX_COUNT
    assert 0 <= answer.cached_tokens <= MAX_COUNT


def test_a_chat_reply_that_is_wrong_anywhere_is_a_bad_reply_or_read_for_what_it_says(serve: Any, connect: Any) -> None:
    good = chat(GOOD, refusal=None)
    wrong = some(list(mutations(good.payload)), short=150)
    seen: Counter[int] = Counter()

    def script(call: Call) -> Any:
        number = int(call.body["messages"][-1]["content"].split("document ")[1].split()[0])
        seen[number] += 1
        return Raw(wrong[number].raw) if seen[number] == 1 else good

    answers = run_all(connect(serve(script), max_tries=4), requests_for(len(wrong)))
    for number, (mutation, answer) in enumerate(zip(wrong, answers, strict=True)):
        check_form(answer)
        is_bad, field = seen[number] == 2, mutation.path[-1] if mutation.path else ""
        if mutation.kind in NO_JSON or (len(mutation.path) < 3 and mutation.path[:1] != ("usage",)):
            assert is_bad, mutation
        if field in RIGHT_KINDS:
            assert is_bad == (mutation.kind not in RIGHT_KINDS[field]), mutation
        elif is_bad or field not in RIGHT_KINDS:
            is_empty = field == "message" and not is_bad  # a message without `content` says nothing
            assert (answer.finish, answer.text) == ("stop", "" if is_empty else GOOD), mutation


@pytest.mark.parametrize("status", [400, 500])
def test_an_error_that_is_wrong_anywhere_is_an_error_all_the_same(status: int, serve: Any, connect: Any) -> None:
    wrong = list(mutations(error(status, "oops", "context_length_exceeded" if status == 400 else None).payload))

    def script(call: Call) -> Any:
        number = int(call.body["messages"][-1]["content"].split("document ")[1].split()[0])
        # every other one is fine: the server lives
        return echo(call) if number % 2 == 0 else Raw(wrong[number // 2].raw, status=status)

    engine = connect(serve(script), max_tries=1, concurrency=2)
    engine.prepare([requests_for(1)[0].ask])
    for number, answer in enumerate(run_all(engine, requests_for(2 * len(wrong)))):
        check_form(answer)
        assert answer.finish in (("stop",) if number % 2 == 0 else ("error", "overlong", "refused"))
