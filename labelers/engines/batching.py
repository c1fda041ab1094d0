"""Continuous batching on torch: finished sequences leave and waiting ones join between steps, shared prefixes are
computed once, and tokens are sampled per request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from relabel.labelers.engines.decisions import TokenSequence
from relabel.labelers.engines.forward import Forward
from relabel.labelers.engines.grammars import GrammarCompiler
from relabel.manifests.asks import Sampling

if TYPE_CHECKING:
    from numpy.typing import NDArray

# ------------------------------------------------------------------------------
# Prefixes that prompts share: found among what waits, computed once, kept while they are in use. Prompts of one labeler
# begin with the same instructions, those of one query go on alike.


MIN_SHARED = 32
"""Tokens that a prefix must add to be worth a forward pass of its own."""


class Prefix(NamedTuple):
    """Some first tokens, and their keys and values as the row cache's snapshot gave them."""

    ids: NDArray[np.int64]
    state: Any


NO_PREFIX = Prefix(np.empty(0, dtype=np.int64), None)


class PrefixStore:
    """The prefixes used last.

    Args:
        max_tokens: tokens of all kept prefixes together; the one not used for longest goes first.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._kept: OrderedDict[bytes, Prefix] = OrderedDict()

    def longest(self, ids: NDArray[np.int64]) -> Prefix:
        """The longest kept prefix of `ids` that leaves at least one token to run; `NO_PREFIX` if there is none."""
        best = max((one for one in self._kept.values() if begins(ids, one)), key=_length_of, default=NO_PREFIX)
        if best is not NO_PREFIX:
            self._kept.move_to_end(best.ids.tobytes())
        return best

    def keep(self, prefix: Prefix) -> None:
        """Keep one more; forget the least used ones over the limit, but never this one."""
        self._kept[prefix.ids.tobytes()] = prefix
        while len(self._kept) > 1 and sum(map(_length_of, self._kept.values())) > self.max_tokens:
            self._kept.popitem(last=False)


def _length_of(prefix: Prefix) -> int:
    return len(prefix.ids)


def begins(ids: NDArray[np.int64], prefix: Prefix) -> bool:
    """Whether a prompt goes on from a prefix, by one token at least."""
    return len(ids) > len(prefix.ids) and common_length(ids, prefix.ids) == len(prefix.ids)


def common_length(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """How many first tokens two prompts have in common."""
    size = min(len(one), len(other))
    differs = one[:size] != other[:size]
    return int(differs.argmax()) if differs.any() else size


def shared_length(leader: NDArray[np.int64], others: Sequence[NDArray[np.int64]], known: int) -> int:
    """The length of the leader's next prefix that is worth computing, or `known` if none is.

    Of all lengths that some other prompt shares, the one that spares most tokens: (length - known) x (prompts that
    share it). Within it, a shorter one comes first if so many more prompts share it that it spares them more: it is
    what stays of use when the longer one has gone (the instructions, as against the query).

    Args:
        leader: the prompt to be run next.
        others: those that wait.
        known: tokens of the leader that are kept already.
    """
    lengths = np.array([min(common_length(leader, other), len(leader) - 1) for other in others], dtype=np.int64)
    best, limit, floor = known, len(leader), 0
    while True:
        candidates = np.unique(lengths[(lengths >= known + MIN_SHARED) & (lengths <= limit)])
        if not len(candidates):
            return best
        sharers = np.array([(lengths >= candidate).sum() for candidate in candidates])
        spared = (candidates - known) * (sharers - floor)
        place = int(spared.argmax())
        if spared[place] < MIN_SHARED:
            return best
        best, floor = int(candidates[place]), int(sharers[place])
        limit = best - MIN_SHARED


# ------------------------------------------------------------------------------
# Drawing the next token: greedy, or by a random number that only the request's own seed decides.


# B rows, V vocabulary


NUCLEUS_GUESS = 1024
"""Tokens sorted at first for a nucleus; the whole vocabulary is sorted only where these do not hold `top_p`."""


def draw_tokens(sequences: Sequence[TokenSequence], logits_BV: torch.Tensor) -> list[int]:
    """One token a sequence, from its raw logits, and within its grammar: what that forbids is set to -inf in them.

    A row's own source of chance is used once per token, and only if the temperature is above 0: what other rows do in
    the meantime does not shift it.
    """
    bound = [number for number, sequence in enumerate(sequences) if sequence.matcher is not None]
    if bound:
        words = np.empty((len(bound), -(-logits_BV.shape[1] // 32)), dtype=np.int32)
        for row, number in zip(words, bound, strict=True):
            sequences[number].matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        # llguidance's bits, 32 to a word and lowest first
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, : logits_BV.shape[1]]
        is_allowed = torch.from_numpy(bits.view(np.bool_)).to(logits_BV.device)
        logits_BV[bound] = logits_BV[bound].masked_fill(~is_allowed, float("-inf"))
    tokens: list[int] = logits_BV.argmax(dim=-1).tolist()
    for row, sequence in enumerate(sequences):
        sampling = sequence.request.ask.sampling
        if sampling.temperature > 0.0:
            tokens[row] = _draw_row(logits_BV[row], sampling, sequence.rng.random())
    return tokens


def _draw_row(logits_V: torch.Tensor, sampling: Sampling, chance: float) -> int:
    probs_V = torch.softmax(logits_V / sampling.temperature, dim=-1)
    order: torch.Tensor | None = None
    if sampling.top_p < 1.0:
        probs_V, order = _nucleus(probs_V, sampling.top_p)
    mass = probs_V.double().cumsum(dim=-1)
    place = int(torch.searchsorted(mass, mass.new_tensor(chance * float(mass[-1])), right=True))
    place = min(place, len(mass) - 1)
    while float(probs_V[place]) == 0.0:  # rounding at the very end of the sum: step back to a token that has mass
        place -= 1
    return int(order[place]) if order is not None else place


def _nucleus(probs_V: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The fewest most probable tokens that hold `top_p`, most probable first, and their ids."""
    top, order = probs_V.topk(min(NUCLEUS_GUESS, len(probs_V)))
    if float(top.sum()) < top_p:
        top, order = probs_V.sort(descending=True)
    size = int((top.cumsum(dim=-1) < top_p).sum()) + 1
    return top[:size], order[:size]


