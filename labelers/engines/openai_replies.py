"""What an OpenAI-compatible server replied, read strictly: a reply that is not of the API's form is no answer, and is
never repaired into one.

Read on: `read_completion` and `read_chat` make a `Reply` of a reply's JSON; the steps follow them.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import pydantic_core
from pydantic import BaseModel, Field, ValidationError

from relabel.labelers.engines.openai_complaints import shown
from relabel.manifests.asks import Finish

_STOPS = frozenset({"stop", "eos", "eos_token", "stop_sequence", "end_turn"})
_LENGTHS = ("length", "max_tokens", "max_output_tokens", "context_window_exceeded")
_FILTERS = ("filter", "safety", "refusal", "recitation", "prohibited", "blocklist", "spii", "sensitive", "guardrail")
_BREAKS = ("abort", "error", "cancel", "insufficient_system_resource")
UNKNOWN_FINISH = "finish_unknown"
"""Flag of an answer whose end the server gives no known reason for: whether it is whole, its reader finds."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking", "reasoning_details", "thinking_blocks")
"""Fields of a message in which servers keep the model's thought apart, the same one perhaps twice."""
_TEXTS = ("text", "content", "thinking", "reasoning", "summary", "value")
MAX_COUNT = 10_000_000
"""No request has more tokens; a higher number from a server is not a count."""
OTHER_MODEL = "other_model"
"""Flag of an answer under another model's name."""


class ReplyError(ValueError):
    """A reply without the API's form. Caught by the client, which asks again."""


class CutOffError(ReplyError):
    """A reply whose answer the server gave up halfway."""


class OtherModelError(ReplyError):
    """A reply of another model.

    Args:
        usage: what it is charged.
    """

    def __init__(self, message: str, usage: Usage) -> None:
        super().__init__(message)
        self.usage = usage


class Usage(NamedTuple):
    """Tokens of one reply, by the server's own count; `cached` ones are among the prompt's."""

    prompt: int = 0
    cached: int = 0
    output: int = 0


class Reply(NamedTuple):
    """One answer.

    Args:
        token_ids: ids of the generated tokens, where the server gives them.
        prompt_ids: ids of the prompt as the server saw it, where it gives them.
        logprobs: log-probabilities at the first generated token by token id, where they were asked for and given.
        detail: why it was refused or is of no use.
        reasoning: what the server keeps apart as the model's thought.
        raw: the message as it came, where it is more than its text.
        flags: what a reader of the label should know.
        model: the name that the server gives the model that answered; empty where it gives none.
    """

    text: str
    finish: Finish
    usage: Usage
    token_ids: list[int] | None = None
    prompt_ids: list[int] | None = None
    logprobs: dict[int, float] = {}  # noqa: RUF012 — never written to
    detail: str = ""
    reasoning: str = ""
    raw: str = ""
    flags: tuple[str, ...] = ()
    model: str = ""


TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
Logprob = Annotated[float, Field(gt=-1e9, le=1e-3, strict=True)]
"""A little above 0 by rounding."""


class _Logprobs(BaseModel):
    top_logprobs: list[dict[str, Logprob] | None] | None = None


class _TextChoice(BaseModel):
    finish_reason: str | None = None
    text: str
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None
    logprobs: _Logprobs | None = None


class _ChatChoice(BaseModel):
    finish_reason: str | None = None
    message: dict[str, Any]


ChoiceT = TypeVar("ChoiceT", _TextChoice, _ChatChoice)


class _Choices(BaseModel, Generic[ChoiceT]):
    choices: tuple[ChoiceT]
    usage: Any = None
    model: Any = None

    @property
    def model_name(self) -> str:
        return shown(self.model) if isinstance(self.model, str) else ""


ModelT = TypeVar("ModelT", bound=BaseModel)


def parse_reply(raw: bytes) -> Any:
    """A reply's JSON.

    Raises:
        ReplyError: it is none: cut off, nested too deep, NaN, half a character.
    """
    try:
        return pydantic_core.from_json(raw, allow_inf_nan=False)
    except ValueError:
        raise ReplyError("the reply is not complete JSON") from None


def read_as(model: type[ModelT], raw: bytes) -> ModelT:
    """A reply as a record; see `parse_reply` and `validated`."""
    return validated(model, parse_reply(raw))


def validated(model: type[ModelT], payload: Any) -> ModelT:
    """A reply's JSON as a record.

    Raises:
        ReplyError: it has another form.
    """
    try:
        return model.model_validate(payload)
    except ValidationError as exc:
        fault = exc.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, fault["loc"][:4]))
        raise ReplyError(f"the reply has another form: {where or 'all of it'}: {fault['msg']}") from None


def read_completion(payload: Any) -> Reply:
    """The one choice of `/completions`.

    Raises:
        ReplyError: the payload has not the form of a completion.
    """
    completion = validated(_Choices[_TextChoice], payload)
    choice = completion.choices[0]
    finish, detail, flags = _finish(choice.finish_reason, choice.text)
    return Reply(
        text=choice.text,
        finish=finish,
        usage=_usage(completion.usage),
        token_ids=choice.token_ids,
        prompt_ids=choice.prompt_token_ids,
        logprobs=_first_logprobs(choice.logprobs),
        detail=detail,
        flags=flags,
        model=completion.model_name,
    )


