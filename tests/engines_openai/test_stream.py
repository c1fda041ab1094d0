"""Reading along: answers that come in pieces are those that come whole."""

from __future__ import annotations

from typing import Any

import pytest

from relabel.labelers.engines.api_replies import ReplyError
from relabel.labelers.engines.api_stream import ChatStream, whole_stream
from relabel.manifests.asks import Request, WritesInSight

from .conftest import GOOD, KEY, ask_for, echo, run_all
from .scripted_server import Call, Raw, chat, error, pieces

PARTS = ("<think>só", "</think>", "<score>", "1</score>")


def asked(engine: Any) -> tuple[Any, list[tuple[int, str]]]:
    seen: list[tuple[int, str]] = []
    assert isinstance(engine, WritesInSight)
    engine.show_writing(lambda request_id, text: seen.append((request_id, text)))
    (answer,) = run_all(engine, [Request(7, ask_for("red shoes", "7 shoes"), 0)])
    return answer, seen


def test_what_is_read_along_grows_to_the_answer(serve: Any, connect: Any) -> None:
    server = serve(lambda _: pieces(*PARTS, prompt=12, output=9))
    answer, seen = asked(connect(server))
    assert seen == [(7, "".join(PARTS[:count])) for count in range(1, 5)]
    assert (answer.text, answer.finish) == ("".join(PARTS), "stop")
    assert (answer.prompt_tokens, answer.output_tokens) == (12, 9)
    assert server.calls[-1].body["stream"] is True


def test_without_anybody_who_reads_along_no_stream_is_asked_for(serve: Any, connect: Any) -> None:
    server = serve(echo)
    run_all(connect(server), [Request(7, ask_for("red shoes", "7 shoes"), 0)])
    assert "stream" not in server.calls[-1].body


def test_a_server_that_sends_it_whole_or_refuses_to_stream_is_taken_as_it_is(serve: Any, connect: Any) -> None:
    answer, seen = asked(connect(serve(lambda _: chat(GOOD))))
    assert (answer.text, seen) == (GOOD, [])

    def refuses(call: Call) -> Any:
        return error(400, "stream is not supported") if "stream" in call.body else chat(GOOD)

    answer, seen = asked(connect(serve(refuses)))
    assert (answer.text, seen) == (GOOD, [])


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
    answer, _ = asked(connect(serve(lambda _: next(replies))))
    assert answer.text == "".join(PARTS)


def test_a_key_that_the_server_repeats_is_in_no_answer(serve: Any, connect: Any) -> None:
    answer, _ = asked(connect(serve(lambda _: pieces(f"your key is {KEY}")), key=KEY))
    assert KEY not in answer.text


def test_pieces_may_be_cut_anywhere_and_a_refusal_is_one() -> None:
    raw = pieces(*PARTS).raw
    for size in (1, 2, 3, 7, 64):
        seen: list[str] = []
        stream = ChatStream(lambda text, _, seen=seen: seen.append(text))  # type: ignore[misc]
        for start in range(0, len(raw), size):
            stream.feed(raw[start : start + size])
        assert stream.whole() == whole_stream(raw)
        assert seen[-1] == "".join(PARTS)
    refused = b'data: {"choices": [{"delta": {"refusal": "no"}}]}\n\ndata: [DONE]\n'
    assert whole_stream(refused)["choices"][0]["message"] == {"refusal": "no"}
    with pytest.raises(ReplyError, match="not text"):
        whole_stream(b'data: {"choices": [{"delta": {"content": 3}}]}\n')
