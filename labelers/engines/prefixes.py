"""Prefixes that prompts share: found among what waits, computed once, kept while they are in use.

Prompts of one labeler begin with the same instructions, those of one query go on alike. Deciding (`shared_length`) is
kept apart from keeping (`PrefixStore`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

MIN_SHARED = 32
"""Tokens that a prefix must add to be worth a forward pass of its own."""


class Prefix:
    """The keys and values of some first tokens. `state` is what the row cache's snapshot gave."""

    def __init__(self, ids: NDArray[np.int64], state: Any) -> None:
        self.ids = ids
        self.state = state

    def __len__(self) -> int:
        return len(self.ids)


class PrefixStore:
    """The prefixes used last.

    Args:
        max_tokens: tokens of all kept prefixes together; the one not used for longest goes first.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._kept: OrderedDict[bytes, Prefix] = OrderedDict()

    def longest(self, ids: NDArray[np.int64]) -> Prefix | None:
        """The longest kept prefix of `ids` that leaves at least one token to run."""
        best: Prefix | None = None
        for prefix in self._kept.values():
            if (
                (best is None or len(prefix) > len(best))
                and len(prefix) < len(ids)
                and common_length(prefix.ids, ids) == len(prefix)
            ):
                best = prefix
        if best is not None:
            self._kept.move_to_end(best.ids.tobytes())
        return best

    def keep(self, prefix: Prefix) -> None:
        """Keep one more; forget the least used ones over the limit, but never this one."""
        self._kept[prefix.ids.tobytes()] = prefix
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > self.max_tokens:
            self._kept.popitem(last=False)

    def clear(self) -> None:
        """Forget all of them."""
        self._kept.clear()


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
