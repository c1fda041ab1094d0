"""Prompts as token ids: what a labeler asks becomes what a model reads, and hostile data stays plain text on the way.

An ordinary prompt is what the tokenizer's own chat template makes of the conversation, token for token. Where data
would give rise to a control token, that data is encoded apart, as ordinary characters. Where a prompt is too long, the
document is cut and nothing else.

Control tokens are the tokenizer's special tokens, and all other added tokens whose text is not white space (`</think>`,
`<tool_call>`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jinja2 import TemplateError

from manifests.asks import DOCUMENT_FIELD, Ask, Message
from manifests.errors import ConfigError, ModelError

CHARS_PER_TOKEN = 8
"""How many characters of a document are looked at for each token of room, at first. English has 4 to 5; fewer tokens
than room only means a second, longer look.
"""

OWN_TEMPLATE_KWARGS = {"conversation", "tokenize", "add_generation_prompt", "continue_final_message"}
"""Arguments of `apply_chat_template` that are no user's to say."""


class Prompt(NamedTuple):
    """A prompt that fits.

    Args:
        ids: token ids, the ask's prefill at the end included.
        num_prefill: how many of them are the prefill's.
        cut_document: the document as far as the model sees it, or None if it sees the whole.
    """

    ids: list[int]
    num_prefill: int
    cut_document: str | None = None


class Overlong(NamedTuple):
    """A prompt that does not fit and may not be cut, with its length as far as it was counted."""

    num_tokens: int
    max_prompt_tokens: int


