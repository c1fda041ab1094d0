"""Which prefixes are worth running on their own, and which are kept."""

from __future__ import annotations

import numpy as np

from relabel.labelers.engines.batching import Prefix, PrefixStore, shared_length


def prompt(*parts: tuple[int, int]) -> np.ndarray:
    """Parts of (token, how often)."""
    return np.concatenate([np.full(times, token, dtype=np.int64) for token, times in parts])


INSTRUCTIONS, QUERY, OTHER_QUERY = (1, 100), (2, 50), (3, 50)


def test_instructions_come_before_the_query():
    leader = prompt(INSTRUCTIONS, QUERY, (9, 20))
    waiting = [
        prompt(INSTRUCTIONS, QUERY, (8, 20)),
        *[prompt(INSTRUCTIONS, OTHER_QUERY, (7, 20 + n)) for n in range(6)],
    ]
    assert shared_length(leader, waiting, 0) == 100
    assert shared_length(leader, waiting, 100) == 150
    assert shared_length(leader, waiting, 150) == 150


def test_nothing_is_run_for_a_few_tokens_or_for_one_prompt():
    leader = prompt((1, 20), (2, 90))
    assert shared_length(leader, [prompt((1, 20), (3, 90))], 0) == 0
    assert shared_length(leader, [], 0) == 0


def test_the_store_forgets_what_was_not_used_for_longest():
    store = PrefixStore(max_tokens=120)
    for token in (1, 2, 3):
        store.keep(Prefix(prompt((token, 50)), None))
        store.longest(prompt((2, 50), (9, 1)))
    assert store.longest(prompt((1, 60))) is None
    assert store.longest(prompt((2, 60))) is not None
    assert store.longest(prompt((3, 50))) is None  # nothing would be left to run
    assert store.longest(prompt((3, 51))) is not None
