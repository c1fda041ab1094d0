"""What a labeler asks, what an engine answers and what it costs.

A labeler yields an `Ask` and is sent an `Answer`; the run loop turns each ask into a `Request` with an id and a
seed."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

if TYPE_CHECKING:
    from pydantic import SecretStr

    from relabel.manifests.records import BatchRecords
    from relabel.manifests.specs import EngineArgs, EngineSpec

# ------------------------------------------------------------------------------
# The shape of an answer, as data: a row of tagged sections that a grammar enforces, the fake engine imitates and a
# reader checks. An answer in this shape is `<tag>content</tag>` for each section, in order, once each, with nothing
# but white space between them. One `AnswerFormat` a stage; it is static, so that engines can compile it once. A
# `Fragment` quotes a document that differs from ask to ask: that text travels in `Ask.fragment_source`.


@dataclass(frozen=True, slots=True)
class Text:
    """Free text, at most `max_tokens` tokens long. Its closing tag is the first one that follows.

    `only_with` names a section before it and its text, `""` for any text at all: this section is there if and
    only if the other has that text. A reader holds it to this, no grammar does.
    """

    tag: str
    max_tokens: int
    may_be_empty: bool = True
    only_with: tuple[str, str] | None = field(default=None, repr=False)  # keys of kept answers hold a format's repr


@dataclass(frozen=True, slots=True)
class Fragment:
    """`none`, or text found verbatim in `Ask.fragment_source`.

    `is_constrained` asks the engine to admit nothing else while decoding; the reader checks in any case.
    """

    tag: str
    max_tokens: int
    is_constrained: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """Exactly one of `options`, as it is."""

    tag: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lines:
    """One thing a line, `least` to `most` lines, none empty, each at most `max_line_tokens` tokens long."""

    tag: str
    least: int
    most: int
    max_line_tokens: int

    @property
    def max_tokens(self) -> int:
        """Most tokens that they take, line breaks included."""
        return self.most * (self.max_line_tokens + 1)


@dataclass(frozen=True, slots=True)
class Indices:
    """Whole numbers from 1 to `most`, separated by commas; or nothing. While decoding, `MOST_INDICES` at most."""

    tag: str
    most: int

    @property
    def max_tokens(self) -> int:
        """Most tokens that they take, commas included."""
        return min(self.most, MOST_INDICES) * (len(str(self.most)) + 2)


MOST_INDICES = 64
"""So that a list ends: no answer names more."""


@dataclass(frozen=True, slots=True)
class JsonIndices:
    """A JSON object with these keys in this order, each with a list of whole numbers from 1 to its bound; nothing but
    the empty list where that is 0. The whole answer, without a tag. While decoding, a list ends one beyond its bound.
    """

    keys: tuple[str, ...]
    mosts: tuple[int, ...]
    tag: str = field(default="", init=False)

    @property
    def max_tokens(self) -> int:
        """Most tokens that the object takes, each digit taken for a token."""
        each = zip(self.keys, self.mosts, strict=True)
        return sum(8 + len(key) + (most + 1) * (len(str(most)) + 2) for key, most in each)


@dataclass(frozen=True, slots=True)
class JsonTexts:
    """A JSON array of short texts, at most `most` of them, perhaps none. The whole answer, without a tag. While
    decoding, each has `max_text_tokens` tokens at most, and no `"` or backslash.
    """

    most: int
    max_text_tokens: int
    tag: str = field(default="", init=False)

    @property
    def max_tokens(self) -> int:
        """Most tokens that the array takes."""
        return 4 + self.most * (self.max_text_tokens + 4)


@dataclass(frozen=True, slots=True)
class OptionLines:
    """`alone`, or one of `options` a line. The whole answer, without a tag. While decoding, `MOST_OPTION_LINES` at
    most; a reader leaves the lines to its labeler.
    """

    options: tuple[str, ...]
    alone: str
    tag: str = field(default="", init=False)

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest lines, two bytes of UTF-8 taken for one."""
        longest = sorted((len(one.encode()) for one in (*self.options, self.alone)), reverse=True)[:MOST_OPTION_LINES]
        return sum(size // 2 + 4 for size in longest)


MOST_OPTION_LINES = 16
"""So that an answer ends."""

Section = Text | Fragment | Choice | Lines | Indices | JsonIndices | JsonTexts | OptionLines


def opening_of(section: Section) -> str:
    """The tag that a section begins with; nothing where it has none."""
    return f"<{section.tag}>" if section.tag else ""


def closing_of(section: Section) -> str:
    """The tag that a section ends with."""
    return f"</{section.tag}>" if section.tag else ""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The sections of one answer, in order. Tags are unique and hold only a-z, `_` and `-`; a section without one
    is alone.
    """

    sections: tuple[Section, ...]

    def __post_init__(self) -> None:
        tags = [section.tag for section in self.sections]
        if tags == [""]:
            return
        if len(set(tags)) != len(tags):
            raise ValueError(f"an answer format names a tag twice: {tags}")
        for tag in tags:
            if not re.fullmatch("[a-z_-]*[a-z][a-z_-]*", tag):
                raise ValueError(f"tag {tag!r} holds something other than a-z, _ and -")


# ------------------------------------------------------------------------------
# What a labeler asks, what an engine answers, and the three verbs between them.
#
# A labeler yields an `Ask` and is sent an `Answer`; the run loop turns each ask into a `Request` with an id and a seed
# of its own, and an engine turns requests into answers in any order. Neither side knows the other.


Role = Literal["system", "user", "assistant"]
Finish = Literal["stop", "length", "refused", "overlong", "error"]

POLL_S = 1.0
"""How long `Engine.poll` may work without an answer, seconds."""

DOCUMENT_FIELD = "document"
"""The one field of a message that may be cut when a prompt is too long."""


class Message(NamedTuple):
    """One turn of a conversation, template text and data kept apart.

    `parts` alternates: template text at even places, data at odd ones, so it has an odd length. `fields` names the data
    parts in order. Data is hostile: an engine encodes it so that no control token can come of it.
    """

    role: Role
    parts: tuple[str, ...]
    fields: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The whole message; which parts are data is lost."""
        return "".join(self.parts)


class Decision(NamedTuple):
    """A place in the answer where the distribution over a few label texts is wanted.

    The place is right after `marker` (for instance `<score>`) in the answer, prefill included. `labels` are the texts
    of the labels in order, one token each at that place.
    """

    name: str
    marker: str
    labels: tuple[str, ...]


class Distribution(NamedTuple):
    """Probabilities at a decision: the softmax over the label tokens' logits alone, and the mass that all other tokens
    had.

    `probs` sums to 1; `outside_mass` is in 0..1 and is taken from the model's full softmax at temperature 1, before any
    grammar's mask. `probs[k] * (1 - outside_mass)` is the model's own probability of label k.
    """

    probs: tuple[float, ...]
    outside_mass: float

    @property
    def expected(self) -> float:
        """E[k] = sum of k p(k)."""
        total: float = sum(map(mul, range(len(self.probs)), self.probs))
        return total

    @property
    def argmax(self) -> int:
        """The most probable label; the lower one of equals."""
        return self.probs.index(max(self.probs))


class Sampling(NamedTuple):
    """How tokens are drawn. Temperature 0 is greedy. Distributions at decisions are never affected by it."""

    temperature: float = 0.0
    top_p: float = 1.0


GREEDY = Sampling()


@dataclass(slots=True)
class Ask:
    """One turn that a labeler wants answered.

    Args:
        stage: the turn's name within the labeler, for logs and counts.
        messages: the conversation so far; the last message is the user's.
        format: the sections of the answer, or None for an answer that is a decision alone.
        max_tokens: most tokens to generate; 0 asks for the decisions alone (their marker is then in `prefill`).
        decisions: where distributions are wanted.
        prefill: text that the answer begins with, put after the chat template's generation prompt as template text. It
            is not repeated in `Answer.text`.
        fragment_source: the document that `Fragment` sections quote.
        shared_by: identical asks with the same value are answered once.
    """

    stage: str
    messages: tuple[Message, ...]
    format: AnswerFormat | None
    max_tokens: int
    decisions: tuple[Decision, ...] = ()
    prefill: str = ""
    fragment_source: str | None = None
    shared_by: str | None = None
    sampling: Sampling = GREEDY


class Request(NamedTuple):
    """An ask on its way to an engine. `id` is unique while in flight. Of requests that wait, those with lower ids are
    wanted sooner; an engine need not heed that.

    The same ask and seed give the same answer, as far as the engine can.
    """

    id: int
    ask: Ask
    seed: int


@dataclass(slots=True)
class Answer:
    """What the engine made of one request.

    Args:
        request_id: the request's id.
        text: the model's own words, without the prefill and without control tokens.
        finish: `stop` (the model or the format ended it), `length` (max_tokens reached first), `refused` (by the
            server), `overlong` (the prompt does not fit and may not be cut; nothing was generated), `error` (`detail`
            reports which).
        distributions: by decision name; a decision whose place was not found, or that the engine can't give, is absent.
        prompt_tokens, output_tokens: tokens of the request, whether cached or not.
        cached_tokens: prompt tokens that came from the engine's prefix cache.
        flags: what a reader of the label should know (`document_truncated`).
        raw: what a server sent, where that is more than `text` or other than it; for people.
    """

    request_id: int
    text: str
    finish: Finish
    distributions: dict[str, Distribution] = field(default_factory=dict)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    detail: str = ""
    flags: tuple[str, ...] = ()
    raw: str = ""


@dataclass(slots=True)
class EngineFacts:
    """Provenance of an engine: what goes into receipts and the manifest."""

    family: str
    version: str
    model: str
    model_digest: str
    device: str = "cpu"
    dtype: str = ""
    notes: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)


