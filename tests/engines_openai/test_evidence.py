"""What a reply proves next to its answer: whose it is, what was read of the prompt, what is billed; and replies that
come in pieces.
"""

import json
from typing import Any

import pytest

from relabel.labelers.engines.openai_evidence import PromptCounts, is_form_of
from relabel.manifests.errors import ModelError, ServerGoneError

from .conftest import GOOD, ask_for, echo, requests_for, run_all
from .scripted_server import MODEL, Call, Json, Raw, chat

# ------------------------------------------------------------------------------
# Whose.

SAME = [
    ("m", "m-2026-01"),
    ("m", "org/m"),
    ("m", "M"),
    ("m_a", "m-a"),
    ("m", "/models/m.Q4_K_M.gguf"),
    ("m", "m-q8_0"),
    ("m", "m:8b"),
    ("m", "m:latest"),
    ("m", "m@20260101"),
    ("m", "accounts/x/models/m"),
    ("m-AWQ", "m"),
    ("m-8bit", "m"),
    ("a/m-latest", "m-20260101"),
    ("m-4", "m-4-0613"),
    ("m", "m-20260101-v1:0"),
    ("m-large", "m-large-2411"),
    ("m", "m-002"),
]
OTHER = [
    ("m", "cheap-mini"),
    ("m", "m-mini"),
    ("m", "mm"),
    ("m-4", "m-4.1"),
    ("m-4", "m-4-5"),
    ("m-4", "m-4-turbo"),
    ("m", "m-v2"),
    ("m-7b", "m-70b"),
    ("m-7b", "m-7b-instruct"),
    ("m:8b", "m:70b"),
    ("m-awq", "m-gptq"),
    ("m-2026-01-01", "m-2026-03-01"),
    ("m", "m-preview"),
]


@pytest.mark.parametrize(("asked", "name"), SAME)
def test_forms_of_one_name(asked: str, name: str) -> None:
    assert is_form_of(asked, name)
    assert is_form_of(name, asked)


@pytest.mark.parametrize(("asked", "name"), OTHER)
def test_names_of_other_models(asked: str, name: str) -> None:
    assert not is_form_of(asked, name)
    assert not is_form_of(name, asked)


def named(reply: Json, model: Any) -> Json:
    reply.payload["model"] = model
    return reply


def test_an_answer_of_another_model_is_not_taken_and_asked_again(serve: Any, connect: Any, caplog: Any) -> None:
    def script(call: Call) -> Json:
        if call.number % 2:
            return named(chat("<think>x</think><score>0</score>", prompt=1000), "cheap-mini")
        return named(echo(call), f"{MODEL}-2026-01")

    server = serve(script)
    engine = connect(server, concurrency=1, price_per_million_input=1.0)
    remarks = engine.prepare([ask_for("q", "7")])
    assert len([remark for remark in remarks if f"{MODEL}-2026-01" in remark]) == 1
    answers = run_all(engine, requests_for(6))
    assert [answer.text for answer in answers] == [f"<think>{n}</think><score>{n % 3}</score>" for n in range(6)]
    assert len([record for record in caplog.records if "cheap-mini" in record.getMessage()]) == 1
    num_foreign = len(server.calls) // 2
    assert engine.costs()["prompt_tokens"] == 1000 * num_foreign + 10 * (len(server.calls) - num_foreign)


def test_an_answer_of_another_model_is_flagged_by_option(serve: Any, connect: Any) -> None:
    names = {0: MODEL, 1: "cheap-mini", 2: MODEL, 3: None}
    engine = connect(serve(lambda call: named(echo(call), names[call.number])), concurrency=1, other_model="flag")
    engine.prepare([ask_for("q", "7")])
    assert [answer.flags for answer in run_all(engine, requests_for(3))] == [("other_model",), (), ()]


def test_a_server_that_only_answers_as_another_model_later_ends_the_run(serve: Any, connect: Any) -> None:
    engine = connect(
        serve(lambda call: named(echo(call), "cheap-mini" if call.number > 3 else MODEL)), max_tries=2, concurrency=2
    )
    engine.prepare([ask_for("q", "7")])
    with pytest.raises(ServerGoneError, match="another model's name, 'cheap-mini'"):
        run_all(engine, requests_for(100))


