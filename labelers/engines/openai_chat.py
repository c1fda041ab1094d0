"""Chat mode of the openai engine: messages as text for any OpenAI-compatible server, without token ids or
distributions."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from relabel.labelers.engines.openai_client import CHARS_PER_TOKEN, ApiClient, Failure
from relabel.labelers.engines.openai_connections import OpenAiArgs
from relabel.labelers.engines.openai_replies import Reply, read_chat
from relabel.labelers.engines.tokens import KNOWN_CONTROL_TEXTS, ControlTexts, documents_of, with_documents
from relabel.manifests.asks import Answer, Ask, Message, Request, most_prompt_tokens
from relabel.manifests.errors import ModelError
from relabel.manifests.formats import Text, closing_of, opening_of
from relabel.manifests.models import DAY
from relabel.manifests.specs import EngineSpec

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

PATH = "/chat/completions"
THINK = "think"
"""The section that a model's own thought is, in formats that begin with it."""
_OPENED = re.compile(r"\s*(?:<(?:think|thinking|thought|seed:think)>|\[THINK\]|◁think▷)")
_CLOSED = re.compile(r"</(?:think|thinking|thought|seed:think)>|\[/THINK\]|◁/think▷")


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
        self._control = ControlTexts((*known, *args.control_texts))
        self._folds_system = False

    def details(self) -> dict[str, Any]:
        """What a run records of this way to ask."""
        return {"constrain": False} | ({"system_role": "folded"} if self._folds_system else {})

    def prepare(self, asks: Sequence[Ask], loop: BlockingPortal) -> list[str]:
        """Refuse what can't be asked this way, and try each stage as it will be asked; without the system role, where
        the server refuses and takes that.

        Raises:
            ModelError: a stage wants a distribution and nothing else, or begins the answer; or the server refuses the
                requests.
            ServerGoneError: the server does not answer.
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
        remarks: list[str] = []
        for ask in asks:
            body = self._body(ask, ask.messages, 0)
            found = loop.call(self._client.post, PATH, body, read_chat)
            if isinstance(found, Failure) and not self._folds_system and body["messages"][0]["role"] == "system":
                self._folds_system = True
                folded = self._body(ask, ask.messages, 0)
                if isinstance(again := loop.call(self._client.post, PATH, folded, read_chat), Failure):
                    self._folds_system = False
                else:
                    remarks.append(
                        f"The server at {self._client.at} takes no system turn ({found.detail}): its text opens the "
                        "first user turn."
                    )
                    body, found = folded, again
            if isinstance(found, Failure):
                found.raise_at_start(ask.stage, body, at=self._client.at)
        if any(ask.decisions for ask in asks):
            remarks.append(
                "The server is used as a chat API, which gives no distributions: labels carry the grade alone "
                "(`no_distribution`)."
            )
        return remarks

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
        return answer_of(work, await self._client.post(PATH, work.body, read_chat))

    def _body(self, ask: Ask, messages: Sequence[Message], seed: int) -> dict[str, Any]:
        turns = [{"role": message.role, "content": message.text} for message in messages]
        if self._folds_system and turns[0]["role"] == "system" and len(turns) > 1:
            turns[:2] = [{"role": turns[1]["role"], "content": f"{turns[0]['content']}\n\n{turns[1]['content']}"}]
        extra: dict[str, Any] = {}
        if ask.prefill:
            turns.append({"role": "assistant", "content": ask.prefill})
            if self._args.assistant_prefill == "continue":
                extra = {"add_generation_prompt": False, "continue_final_message": True}
        if kwargs := {key: value for key, value in self._spec.chat_template_kwargs.items() if key != DAY}:
            extra["chat_template_kwargs"] = kwargs
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
    usage, ask = found.usage, work.request.ask
    text = answer_text(ask, found.text, found.reasoning, is_cut=found.finish == "length")
    return Answer(
        work.request.id,
        text,
        found.finish,
        {},
        usage.prompt,
        usage.output,
        usage.cached,
        detail=found.detail,
        flags=(*work.flags, *found.flags),
        raw=found.raw or ("" if text == found.text else found.text),
    )


def answer_text(ask: Ask, content: str, reasoning: str, *, is_cut: bool) -> str:
    """The answer in its format: with the model's own thought where that has a section for it, without where it has
    none. What needs no change gets none.

    Args:
        reasoning: what the server took out of the answer as the model's thought.
        is_cut: the answer may go on.
    """
    if ask.prefill or ask.format is None:
        return content
    if not content.strip() and _CLOSED.search(reasoning):  # a server that took all of it for the thought
        content, reasoning = reasoning, ""
    first = ask.format.sections[0]
    thought, rest = _split(content, opening_of(first))
    if not (isinstance(first, Text) and first.tag == THINK):
        return rest
    opening, closing = opening_of(first), closing_of(first)
    if rest is not content and rest.lstrip().startswith(opening):  # a thought, and then the section that was asked for
        own, after = _split(rest, opening)
        if own.strip() or after is rest:
            return rest
        rest = after
    elif thought.strip() and content.lstrip().startswith(opening):
        return content
    thought = thought if thought.strip() else reasoning
    if not thought.strip():
        return content
    # it may quote the format, and is no part of the verdict
    tags = "|".join(re.escape(section.tag) for section in ask.format.sections)
    thought = re.sub(rf"<(/?(?:{tags}))>", r"[\1]", thought)
    return f"{opening}{thought}" if is_cut and not rest.strip() else f"{opening}{thought}{closing}\n{rest.lstrip()}"


def _split(content: str, opening: str) -> tuple[str, str]:
    """A thought that an answer begins with, and the rest; the beginning of the thought may be in the prompt, where a
    template opens it. All is the rest where there is none.

    Args:
        opening: of the format's first section; an answer that has begun is no thought.
    """
    begun, closed = _OPENED.match(content), _CLOSED.search(content)
    if closed is None or (begun is None and opening and opening in content[: closed.start()]):
        return "", content
    return content[begun.end() if begun else 0 : closed.start()], content[closed.end() :]


def _cut(messages: Sequence[Message], surplus: int) -> list[Message] | None:
    """The messages with `surplus` characters fewer, from the ends of the documents, last one first; None if those are
    too short.
    """
    places = documents_of(messages)
    texts = [text for _, _, text in places]
    for number in reversed(range(len(texts))):
        kept = texts[number][: max(len(texts[number]) - surplus, 0)]
        surplus -= len(texts[number]) - len(kept)
        texts[number] = kept
    return None if surplus > 0 or not any(texts) else with_documents(messages, places, texts)
