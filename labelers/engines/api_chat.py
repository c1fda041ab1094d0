"""The chat way: messages as text to any OpenAI-compatible server. No distributions, no token ids, no control token
written as plain text.

So a row whose data hold a control token's text is refused before it is sent, and says why. Where prompts are measured,
a token is counted as four characters, since the server's tokenizer is not at hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from labelers.engines.api_client import ApiClient, Failure
from labelers.engines.api_options import OpenAiArgs
from labelers.engines.api_replies import Reply, read_chat
from labelers.engines.api_stream import STREAMED
from labelers.engines.control_texts import KNOWN_CONTROL_TEXTS, ControlTexts
from labelers.engines.loop_thread import LoopThread
from manifests.asks import DOCUMENT_FIELD, Answer, Ask, Message, Request
from manifests.charges import most_prompt_tokens
from manifests.errors import ModelError
from manifests.specs import EngineSpec

CHARS_PER_TOKEN = 4
STREAM_REFUSED = 400
TRIAL_TOKENS = 16
"""Tokens of an answer at start-up, when it only matters whether the server takes the request."""


class ChatWork(NamedTuple):
    """A request ready to be sent."""

    request: Request
    body: dict[str, Any]
    flags: tuple[str, ...]


class ChatMode:
    """Asks as `/chat/completions`.

    Args:
        own_control_texts: the tokenizer's own, where one is known; else all that we have heard of.
    """

    name = "chat"
    has_distributions = False

    def __init__(
        self,
        client: ApiClient,
        spec: EngineSpec,
        args: OpenAiArgs,
        *,
        overlong: Literal["truncate", "quarantine"],
        own_control_texts: frozenset[str] | None = None,
    ) -> None:
        self._client, self._spec, self._args, self._overlong = client, spec, args, overlong
        known = KNOWN_CONTROL_TEXTS if own_control_texts is None else own_control_texts
        self.told: Callable[[int, str], None] | None = None
        """Called, in the loop's thread, with a request's id and its answer so far."""
        self._control = ControlTexts((*known, *args.control_texts))

    def details(self) -> dict[str, Any]:
        """What a run records of this way to ask."""
        return {"constrain": False}

    def prepare(self, asks: Sequence[Ask], loop: LoopThread) -> list[str]:
        """Refuse what can't be asked this way, and try one short answer of each stage.

        Raises:
            ModelError: a stage wants a distribution and nothing else, or begins the answer; or the server refuses the
                requests.
            EngineCrashError: the server does not answer.
        """
        for ask in asks:
            if ask.max_tokens == 0 or ask.format is None:
                raise ModelError(
                    f"stage {ask.stage!r} asks for a distribution and nothing else, which a chat API does not give. "
                    "Use engine.args.mode: tokens with engine.model and a server that takes token ids (vLLM), or a "
                    "labeler that writes its verdict."
                )
            if ask.prefill and self._args.assistant_prefill == "refuse":
                raise ModelError(
                    f"stage {ask.stage!r} begins the answer with {ask.prefill!r}, which not every chat server can: "
                    "set engine.args.assistant_prefill to `message` or `continue` if yours continues a last "
                    "assistant message."
                )
        for ask in asks:
            body = {**self._body(ask, ask.messages, 0), **self._limit(TRIAL_TOKENS)}
            found = loop.call(self._client.post("/chat/completions", body, read_chat))
            if isinstance(found, Failure):
                found.raise_at_start(ask.stage)
        if any(ask.decisions for ask in asks):
            return [
                (
                    "The server is used as a chat API, which gives no distributions: labels carry the grade alone "
                    "(`no_distribution`)."
                )
            ]
        return []

    def most_tokens(self, ask: Ask, max_output: int) -> tuple[int, int]:
        """Most tokens that an ask's prompt and answer are charged for."""
        extra = len(json.dumps(self._spec.chat_template_kwargs))
        return most_prompt_tokens(ask) + extra, max_output

    def admit(self, request: Request) -> ChatWork | Answer:
        """Make a request ready, or answer it here."""
        ask = request.ask
        if (found := self._control.find(ask.messages)) is not None:
            field, text = found
            why = "a control token, which a chat API would not take for text; engine.args.mode: tokens can ask this row"
            return Answer(request.id, "", "refused", detail=f"{field} holds {text!r}, {why}")
        messages: Sequence[Message] | None = ask.messages
        flags: tuple[str, ...] = ()
        surplus = (
            sum(len(message.text) for message in ask.messages)
            + len(ask.prefill)
            - self._spec.max_prompt_tokens * CHARS_PER_TOKEN
        )
        if surplus > 0:
            messages = _cut(ask.messages, surplus) if self._overlong == "truncate" else None
            flags = ("document_truncated",)
        if messages is None:
            limit = (
                f"engine.max_prompt_tokens is {self._spec.max_prompt_tokens}, counted as {CHARS_PER_TOKEN} characters "
                "each"
            )
            return Answer(request.id, "", "overlong", detail=f"the prompt is {surplus} characters too long: {limit}")
        return ChatWork(request, self._body(ask, messages, request.seed), flags)

    async def answer(self, work: ChatWork) -> Answer:
        """Ask the server."""
        found: Reply | Failure = Failure("error", "", STREAM_REFUSED)
        if (told := self.told) is not None:
            streamed = work.body | STREAMED
            found = await self._client.post(
                "/chat/completions", streamed, read_chat, written=lambda text: told(work.request.id, text)
            )
        if isinstance(found, Failure) and found.status == STREAM_REFUSED:  # not every server can
            found = await self._client.post("/chat/completions", work.body, read_chat)
        return answer_of(work, found)

    def _limit(self, max_tokens: int) -> dict[str, int]:
        return (
            {self._args.max_tokens_field: max_tokens}
            if self._args.extra_body.get(self._args.max_tokens_field, 0) is not None
            else {}
        )

    def _body(self, ask: Ask, messages: Sequence[Message], seed: int) -> dict[str, Any]:
        turns = [{"role": message.role, "content": message.text} for message in messages]
        extra: dict[str, Any] = {}
        if ask.prefill:
            turns.append({"role": "assistant", "content": ask.prefill})
            if self._args.assistant_prefill == "continue":
                extra = {"add_generation_prompt": False, "continue_final_message": True}
        if self._spec.chat_template_kwargs:
            extra["chat_template_kwargs"] = self._spec.chat_template_kwargs
        body = {
            "model": self._args.served_model,
            "messages": turns,
            self._args.max_tokens_field: ask.max_tokens,
            "temperature": ask.sampling.temperature,
            "top_p": ask.sampling.top_p,
            "seed": seed & 0x7FFFFFFF,  # 31 bits, which every server takes
            **extra,
            **self._args.extra_body,
        }
        return {key: value for key, value in body.items() if value is not None}


