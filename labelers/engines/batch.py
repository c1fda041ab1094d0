"""Continuous batching: rows that are done leave, rows that wait join, and nobody waits for the slowest.

One step is either a prefill of some waiting rows or one more token for every row in flight. The row that has waited
longest decides which prefix is shared and which length is sought; the rows nearest to its length go with it.
"""

# B rows, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from labelers.engines.forward import Forward
from labelers.engines.prefixes import Prefix, PrefixStore, common_length, shared_length
from labelers.engines.sampling import draw
from labelers.engines.sequences import Row

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_PADDING = 0.15
"""Share of a prefill's tokens that may be padding."""


class BatchLimits(NamedTuple):
    """How much is run at a time.

    Args:
        rows: rows in flight.
        columns: key-value columns of all rows together, as memory allows.
        prefill_tokens: tokens of one prefill, padding included; a longer row goes alone.
        share_prefixes: whether a prefix that several prompts share is run once.
    """

    rows: int
    columns: int
    prefill_tokens: int
    share_prefixes: bool


class BatchVocabulary(NamedTuple):
    """What the batch must know of tokens: the bytes of each, those that end an answer, and those that are not text."""

    token_bytes: Callable[[int], bytes]
    eos_ids: frozenset[int]
    silent_ids: frozenset[int]
    encode_text: Callable[[str], list[int]]


