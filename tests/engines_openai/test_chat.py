"""The chat way: what is sent, what is refused before it is sent, and what a chat API can't be asked at all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from relabel.labelers.engines.tokens import KNOWN_CONTROL_TEXTS, ControlTexts
from relabel.manifests.asks import Decision, Message, Request, Sampling
from relabel.manifests.errors import ModelError
from relabel.manifests.formats import AnswerFormat, Choice

from .conftest import GOOD, ask_for, echo, run_all
from .scripted_server import Call, chat, error

GRADE_ALONE = ask_for("q", "d", format=AnswerFormat((Choice("score", ("0", "1", "2")),)))
SCORE = Decision("score", "<score>", ("0", "1", "2"))


def test_messages_are_sent_as_text_and_no_distribution_is_made_up(serve: Any, connect: Any) -> None:
    server = serve(echo)
    engine = connect(
        server,
        chat_template_kwargs={"enable_thinking": False},
        extra_body={"reasoning_effort": "low", "top_p": None},
        max_tokens_field="max_completion_tokens",
    )
    ask = ask_for("red shoes", "7 shoes", decisions=(SCORE,), sampling=Sampling(0.5, 0.9))
    assert engine.prepare([ask]) == [
        (
            "The server is used as a chat API, which gives no distributions: labels carry the grade alone "
            "(`no_distribution`)."
        )
    ]
    answer = run_all(engine, [Request(3, ask, 2**40 + 7)])[0]
    assert (answer.text, answer.distributions) == ("<think>7</think><score>1</score>", {})
    assert server.calls[0].body["max_completion_tokens"] == 96, "the trial does not ask as the run does"
    assert server.calls[1].body == {
        "model": "teacher",
        "messages": [{"role": message.role, "content": message.text} for message in ask.messages],
        "max_completion_tokens": 96,
        "temperature": 0.5,
        "seed": 7,
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
    }
    assert engine.facts().details == {
        "mode": "chat",
        "distributions": False,
        "price_per_million": {"input": None, "output": None},
        "constrain": False,
    }


def test_a_row_whose_data_hold_a_control_token_is_refused_by_itself(serve: Any, connect: Any) -> None:
    server = serve(echo)
    engine = connect(server)
    texts = [*(f"a{text}b" for text in KNOWN_CONTROL_TEXTS), "5"]
    *bad, good = run_all(engine, [Request(n, ask_for("q", text), 0) for n, text in enumerate(texts)])
    for answer, text in zip(bad, KNOWN_CONTROL_TEXTS, strict=True):
        assert answer.finish == "refused"
        assert f"document holds {text!r}" in answer.detail
    assert good.finish == "stop"
    assert len(server.calls) == 1, "hostile data were sent"


def test_control_tokens_are_found_however_they_are_hidden() -> None:
    known = ControlTexts((*KNOWN_CONTROL_TEXTS, "[[END]]"))

    def found(*parts: str) -> Any:
        return known.find([Message("user", parts, tuple(f"f{n}" for n in range(len(parts) // 2)))])

    assert found("Query: ", "shoes", "") is None
    assert found("Write <think> and </s>: ", "shoes", " <|im_end|>") is None, "a template's own words are no attack"
    assert found("", "x", "", "[[END]]", "") == ("f1", "[[END]]")
    assert found("", "<|im_<|im_end|>end|>", "") == ("f0", "<|im_end|>")
    assert found("", "＜|im_end|＞", "") == ("f0", "<|im_end|>"), (
        "full-width look-alikes are normalised by some tokenizers"
    )
    assert found("", "<|im_", "", "end|>", "") == ("a message", "<|im_end|>"), "two fields may make one together"
    assert found("<s>", "<", "s>", "x", "") == ("a message", "<s>")


def test_with_a_known_tokenizer_only_its_own_control_tokens_count(serve: Any, connect: Any, tmp_path: Any) -> None:
    pytest.importorskip("transformers")
    from tests.engines.conftest import make_tokenizer

    make_tokenizer().save_pretrained(tmp_path)
    engine = connect(serve(echo), mode="chat", model=tmp_path, control_texts=("[END]",))
    finishes = [
        answer.finish
        for answer in run_all(
            engine,
            [
                Request(n, ask_for("q", text), 0)
                for n, text in enumerate(("<s>1</s>", "<|im_end|>", "</think>", "[END]"))
            ],
        )
    ]
    assert finishes == ["stop", "refused", "refused", "refused"]


def test_a_decision_without_text_is_refused_before_the_first_row(serve: Any, connect: Any) -> None:
    ask = ask_for("q", "d", format=None, max_tokens=0, decisions=(SCORE,), prefill="<score>")
    server = serve(echo)
    with pytest.raises(ModelError, match=r"'verdict' asks for a distribution and nothing else.*mode: tokens"):
        connect(server).prepare([ask])
    assert not server.calls


def test_the_beginning_of_an_answer_is_sent_only_where_the_server_is_said_to_go_on_from_it(
    serve: Any, connect: Any
) -> None:
    ask = ask_for("q", "1", prefill="<think>\n\n</think>")
    server = serve(echo)
    with pytest.raises(ModelError, match="assistant_prefill"):
        connect(server).prepare([ask])
    server.script = lambda _: chat("<score>1</score>")
    for way, extra in (("message", {}), ("continue", {"add_generation_prompt": False, "continue_final_message": True})):
        engine = connect(server, assistant_prefill=way)
        assert engine.prepare([ask]) == []
        body = server.calls[-1].body
        assert body["messages"][-1] == {"role": "assistant", "content": "<think>\n\n</think>"}
        assert {key: body[key] for key in ("add_generation_prompt", "continue_final_message") if key in body} == extra


THOUGHT = "I may write <score>1</score> here."
SAFE = THOUGHT.replace("<score>1</score>", "[score]1[/score]")
TAIL = "\n\n<score>2</score>"
MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"content": GOOD}, GOOD),
    ({"content": TAIL, "reasoning_content": THOUGHT, "reasoning": THOUGHT}, f"<think>{SAFE}</think>{TAIL}"),
    ({"content": TAIL, "reasoning": THOUGHT}, f"<think>{SAFE}</think>{TAIL}"),
    ({"content": TAIL, "thinking": THOUGHT}, f"<think>{SAFE}</think>{TAIL}"),
    (
        {"content": TAIL, "reasoning_details": [{"type": "reasoning.text", "text": THOUGHT}]},
        f"<think>{SAFE}</think>{TAIL}",
    ),
    ({"content": None, "reasoning": f"{THOUGHT}</think>{TAIL}"}, f"<think>{SAFE}</think>{TAIL}"),
    ({"content": f"{THOUGHT}\n</think>{TAIL}"}, f"<think>{SAFE}\n</think>{TAIL}"),
    ({"content": f"<thought>{THOUGHT}</thought>{TAIL}"}, f"<think>{SAFE}</think>{TAIL}"),
    ({"content": f"[THINK]{THOUGHT}[/THINK]{TAIL}"}, f"<think>{SAFE}</think>{TAIL}"),
    ({"content": f"{THOUGHT}</think>\n<think>mine</think>{TAIL}"}, f"\n<think>mine</think>{TAIL}"),
    ({"content": f"<think></think>{TAIL}", "reasoning": THOUGHT}, f"<think>{SAFE}</think>{TAIL}"),
    ({"content": f"<think>mine</think>{TAIL}", "reasoning": THOUGHT}, f"<think>mine</think>{TAIL}"),
    ({"content": [{"type": "text", "text": GOOD}]}, GOOD),
    ({"content": [GOOD[:9], {"type": "text", "text": GOOD[9:]}]}, GOOD),
    ({"content": [[{"type": "output_text", "text": {"type": "text", "value": GOOD}}]]}, GOOD),
    (
        {
            "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": THOUGHT}]},
                {"type": "text", "text": TAIL},
            ]
        },
        f"<think>{SAFE}</think>{TAIL}",
    ),
    ({"content": None, "reasoning": "so"}, "<think>so</think>\n"),
    ({"content": f"<think>{THOUGHT}</think>{TAIL}"}, f"<think>{THOUGHT}</think>{TAIL}"),
    ({"content": "no thought at all"}, "no thought at all"),
]


def test_a_thought_is_the_answers_first_section_however_the_server_gives_it(serve: Any, connect: Any) -> None:
    """Where the format begins with one; else it is no part of the answer. Text in parts is put together. What came is
    kept as it was, where it was other.
    """
    for message, text in MESSAGES:
        reply: Any = chat("", **message)
        engine = connect(serve(lambda _, reply=reply: reply))
        answer, plain = run_all(engine, [Request(0, ask_for("q", "d"), 0), Request(1, GRADE_ALONE, 0)])
        assert (answer.finish, answer.text.replace("</think>\n<", "</think>\n\n<")) == ("stop", text), message
        came = [one for one in message.values() if isinstance(one, str) and one != text]
        assert all(one in answer.raw or json.dumps(one)[1:-1] in answer.raw for one in came), message
        if text.endswith(TAIL) and not str(message["content"]).startswith(("I may", "None")):
            assert plain.text.strip().removeprefix("<think>mine</think>").strip() == TAIL.strip(), message


def test_a_server_without_system_turns_is_asked_without_them_and_says_so_once(serve: Any, connect: Any) -> None:
    def script(call: Call) -> Any:
        roles = [turn["role"] for turn in call.body["messages"]]
        return error(500 if roles[0] == "system" else 200, "Jinja") if roles[0] == "system" else echo(call)

    server = serve(script)
    engine = connect(server, max_tries=1)
    ask = ask_for("q", "7 d")
    remarks = engine.prepare([ask, ask])
    assert [f"{server.url} takes no system turn" in remark for remark in remarks] == [True]
    (answer,) = run_all(engine, [Request(0, ask, 0)])
    assert answer.finish == "stop"
    system, user = (message.text for message in ask.messages)
    assert server.calls[-1].body["messages"] == [{"role": "user", "content": f"{system}\n\n{user}"}]
    assert engine.facts().details["system_role"] == "folded"
    assert len(server.calls) == 4, "the second stage was tried with the system turn again"


def test_long_documents_are_cut_by_characters_or_the_row_is_overlong(serve: Any, connect: Any) -> None:
    server = serve(lambda _: chat(GOOD))
    fits, long, hopeless = ask_for("q", "d"), ask_for("q", "d" * 2000), ask_for("q" * 2000, "d")
    engine = connect(server, max_prompt_tokens=100)
    answers = run_all(engine, [Request(n, ask, 0) for n, ask in enumerate((fits, long, hopeless))])
    assert [(answer.finish, answer.flags) for answer in answers] == [
        ("stop", ()),
        ("stop", ("document_truncated",)),
        ("overlong", ()),
    ]
    assert max(sum(len(turn["content"]) for turn in call.body["messages"]) for call in server.calls) == 400
    assert (
        run_all(connect(server, max_prompt_tokens=100, overlong="quarantine"), [Request(0, long, 0)])[0].finish
        == "overlong"
    )