# ------------------------------------------------------------------------------
# Continuous batching: sequences that are done leave, sequences that wait join, and nobody waits for the slowest.
#
# One step is either a prefill of some waiting sequences or one more token for every sequence in flight. The one that
# has waited longest decides which prefix is shared and which length is sought; those nearest to its length go with it.


# B sequences, V vocabulary


MAX_PADDING = 0.15
"""Share of a prefill's tokens that may be padding."""


class BatchLimits(NamedTuple):
    """How much is run at a time.

    Args:
        sequences: sequences in flight.
        columns: key-value columns of all sequences together, as memory allows.
        prefill_tokens: tokens of one prefill, padding included; a longer sequence goes alone.
        share_prefixes: whether a prefix that several prompts share is run once.
    """

    sequences: int
    columns: int
    prefill_tokens: int
    share_prefixes: bool


class Batch:
    """Sequences in flight and sequences that wait."""

    def __init__(
        self, forward: Forward, compiler: GrammarCompiler, encode_text: Callable[[str], list[int]], limits: BatchLimits
    ) -> None:
        self._forward, self._compiler, self._encode_text, self._limits = forward, compiler, encode_text, limits
        self._waiting: list[TokenSequence] = []
        self._active: list[TokenSequence] = []
        self._done: list[TokenSequence] = []
        self._prefixes = PrefixStore(max(limits.columns // 4, 1024))
        self._has_news = True  # something joined or left since a prefill was last thought about

    def __len__(self) -> int:
        return len(self._waiting) + len(self._active)

    def add(self, sequence: TokenSequence) -> None:
        """Let a sequence wait its turn."""
        self._waiting.append(sequence)
        self._has_news = True

    def step(self) -> list[TokenSequence]:
        """Do one piece of work, and return the sequences that it finished."""
        with torch.inference_mode():
            group, prefix = self._next_group() if self._waiting and self._has_news else ([], NO_PREFIX)
            if group:
                self._prefill(group, prefix)
            elif self._active:
                self._has_news = False
                logits_BV = self._forward.decode(
                    [sequence.tokens[-1] for sequence in self._active],
                    [sequence.length - 1 for sequence in self._active],
                )
                self._advance(list(self._active), logits_BV)
        done, self._done = self._done, []
        return done

    def _next_group(self) -> tuple[list[TokenSequence], Prefix]:
        """Waiting sequences to prefill now and what they begin with, or none if it is better to go on decoding."""
        leader = self._waiting[0]
        if self._room_for([leader]) <= 0:
            return [], NO_PREFIX
        prefix = self._share(leader) if self._limits.share_prefixes else NO_PREFIX
        fitting = [sequence for sequence in self._waiting if begins(sequence.prompt, prefix)]
        wanted = len(leader.prompt)
        fitting.sort(key=lambda sequence: (sequence is not leader, abs(len(sequence.prompt) - wanted)))
        group = self._take(fitting, len(prefix.ids))
        if self._active and self._is_too_small(group, len(prefix.ids), fitting):
            return [], NO_PREFIX
        chosen = set(map(id, group))
        self._waiting = [sequence for sequence in self._waiting if id(sequence) not in chosen]
        return group, prefix

    def _take(self, sequences: Sequence[TokenSequence], shared: int) -> list[TokenSequence]:
        """The first of `sequences` that go together: within memory, the prefill's size, and the padding that is worth
        it.
        """
        group: list[TokenSequence] = []
        for sequence in sequences:
            sizes = [len(other.prompt) - shared for other in [*group, sequence]]
            padded = max(sizes) * len(sizes)
            is_padding_fine = padded - sum(sizes) <= MAX_PADDING * padded + 8 * len(sizes)
            if group and (padded > self._limits.prefill_tokens or not is_padding_fine):
                continue
            if self._room_for([*group, sequence]) <= 0:
                break
            group.append(sequence)
        return group

    def _is_too_small(self, group: list[TokenSequence], shared: int, fitting: Sequence[TokenSequence]) -> bool:
        """Whether a prefill would interrupt the others for too little: few short sequences while more could soon go
        with them.
        """
        tokens = sum(len(sequence.prompt) - shared for sequence in group)
        free = self._limits.sequences - len(self._active)
        return (
            len(fitting) > len(group)
            and tokens < self._limits.prefill_tokens // 8
            and free < max(1, self._limits.sequences // 4)
        )

    def _room_for(self, sequences: Sequence[TokenSequence]) -> int:
        """How many may still join those given; 0 or less says that not even they fit. A lone one always fits."""
        count = len(self._active) + len(sequences)
        if count > self._limits.sequences:
            return 0
        longest = max(sequence.max_length for sequence in [*self._active, *sequences])
        return 1 if count == 1 else self._limits.columns // longest - count + 1

    def _share(self, leader: TokenSequence) -> Prefix:
        """The longest prefix that the leader can begin with, after running those that are worth it."""
        prefix = self._prefixes.longest(leader.prompt)
        others = [other.prompt for other in self._waiting if other is not leader]
        while True:
            known = len(prefix.ids)
            length = shared_length(leader.prompt, others, known)
            if length == known:
                return prefix
            leader.num_paid += length - known
            row = self._reserve([leader], prefix)
            self._forward.prefill([leader.prompt[known:length].tolist()], first_row=row, prefix=known)
            prefix = Prefix(leader.prompt[:length].copy(), self._forward.cache.snapshot(row, length))
            self._prefixes.keep(prefix)

    def _reserve(self, group: Sequence[TokenSequence], prefix: Prefix) -> int:
        """Rows for a group, each begun with the prefix; returns the first."""
        first, count = len(self._active), len(self._active) + len(group)
        longest = max(sequence.max_length for sequence in [*self._active, *group])
        used = max((sequence.length for sequence in self._active), default=0)
        num_rows = max(count, min(self._limits.sequences, self._limits.columns // longest))
        self._forward.cache.reserve(num_rows, longest, used_rows=first, used_columns=used)
        if prefix is not NO_PREFIX:
            self._forward.cache.restore(prefix.state, first, count)
        return first

    def _prefill(self, group: list[TokenSequence], prefix: Prefix) -> None:
        shared, first = len(prefix.ids), self._reserve(group, prefix)
        for sequence in group:
            sequence.cached = shared - sequence.num_paid
        suffixes = [sequence.prompt[shared:].tolist() for sequence in group]
        logits_BV = self._forward.prefill(suffixes, first_row=first, prefix=shared)
        self._active += group
        self._advance(group, logits_BV)

    def _advance(self, sequences: list[TokenSequence], logits_BV: torch.Tensor) -> None:
        """Read decisions from the raw logits, draw the next token of each sequence, and drop those that are done."""
        for number, sequence in enumerate(sequences):
            if here := sequence.places_here():
                sequence.read_decisions(logits_BV[number].cpu().numpy(), here)
            if sequence.max_new == 0:
                sequence.finish = "stop"
        going = [number for number, sequence in enumerate(sequences) if sequence.finish is None]
        if going:
            drawn = draw_tokens([sequences[number] for number in going], logits_BV[going])
            for number, token in zip(going, drawn, strict=True):
                self._append(sequences[number], token)
        for sequence in sequences:
            if sequence.finish is not None:
                self._leave(sequence)

    def _append(self, sequence: TokenSequence, token: int) -> None:
        is_end = token in self._compiler.eos_ids
        sequence.append(token, self._compiler.token_bytes(token))
        if sequence.matcher is not None:
            if not is_end and not sequence.matcher.consume_token(token):
                sequence.finish = "error"
                sequence.detail = f"the grammar got stuck: {sequence.matcher.get_error()[:300]}"
            elif is_end or sequence.matcher.is_stopped():
                sequence.finish = "stop"
        elif is_end or sequence.has_closing(since=sequence.ends[-1] - 64):
            sequence.finish = "stop"
        if sequence.finish is None and len(sequence.tokens) >= sequence.max_new:
            sequence.finish = "length"

    def _leave(self, sequence: TokenSequence) -> None:
        """Free the sequence's place: the last one moves there. A decision that never came by is asked for first."""
        self._has_news = True
        place, last = self._active.index(sequence), len(self._active) - 1
        if place != last:
            mover = self._active[last]
            self._forward.cache.move(last, place, mover.length)
            self._active[place] = mover
        self._active.pop()
        done, probes = sequence.settle(self._encode_text)
        self._done += done
        self._waiting[:0] = probes
