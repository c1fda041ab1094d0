"""Asks as batches: the same labels at half the price, and no ask is paid for twice, whatever ends the run."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from relabel.labelers.engines.tokens import KNOWN_CONTROL_TEXTS, ControlTexts
from relabel.labelers.verdicts import Reader
from relabel.manifests.asks import AnswerFormat, Choice, Decision, Message, Request, Sampling, Text
from relabel.manifests.errors import ModelError, VerdictError
from relabel.manifests.failpoints import BATCH_FAILPOINTS
from tests.faults import forks
from tests.faults.command_lines import inside

from .batch_endings import KEPT, PLAIN
from .batch_server import BatchServer, Fate
from .conftest import GOOD, ask_for, echo, run_all
from .scripted_server import Call, Json, ScriptedServer, chat, error
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
    code, ended = run(job, capsys=capsys)
    assert code == 20
    assert ended["batches"] == {"batches": 1, "asks": 4}
    said = "1 batch of 4 asks is with the provider; the next run looks for it"
    assert relabel("status", job, "--output", "json") == 0
    assert json.loads(capsys.readouterr().out)["batches"] == ended["batches"]
    assert relabel("status", job) == 0
    assert said in capsys.readouterr().out
    assert relabel("run", job, "--for", "2s") == 20
    assert said in capsys.readouterr().out
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


def test_a_batch_whose_results_were_read_is_not_with_the_provider_any_more(
    serve: Any, write_job: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relabel.jobs.run.stop.DRAIN_S", 1e6)
    provider = BatchServer(r3a, lambda nth: "held" if nth else "completed")
    provider.on_look = lambda: os.kill(os.getpid(), signal.SIGTERM) if provider.num_seen["batch-1"] == 3 else None
    job = job_of(write_job, start(serve, provider))
    code, ended = run(job, capsys=capsys)
    assert (code, len(provider.batches)) == (20, 2)
    assert ended["batches"] == {"batches": 1, "asks": 19}


def test_a_reply_that_is_lost_hands_nothing_over_twice(serve: Any, write_job: Any, capsys: Any) -> None:
    provider = BatchServer(r3a)
    provider.loses_reply = True
    assert run(job_of(write_job, start(serve, provider)), capsys=capsys)[0] == 0
    assert grades() == WANTED
    assert set(provider.paid.values()) == {1}
    assert len(provider.batches) == 2


@pytest.mark.parametrize("fate", ["failed", "expired"])
def test_what_a_batch_leaves_unanswered_goes_into_another(fate: Fate, serve: Any, write_job: Any, capsys: Any) -> None:
    provider = BatchServer(r3a, lambda nth: fate if nth == 0 else "completed")
    assert run(job_of(write_job, start(serve, provider)), capsys=capsys)[0] == 0
    assert grades() == WANTED
    first, *others = [[line["custom_id"] for line in batch["lines"]] for batch in provider.batches.values()]
    again = sorted(ask for asks in others for ask in asks if ask in first)
    left = first[::-1][1::2] if fate == "expired" else first
    assert again == sorted(left), "what was answered is not asked again, and the rest once"


def test_a_batch_that_the_server_does_not_know_ends_the_run_and_is_not_paid_again(
    serve: Any, write_job: Any, capsys: Any
) -> None:
    """Another key or address may be the reason. Its record, removed by hand, is what forgets it."""
    provider = BatchServer(r3a, lambda nth: "gone" if nth == 0 else "completed")
    job = job_of(write_job, start(serve, provider))
    for _ in range(2):
        assert relabel("run", job) == 20
        (record,) = Path("out/batches").iterdir()
        message = " ".join(capsys.readouterr().err.split())
        assert "batch batch-0 at" in message
        assert f"remove batches/{record.name} from the output" in message
        assert len(provider.batches) == 1
    record.unlink()
    assert run(job, capsys=capsys)[0] == 0
    assert grades() == WANTED


def test_a_batch_of_an_unknown_form_ends_every_run_until_it_can_be_read(
    serve: Any, write_job: Any, capsys: Any
) -> None:
    provider = BatchServer(r3a, ending=KEPT["bodies within another object"])
    job = job_of(write_job, start(serve, provider))
    for _ in range(2):
        assert relabel("run", job) == 4
        message = " ".join(capsys.readouterr().err.split())
        assert "batch batch-0 at" in message
        assert '"body": {"result": ' in message
        assert len(provider.batches) == 1
    provider.ending = PLAIN
    assert run(job, capsys=capsys)[0] == 0
    assert grades() == WANTED
    assert set(provider.paid.values()) == {1}


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


# The chat way: what is sent, what is refused before it is sent, and what a chat API can't be asked at all.


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
    ({"content": f"{THOUGHT}</think>\n<think>mine</think>{TAIL}"}, f"<think>mine</think>{TAIL}"),
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
    ({"content": f"<think>{THOUGHT}</think>{TAIL}"}, f"<think>{SAFE}</think>{TAIL}"),
    ({"content": "no thought at all"}, "no thought at all"),
    ({"content": f"Here:\n```xml\n{GOOD}\n```<|im_end|>"}, GOOD.replace("><score", ">\n\n<score")),
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


def test_a_quoted_document_is_no_answer_and_the_reason_says_so(serve: Any, connect: Any) -> None:
    text = "<think>so</think>\nIt says: <score>1</score>"
    engine = connect(serve(lambda _: chat(text)))
    quoted, own = run_all(engine, [Request(n, ask_for("q", f"<score>{n + 1}</score>"), 0) for n in range(2)])
    assert (quoted.text, quoted.raw) == ("", text)
    assert own.text == "<think>so</think>\n<score>1</score>"
    with pytest.raises(VerdictError, match=r"format: .*an echo of them"):
        Reader(AnswerFormat((Text("think", 9), Choice("score", ("0", "1", "2"))))).read(quoted)


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


def test_a_line_of_another_model_is_no_answer_and_is_paid(serve: Any, write_job: Any, capsys: Any) -> None:
    def script(call: Call) -> Json:
        reply = r3a(call)
        is_other = re.search(r"of kind 3\b", call.raw.decode()) is not None
        reply.payload["model"] = "cheap-mini" if is_other else "teacher-2026-01"
        return reply

    assert run(job_of(write_job, start(serve, BatchServer(script))), capsys=capsys)[0] == 0
    assert grades() == {row: grade for row, grade in WANTED.items() if row != 3}
    refused = committed("quarantine")[3]
    assert (refused["status"], "cheap-mini" in refused["reason"]) == ("engine", True)