class Batch:
    """Rows in flight and rows that wait."""

    def __init__(self, forward: Forward, vocabulary: BatchVocabulary, limits: BatchLimits) -> None:
        self._forward = forward
        self._vocabulary = vocabulary
        self._limits = limits
        self._waiting: list[Row] = []
        self._active: list[Row] = []
        self._done: list[Row] = []
        self._prefixes = PrefixStore(max(limits.columns // 4, 1024))
        words = -(-forward.vocab_size // 32)
        self._mask_words = np.zeros((limits.rows, words), dtype=np.int32)
        self._has_news = True  # something joined or left since a prefill was last thought about

    def __len__(self) -> int:
        return len(self._waiting) + len(self._active)

    def add(self, row: Row) -> None:
        """Let a row wait its turn."""
        self._waiting.append(row)
        self._has_news = True

    def step(self) -> list[Row]:
        """Do one piece of work, and return the rows that it finished."""
        with torch.inference_mode():
            group, shared = self._next_group() if self._waiting and self._has_news else ([], 0)
            if group:
                self._prefill(group, shared)
            elif self._active:
                self._has_news = False
                self._decode()
        done, self._done = self._done, []
        return done

    def _next_group(self) -> tuple[list[Row], int]:
        """Waiting rows to prefill now and the columns they share, or none if it is better to go on decoding."""
        leader = self._waiting[0]
        if self._room_for([leader]) <= 0:
            return [], 0
        prefix, num_run = self._share(leader) if self._limits.share_prefixes else (None, 0)
        leader.num_paid += num_run
        shared = len(prefix) if prefix is not None else 0
        fitting = [row for row in self._waiting if prefix is None or self._begins_with(row, prefix)]
        wanted = len(leader.prompt)
        fitting.sort(key=lambda row: (row is not leader, abs(len(row.prompt) - wanted)))
        group = self._take(fitting, shared)
        if self._active and self._is_too_small(group, shared, fitting):
            return [], 0
        chosen = set(map(id, group))
        self._waiting = [row for row in self._waiting if id(row) not in chosen]
        self._reserve(group)
        if prefix is not None:
            self._forward.cache.restore(prefix.state, len(self._active), len(self._active) + len(group))
        for row in group:
            row.cached = shared - row.num_paid
        return group, shared

    def _take(self, rows: Sequence[Row], shared: int) -> list[Row]:
        """The first of `rows` that go together: within memory, the prefill's size, and the padding that is worth it."""
        group: list[Row] = []
        for row in rows:
            sizes = [len(other.prompt) - shared for other in [*group, row]]
            padded = max(sizes) * len(sizes)
            if len(group) >= 1 and (
                padded > self._limits.prefill_tokens or padded - sum(sizes) > MAX_PADDING * padded + 8 * len(sizes)
            ):
                continue
            if self._room_for([*group, row]) <= 0:
                break
            group.append(row)
        return group

    def _is_too_small(self, group: list[Row], shared: int, fitting: Sequence[Row]) -> bool:
        """Whether a prefill would interrupt the others for too little: few short rows while more could soon go with
        them.
        """
        tokens = sum(len(row.prompt) - shared for row in group)
        free = self._limits.rows - len(self._active)
        return (
            len(fitting) > len(group)
            and tokens < self._limits.prefill_tokens // 8
            and free < max(1, self._limits.rows // 4)
        )

    def _room_for(self, rows: Sequence[Row]) -> int:
        """Rows that may still join beside those given; 0 or less says that not even they fit. A
        lone row always fits.
        """
        count = len(self._active) + len(rows)
        if count > self._limits.rows:
            return 0
        longest = max(row.max_length for row in [*self._active, *rows])
        return 1 if count == 1 else self._limits.columns // longest - count + 1

    def _reserve(self, group: Sequence[Row]) -> None:
        longest = max(row.max_length for row in [*self._active, *group])
        used = max((row.length for row in self._active), default=0)
        rows = max(len(self._active) + len(group), min(self._limits.rows, self._limits.columns // longest))
        self._forward.cache.reserve(rows, longest, used_rows=len(self._active), used_columns=used)

    def _share(self, leader: Row) -> tuple[Prefix | None, int]:
        """The longest prefix that the leader can begin with, after running those that are worth it, and tokens run for
        it.
        """
        others = [row.prompt for row in self._waiting if row is not leader]
        prefix = self._prefixes.longest(leader.prompt)
        found = len(prefix) if prefix is not None else 0
        while True:
            known = len(prefix) if prefix is not None else 0
            length = shared_length(leader.prompt, others, known)
            if length == known:
                return prefix, known - found
            prefix = self._run_prefix(leader, prefix, length)

    def _run_prefix(self, leader: Row, base: Prefix | None, length: int) -> Prefix:
        spare = len(self._active)
        self._reserve([leader])
        known = len(base) if base is not None else 0
        if base is not None:
            self._forward.cache.restore(base.state, spare, spare + 1)
        self._forward.prefill([leader.prompt[known:length].tolist()], first_row=spare, prefix=known)
        prefix = Prefix(leader.prompt[:length].copy(), self._forward.cache.snapshot(spare, length))
        self._prefixes.keep(prefix)
        return prefix

    @staticmethod
    def _begins_with(row: Row, prefix: Prefix) -> bool:
        return len(row.prompt) > len(prefix) and common_length(row.prompt, prefix.ids) == len(prefix)

    def _prefill(self, group: list[Row], shared: int) -> None:
        first = len(self._active)
        logits_BV = self._forward.prefill(
            [row.prompt[shared:].tolist() for row in group], first_row=first, prefix=shared
        )
        self._active += group
        self._advance(group, logits_BV)

    def _decode(self) -> None:
        logits_BV = self._forward.decode(
            [row.tokens[-1] for row in self._active], [row.length - 1 for row in self._active]
        )
        self._advance(list(self._active), logits_BV)

    def _advance(self, rows: list[Row], logits_BV: torch.Tensor) -> None:
        """Look at the raw logits, then draw the next token of each row, and let go of those that are done."""
        for number, row in enumerate(rows):
            if here := row.places_here():
                row.look(logits_BV[number].cpu().numpy(), here)
            if row.max_new == 0:
                row.finish = "stop"
        going = [number for number, row in enumerate(rows) if row.finish is None]
        if going:
            drawn = self._draw(
                [rows[number] for number in going], logits_BV if len(going) == len(rows) else logits_BV[going]
            )
            for number, token in zip(going, drawn, strict=True):
                self._append(rows[number], token)
        for row in rows:
            if row.finish is not None:
                self._leave(row)

    def _draw(self, rows: list[Row], logits_BV: torch.Tensor) -> list[int]:
        bound = [number for number, row in enumerate(rows) if row.matcher is not None]
        if bound:
            for place, number in enumerate(bound):
                words = self._mask_words[place]
                rows[number].matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            is_allowed = torch.from_numpy(unpack_mask(self._mask_words[: len(bound)], logits_BV.shape[1])).to(
                logits_BV.device
            )
            if len(bound) == len(rows):
                logits_BV = logits_BV.masked_fill(~is_allowed, float("-inf"))
            else:
                logits_BV = logits_BV.clone()
                logits_BV[bound] = logits_BV[bound].masked_fill(~is_allowed, float("-inf"))
        return draw(logits_BV, [row.request.ask.sampling for row in rows], [row.dice for row in rows])

    def _append(self, row: Row, token: int) -> None:
        vocabulary = self._vocabulary
        is_end = token in vocabulary.eos_ids
        row.append(token, b"" if is_end or token in vocabulary.silent_ids else vocabulary.token_bytes(token))
        if row.matcher is not None:
            if not is_end and not row.matcher.consume_token(token):
                row.finish, row.detail = "error", f"the grammar got stuck: {row.matcher.get_error()[:300]}"
            elif is_end or row.matcher.is_stopped():
                row.finish = "stop"
        elif is_end or (
            row.closing and row.closing in row.written[max(row.ends[-1] - len(row.closing) - 64, len(row.prefill)) :]
        ):
            row.finish = "stop"
        if row.finish is None and len(row.tokens) >= row.max_new:
            row.finish = "length"

    def _leave(self, row: Row) -> None:
        """Free the row's place: the last row moves there. A decision that never came by is asked for first."""
        self._has_news = True
        place, last = self._active.index(row), len(self._active) - 1
        if place != last:
            mover = self._active[last]
            self._forward.cache.move(last, place, mover.length)
            self._active[place] = mover
        self._active.pop()
        if row.asker is not None:
            if row.asker.take_probe(row):
                self._done.append(row.asker)
            return
        probes = row.probes(self._vocabulary.encode_text)
        self._waiting[:0] = probes
        if not probes:
            self._done.append(row)

    def close(self) -> None:
        """Forget all rows and prefixes."""
        self._waiting, self._active, self._done = [], [], []
        self._prefixes.clear()


def unpack_mask(words: NDArray[np.int32], width: int) -> NDArray[np.bool_]:
    """llguidance's bits, 32 to a word and lowest first, as booleans [B, width]."""
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :width]
    return bits.view(np.bool_)
