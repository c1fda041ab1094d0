"""Decisions in an answer: label tokens and their distributions, the sequence in flight, and the checks of a labeler's
stages before the first row."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from relabel.labelers.engines.tokens import Overlong, Prompt, PromptEncoder, extends
from relabel.manifests.asks import Answer, Ask, Decision, Distribution, Finish, Request, closing_of
from relabel.manifests.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# ------------------------------------------------------------------------------
# Decisions: which token each label is at its place in the answer, and what the raw logits there say about them.


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
    firsts = [ids[0] if ids else None for ids in sequences]
    if None in firsts or len(set(firsts)) < len(firsts):
        seen = "; ".join(f"{label!r} is {ids}" for label, ids in zip(decision.labels, sequences, strict=True))
        raise ModelError(
            f"tokenizer of {tokenizer_name}: the labels of decision {decision.name!r} are not one distinct token each "
            f"after {decision.marker!r}: {seen}. Choose labels that begin with different tokens."
        )
    return tuple(token for token in firsts if token is not None)


def _label_ids(encoder: PromptEncoder, marker: str, label: str) -> list[int]:
    before, after = encoder.encode_text(marker), encoder.encode_text(marker + label)
    if len(after) > len(before) and after[: len(before)] == before:
        return after[len(before) :]
    alone = encoder.encode_text(label)
    if len(alone) == 1 and encoder.decode(alone) == label:
        return alone
    spelled = encoder.vocabulary.get(label)
    if spelled is not None and spelled not in encoder.control_ids and encoder.decode([spelled]) == label:
        return [spelled]
    return alone


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
# Bytes say where a marker ends, not tokens: its place is reached when the answer's bytes end with the marker's. Where
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
        closing: what ends an answer that is not constrained; empty for nothing but the model's own end.
        asker: for a probe, the sequence whose decision it finds.
    """

    request: Request
    prompt: NDArray[np.int64]
    max_new: int
    places: Sequence[DecisionPlace] = ()
    prefill: bytes = b""
    num_prefill: int = 0
    is_prefill_shown: bool = False
    matcher: Any = None
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
    """By decision: where in `written` its marker ended, and what the logits there said."""
    open_probes: int = 0
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.written += self.prefill
        self.rng = random.Random(self.request.seed)

    @property
    def length(self) -> int:
        """Columns in use once its last token has been run."""
        return len(self.prompt) + len(self.tokens)

    @property
    def max_length(self) -> int:
        """Columns that it may use."""
        return len(self.prompt) + self.max_new

    @property
    def _shown_from(self) -> int:
        return 0 if self.is_prefill_shown else len(self.prefill)

    def places_here(self) -> list[DecisionPlace]:
        """Decisions whose marker ends exactly here."""
        return [place for place in self.places if self.written.endswith(place.marker)]

    def read_decisions(self, logits_V: NDArray[np.float32], here: Sequence[DecisionPlace]) -> None:
        """Take the distributions of the decisions that are taken here, from raw logits."""
        for place in here:
            self.note(place, distribution(logits_V, place.label_ids))

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
        return [
            (place, end)
            for place in self.places
            if (end := self._only_end(place.marker)) is not None and self.found.get(place.name, (-1, None))[0] != end
        ]

    def probe_for(self, place: DecisionPlace, end: int, encode: Callable[[str], list[int]]) -> TokenSequence:
        """A sequence that runs up to a place: the tokens that end before it as they are, and the rest of the text
        encoded apart.
        """
        whole = sum(token_end <= end for token_end in self.ends)
        start, kept = (self.ends[whole - 1] if whole else len(self.prefill)), self.prompt
        if end < len(self.prefill):  # the prefill goes on after the place: it is encoded again up to there
            start, kept = 0, self.prompt[: len(self.prompt) - self.num_prefill]
        rest = encode(self.written[start:end].decode("utf-8", errors="replace"))
        ids = np.concatenate([kept, np.array([*self.tokens[:whole], *rest], dtype=np.int64)])
        return TokenSequence(self.request, ids, 0, (place,), prefill=place.marker, asker=self)

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
        for name, (_, found) in probe.found.items():
            end = next(end for place, end in self.missing() if place.name == name)
            self.found[name] = (end, found)
        self.open_probes -= 1
        return [] if self.open_probes else [self]

    def answer(self) -> Answer:
        """The finished sequence as an answer. A decision whose marker is absent, or there more than once, has no
        distribution.
        """
        ends = {place.name: self._only_end(place.marker) for place in self.places}
        return Answer(
            self.request.id,
            self.written[self._shown_from :].decode("utf-8", errors="replace"),
            self.finish or "stop",
            distributions={name: found for name, (end, found) in self.found.items() if ends[name] == end},
            prompt_tokens=len(self.prompt),
            output_tokens=len(self.tokens),
            cached_tokens=self.cached,
            detail=self.detail,
            flags=self.flags,
        )

    def _only_end(self, marker: bytes) -> int | None:
        first = self.written.find(marker)
        if first < 0 or self.written.find(marker, first + 1) >= 0:
            return None
        return first + len(marker)


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
    ask = request.ask
    prompt = encoder.encode(ask, max_prompt_tokens=max_prompt_tokens)
    if isinstance(prompt, Overlong):
        # the answer to a request whose prompt does not fit
        room = f"{prompt.max_prompt_tokens} fit, and nothing but the document may be cut"
        detail = f"the prompt has {prompt.num_tokens} tokens or more, {room}"
        return Answer(request.id, "", "overlong", prompt_tokens=prompt.num_tokens, detail=detail)
    return TokenSequence(
        request,
        np.array(prompt.ids, dtype=np.int64),
        ask.max_tokens,
        places.of(ask),
        prefill=prompt.begins.encode(),
        is_prefill_shown=not ask.prefill,
        num_prefill=prompt.num_prefill,
        matcher=bind(ask, prompt) if bind is not None and ask.format is not None and ask.max_tokens > 0 else None,
        closing=closing_tag(ask),
        flags=("document_truncated",) if prompt.cut_document is not None else (),
    )


def quotable(ask: Ask, prompt: Prompt) -> str | None:
    """What a constrained quotation may come from: the document as far as the model was shown it."""
    source, seen = ask.fragment_source, prompt.cut_document
    return seen if source is not None and seen is not None and source.startswith(seen) else source


def closing_tag(ask: Ask) -> bytes:
    """What ends an answer of the ask's format; empty where it has none."""
    return closing_of(ask.format.sections[-1]).encode() if ask.format is not None and ask.format.sections else b""


def _check_extends(encoder: PromptEncoder, earlier: Ask, later: Ask) -> list[str]:
    """Whether the later prompt begins with the earlier one and its answer, token for token."""
    number = len(earlier.messages)
    turn, opened = later.messages[number], encoder.opened_for(earlier)
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