# ------------------------------------------------------------------------------
# What asking is paid with, tokens and money, and how much of both an ask may take at most.


TEMPLATE_TOKENS = 256
"""Room for what a chat template adds by itself: the system prompts that models bring take up to 70 tokens."""
TURN_TOKENS = 16
"""Room for the control tokens around a turn."""


class Charge(NamedTuple):
    """Tokens, prompt and output together, and money in the currency of the prices; 0.0 where no price is named."""

    tokens: int = 0
    cost: float = 0.0

    def plus(self, other: Charge) -> Charge:
        return Charge(self.tokens + other.tokens, self.cost + other.cost)

    def minus(self, other: Charge) -> Charge:
        return Charge(self.tokens - other.tokens, self.cost - other.cost)

    def times(self, count: float) -> Charge:
        return Charge(round(self.tokens * count), self.cost * count)


def most_prompt_tokens(ask: Ask) -> int:
    """More tokens than a prompt can have: no tokenizer makes more of a text than it has bytes."""
    texts = [*(message.text for message in ask.messages), ask.prefill]
    return sum(len(text.encode("utf-8", "replace")) + TURN_TOKENS for text in texts) + TEMPLATE_TOKENS


def most_output_tokens(ask: Ask) -> int:
    """Its own limit, and a token for each of its decisions."""
    return ask.max_tokens + len(ask.decisions)


