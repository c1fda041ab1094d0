"""Replies as server-sent events, which some servers send without being asked, are those that come whole."""

from __future__ import annotations

from typing import Any

import pytest

from relabel.labelers.engines.openai_replies import ReplyError, whole_stream
from relabel.manifests.asks import Answer, Request

from .conftest import KEY, ask_for, run_all
from .scripted_server import Raw, pieces

PARTS = ("<think>só", "</think>", "<score>", "1</score>")


def asked(engine: Any) -> Answer:
    (answer,) = run_all(engine, [Request(7, ask_for("red shoes", "7 shoes"), 0)])
    assert isinstance(answer, Answer)
    return answer


def test_a_server_that_streams_without_being_asked_is_read_all_the_same(serve: Any, connect: Any) -> None:
    server = serve(lambda _: pieces(*PARTS, prompt=12, output=9))
    answer = asked(connect(server))
    assert (answer.text, answer.finish) == ("".join(PARTS), "stop")
    assert (answer.prompt_tokens, answer.output_tokens) == (12, 9)
    assert "stream" not in server.calls[-1].body


@pytest.mark.parametrize(
    "broken",
    [
        pieces(*PARTS, end=""),
        Raw(pieces(*PARTS).raw[:-60], headers={"content-type": "text/event-stream"}),
        Raw(b"data: {nonsense\n\n", headers={"content-type": "text/event-stream"}),
        Raw(b"data: [1]\n\ndata: [DONE]\n\n", headers={"content-type": "text/event-stream"}),
        Raw(b'data: {"choices": [{"text": "x"}]}\n\ndata: [DONE]\n\n', headers={"content-type": "text/event-stream"}),
    ],
)
def test_a_stream_that_breaks_is_no_answer_and_is_asked_for_again(serve: Any, connect: Any, broken: Raw) -> None:
    replies = iter([broken, pieces(*PARTS)])
    answer = asked(connect(serve(lambda _: next(replies))))
    assert answer.text == "".join(PARTS)


def test_a_key_that_the_server_repeats_is_in_no_answer(serve: Any, connect: Any) -> None:
    answer = asked(connect(serve(lambda _: pieces(f"your key is {KEY}")), key=KEY))
    assert KEY not in answer.text


def test_a_refusal_in_pieces_is_one_and_what_is_no_text_is_refused() -> None:
    refused = b'data: {"choices": [{"delta": {"refusal": "no"}}]}\n\ndata: [DONE]\n'
    assert whole_stream(refused)["choices"][0]["message"] == {"refusal": "no"}
    with pytest.raises(ReplyError, match="not text"):
        whole_stream(b'data: {"choices": [{"delta": {"content": 3}}]}\n')
