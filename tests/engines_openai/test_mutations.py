"""A reply that is wrong anywhere is a bad reply, asked for again, or is read for what it says; never a traceback, never
more memory.
"""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from relabel.labelers.engines.openai_replies import MAX_COUNT
from relabel.manifests.asks import Answer
from tests.faults.conftest import some

from .conftest import GOOD, echo, requests_for, run_all
from .mutations import mutations
from .scripted_server import Call, Raw, chat, error

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


def bomb(megabytes: int) -> bytes:
    """A reply that unpacks to so many megabytes of a good one's text."""
    text = json.dumps(chat("<think>" + "x" * (megabytes << 20) + "</think><score>1</score>").payload).encode()
    return gzip.compress(text, 9, mtime=0)


def test_a_reply_that_unpacks_to_gigabytes_is_cut_off_and_costs_no_memory(serve: Any, connect: Any) -> None:
    packed = bomb(64)
    assert len(packed) < 80_000
    engine = connect(serve(lambda _: Raw(packed, headers={"content-encoding": "gzip"})), max_tries=2)
    tracemalloc.start()
    try:
        answer = run_all(engine, requests_for(1))[0]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert answer.finish == "error"
    assert "reply is longer than" in answer.detail
    assert peak < 16 << 20


def test_a_reply_that_never_ends_is_cut_off(serve: Any, connect: Any) -> None:
    server = serve(lambda _: Raw(b"[" * (8 << 20), missing=1 << 40))
    answer = run_all(connect(server, max_tries=2, timeout_s=30.0), requests_for(1))[0]
    assert "reply is longer than" in answer.detail


@pytest.mark.parametrize("packed", [gzip.compress, zlib.compress])
def test_a_packed_reply_is_read_like_any_other(packed: Callable[[bytes], bytes], serve: Any, connect: Any) -> None:
    raw = packed(json.dumps(chat(GOOD).payload).encode())
    answer = run_all(connect(serve(lambda _: Raw(raw, headers={"content-encoding": "gzip"}))), requests_for(1))[0]
    assert answer.text == GOOD


def test_a_long_answer_with_all_that_was_asked_for_is_no_bad_reply(serve: Any, connect: Any) -> None:
    """As much as a server may rightly say: every token a long word, with twenty alternatives each."""
    per_token = {
        "token": "w" * 60,
        "logprob": -0.123456789,
        "top_logprobs": [{"token": "w" * 60, "logprob": -9.87654321}] * 20,
    }
    reply = chat("word " * 2000)
    reply.payload["choices"][0]["logprobs"] = {"content": [per_token] * 2000}
    engine = connect(serve(lambda _: reply), max_tries=1, extra_body={"logprobs": True, "top_logprobs": 20})
    assert run_all(engine, requests_for(1, max_tokens=2000))[0].finish == "stop"
