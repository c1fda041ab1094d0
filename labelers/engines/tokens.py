"""Prompts as token ids, in which data stays plain text; the detection of control-token texts in data sent to chat APIs;
decisions in an answer, the sequence in flight, and the checks of a labeler's stages before the first row."""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np

from relabel.labelers.answers import AnswerText, answer_in
from relabel.manifests.asks import (
    DOCUMENT_FIELD,
    Answer,
    Ask,
    Decision,
    Distribution,
    Finish,
    Message,
    Request,
    closing_of,
    opening_of,
)
from relabel.manifests.chat_templates import ChatTemplate, start_ids
from relabel.manifests.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# ------------------------------------------------------------------------------
# Texts that are control tokens to one model or another. A chat API turns them into those tokens wherever they occur,
# in data too.


KNOWN_CONTROL_TEXTS: tuple[str, ...] = (
    # ChatML: Qwen, SmolLM, Yi, …; GPT
    *("<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|endoftext|>", "<|endofprompt|>"),
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
    # Llama 2, Mistral
    *("<s>", "</s>", "<unk>", "[INST]", "[/INST]", "<<SYS>>", "<</SYS>>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *(
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_CALLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "[THINK]",
        "[/THINK]",
    ),
    # Llama 3, 4
    *(
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|python_tag|>",
    ),
    *("<|header_start|>", "<|header_end|>", "<|eot|>", "<|eom|>", "<|finetune_right_pad_id|>"),
    # Gemma
    *("<start_of_turn>", "<end_of_turn>", "<bos>", "<eos>", "<pad>", "<start_of_image>", "<end_of_image>"),
    # Phi, GLM, InternLM
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "[gMASK]", "<sop>", "<eop>", "<eoh>", "<eoa>"),
    # Command R, Granite
    *(
        "<BOS_TOKEN>",
        "<EOS_TOKEN>",
        "<|START_OF_TURN_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|SYSTEM_TOKEN|>",
        "<|USER_TOKEN|>",
    ),
    *("<|CHATBOT_TOKEN|>", "<|start_of_role|>", "<|end_of_role|>"),
    # DeepSeek (fullwidth bars)
    *(
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁outputs▁begin｜>",
    ),
    # tools and thoughts of several; images
    *(
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
    ),
    *("<think>", "</think>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|file_sep|>", "<|repo_name|>"),
)


class ControlTexts:
    """Finds control tokens' texts in data, in compatibility forms too, which some tokenizers normalise.

    Args:
        texts: what counts as one.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        longest_first = sorted({text for text in texts if text.strip()}, key=len, reverse=True)
        self._pattern: re.Pattern[str] | None = None
        if longest_first:
            self._pattern = re.compile("|".join(map(re.escape, longest_first)))

    def find(self, messages: Sequence[Message]) -> tuple[str, str] | None:
        """Field and text of the first control token in the messages' data, or None; `a message` where several parts
        make it together.
        """
        pattern = self._pattern
        if pattern is None:
            return None
        for message in messages:
            for name, text in zip(message.fields, message.parts[1::2], strict=False):
                match = pattern.search(text)
                if match is None and not text.isascii():
                    match = pattern.search(unicodedata.normalize("NFKC", text))
                if match is not None:
                    return name, match.group()
            in_template: list[str] = []
            for part in message.parts[::2]:
                in_template += pattern.findall(part)
            whole = pattern.findall(message.text)
            if whole != in_template:
                added = [text for text in whole if text not in in_template] or whole
                return "a message", added[0] if added else ""
        return None


# ------------------------------------------------------------------------------
# Prompts as token ids: what a labeler asks becomes what a model reads, and hostile data stays plain text on the way.
#
# An ordinary prompt is what the tokenizer's own chat template makes of the conversation, token for token. Where data
# would give rise to a control token, that data is encoded apart, as ordinary characters. Where a prompt is too long,
# the document is cut and nothing else.
#
# Control tokens are the tokenizer's special tokens, and all other added tokens whose text is not white space
# (`</think>`, `<tool_call>`).


CHARS_PER_TOKEN = 8
"""How many characters of a document are encoded for each token of room, at first. English has 4 to 5; fewer tokens
than room only means a second, longer try.
"""


class Prompt(NamedTuple):
    """A prompt that fits.

    Args:
        ids: token ids, the ask's prefill at the end included.
        num_prefill: how many of them are the ask's prefill's.
        begins: how the answer begins in the prompt: the ask's prefill, or a thought that the template opens.
        cut_document: the document as far as the model sees it, or None if it sees the whole.
    """

    ids: list[int]
    num_prefill: int
    begins: str = ""
    cut_document: str | None = None


class Overlong(NamedTuple):
    """A prompt that does not fit and may not be cut, with its length as far as it was counted."""

    num_tokens: int
    max_prompt_tokens: int


@dataclass(slots=True)
class _Draft:
    """An ask on its way to a prompt.

    Args:
        prefill: token ids of the ask's prefill.
        end: what the prompt ends with in place of a thought that the template opens.
        parts: the whole prompt, template text and data by turns.
        room: most tokens that the prompt may have before its prefill.
        ids: the token ids without the prefill, or None where it is plain that they are too many.
    """

    ask: Ask
    prefill: tuple[int, ...]
    end: str
    parts: list[str]
    room: int
    ids: list[int] | None = None


class _Opening(NamedTuple):
    """What many prompts begin with: characters of template text, and their token ids."""

    length: int = 0
    ids: Sequence[int] = ()


CHECKED_AFTER_OPENING = ("", "a", " a", "\n\n", "\u0301", "é 日本 🙂", "<", "|>")
"""Data that is put after a prompt's opening to see that the two can be encoded apart."""