def answer_of(work: ChatWork, found: Reply | Failure) -> Answer:
    """What came of a request, as the answer to its ask."""
    if isinstance(found, Failure):
        return Answer(work.request.id, "", found.finish, detail=found.detail, flags=work.flags)
    usage = found.usage
    return Answer(
        work.request.id,
        found.text,
        found.finish,
        {},
        usage.prompt,
        usage.output,
        usage.cached,
        detail=found.detail,
        flags=work.flags,
    )


def _cut(messages: Sequence[Message], surplus: int) -> list[Message] | None:
    """The messages with `surplus` characters fewer, from the ends of the documents, last one first; None if those are
    too short.
    """
    changed = list(messages)
    for number in reversed(range(len(changed))):
        message = changed[number]
        for place in reversed(range(len(message.fields))):
            if message.fields[place] == DOCUMENT_FIELD and surplus > 0:
                parts = list(changed[number].parts)
                kept = parts[2 * place + 1][: max(len(parts[2 * place + 1]) - surplus, 0)]
                surplus -= len(parts[2 * place + 1]) - len(kept)
                parts[2 * place + 1] = kept
                changed[number] = message = message._replace(parts=tuple(parts))
    is_emptied = all(
        not message.parts[2 * place + 1]
        for message in changed
        for place, field in enumerate(message.fields)
        if field == DOCUMENT_FIELD
    )
    return None if surplus > 0 or is_emptied else changed