# ------------------------------------------------------------------------------
# What runs a model.


class Engine(ABC):
    """Runs a model. One process, one thread: the caller alternates `submit` and `poll`. Importing an engine's module
    loads no heavy package; starting the engine does.

    Args:
        spec: the job's `engine`.
        overlong: what happens to a prompt that is too long.
    """

    Args: ClassVar[type[EngineArgs]]
    """Option model of the spec's `engine.args`."""

    def __init__(self, spec: EngineSpec, *, overlong: Literal["truncate", "quarantine"]) -> None:  # noqa: B027
        """Load the model, or raise ModelError or MissingExtraError."""

    @staticmethod
    def model_digest(spec: EngineSpec) -> str:
        """Digest of the model's files (and of a LoRA, where there is one), without starting anything.

        Raises:
            ModelError: the reference names no model.
        """
        raise NotImplementedError

    @staticmethod  # noqa: B027
    def check(spec: EngineSpec) -> None:
        """Check whether the engine could start here, without loading a model.

        Raises:
            MissingExtraError: a package or the device that the spec names is absent.
        """

    @staticmethod
    def resolve_auto(spec: EngineSpec) -> dict[str, str]:  # noqa: ARG004
        """Values of the options that are `auto`, by option, as `facts` would give them; only those that could differ
        on another machine of the same kind.

        Raises:
            ModelError: the reference names no model.
        """
        return {}

    @staticmethod
    def token_counter(
        spec: EngineSpec,  # noqa: ARG004
        *,
        overlong: Literal["truncate", "quarantine"],  # noqa: ARG004
    ) -> Callable[[Ask], int]:
        """From an ask to its prompt's tokens, without the weights; here characters over four.

        Raises:
            ModelError: the model's tokenizer can't be read.
        """
        return lambda ask: sum(len(message.text) for message in ask.messages) // 4 + 1

    @staticmethod
    def try_server(spec: EngineSpec, asks: Sequence[Ask], secrets: Mapping[str, SecretStr]) -> str:  # noqa: ARG004
        """Call the server as a start does; what was found, in words. Empty for an engine without a server.

        Raises:
            ModelError: it refuses.
            ServerGoneError: it does not answer.
        """
        return ""

    def prepare(self, asks: Sequence[Ask]) -> list[str]:
        """Check before the first row what a labeler will need, on asks made from a made-up pair.

        Resolves the label tokens of every decision, and checks whether a later stage's prompt extends an earlier one's
        tokens.

        Returns:
            Remarks for the user, each a sentence.
        Raises:
            ModelError: a decision's labels are not one distinct token each.
        """
        return []

    def use_records(self, records: BatchRecords) -> None:  # noqa: B027
        """Send asks as batches from here on, where the spec asks for that; called once, after the start."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Requests that `submit` would take now; more than the batch, so that the engine can group by length."""

    @abstractmethod
    def submit(self, request: Request) -> None:
        """Take one request. Never blocks."""

    @abstractmethod
    def poll(self) -> list[Answer]:
        """Work until at least one answer is ready, and return all that are.

        Returns after about `POLL_S` with what there is, perhaps nothing, so that the caller can heed a stop; empty at
        once if nothing is in flight.

        Raises:
            EngineCrashError: the engine is gone, with all that was in flight.
        """

    @abstractmethod
    def facts(self) -> EngineFacts:
        """Provenance of this engine."""

    def rendered(self, ask: Ask) -> list[str] | None:
        """The whole prompt, template text and data by turns as in `Message.parts`, its document not cut; None where a
        server makes it.
        """
        return None

    def costs(self) -> dict[str, Any] | None:
        """Requests, tries, tokens and money so far, by name, for the receipts; None where nothing is counted beyond
        tokens. May be called once it is closed.
        """
        return None

    def most(self, ask: Ask) -> Charge | None:
        """What an ask is charged for at most, if each of its requests is answered at the first try; None where its
        tokens decide that.

        Raises:
            ConfigError: its answer has no limit.
        """
        return None

    def charged(self) -> Charge | None:
        """What was charged so far at most, without what is in flight, further requests and lost replies included; None
        where answers alone count. May be called once it is closed.
        """
        return None

    def close(self) -> None:  # noqa: B027
        """Free device and memory. Safe to call twice."""