def boundary_texts(backend: Any) -> list[str]:
    """Added tokens before which a text can be cut in two such that the ids of both, put together, are the whole's.

    Tokenizers look for added tokens first, and encode what is between them piece by piece. So a cut before one changes
    nothing, if none reaches over the cut: none has that one's first character anywhere but as its own first, takes
    white space before it or looks at what it is next to. Those that are looked for after normalisation do not count.

    Args:
        backend: a `tokenizers.Tokenizer`.
    """
    added = list(backend.get_added_tokens_decoder().values())
    if any(token.lstrip or token.single_word for token in added):
        return []
    inner = set[str]()
    for token in added:
        inner.update(token.content[1:])
    boundaries: list[str] = []
    for token in added:
        first = token.content[:1]
        if not token.normalized and first.strip() and first not in inner:
            boundaries.append(token.content)
    return boundaries


class PromptEncoder:
    """Encodes asks for one tokenizer.

    Args:
        tokenizer: a fast tokenizer of transformers.
        overlong: what to do with a prompt that is too long: cut the document, or nothing.
        chat_template_kwargs: passed to the chat template (`enable_thinking`).
    Raises:
        ConfigError, ModelError: see `ChatTemplate`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        overlong: Literal["truncate", "quarantine"] = "truncate",
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # A prompt is whole, and as long as it is: transformers too turns these off in every call that asks for neither.
        self._backend.no_padding()
        self._backend.no_truncation()
        self._overlong = overlong
        self._template = ChatTemplate(tokenizer, chat_template_kwargs)
        # sentencePiece tokenizers put a space before what they encode; a line break before it keeps that space off
        # our text
        first = self._tokenizer.decode(self._ids("a"), clean_up_tokenization_spaces=False)
        pieces = self._tokenizer.convert_ids_to_tokens(self._ids("a"))
        self._anchor = "\n" if first != "a" or (pieces and pieces[0].startswith("▁")) else ""
        self._anchor_length = len(self._ids(self._anchor)) if self._anchor else 0
        special = {str(token) for token in tokenizer.all_special_tokens}
        added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special or str(token).strip()}
        texts = (special | added) - {""}
        ids = {self._tokenizer.convert_tokens_to_ids(text) for text in texts}
        # Where unknown characters become `unk`, that id is no sign of an attack (a byte-level vocabulary never needs
        # it).
        if self._tokenizer.unk_token_id in self._ids("\U000f1234"):
            ids.discard(self._tokenizer.unk_token_id)
        self.control_ids = frozenset(token for token in ids if token is not None)
        """Ids that no data may give rise to."""
        self._control: re.Pattern[str] | None = None
        self._any_control: re.Pattern[str] | None = None
        if texts:
            longest_first = sorted(texts, key=len, reverse=True)
            choices = "|".join(map(re.escape, longest_first))
            # A lookahead finds overlapping strings too: "<|im_<|im_end|>end|>" hides one in another.
            self._control = re.compile(f"(?={choices})")
            # To learn whether there is any, a pattern that begins with a character is twelve times as fast.
            self._any_control = re.compile(choices)
        # template text is the same for all pairs of a stage; earlier answers in it are not, hence the bound
        self._count = functools.lru_cache(maxsize=256)(self._count_of_template)
        self._prefill_ids = functools.lru_cache(maxsize=256)(lambda prefill: tuple(self.encode_text(prefill)))
        self._boundaries = boundary_texts(self._backend)
        self._opening_of = functools.lru_cache(maxsize=256)(self._find_opening)
        self._start_ids = [] if self._template.is_own else start_ids(tokenizer)

    def encode(self, ask: Ask, *, max_prompt_tokens: int) -> Prompt | Overlong:
        """Encode one ask, cutting its document if that is allowed and needed.

        Raises:
            ConfigError, ModelError: the chat template can't show all of it, see `ChatTemplate.around`.
        """
        return self.encode_all([(ask, max_prompt_tokens)])[0]

    def encode_all(self, asks: Sequence[tuple[Ask, int]]) -> list[Prompt | Overlong]:
        """Encode asks, each with the most tokens that its prompt may have, in one call of the tokenizer.

        Raises:
            ConfigError, ModelError: the chat template can't show all of one, see `ChatTemplate.around`.
        """
        drafts = [self._draft(ask, max_prompt_tokens) for ask, max_prompt_tokens in asks]
        whole = [draft for draft in drafts if not self._bursts(draft.ask.messages, draft.room)]
        for draft, ids in zip(whole, self._encode_each([draft.parts for draft in whole]), strict=True):
            draft.ids = ids
        return [self._fit(draft) for draft in drafts]

    def _draft(self, ask: Ask, max_prompt_tokens: int) -> _Draft:
        prefill = self._prefill_ids(ask.prefill) if ask.prefill else ()
        end = self._end_for(ask)
        return _Draft(ask, prefill, end, self._parts(ask.messages, end), max_prompt_tokens - len(prefill))

    def _fit(self, draft: _Draft) -> Prompt | Overlong:
        """The prompt of a draft, with its document cut if that is allowed and needed."""
        ask = draft.ask
        num_prefill = len(draft.prefill)
        begins = ask.prefill or self.opened_for(ask)
        max_prompt_tokens = draft.room + num_prefill
        num_tokens = max_prompt_tokens + 1
        if draft.ids is not None:
            if len(draft.ids) <= draft.room:
                return Prompt([*draft.ids, *draft.prefill], num_prefill, begins)
            num_tokens = len(draft.ids) + num_prefill
        refused = Overlong(num_tokens, max_prompt_tokens)
        if self._overlong == "quarantine":
            return refused
        cut = self._cut_to_fit(ask.messages, draft.room, draft.end)
        if cut is None:
            return refused
        ids, document = cut
        return Prompt([*ids, *draft.prefill], num_prefill, begins, document)

    def opened_for(self, ask: Ask) -> str:
        """The thought that the template opens at the prompt's end and the answer goes on in, since the ask's format
        begins with it; empty where there is none.
        """
        if ask.prefill or ask.format is None or not ask.format.sections:
            return ""
        begins = opening_of(ask.format.sections[0])
        return self._template.opened if begins == self._template.opened_tag else ""

    def remarks(self, ask: Ask) -> list[str]:
        """What the chat template does to an ask that a user may not expect, each a sentence."""
        template = self._template
        stage = f"Stage {ask.stage!r}: the chat template"
        remarks: list[str] = []
        if template.around([(message.role, message.text) for message in ask.messages]).is_folded:
            remarks.append(f"{stage} does not show a system turn in its place, so its text opens the first user turn.")
        if template.close_thought and self._end_for(ask).endswith(template.close_thought):
            remarks.append(
                f"{stage} opens a thought ({template.opened_tag}), which is no part of this stage's answer, so it is "
                "closed before that."
            )
        return remarks

    def shown(self, ask: Ask) -> list[str]:
        """The whole prompt as the model reads it, template text and data by turns as in `Message.parts`; a document in
        it is not cut.
        """
        first, *others, last = self._parts(ask.messages, self._end_for(ask))
        return [self.decode(self._start_ids) + first, *others, last + ask.prefill]

    def encode_messages(self, messages: Sequence[Message], *, end: str | None = None) -> list[int]:
        """Token ids of a conversation with the generation prompt at its end.

        Args:
            end: in place of a thought that the template opens there.
        """
        return self._encode_each([self._parts(messages, end)])[0]

    def encode_text(self, text: str) -> list[int]:
        """Token ids of template text that continues something: no token of a sequence's start, no
        space put before it.
        """
        return self._ids(self._anchor + text)[self._anchor_length :]

    def encode_answer(self, parts: Sequence[str]) -> list[int]:
        """Token ids of an answer after its prompt, template text (tags) and data by turns as in `Message.parts`: as
        the model would write it in one piece, and no control token comes of its data.
        """
        ids = self.encode_text("".join(parts))
        if self.count_control(ids) == sum(self.count_control(self.encode_text(text)) for text in parts[::2]):
            return ids
        apart: list[int] = []
        for number, text in enumerate(parts):
            apart += self.encode_data(text) if number % 2 else self.encode_text(text)
        return apart

    def encode_data(self, text: str) -> list[int]:
        """Token ids of hostile text: ordinary characters only, whatever its words."""
        return self._encode_data(text)[0]

    def count_control(self, ids: Iterable[int]) -> int:
        """How many of `ids` are control tokens."""
        return sum(map(self.control_ids.__contains__, ids))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, control tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @property
    def vocabulary(self) -> dict[str, int]:
        """The tokenizer's own spelling of every token, and its id."""
        return cast("dict[str, int]", self._tokenizer.get_vocab())

    def _ids(self, text: str) -> list[int]:
        return self._ids_of_each([text])[0]

    def _ids_of_each(self, texts: Sequence[str]) -> list[list[int]]:
        # A batch lets go of Python's lock meanwhile, once for all its texts; `encode` holds it, and vLLM's step waits.
        # `fast` leaves out where each token was in the text.
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def _bursts(self, messages: Sequence[Message], room: int) -> bool:
        """Whether a document's head alone takes more than `room` tokens: spares tokenizing 450,000 characters to learn
        the obvious.
        """
        head = room * CHARS_PER_TOKEN
        long_texts = [text for _, _, text in documents_of(messages) if len(text) > head * 2]
        return any(len(self._ids(text[:head])) > room + 8 for text in long_texts)

    def _has_control_text(self, text: str) -> bool:
        return self._any_control is not None and self._any_control.search(text) is not None

    def _end_for(self, ask: Ask) -> str:
        """What a prompt ends with where the template opens a thought: that, if the answer goes on in it; nothing, if
        the ask's prefill opens it; else the thought, closed.
        """
        template = self._template
        if template.opened and ask.prefill.startswith(template.opened_tag):
            return ""
        return template.opened if self.opened_for(ask) else template.opened + template.close_thought

    def _parts(self, messages: Sequence[Message], end: str | None) -> list[str]:
        """The whole prompt, template text and data by turns; see `encode_messages`."""
        around = self._template.around([(message.role, message.text) for message in messages])
        parts = around.pieces[:1]
        for number, after in zip(around.order, around.pieces[1:], strict=True):
            first, *others = _stripped(messages[number].parts)
            parts[-1] += first
            parts += others
            parts[-1] += after
        if end is not None:
            parts[-1] = parts[-1].removesuffix(self._template.opened) + end
        return parts

    def _count_of_template(self, *texts: str) -> int:
        """Control tokens of a prompt's template text."""
        return self.count_control(self._start_ids) + sum(self.count_control(self.encode_text(text)) for text in texts)

    def _encode_each(self, prompts: Sequence[Sequence[str]]) -> list[list[int]]:
        """Token ids of prompts that are given as parts; of all whose data is harmless, in one call of the tokenizer."""
        hostile = [any(map(self._has_control_text, parts[1::2])) for parts in prompts]
        harmless = [parts for parts, is_hostile in zip(prompts, hostile, strict=True) if not is_hostile]
        whole = iter(self._encode_whole(harmless))
        encoded: list[list[int]] = []
        for parts, is_hostile in zip(prompts, hostile, strict=True):
            ids = self._encode_parts(parts, self._has_control_text) if is_hostile else next(whole)
            # Equal counts also rule out what only becomes a control string next to template text, or after
            # normalisation.
            if self.count_control(ids) != self._count(*parts[::2]):
                ids = self._encode_parts(parts, lambda _: True)
            encoded.append(ids)
        return encoded

    def _encode_whole(self, prompts: Sequence[Sequence[str]]) -> list[list[int]]:
        """Token ids of prompts, data and all in one piece, without those of an opening that is known already."""
        openings = [self._opening_of(parts[0]) for parts in prompts]
        texts = ["".join(parts) for parts in prompts]
        rests = [text[opening.length :] for text, opening in zip(texts, openings, strict=True)]
        return [
            [*self._start_ids, *opening.ids, *ids]
            for opening, ids in zip(openings, self._ids_of_each(rests), strict=True)
        ]

    def _find_opening(self, text: str) -> _Opening:
        """As much of a prompt's first template text as can be encoded for itself: up to the last added token in it
        that parts what is before it from all that comes after.
        """
        end = max((text.rfind(boundary) for boundary in self._boundaries), default=-1)
        if end <= 0:
            return _Opening()
        ids = self._ids(text[:end])
        # The tokenizer at hand has the last word.
        for data in CHECKED_AFTER_OPENING:
            if ids + self._ids(text[end:] + data) != self._ids(text + data):
                return _Opening()
        return _Opening(end, ids)

    def _encode_parts(self, parts: Sequence[str], is_apart: Callable[[str], bool]) -> list[int]:
        """Token ids of a prompt's parts, with the data that `is_apart` names encoded apart."""
        pieces = [parts[0]]
        data = list[str]()
        for text, after in zip(parts[1::2], parts[2::2], strict=True):
            if is_apart(text):
                data.append(text)
                pieces.append(after)
            else:
                pieces[-1] += text + after
        ids = self._start_ids + self._ids(pieces[0])
        for text, piece in zip(data, pieces[1:], strict=True):
            ids += self.encode_data(text) + (self.encode_text(piece) if piece else [])
        return ids

    def _encode_data(self, text: str) -> tuple[list[int], list[int]]:
        """Ids of hostile text, and for each the place in `text` where its characters end."""
        cuts: list[int] = []
        if self._control is not None:
            cuts = [match.start() + 1 for match in self._control.finditer(text)]
        ids: list[int] = []
        ends: list[int] = []
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            if start < end:
                self._extend(ids, ends, text[start:end], start)
        return ids, ends

    def _extend(self, ids: list[int], ends: list[int], piece: str, start: int) -> None:
        encoding = self._backend.encode(self._anchor + piece, add_special_tokens=False)
        piece_ids = encoding.ids[self._anchor_length :]
        if self.count_control(piece_ids) == 0:
            ids += piece_ids
            ends += [start + max(end - len(self._anchor), 0) for _, end in encoding.offsets[self._anchor_length :]]
        elif len(piece) > 1:  # a normaliser made a control string: no two characters stay together
            for offset, character in enumerate(piece):
                self._extend(ids, ends, character, start + offset)
        else:  # a control token of one character has no other spelling
            substitute = self.encode_text("\ufffd")
            ids += substitute
            ends += [start + 1] * len(substitute)

    def _cut_to_fit(self, messages: Sequence[Message], room: int, end: str) -> tuple[list[int], str] | None:
        """Ids with the documents cut at their ends, last document first, and what is left of them; None if even that
        does not fit.
        """
        places = documents_of(messages)
        allowed = room - len(self.encode_messages(with_documents(messages, places, [""] * len(places)), end=end))
        if not places or allowed <= 0:
            return None
        for _ in range(8):  # tokens may merge differently at a cut, which costs one or two; each round gives those back
            heads = []
            left = allowed
            for _, _, text in places:
                head, used = self._head(text, left)
                heads.append(head)
                left -= used
            ids = self.encode_messages(with_documents(messages, places, heads), end=end)
            if len(ids) <= room:
                return ids, "\n\n".join(heads)
            allowed -= len(ids) - room
            if allowed <= 0:
                return None
        return None

    def _head(self, text: str, max_tokens: int) -> tuple[str, int]:
        """The longest start of `text` that ends on a token's end within `max_tokens`, and how many tokens it has."""
        if max_tokens <= 0:
            return "", 0
        chars = max_tokens * CHARS_PER_TOKEN
        while True:
            ids, ends = self._encode_data(text[:chars])
            if len(ids) > max_tokens:
                return text[: ends[max_tokens - 1]], max_tokens
            if chars >= len(text):
                return text, len(ids)
            chars *= 4


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens that are not text of an answer."""
    return frozenset(
        {token for token, kind in tokenizer.added_tokens_decoder.items() if kind.special}
        | set(tokenizer.all_special_ids)
    )


def extends(earlier: Sequence[int], later: Sequence[int]) -> bool:
    """Whether `later` begins with all of `earlier`: only then does a conversation's next turn
    build on the cached one.
    """
    return list(later[: len(earlier)]) == list(earlier)


def documents_of(messages: Sequence[Message]) -> list[tuple[int, int, str]]:
    """Where the parts are that may be cut: (message, part, text)."""
    documents: list[tuple[int, int, str]] = []
    for number, message in enumerate(messages):
        for field_number, field_name in enumerate(message.fields):
            if field_name == DOCUMENT_FIELD:
                part = 2 * field_number + 1
                documents.append((number, part, message.parts[part]))
    return documents


def with_documents(
    messages: Sequence[Message], places: list[tuple[int, int, str]], texts: Sequence[str]
) -> list[Message]:
    """The messages with other texts in the places of `documents_of`."""
    changed = list(messages)
    for (number, part, _), text in zip(places, texts, strict=True):
        parts = changed[number].parts
        changed[number] = changed[number]._replace(parts=(*parts[:part], text, *parts[part + 1 :]))
    return changed


def _stripped(parts: Sequence[str]) -> list[str]:
    """The parts of a text without the white space at its ends."""
    stripped = list(parts)
    for number in range(len(stripped)):
        stripped[number] = stripped[number].lstrip()
        if stripped[number]:
            break
    for number in reversed(range(len(stripped))):
        stripped[number] = stripped[number].rstrip()
        if stripped[number]:
            break
    return stripped


# ------------------------------------------------------------------------------
# Decisions: which token each label is at its place in the answer, and how probable the raw logits there make them.


def resolve_labels(encoder: PromptEncoder, decision: Decision, *, tokenizer_name: str) -> tuple[int, ...]:
    """The token that each of a decision's labels is (or begins with) right after the marker, in the order of the
    labels.

    The marker's tokens and those of marker + label are compared: what is added is the label's. Where the tokenizer
    merges the marker's end with the label (`>2` as one token), the label is looked up on its own, since distributions
    are always taken after the marker's own tokens. Of a label of several tokens the first one counts, if no other
    label begins with it.

    Raises:
        ModelError: two labels do not differ in their first token; names the tokenizer, the labels and their ids.
    """
    sequences = [_label_ids(encoder, decision.marker, label) for label in decision.labels]
    firsts = [ids[0] for ids in sequences if ids]
    if len(set(firsts)) < len(sequences):
        seen = "; ".join(f"{label!r} is {ids}" for label, ids in zip(decision.labels, sequences, strict=True))
        raise ModelError(
            f"tokenizer of {tokenizer_name}: the labels of decision {decision.name!r} are not one distinct token each "
            f"after {decision.marker!r}: {seen}. Choose labels that begin with different tokens."
        )
    return tuple(firsts)


def _label_ids(encoder: PromptEncoder, marker: str, label: str) -> list[int]:
    before = encoder.encode_text(marker)
    after = encoder.encode_text(marker + label)
    if len(after) > len(before) and after[: len(before)] == before:
        return after[len(before) :]
    alone = encoder.encode_text(label)
    if len(alone) == 1 and encoder.decode(alone) == label:
        return alone
    spelled = encoder.vocabulary.get(label)
    if spelled is None or spelled in encoder.control_ids or encoder.decode([spelled]) != label:
        return alone
    return [spelled]


def distribution(logits_V: NDArray[np.float32], label_ids: tuple[int, ...]) -> Distribution:
    """Probabilities of the labels, from the raw logits at their place.

    Args:
        logits_V: the model's logits over its whole vocabulary, float32, before any grammar's mask and without
            temperature.
        label_ids: one vocabulary id for each label.
    Returns:
        probs: softmax over the label logits alone. outside_mass: 1 - (the labels' mass in the full softmax), clipped to
            0..1.
    """
    wide = logits_V.astype(np.float64)
    top = float(wide.max())
    log_total = top + float(np.log(np.exp(wide - top).sum()))
    labels = wide[list(label_ids)]
    weights = np.exp(labels - labels.max())
    inside = float(np.exp(labels - log_total).sum())
    return Distribution(tuple(float(p) for p in weights / weights.sum()), min(max(1.0 - inside, 0.0), 1.0))


def distribution_of_logprobs(logprobs: Sequence[float]) -> Distribution:
    """Probabilities of the labels, from their log-probabilities in the full softmax of the raw logits, one for each
    label.
    """
    masses = [math.exp(logprob) for logprob in logprobs]
    top = max(logprobs)
    weights = [math.exp(logprob - top) for logprob in logprobs]  # relative to the top, since all masses may underflow
    total = sum(weights)
    return Distribution(tuple(weight / total for weight in weights), min(max(1.0 - sum(masses), 0.0), 1.0))


# ------------------------------------------------------------------------------
# One request on its way: its tokens, its answer so far, and the distributions found at its decisions.
#
# Bytes show where a marker ends, not tokens: its place is reached when the answer's bytes end with the marker's. Where
# one token straddles the marker's end, the place never comes by; it is then asked for afterwards, on the prefix encoded
# apart (`probe_for`).


PROBE_ROOM = 16
"""Tokens left free for a decision's marker when it is encoded apart."""


class DecisionPlace(NamedTuple):
    """Where a decision is taken: its name, its marker as bytes, and its labels' token ids."""

    name: str
    marker: bytes
    label_ids: tuple[int, ...]


@dataclass(slots=True, eq=False)
class TokenSequence:
    """A prompt, and at most `max_new` tokens after it.

    Args:
        request: what was asked.
        prompt: token ids, the last `num_prefill` of them those of the ask's prefill.
        max_new: most tokens to generate; 0 only reads the logits after the prompt.
        places: decisions to watch for.
        prefill: how the answer begins in the prompt.
        is_prefill_shown: that is part of the answer's text: a thought that the chat template opened.
        written: the answer so far as bytes, the prefill first.
        matcher: llguidance's state, or None for an answer that is not constrained.
        is_free: no grammar holds the answer to its format.
        closing: what ends an answer that is not constrained; empty for nothing but the model's own end.
        asker: for a probe, the sequence whose decision it finds.
    """

    request: Request
    prompt: list[int]
    max_new: int
    places: Sequence[DecisionPlace] = ()
    prefill: bytes = b""
    num_prefill: int = 0
    is_prefill_shown: bool = False
    matcher: Any = None
    is_free: bool = False
    closing: bytes = b""
    flags: tuple[str, ...] = ()
    asker: TokenSequence | None = None
    cached: int = 0
    num_paid: int = 0
    """Tokens of the shared prefix that were run on its account."""
    finish: Finish | None = None
    detail: str = ""
    written: bytearray = field(default_factory=bytearray)
    tokens: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """Where each token ends in `written`."""
    found: dict[str, tuple[int, Distribution]] = field(default_factory=dict)
    """By decision: where in `written` its marker ended, and the distribution there."""
    open_probes: int = 0
    rng: random.Random = field(init=False)
    _array: NDArray[np.int64] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.written += self.prefill
        self.rng = random.Random(self.request.seed)

    def prompt_array(self) -> NDArray[np.int64]:
        """The prompt as an array, made when it is first wanted: vLLM wants none."""
        if self._array is None:
            self._array = np.array(self.prompt, dtype=np.int64)
        return self._array

    @property
    def length(self) -> int:
        """Columns in use once its last token has been run."""
        return len(self.prompt) + len(self.tokens)

    @property
    def max_length(self) -> int:
        """Columns that it may use."""
        return len(self.prompt) + self.max_new

    def places_here(self) -> list[DecisionPlace]:
        """Decisions whose marker ends exactly here."""
        return [place for place in self.places if self.written.endswith(place.marker)]

    def note(self, place: DecisionPlace, found: Distribution) -> None:
        """Keep what was found at a place that is here."""
        self.found[place.name] = (len(self.written), found)

    def append(self, token: int, raw: bytes) -> None:
        """Add a generated token and its text's bytes; none for a control token."""
        self.tokens.append(token)
        self.written += raw
        self.ends.append(len(self.written))

    def extend(self, tokens: Sequence[int], raws: Sequence[bytes]) -> None:
        """Add many generated tokens and the bytes of each."""
        self.tokens += tokens
        self.ends += itertools.accumulate(map(len, raws), initial=len(self.written))
        del self.ends[-len(raws) - 1]  # where the first one begins
        self.written += b"".join(raws)

    def has_closing(self, *, since: int) -> bool:
        """Whether what ends the answer is in it and goes on beyond a place in `written`."""
        return bool(self.closing) and self.closing in self.written[max(since - len(self.closing), len(self.prefill)) :]

    def missing(self) -> list[tuple[DecisionPlace, int]]:
        """Decisions whose marker occurs once in the answer, but whose place never came by, and where in `written` it
        is.
        """
        missing: list[tuple[DecisionPlace, int]] = []
        for place in self.places:
            end = self._only_end(place.marker)
            if end is None:
                continue
            if place.name not in self.found or self.found[place.name][0] != end:
                missing.append((place, end))
        return missing

    def probe_for(self, place: DecisionPlace, end: int, encode: Callable[[str], list[int]]) -> TokenSequence:
        """A sequence that runs up to a place: the tokens that end before it as they are, and the rest of the text
        encoded apart.
        """
        whole = sum(token_end <= end for token_end in self.ends)
        start = self.ends[whole - 1] if whole else len(self.prefill)
        prompt = self.prompt
        if end < len(self.prefill):  # the prefill goes on after the place: it is encoded again up to there
            start = 0
            prompt = self.prompt[: len(self.prompt) - self.num_prefill]
        rest = encode(self.written[start:end].decode("utf-8", errors="replace"))
        return TokenSequence(
            self.request,
            [*prompt, *self.tokens[:whole], *rest],
            0,
            (place,),
            prefill=place.marker,
            asker=self,
        )

    def settle(self, encode: Callable[[str], list[int]]) -> tuple[list[TokenSequence], list[TokenSequence]]:
        """Once it is over: the sequences that are done with it, and the probes that it has to wait for, which find
        decisions whose places never came by. A probe hands over what it found.
        """
        if self.asker is not None:
            return self.asker._take_probe(self), []
        missing = self.missing() if self.finish != "error" else []
        probes = [self.probe_for(place, end, encode) for place, end in missing]
        self.open_probes = len(probes)
        return ([] if probes else [self]), probes

    def _take_probe(self, probe: TokenSequence) -> list[TokenSequence]:
        ends = {place.name: end for place, end in self.missing()}
        self.found |= {name: (ends[name], found) for name, (_, found) in probe.found.items()}
        self.open_probes -= 1
        return [] if self.open_probes else [self]

    def answer(self) -> Answer:
        """The finished sequence as an answer. A decision whose marker is absent, or there more than once, has no
        distribution.
        """
        ends = {place.name: self._only_end(place.marker) for place in self.places}
        shown_from = 0 if self.is_prefill_shown else len(self.prefill)
        written = self.written[shown_from:].decode("utf-8", errors="replace")
        answer = AnswerText(written)
        if self.is_free:
            answer = answer_in(self.request.ask, written, is_cut=self.finish == "length")
        return Answer(
            self.request.id,
            answer.text,
            self.finish or "stop",
            distributions={name: found for name, (end, found) in self.found.items() if ends[name] == end},
            prompt_tokens=len(self.prompt),
            output_tokens=len(self.tokens),
            cached_tokens=self.cached,
            detail=self.detail or answer.detail,
            flags=self.flags,
            raw="" if answer.text == written else written,
        )

    def _only_end(self, marker: bytes) -> int | None:
        first = self.written.find(marker)
        is_only = first >= 0 and self.written.find(marker, first + 1) < 0
        return first + len(marker) if is_only else None


# ------------------------------------------------------------------------------
# What can be known of a labeler's asks before the first row: where its decisions are taken, whether its prompts leave
# room for a document, and whether a later stage goes on from the tokens of an earlier one.


class DecisionPlaces:
    """The places of decisions for one tokenizer; each decision's label tokens are looked up once."""

    def __init__(self, encoder: PromptEncoder, *, tokenizer_name: str) -> None:
        self._place = functools.cache(
            lambda decision: DecisionPlace(
                decision.name,
                decision.marker.encode(),
                resolve_labels(encoder, decision, tokenizer_name=tokenizer_name),
            )
        )

    def of(self, ask: Ask) -> list[DecisionPlace]:
        """The places of an ask's decisions.

        Raises:
            ModelError: a decision's labels are not one distinct token each.
        """
        return [self._place(decision) for decision in ask.decisions]


def stage_remarks(encoder: PromptEncoder, asks: Sequence[Ask], max_prompt: Callable[[Ask], int]) -> list[str]:
    """What a user should hear about a labeler's stages, each a sentence.

    Raises:
        ConfigError: a stage has no room for its own instructions, so that every row would end as overlong.
    """
    remarks: list[str] = []
    for ask in asks:
        room = max_prompt(ask)
        remarks += encoder.remarks(ask)
        prompt = encoder.encode(ask, max_prompt_tokens=max(room, 0))
        if isinstance(prompt, Overlong):
            raise ConfigError(
                f"stage {ask.stage!r} can't be asked: with the {ask.max_tokens} tokens that its answer may take "
                f"there is room for {max(room, 0)} tokens of prompt, and its instructions need more. Lower "
                "labeler.max_think_tokens or labeler.max_text_tokens, raise engine.max_prompt_tokens, or take a "
                "model with a longer context."
            )
    for earlier, later in itertools.pairwise(asks):
        if later.messages[: len(earlier.messages)] == earlier.messages and len(later.messages) > len(earlier.messages):
            remarks += _check_extends(encoder, earlier, later)
    return remarks


def admit(
    request: Request,
    encoder: PromptEncoder,
    places: DecisionPlaces,
    *,
    max_prompt_tokens: int,
    bind: Callable[[Ask, Prompt], Any] | None,
) -> TokenSequence | Answer:
    """Make a request ready to run, or answer it here because its prompt does not fit.

    Args:
        bind: makes what holds the answer to its format, for the prompt as the model will see it; None leaves the
            answer free.
    """
    return admit_all([request], encoder, places, max_prompt_tokens=lambda _: max_prompt_tokens, bind=bind)[0]


def admit_all(
    requests: Sequence[Request],
    encoder: PromptEncoder,
    places: DecisionPlaces,
    *,
    max_prompt_tokens: Callable[[Ask], int],
    bind: Callable[[Ask, Prompt], Any] | None,
    each: Callable[..., Iterable[Any]] = map,
) -> list[TokenSequence | Answer]:
    """Make requests ready to run, as `admit` does one, their prompts encoded together.

    Args:
        each: calls `bind` for each of them, as `map` does; a pool's `map` does it in several threads.
    """
    prompts = encoder.encode_all([(request.ask, max_prompt_tokens(request.ask)) for request in requests])

    def matcher_of(request: Request, prompt: Prompt | Overlong) -> Any:
        ask = request.ask
        if bind is None or ask.format is None or ask.max_tokens == 0 or isinstance(prompt, Overlong):
            return None
        return bind(ask, prompt)

    admitted: list[TokenSequence | Answer] = []
    for request, prompt, matcher in zip(requests, prompts, each(matcher_of, requests, prompts), strict=True):
        if isinstance(prompt, Overlong):
            admitted.append(_overlong_answer(request, prompt))
        else:
            admitted.append(_sequence(request, prompt, places, matcher, is_free=bind is None))
    return admitted


def _overlong_answer(request: Request, prompt: Overlong) -> Answer:
    room = f"{prompt.max_prompt_tokens} fit, and nothing but the document may be cut"
    return Answer(
        request.id,
        "",
        "overlong",
        prompt_tokens=prompt.num_tokens,
        detail=f"the prompt has {prompt.num_tokens} tokens or more, {room}",
    )


def _sequence(
    request: Request, prompt: Prompt, places: DecisionPlaces, matcher: Any, *, is_free: bool
) -> TokenSequence:
    ask = request.ask
    closing = ""
    if ask.format is not None and ask.format.sections:
        closing = closing_of(ask.format.sections[-1])
    return TokenSequence(
        request,
        prompt.ids,
        ask.max_tokens,
        places.of(ask),
        prefill=prompt.begins.encode(),
        is_prefill_shown=not ask.prefill,
        num_prefill=prompt.num_prefill,
        matcher=matcher,
        is_free=is_free,
        closing=closing.encode(),
        flags=("document_truncated",) if prompt.cut_document is not None else (),
    )


def quotable(ask: Ask, prompt: Prompt) -> str | None:
    """What a constrained quotation may come from: the document as far as the model was shown it."""
    source = ask.fragment_source
    seen = prompt.cut_document
    if source is None or seen is None or not source.startswith(seen):
        return source
    return seen


def _check_extends(encoder: PromptEncoder, earlier: Ask, later: Ask) -> list[str]:
    """Whether the later prompt begins with the earlier one and its answer, token for token."""
    number = len(earlier.messages)
    turn = later.messages[number]
    opened = encoder.opened_for(earlier)
    if opened:  # as an answer in the opened thought begins
        turn = turn._replace(parts=(turn.parts[0].replace(opened.strip(), opened, 1), *turn.parts[1:]))
    first = encoder.encode_messages(earlier.messages)
    whole = first + encoder.encode_text(turn.text.removeprefix(opened))
    second = encoder.encode_messages((*later.messages[:number], turn, *later.messages[number + 1 :]))
    if extends(whole, second):
        return []
    dropped = "rewrites the turn before" if extends(first, second) else "renders the earlier turns differently"
    return [
        f"Stage {later.stage!r} does not continue the tokens of stage {earlier.stage!r}: the chat template {dropped}, "
        "so less of what was cached of the first prompt is used."
    ]