class PromptEncoder:
    """Encodes asks for one tokenizer.

    Args:
        tokenizer: a fast tokenizer of transformers.
        overlong: what to do with a prompt that is too long: cut the document, or nothing.
        chat_template_kwargs: passed to the chat template (`enable_thinking`).
    Raises:
        ConfigError: one of them is not the user's to say.
        ModelError: the chat template can't render a user turn.
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
        self._overlong = overlong
        self._template_kwargs = dict(chat_template_kwargs or {})
        if taken := sorted(OWN_TEMPLATE_KWARGS & self._template_kwargs.keys()):
            raise ConfigError(f"chat_template_kwargs: `{taken[0]}` is said by relabel itself. Leave it out.")
        self._has_template = bool(tokenizer.chat_template)
        self._folds_system = False
        self._folds_system = self._refuses_system()
        self._anchor = self._find_anchor()
        texts = _control_texts(tokenizer)
        self.control_ids = self._reserved_ids(texts)
        """Ids that no data may give rise to."""
        longest_first = sorted(texts, key=len, reverse=True)
        # A lookahead finds overlapping strings too: "<|im_<|im_end|>end|>" hides one in another.
        self._control = re.compile("(?=" + "|".join(map(re.escape, longest_first)) + ")") if texts else None
        self._skeletons: dict[tuple[Any, ...], int] = {}
        self._start_ids: list[int] = [] if self._has_template else list(tokenizer("")["input_ids"])

    def encode(self, ask: Ask, *, max_prompt_tokens: int) -> Prompt | Overlong:
        """Encode one ask, cutting its document if that is allowed and needed."""
        prefill = self.encode_text(ask.prefill) if ask.prefill else []
        room = max_prompt_tokens - len(prefill)
        if not self._is_surely_longer(ask.messages, room):
            ids = self.encode_messages(ask.messages)
            if len(ids) <= room:
                return Prompt(ids + prefill, len(prefill))
            num_tokens = len(ids) + len(prefill)
        else:
            num_tokens = max_prompt_tokens + 1
        refused = Overlong(num_tokens, max_prompt_tokens)
        if self._overlong == "quarantine":
            return refused
        cut = self._cut_to_fit(ask.messages, room)
        return Prompt(cut[0] + prefill, len(prefill), cut[1]) if cut is not None else refused

    def encode_messages(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation with the generation prompt at its end."""
        if any(self._has_control_text(part) for message in messages for part in message.parts[1::2]):
            ids = self._encode_apart(messages, self._has_control_text)
        else:
            ids = self._start_ids + self._ids(self._render([message.text for message in messages], messages))
        # Equal counts also rule out what only becomes a control string next to template text, or after normalisation.
        if self.count_control(ids) == self._skeleton_count(messages):
            return ids
        return self._encode_apart(messages, lambda _: True)

    def encode_text(self, text: str) -> list[int]:
        """Token ids of template text that continues something: no token of a sequence's start, no
        space put before it.
        """
        if not self._anchor:
            return self._ids(text)
        return self._ids(self._anchor + text)[len(self._ids(self._anchor)) :]

    def encode_answer(self, parts: Sequence[str]) -> list[int]:
        """Token ids of an answer behind its prompt, template text (tags) and data by turns as in `Message.parts`: as
        the model would write it in one piece, and no control token comes of its data.
        """
        ids = self.encode_text("".join(parts))
        if self.count_control(ids) == sum(self.count_control(self.encode_text(text)) for text in parts[::2]):
            return ids
        pieces = (self.encode_data(text) if place % 2 else self.encode_text(text) for place, text in enumerate(parts))
        return [token for piece in pieces for token in piece]

    def encode_data(self, text: str) -> list[int]:
        """Token ids of hostile text: ordinary characters only, whatever it says."""
        return self._encode_data(text)[0]

    def count_control(self, ids: Iterable[int]) -> int:
        """How many of `ids` are control tokens."""
        return sum(map(self.control_ids.__contains__, ids))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, control tokens included."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    @property
    def vocabulary(self) -> dict[str, int]:
        """The tokenizer's own spelling of every token, and its id."""
        known: dict[str, int] = self._tokenizer.get_vocab()
        return known

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def _find_anchor(self) -> str:
        """SentencePiece tokenizers put a space before what they encode; a line break before it keeps that space off our
        text.
        """
        first = self._tokenizer.decode(self._ids("a"), clean_up_tokenization_spaces=False)
        pieces = self._tokenizer.convert_ids_to_tokens(self._ids("a"))
        return "\n" if first != "a" or (pieces and pieces[0].startswith("▁")) else ""

    def _reserved_ids(self, texts: frozenset[str]) -> frozenset[int]:
        ids = {self._tokenizer.convert_tokens_to_ids(text) for text in texts}
        # Where unknown characters become `unk`, that id is no sign of an attack (a byte-level vocabulary never needs
        # it).
        if self._tokenizer.unk_token_id in self._ids("\U000f1234"):
            ids.discard(self._tokenizer.unk_token_id)
        return frozenset(token for token in ids if token is not None)

    def _has_control_text(self, text: str) -> bool:
        return self._control is not None and self._control.search(text) is not None

    def _refuses_system(self) -> bool:
        """Whether the chat template takes no system turn (Gemma's); its text then opens the first user turn.

        Raises:
            ModelError: the template can't render a plain user turn either.
        """
        user = Message("user", ("Hello.",))
        try:
            self._render(["Be brief.", user.text], [Message("system", ("Be brief.",)), user])
        except TemplateError:
            try:
                self._render([user.text], [user])
            except TemplateError as exc:
                raise ModelError(
                    f"the model's chat template can't render a user turn ({exc}); it is not one for chats."
                ) from exc
            return True
        return False

    def _render(self, contents: Sequence[str], messages: Sequence[Message]) -> str:
        if self._folds_system and messages[0].role == "system" and len(messages) > 1:
            contents = [f"{contents[0]}\n\n{contents[1]}", *contents[2:]]
            messages = messages[1:]
        if self._has_template:
            turns = [
                {"role": message.role, "content": content} for message, content in zip(messages, contents, strict=True)
            ]
            rendered: str = self._tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True, **self._template_kwargs
            )
            return rendered
        # A base model: headers in words, since it has no tokens for turns.
        turns_text = [
            f"### {message.role.capitalize()}\n{content}\n\n"
            for message, content in zip(messages, contents, strict=True)
        ]
        return "".join(turns_text) + "### Assistant\n"

    def _skeleton_count(self, messages: Sequence[Message]) -> int:
        """Control tokens that the template itself brings; the same for all pairs of a stage, so it is counted once."""
        key = tuple((message.role, len(message.parts), message.parts[::2]) for message in messages)
        if key not in self._skeletons:
            if len(self._skeletons) >= 256:
                self._skeletons.clear()  # earlier answers may be template text, and there is no end to those
            pieces, _ = self._split(messages, lambda _: True)
            self._skeletons[key] = self.count_control(self._start_ids) + sum(
                self.count_control(self.encode_text(piece)) for piece in pieces
            )
        return self._skeletons[key]

    def _split(self, messages: Sequence[Message], is_apart: Callable[[str], bool]) -> tuple[list[str], list[str]]:
        """The rendered prompt cut at the data that `is_apart` names: n + 1 pieces of other text and n of data, in the
        order of the prompt.

        A template may drop a turn or show one twice, so the data comes back in the order in which it was found.
        """
        everything = "".join(message.text for message in messages)
        salt = next(word for number in range(1_000_000) if (word := f"Qz{number}Zq") not in everything)
        data: list[str] = []
        contents = []
        for message in messages:
            parts = list(message.parts)
            for place in range(1, len(parts), 2):
                if is_apart(parts[place]):
                    data.append(parts[place])
                    parts[place] = f"{salt}{len(data) - 1}x"
            contents.append("".join(parts))
        pieces = re.split(salt + r"(\d+)x", self._render(contents, messages))
        return pieces[::2], [data[int(number)] for number in pieces[1::2]]

    def _encode_apart(self, messages: Sequence[Message], is_apart: Callable[[str], bool]) -> list[int]:
        pieces, data = self._split(messages, is_apart)
        ids = self._start_ids + self._ids(pieces[0])
        for text, piece in zip(data, pieces[1:], strict=True):
            ids += self.encode_data(text) + (self.encode_text(piece) if piece else [])
        return ids

    def _encode_data(self, text: str) -> tuple[list[int], list[int]]:
        """Ids of hostile text, and for each the place in `text` where its characters end."""
        cuts = [match.start() + 1 for match in self._control.finditer(text)] if self._control is not None else []
        ids: list[int] = []
        ends: list[int] = []
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            if start < end:
                self._extend(ids, ends, text[start:end], start)
        return ids, ends

    def _extend(self, ids: list[int], ends: list[int], piece: str, start: int) -> None:
        encoding = self._backend.encode(self._anchor + piece, add_special_tokens=False)
        skip = len(self._ids(self._anchor)) if self._anchor else 0
        found = encoding.ids[skip:]
        if self.count_control(found) == 0:
            ids += found
            ends += [start + max(end - len(self._anchor), 0) for _, end in encoding.offsets[skip:]]
        elif len(piece) > 1:  # a normaliser made a control string of look-alikes: no two characters stay together
            for place, character in enumerate(piece):
                self._extend(ids, ends, character, start + place)
        else:  # a control token of one character has no other spelling
            substitute = self.encode_text("\ufffd")
            ids += substitute
            ends += [start + 1] * len(substitute)

    def _is_surely_longer(self, messages: Sequence[Message], room: int) -> bool:
        """Whether the documents' heads alone burst the room: spares tokenizing 450,000 characters
        to learn the obvious.
        """
        return any(
            len(text) > room * CHARS_PER_TOKEN * 2 and len(self._ids(text[: room * CHARS_PER_TOKEN])) > room + 8
            for _, _, text in _documents(messages)
        )

    def _cut_to_fit(self, messages: Sequence[Message], room: int) -> tuple[list[int], str] | None:
        """Ids with the documents cut at their ends, last document first, and what is left of them; None if even that
        does not fit.
        """
        places = _documents(messages)
        bare = self.encode_messages(_with_documents(messages, places, [""] * len(places)))
        allowed = room - len(bare)
        if not places or allowed <= 0:
            return None
        for _ in range(8):  # tokens may merge differently at a cut, which costs one or two; each round gives those back
            kept, left = [], allowed
            for _, _, text in places:
                head, used = self._head(text, left)
                kept.append(head)
                left -= used
            ids = self.encode_messages(_with_documents(messages, places, kept))
            if len(ids) <= room:
                return ids, "\n\n".join(kept) if len(kept) > 1 else kept[0]
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


def extends(earlier: Sequence[int], later: Sequence[int]) -> bool:
    """Whether `later` begins with all of `earlier`: only then does a conversation's next turn
    build on the cached one.
    """
    return len(later) >= len(earlier) and list(later[: len(earlier)]) == list(earlier)


def _control_texts(tokenizer: Any) -> frozenset[str]:
    special = {str(token) for token in tokenizer.all_special_tokens}
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special or str(token).strip()}
    return frozenset(text for text in special | added if text)


def _documents(messages: Sequence[Message]) -> list[tuple[int, int, str]]:
    """Where the parts are that may be cut: (message, part, text)."""
    return [
        (number, 2 * place + 1, message.parts[2 * place + 1])
        for number, message in enumerate(messages)
        for place, field in enumerate(message.fields)
        if field == DOCUMENT_FIELD
    ]


def _with_documents(
    messages: Sequence[Message], places: list[tuple[int, int, str]], texts: Sequence[str]
) -> list[Message]:
    changed = list(messages)
    for (number, part, _), text in zip(places, texts, strict=True):
        parts = changed[number].parts
        changed[number] = changed[number]._replace(parts=(*parts[:part], text, *parts[part + 1 :]))
    return changed