def test_a_gateways_own_name_is_taken_once_it_is_always_given(serve: Any, connect: Any) -> None:
    """And not if the start's other requests are answered as the asked model."""
    engine = connect(serve(lambda call: named(echo(call), "deployment-7")))
    assert len([remark for remark in engine.prepare([ask_for("q", "7")]) if "its own name" in remark]) == 1
    assert {answer.finish for answer in run_all(engine, requests_for(4))} == {"stop"}

    def alternates(call: Call) -> Json:
        return named(echo(call), MODEL if call.number % 2 else "cheap-mini")

    engine = connect(serve(alternates), concurrency=1, max_tries=1)
    assert not [remark for remark in engine.prepare([ask_for("q", "7")]) if "its own name" in remark]
    assert {answer.finish for answer in run_all(engine, requests_for(4))} == {"stop", "error"}


# ------------------------------------------------------------------------------
# How much of the prompt.

SHORT = "Grade this document from 0 to 2, and say first what you think of it. " * 10
LONG = "It is a shoe of fine leather, sewn by hand, with a sole of rubber. " * 400


def counts_after(count: int = len(SHORT) // 4) -> PromptCounts:
    counts = PromptCounts()
    assert not counts.is_cut(SHORT, count)
    return counts


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        (LONG, len(LONG) // 4),
        (LONG, len(LONG) // 6),
        (LONG, 0),
        (LONG, len(SHORT) // 4),  # the same count for everything
        ("革の靴です。" * 900, 900 * 4),
        ("चमड़े का जूता " * 900, len("चमड़े का जूता".encode()) * 900 // 10),
        (SHORT + " " * 20_000 + "-" * 9_000 + "a" * 9_000, len(SHORT) // 4 + 60),
        (SHORT + "word " * 40, 60),  # a server that counts what was not in its cache alone
    ],
)
def test_no_alarm_where_nothing_is_cut(prompt: str, count: int) -> None:
    assert not counts_after().is_cut(prompt, count)


@pytest.mark.parametrize("prompt", [LONG, "革の靴です。" * 6_000, LONG + "革の靴です。" * 900])
def test_a_prompt_that_is_cut_by_far(prompt: str) -> None:
    counts = counts_after()
    assert [counts.is_cut(prompt, 2050) for _ in range(3)] == [True] * 3
    assert not counts.is_cut(SHORT + "a", len(SHORT) // 4)


def test_counts_that_do_not_follow_the_prompt_prove_nothing() -> None:
    assert not counts_after(3).is_cut(LONG, 5)


def test_many_sizes_with_one_greatest_count_are_cut_there() -> None:
    counts = counts_after()
    sizes = [18_000, 20_000, 22_000, 24_000, 26_000]
    assert [counts.is_cut(LONG[:size], 4096) for size in sizes][3:] == [True, True]
    assert not counts.is_cut(LONG, 6_000), "a greater count: that was no bound"
    assert not counts.is_cut(LONG[:20_000], 4096)


def test_rows_whose_prompt_the_server_cuts_are_overlong_and_it_is_said_once(
    serve: Any, connect: Any, caplog: Any
) -> None:
    def script(call: Call) -> Json:
        reply = echo(call)
        size = sum(len(turn["content"]) for turn in call.body["messages"])
        reply.payload["usage"]["prompt_tokens"] = min(size // 4, 2050)
        return reply

    engine = connect(serve(script), max_prompt_tokens=30_000)
    engine.prepare([ask_for("q", "7")])
    requests = requests_for(8)
    requests[1::2] = [one._replace(ask=ask_for("q", f"document {one.id} {LONG}")) for one in requests[1::2]]
    answers = run_all(engine, requests)
    assert [answer.finish for answer in answers] == ["stop", "overlong"] * 4
    assert "2050 tokens" in answers[1].detail
    assert answers[1].prompt_tokens == 2050
    assert len([record for record in caplog.records if "cuts long prompts" in record.getMessage()]) == 1


# ------------------------------------------------------------------------------
# What is billed.


@pytest.mark.parametrize(
    ("usage", "counted"),
    [
        ({"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 1120}, (100, 1020)),
        ({"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}, (100, 20)),
        ({"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 90}, (100, 20)),
        ({"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": "many"}, (100, 20)),
        (
            {
                "prompt_tokens": 100,
                "completion_tokens": 20,
                "total_tokens": 1120,
                "completion_tokens_details": {"reasoning_tokens": 1000},
            },
            (100, 1020),
        ),
        (
            {
                "prompt_tokens": 100,
                "completion_tokens": 20,
                "completion_tokens_details": {"reasoning_tokens": 1000},
            },
            (100, 1020),
        ),
        (
            {
                "prompt_tokens": 100,
                "completion_tokens": 1020,
                "total_tokens": 1120,
                "completion_tokens_details": {"reasoning_tokens": 1000},
            },
            (100, 1020),
        ),
        (
            {
                "prompt_tokens": 10,
                "completion_tokens": 20,
                "total_tokens": 130,
                "prompt_tokens_details": {"cached_tokens": 100},
            },
            (110, 20),
        ),
    ],
)
def test_thoughts_and_cached_tokens_are_counted_however_a_server_reports_them(
    usage: Any, counted: tuple[int, int], serve: Any, connect: Any
) -> None:
    server = serve(lambda _: Json({**chat(GOOD).payload, "usage": usage}))
    engine = connect(server, price_per_million_input=1.0, price_per_million_output=100.0)
    (answer,) = run_all(engine, requests_for(1))
    assert (answer.prompt_tokens, answer.output_tokens) == counted
    assert engine.costs()["cost"] == pytest.approx((counted[0] + 100 * counted[1]) / 1e6)


# ------------------------------------------------------------------------------
# Replies in pieces, and replies without the API's form.


def pieces_of(text: str, *, finish: str | None = "stop", done: bool = True, **usage: Any) -> list[Any]:
    deltas: list[Any] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": "a "}, {"reasoning_content": "thought"}]
    deltas += [{"content": text[start : start + 5]} for start in range(0, len(text), 5)]
    pieces: list[Any] = [
        {"model": MODEL, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    if finish:
        pieces.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    if usage:
        pieces.append({"choices": [], "usage": usage})
    return [*pieces, *["[DONE]"] * done]


def stream(pieces: list[Any], *, line_end: str = "\n", content_type: str = "text/event-stream") -> Raw:
    text = f": comment{line_end}{line_end}"
    for piece in pieces:
        data = piece if isinstance(piece, str) else json.dumps(piece)
        text += f"data: {data}{line_end}{line_end}"
    return Raw(text.encode(), headers={"content-type": content_type})


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("content_type", ["text/event-stream; charset=utf-8", "application/json"])
@pytest.mark.parametrize("is_asked", [True, False])
def test_a_stream_is_read_as_the_reply_that_its_pieces_make(
    is_asked: bool, content_type: str, line_end: str, serve: Any, connect: Any
) -> None:
    pieces = pieces_of("<score>1</score>", prompt_tokens=100, completion_tokens=20)
    server = serve(lambda _: stream(pieces, line_end=line_end, content_type=content_type))
    engine = connect(server, **({"extra_body": {"stream": True}} if is_asked else {}))
    engine.prepare([ask_for("q", "7")])
    (answer,) = run_all(engine, requests_for(1))
    assert answer.text == "<think>a thought</think>\n<score>1</score>"
    assert (answer.finish, answer.prompt_tokens, answer.output_tokens) == ("stop", 100, 20)
    wanted = {"include_usage": True} if is_asked else None
    assert server.calls[-1].body.get("stream_options") == wanted


@pytest.mark.parametrize(
    "bad",
    [
        stream(pieces_of(GOOD, finish=None, done=False)),
        stream(pieces_of(GOOD)[:3]),
        stream([*pieces_of(GOOD)[:3], {"error": {"code": 502, "message": "upstream"}}, "[DONE]"]),
        stream([*pieces_of(GOOD)[:3], '{"choices": [{']),
        stream([]),
    ],
)
def test_a_stream_that_ends_before_its_answer_is_a_lost_reply(bad: Raw, serve: Any, connect: Any) -> None:
    server = serve(lambda call: bad if call.number == 0 else stream(pieces_of(GOOD)))
    assert run_all(connect(server), requests_for(1))[0].finish == "stop"
    assert len(server.calls) == 2


@pytest.mark.parametrize(
    "reply",
    [
        Raw(b"<html>Welcome</html>"),
        Raw(b""),
        Json({"answer": "yes"}),
        Json({"choices": []}),
        Json({"choices": chat(GOOD).payload["choices"] * 2}),
        stream([["no", "object"]]),
    ],
)
def test_the_same_reply_without_the_apis_form_at_a_start_is_final(reply: Any, serve: Any, connect: Any) -> None:
    with pytest.raises(ModelError, match=r"something else than the API's replies.*base_url"):
        connect(serve(lambda _: reply), max_tries=3).prepare([ask_for("q", "7")])


@pytest.mark.parametrize("second", [Raw(b"<html>busy</html>", status=503), chat(GOOD, finish="abort")])
def test_other_failures_at_a_start_may_pass(second: Any, serve: Any, connect: Any) -> None:
    server = serve(lambda call: second if call.number % 2 else Json({"answer": "yes"}))
    with pytest.raises(ServerGoneError, match="may work later"):
        connect(server, max_tries=3).prepare([ask_for("q", "7")])