def _first_logprobs(logprobs: _Logprobs | None) -> dict[int, float]:
    """Log-probabilities at the first token, of the tokens that are named by their ids."""
    if logprobs is None or not logprobs.top_logprobs or logprobs.top_logprobs[0] is None:
        return {}
    by_id: dict[int, float] = {}
    for name, logprob in logprobs.top_logprobs[0].items():
        token_id = re.fullmatch("token_id:([0-9]{1,10})", name)
        if token_id is not None:
            by_id[int(token_id[1])] = logprob
    return by_id


def read_chat(payload: Any) -> Reply:
    """The one choice of `/chat/completions`. A refusal is `refused`, whatever its text is.

    Raises:
        ReplyError: the payload has not the form of a chat completion.
    """
    chat = validated(_Choices[_ChatChoice], payload)
    usage = _usage(chat.usage)
    message = chat.choices[0].message
    content = message.get("content")
    refusal = message.get("refusal")
    if not isinstance(refusal, str | None):
        raise ReplyError("the message's `refusal` is not text")
    text, thought = _parts_of("" if content is None else content)
    thoughts = [thought]
    for name in THOUGHTS:
        if message.get(name) is not None:
            thoughts.append("".join(_parts_of(message[name])))
    reasoning = next((thought for thought in thoughts if thought.strip()), "")
    is_text_alone = not reasoning and not refusal and text == (content or "")
    raw = "" if is_text_alone else json.dumps(message, ensure_ascii=False)
    if refusal:
        return Reply(
            text="",
            finish="refused",
            usage=usage,
            detail=f"the model declined: {shown(refusal)}",
            raw=raw,
            model=chat.model_name,
        )
    finish, detail, flags = _finish(chat.choices[0].finish_reason, text + reasoning)
    if reasoning and not text.strip() and finish == "stop":
        detail = detail or "the reply holds the model's thought and no answer"
    return Reply(
        text=text,
        finish=finish,
        usage=usage,
        detail=detail,
        reasoning=reasoning,
        raw=raw,
        flags=flags,
        model=chat.model_name,
    )


def _parts_of(content: Any) -> tuple[str, str]:
    """Text and thought of a message's content: text, parts with a type each, or lists of them.

    Raises:
        ReplyError: it is none of these.
    """
    if isinstance(content, str):
        return content, ""
    if isinstance(content, list):
        texts, thoughts = zip(("", ""), *map(_parts_of, content), strict=True)
        return "".join(texts), "".join(thoughts)
    if not isinstance(content, dict) or not isinstance(content.get("type"), str):
        raise ReplyError("the message's `content` is not text")
    inner = next((content[name] for name in _TEXTS if content.get(name) is not None), "")
    text = "".join(_parts_of(inner))
    is_thought = re.search("think|thought|reason", content["type"]) is not None or content.get("thought") is True
    return ("", text) if is_thought else (text, "")


def _finish(reason: str | None, text: str) -> tuple[Finish, str, tuple[str, ...]]:
    """How an answer ended, a remark on that, and its flags. Servers write the reasons in any case."""
    lowered = (reason or "").lower()
    if lowered in _STOPS:
        return "stop", "", ()
    if any(word in lowered for word in _LENGTHS):
        return "length", "", ()
    if any(word in lowered for word in _FILTERS):
        return "refused", "the server's content filter stopped the answer", ()
    if any(word in lowered for word in _BREAKS) or not (reason or text.strip()):
        raise CutOffError(f"the answer was cut off (finish_reason {shown(lowered) or 'absent'})")
    if not reason:
        return "length", "the answer came without finish_reason", (UNKNOWN_FINISH,)
    why = f"the answer ended with finish_reason {shown(reason)!r}"
    if not text.strip():
        return "error", why, ()
    return "stop", why, (UNKNOWN_FINISH,)


def _usage(usage: Any) -> Usage:
    """What the server counted, as it is charged: providers agree neither on whether cached tokens are among the
    prompt's nor on whether the model's thoughts are among the answer's.
    """
    counts = usage if isinstance(usage, dict) else {}
    prompt = _count(counts, "prompt_tokens")
    output = _count(counts, "completion_tokens")
    total = _count(counts, "total_tokens")
    cached = _count(counts.get("prompt_tokens_details"), "cached_tokens")
    thought = _count(counts.get("completion_tokens_details"), "reasoning_tokens")
    if cached > prompt > 0:
        prompt += cached
    if thought > output:
        output += thought
    if prompt > 0:
        output = max(output, total - prompt)
    return Usage(prompt, cached, output)


def _count(counts: Any, name: str) -> int:
    value = counts.get(name) if isinstance(counts, dict) else None
    return value if type(value) is int and 0 <= value <= MAX_COUNT else 0
