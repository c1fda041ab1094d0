"""The two ways in which the openai engine asks: messages as text, for any server, without distributions; and prompts as
token ids, with a one-token request for the exact distribution at each decision, and formats enforced by a grammar.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from relabel.labelers.answers import answer_in
from relabel.labelers.engines.grammars import GrammarCompiler, render_grammar
from relabel.labelers.engines.openai_client import CHARS_PER_TOKEN, ApiClient
from relabel.labelers.engines.openai_failures import Failure
from relabel.labelers.engines.openai_options import OpenAiArgs
from relabel.labelers.engines.openai_replies import Reply, read_chat, read_completion
from relabel.labelers.engines.tokens import (
    KNOWN_CONTROL_TEXTS,
    PROBE_ROOM,
    ControlTexts,
    DecisionPlaces,
    Prompt,
    PromptEncoder,
    TokenSequence,
    admit,
    distribution_of_logprobs,
    documents_of,
    quotable,
    stage_remarks,
    with_documents,
)
from relabel.labelers.engines.transformers import TokenizerFolder
from relabel.manifests.asks import (
    Answer,
    Ask,
    Fragment,
    Message,
    Request,
    most_prompt_tokens,
    opening_of,
)
from relabel.manifests.chat_templates import DAY
from relabel.manifests.errors import ModelError, ServerGoneError
from relabel.manifests.specs import EngineSpec

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal


class _Mode:
    """What both share.

    Args:
        loop: runs the client; for requests at the start, which wait.
    """

    path: ClassVar[str]

    def __init__(self, client: ApiClient, loop: BlockingPortal, spec: EngineSpec, args: OpenAiArgs) -> None:
        self._client = client
        self._loop = loop
        self._spec = spec
        self._args = args
        self.details: dict[str, Any] = {"constrain": False}
        """What a run records of this way to ask."""

    def _post(self, body: dict[str, Any], read: Callable[[Any], Reply], *, is_trial: bool = False) -> Reply | Failure:
        return self._loop.call(
            partial(
                self._client.post,
                self.path,
                body,
                read,
                is_trial=is_trial,
            )
        )

    def _request_body(
        self, request: Request, prompt: dict[str, Any], limit: dict[str, int], more: dict[str, Any]
    ) -> dict[str, Any]:
        """A request that generates text. Fields that `extra_body` sets to null are left out."""
        sampling = request.ask.sampling
        body = {"model": self._args.served_model, **prompt, **limit}
        if self._args.extra_body.get("stream"):
            body["stream_options"] = {"include_usage": True}  # a stream's tokens are counted where that is asked for
        body["temperature"] = sampling.temperature
        body["top_p"] = sampling.top_p
        body["seed"] = request.seed & 0x7FFFFFFF  # 31 bits, which every server takes
        body |= more
        body |= self._args.extra_body
        return {key: value for key, value in body.items() if value is not None}


# ------------------------------------------------------------------------------
# Chat mode.


class ChatWork(NamedTuple):
    """A request ready to be sent."""

    request: Request
    body: dict[str, Any]
    flags: tuple[str, ...]


class ChatMode(_Mode):
    """Asks as `/chat/completions`.

    Args:
        folder: of the server's tokenizer, where one is known: its own control tokens are looked for in data, else all
            that we have heard of.
    """

    name = "chat"
    path = "/chat/completions"

    def __init__(
        self,
        client: ApiClient,
        loop: BlockingPortal,
        spec: EngineSpec,
        args: OpenAiArgs,
        *,
        overlong: Literal["truncate", "quarantine"],
        folder: TokenizerFolder | None,
    ) -> None:
        super().__init__(client, loop, spec, args)
        self._overlong = overlong
        known = KNOWN_CONTROL_TEXTS if folder is None else folder.control_texts()
        self._control = ControlTexts([*known, *args.control_texts])
        self._folds_system = False

    def prepare(self, asks: Sequence[Ask]) -> list[str]:
        """Refuse what can't be asked this way, and try each stage as it will be asked; without the system role, where
        the server refuses that and takes the rest.

        Raises:
            ModelError: a stage wants a distribution and nothing else, or begins the answer; or the server refuses it.
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
            outcome = self._try(ask)
            if isinstance(outcome, Failure) and not self._folds_system and ask.messages[0].role == "system":
                self._folds_system = True
                refused = outcome
                outcome = self._try(ask)
                self._folds_system = not isinstance(outcome, Failure)
                if self._folds_system:
                    self.details["system_role"] = "folded"
                    remarks.append(
                        f"The server at {self._client.at} takes no system turn ({refused.detail}): its text opens the "
                        "first user turn."
                    )
            if isinstance(outcome, Failure):
                outcome.raise_at_start(ask.stage, at=self._client.at)
        remarks += self._loop.call(self._client.start_notes)
        if any(ask.decisions for ask in asks):
            remarks.append(
                "The server is used as a chat API, which gives no distributions: labels carry the grade alone "
                "(`no_distribution`)."
            )
        return remarks

    def most_tokens(self, ask: Ask, max_output: int) -> tuple[int, int]:
        """Most tokens that an ask's prompt and answer are charged for."""
        return most_prompt_tokens(ask) + len(json.dumps(self._spec.chat_template_kwargs)), max_output

    def admit(self, request: Request) -> ChatWork | Answer:
        """Make a request ready, or answer it here."""
        ask = request.ask
        control = self._control.find(ask.messages)
        if control is not None:
            field, text = control
            why = "a control token, which a chat API would not take for text; engine.args.mode: tokens can ask this row"
            return Answer(request.id, "", "refused", detail=f"{field} holds {text!r}, {why}")
        num_chars = sum(len(message.text) for message in ask.messages) + len(ask.prefill)
        surplus = num_chars - self._spec.max_prompt_tokens * CHARS_PER_TOKEN
        if surplus <= 0:
            return ChatWork(request, self._body(request, ask.messages), ())
        cut = _cut(ask.messages, surplus) if self._overlong == "truncate" else None
        if cut is None:
            detail = (
                f"the prompt is {surplus} characters too long: engine.max_prompt_tokens is "
                f"{self._spec.max_prompt_tokens}, counted as {CHARS_PER_TOKEN} characters each"
            )
            return Answer(request.id, "", "overlong", detail=detail)
        return ChatWork(request, self._body(request, cut), ("document_truncated",))

    async def answer(self, work: ChatWork) -> Answer:
        """Ask the server."""
        return answer_of(work, await self._client.post(self.path, work.body, read_chat))

    def _try(self, ask: Ask) -> Reply | Failure:
        return self._post(self._body(Request(0, ask, 0), ask.messages), read_chat)

    def _body(self, request: Request, messages: Sequence[Message]) -> dict[str, Any]:
        ask = request.ask
        turns = [{"role": message.role, "content": message.text} for message in messages]
        if self._folds_system and turns[0]["role"] == "system" and len(turns) > 1:
            turns[:2] = [{"role": turns[1]["role"], "content": f"{turns[0]['content']}\n\n{turns[1]['content']}"}]
        more: dict[str, Any] = {}
        if ask.prefill:
            turns.append({"role": "assistant", "content": ask.prefill})
            if self._args.assistant_prefill == "continue":
                more = {"add_generation_prompt": False, "continue_final_message": True}
        kwargs = {key: value for key, value in self._spec.chat_template_kwargs.items() if key != DAY}
        if kwargs:
            more["chat_template_kwargs"] = kwargs
        return self._request_body(request, {"messages": turns}, {self._args.max_tokens_field: ask.max_tokens}, more)


