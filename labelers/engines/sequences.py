"""One request on its way: its tokens, its answer so far, and the distributions found at its decisions.

Bytes say where a marker ends, not tokens: its place is reached when the answer's bytes end with the marker's. Where one
token straddles the marker's end, the place never comes by; it is then asked for afterwards, on the prefix encoded apart
(`probe_for`).
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from relabel.labelers.engines.decisions import distribution
from relabel.manifests.asks import Answer, Distribution, Finish, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray


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
        max_new: most tokens to generate; 0 only looks at what the logits say after the prompt.
        places: decisions to watch for.
        prefill: how the answer begins in the prompt.
        is_prefill_shown: that is part of the answer's text: a thought that the chat template opened.
        written: the answer so far as bytes, the prefill first.
        matcher: llguidance's state, or None for an answer that is not constrained.
        closing: what ends an answer that is not constrained; empty for nothing but the model's own end.
        asker: for a probe, the sequence whose decision it looks up.
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
        """Columns that it may come to use."""
        return len(self.prompt) + self.max_new

    @property
    def _shown_from(self) -> int:
        return 0 if self.is_prefill_shown else len(self.prefill)

    def places_here(self) -> list[DecisionPlace]:
        """Decisions whose marker ends exactly here."""
        return [place for place in self.places if self.written.endswith(place.marker)]

    def look(self, logits_V: NDArray[np.float32], here: Sequence[DecisionPlace]) -> None:
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
        if end < len(self.prefill):  # the prefill goes on after the place: it is encoded anew up to there
            start, kept = 0, self.prompt[: len(self.prompt) - self.num_prefill]
        rest = encode(self.written[start:end].decode("utf-8", errors="replace"))
        ids = np.concatenate([kept, np.array([*self.tokens[:whole], *rest], dtype=np.int64)])
        return TokenSequence(self.request, ids, 0, (place,), prefill=place.marker, asker=self)

    def probes(self, encode: Callable[[str], list[int]]) -> list[TokenSequence]:
        """Sequences that look up the decisions whose places never came by; the answer has to wait for all of them."""
        probes = [self.probe_for(place, end, encode) for place, end in self.missing()]
        self.open_probes = len(probes)
        return probes

    def take_probe(self, probe: TokenSequence) -> bool:
        """Take over what a probe found; True if it was the last one."""
        for name, (_, found) in probe.found.items():
            end = next(end for place, end in self.missing() if place.name == name)
            self.found[name] = (end, found)
        self.open_probes -= 1
        return self.open_probes == 0

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