def answer_of(work: ChatWork, outcome: Reply | Failure) -> Answer:
    """What came of a request, as the answer to its ask."""
    if isinstance(outcome, Failure):
        return Answer(
            work.request.id,
            "",
            outcome.finish,
            detail=outcome.detail,
            flags=work.flags,
        )
    answer = answer_in(
        work.request.ask,
        outcome.text,
        thought=outcome.reasoning,
        is_cut=outcome.finish == "length",
    )
    raw = outcome.raw
    if not raw and answer.text != outcome.text:
        raw = outcome.text
    return Answer(
        request_id=work.request.id,
        text=answer.text,
        finish=outcome.finish,
        distributions={},
        prompt_tokens=outcome.usage.prompt,
        output_tokens=outcome.usage.output,
        cached_tokens=outcome.usage.cached,
        detail=outcome.detail or answer.detail,
        flags=(*work.flags, *outcome.flags),
        raw=raw,
    )


def _cut(messages: Sequence[Message], surplus: int) -> list[Message] | None:
    """The messages with `surplus` characters fewer, from the ends of the documents, last one first; None if those are
    too short.
    """
    places = documents_of(messages)
    texts = [text for _, _, text in places]
    for number in reversed(range(len(texts))):
        head = texts[number][: max(len(texts[number]) - surplus, 0)]
        surplus -= len(texts[number]) - len(head)
        texts[number] = head
    if surplus > 0 or not any(texts):
        return None
    return with_documents(messages, places, texts)


# ------------------------------------------------------------------------------
# Tokens mode.


MAX_SOURCE_CHARS = 40_000
"""A longer document leaves quotations free, to be checked when read: servers refuse the grammar somewhere above 60,000
characters.
"""
CANNOT = frozenset({400, 404, 405, 422, 501})
"""Statuses of a server that does not know how to take a request."""
_SAMPLE = (
    "Query: how to prune roses\nDocument: Cut back to an outward bud in late winter; 3.5 cm, naïve.\n<score>2</score>"
)

# Said outright, since a server may take other values from the model's generation_config.json.
_NEUTRAL = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "skip_special_tokens": True, "return_token_ids": True}


class TokensMode(_Mode):
    """Asks as `/completions` with token ids.

    Args:
        folder: of the tokenizer of the model that the server runs.
        context: most tokens of prompt and answer together, where the server states it.
    """

    name = "tokens"
    path = "/completions"

    def __init__(
        self,
        client: ApiClient,
        loop: BlockingPortal,
        spec: EngineSpec,
        args: OpenAiArgs,
        *,
        overlong: Literal["truncate", "quarantine"],
        folder: TokenizerFolder,
        context: int | None,
    ) -> None:
        super().__init__(client, loop, spec, args)
        self._reference = folder.reference
        tokenizer = folder.load()
        self._tokenizer = tokenizer
        self.details = {"constrain": args.constrain, "context": context}
        self.encoder = PromptEncoder(tokenizer, overlong=overlong, chat_template_kwargs=spec.chat_template_kwargs)
        self._places = DecisionPlaces(self.encoder, tokenizer_name=folder.reference)
        eos = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
        self._token_bytes = GrammarCompiler(
            tokenizer, vocab_size=max(self.encoder.vocabulary.values()) + 1, eos_ids=eos
        ).token_bytes
        added = ((str(kind), token) for token, kind in tokenizer.added_tokens_decoder.items() if not kind.special)
        self._tag_tokens = {text: token for text, token in added if text.startswith("<") and text.endswith(">")}

    def detect(self) -> str | None:
        """Find out what the server can do.

        Returns:
            None if it takes and gives token ids, and gives distributions; else why not.
        Raises:
            ModelError: its tokenizer is another one.
            ServerGoneError: it answers nothing.
        """
        prompt = self.encoder.encode_messages([Message("user", ("Say 0 or 1.",))])
        label_ids = [self.encoder.encode_text(digit)[-1] for digit in "01"]
        decision = self._post(self._decision_body(prompt, label_ids), read_completion, is_trial=True)
        lacks = "it does not answer `return_token_ids` and `logprob_token_ids`"
        if isinstance(decision, Failure):  # a strict server refuses fields that it does not know
            plain = self._post(self._one_token(prompt), read_completion, is_trial=True)
            if not isinstance(plain, Failure):
                return f"{lacks} ({decision.detail})"
            if plain.status in CANNOT or plain.is_malformed:
                return f"it takes no token ids: {plain.detail}"
            raise ServerGoneError(f"the server at {self._client.at} is not ready: {plain.detail}")
        if (decision.prompt_ids or prompt) != prompt or decision.usage.prompt not in (0, len(prompt)):
            return f"it makes {decision.usage.prompt} tokens of a prompt of {len(prompt)} token ids"
        if decision.token_ids is None or not set(label_ids) <= set(decision.logprobs):
            return lacks
        self._check_tokenizer()
        return None

    def _check_tokenizer(self) -> None:
        """Have the server make tokens of a text, and compare them with ours, where it shows its own.

        Raises:
            ModelError: they differ.
        """
        ours: list[int] = self._tokenizer(_SAMPLE, add_special_tokens=False).input_ids
        reply = self._post(
            {**self._one_token(_SAMPLE), **_NEUTRAL, "add_special_tokens": False}, read_completion, is_trial=True
        )
        if isinstance(reply, Failure) or reply.prompt_ids in (None, ours):
            return
        raise ModelError(
            f"the tokenizer of the server at {self._client.at} is not that of {self._reference!r}: it makes "
            f"{len(reply.prompt_ids or ())} tokens of a text that has {len(ours)} here, or others. Set "
            "engine.model to the model that the server runs."
        )

    def prepare(self, asks: Sequence[Ask]) -> list[str]:
        """Resolve every decision, and try each stage's grammar and decisions at the server.

        Raises:
            ModelError: labels that are not one token each, or a refusal.
        """
        remarks: list[str] = []
        for ask in asks:
            self._places.of(ask)
            if ask.max_tokens:
                remarks += self._try_stage(ask)
        remarks += self._loop.call(self._client.start_notes)
        return remarks + stage_remarks(self.encoder, asks, self._max_prompt)

    def most_tokens(self, ask: Ask, max_output: int) -> tuple[int, int]:
        """Most tokens that an ask is charged for, prompts and answers: each of its decisions may be a request of its
        own, of prompt and answer.
        """
        prompt = min(most_prompt_tokens(ask), self._max_prompt(ask))
        num_probes = len(ask.decisions)
        return prompt + num_probes * (prompt + max_output + PROBE_ROOM), max_output + num_probes

    def admit(self, request: Request) -> TokenSequence | Answer:
        """Make a request ready, or answer it here."""
        return admit(
            request,
            self.encoder,
            self._places,
            max_prompt_tokens=self._max_prompt(request.ask),
            bind=self._grammar if self.details["constrain"] else None,
        )

    async def answer(self, sequence: TokenSequence) -> Answer:
        """Ask the server for the text, then for the distribution at each decision."""
        counted: Reply | None = None
        if sequence.max_new:
            text = await self._client.post(self.path, self._generation(sequence), read_completion)
            if isinstance(text, Failure):
                return _failed(sequence, text)
            self._write(sequence, text)
            counted = text
        for decision, end in sequence.missing():
            probe = sequence.probe_for(decision, end, self.encoder.encode_text)
            body = self._decision_body(probe.prompt, decision.label_ids)
            reply = await self._client.post(self.path, body, read_completion)
            if isinstance(reply, Failure):
                if not sequence.max_new:
                    return _failed(sequence, reply)
                sequence.detail = sequence.detail or f"decision {decision.name}: {reply.detail}"
                continue
            if not sequence.max_new:
                counted = reply
            if all(token in reply.logprobs for token in decision.label_ids):
                logprobs = [reply.logprobs[token] for token in decision.label_ids]
                sequence.found[decision.name] = (end, distribution_of_logprobs(logprobs))
        answer = sequence.answer()
        if counted is not None:
            answer.prompt_tokens = counted.usage.prompt
            answer.cached_tokens = counted.usage.cached
        return answer

    def _write(self, sequence: TokenSequence, text: Reply) -> None:
        """Add the text that the server wrote."""
        for token in text.token_ids or ():
            sequence.append(token, self._token_bytes(token))
        if sequence.matcher is None and sequence.closing:
            # a last token may go on beyond the closing tag, where the server's text already ends
            end = sequence.written.find(sequence.closing, len(sequence.prefill))
            if end >= 0 and text.finish == "stop" and text.text.endswith(sequence.closing.decode()):
                del sequence.written[end + len(sequence.closing) :]
        sequence.finish = text.finish
        sequence.detail = text.detail
        sequence.flags = (*sequence.flags, *text.flags)

    def _generation(self, sequence: TokenSequence) -> dict[str, Any]:
        more: dict[str, Any] = dict(_NEUTRAL)
        if sequence.matcher is not None:
            more["structured_outputs"] = {"grammar": sequence.matcher}
        elif sequence.closing:
            more |= {"stop": [sequence.closing.decode()], "include_stop_str_in_output": True}
        return self._request_body(sequence.request, {"prompt": sequence.prompt}, {"max_tokens": sequence.max_new}, more)

    def _one_token(self, prompt: Any) -> dict[str, Any]:
        # temperature 1 and nothing cut off: the log-probabilities are then the model's own, even where a server gives
        # processed ones
        return {
            "model": self._args.served_model,
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 1.0,
            "top_p": 1.0,
        }

    def _decision_body(self, prompt: list[int], label_ids: Sequence[int]) -> dict[str, Any]:
        # vLLM wants `logprobs` with the ids; versions that cut the list to it need one for each.
        wanted = {"logprobs": len(label_ids), "logprob_token_ids": list(label_ids), "return_tokens_as_token_ids": True}
        return {**self._one_token(prompt), **_NEUTRAL, **wanted}

    def _max_prompt(self, ask: Ask) -> int:
        """Leaves room for a decision's token, and for its marker where that takes more tokens encoded apart."""
        longest = self._spec.max_prompt_tokens
        context: int | None = self.details["context"]
        if context is None:
            return longest
        return min(longest, context - ask.max_tokens - PROBE_ROOM)

    def _grammar(self, ask: Ask, prompt: Prompt) -> str:
        """The grammar of an ask's answer, with tags that are tokens of their own (`</think>`) named by id.

        The server's llguidance takes added tokens in angle brackets for control tokens: spelled out, it would propose
        such a token at the tag's place and then refuse it, which vLLM 0.32 answers with HTTP 500.
        """
        assert ask.format is not None
        source = quotable(ask, prompt)
        is_quoting = any(isinstance(section, Fragment) and section.is_constrained for section in ask.format.sections)
        if source is not None and (not is_quoting or len(source) > MAX_SOURCE_CHARS):
            source = None
        grammar = render_grammar(ask.format, prefill=prompt.begins, fragment_source=source)
        tags, line_break, rules = grammar.partition("\n")
        for text, token in self._tag_tokens.items():
            tags = tags.replace(f'"{text}"', f"<[{token}]>")
        return tags + line_break + rules

    def _try_stage(self, ask: Ask) -> list[str]:
        """A short answer, with the grammar and without if the server does not take that."""
        why = ""
        while True:
            is_bound = self.details["constrain"] and ask.format is not None
            sequence = self.admit(Request(0, ask, 0))
            if isinstance(sequence, Answer):
                return []
            outcome = self._post(self._generation(sequence), read_completion)
            if not isinstance(outcome, Failure):
                opening = opening_of(ask.format.sections[0]) if ask.format is not None else ""
                text = outcome.text.lstrip()
                if not is_bound or sequence.prefill or text.startswith(opening) or opening.startswith(text):
                    break
                why = "it does not heed `structured_outputs`"
            elif is_bound and outcome.status in CANNOT:
                why = outcome.detail
            else:
                outcome.raise_at_start(ask.stage, at=self._client.at)
            self.details["constrain"] = False
        if not why:
            return []
        remark = f"The server holds no answer to its format ({why}): the model writes freely, and what it writes is "
        return [f"{remark}checked when read."]


def _failed(sequence: TokenSequence, failure: Failure) -> Answer:
    return Answer(
        sequence.request.id,
        "",
        failure.finish,
        detail=failure.detail,
        flags=sequence.flags,
    )
