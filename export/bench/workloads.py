"""What is asked while measuring: rows whose lengths are those of real pairs, and batches of one fixed shape.

How long a model takes depends on how many rows there are and how long they are, not on what is in them. So a
bundle's own record of lengths is workload enough; with pairs at hand their texts are taken, and tokenizing can be timed
too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from relabel.export.loader import Encoder
from relabel.export.token_lengths import TokenLengths, describe_lengths
from relabel.manifests.errors import InputError

# N rows of the workload

TokenRow = tuple[list[int], list[int]]
"""Token ids and segment numbers, as the loader's `Encoder` gives them."""
MAX_ROWS = 10_000
PUBLIC_SHAPES = ((1, 128), (32, 128), (1, 384))
"""Rows and tokens of the batches that public tables state, so that figures compare."""
TABLE3_DOCUMENTS = (1, 10, 100, 1_000, 10_000)
"""Documents a query of R3A's Table 3, which states what teacher and student take for them."""
SERVING_DOCUMENTS = 100
SERVING_MS = 150.0
"""R3A's serving (section 3.5): an "average response time" of about 150 ms at 200 queries a second a GPU, 100 documents
each.
"""


@dataclass(frozen=True)
class Workload:
    """Rows to ask about, in the order in which they come.

    Args:
        rows: token ids.
        texts: the (query, document) pairs that they are of; None where only lengths are known.
        source: where their lengths are from: the bundle's record of lengths, or pairs.
    """

    rows: Sequence[TokenRow]
    texts: Sequence[tuple[str, str]] | None
    source: Literal["lengths", "pairs"]
    lengths: TokenLengths

    def draw(self, count: int, *, seed: int) -> Workload:
        """So many rows, drawn with replacement: stretches of a workload of any size."""
        places = np.random.default_rng(seed).integers(0, len(self.rows), size=count).tolist()
        texts = self.texts and [self.texts[place] for place in places]
        return replace(self, rows=[self.rows[place] for place in places], texts=texts)


def workload_of_lengths(lengths: TokenLengths, encoder: Encoder, *, seed: int) -> Workload:
    """Rows as long as those that a bundle was tested on, by its own record.

    Raises:
        InputError: the bundle records no histogram.
    """
    if not lengths.histogram:
        raise InputError(
            "the bundle's manifest records no histogram of lengths (an earlier version made it). Name pairs with "
            "--pairs, or export the student again."
        )
    drawn_N = draw_lengths(lengths.histogram, min(MAX_ROWS, lengths.rows), seed=seed)
    return Workload([blank_row(encoder, int(length)) for length in drawn_N], None, "lengths", lengths)


def workload_of_pairs(pairs: Sequence[tuple[str, str]], encoder: Encoder) -> Workload:
    """Real pairs in the order given.

    Raises:
        InputError: there is none.
    """
    if not pairs:
        raise InputError("--pairs holds no pair to measure with.")
    rows = encoder.encode(pairs)
    return Workload(rows, pairs, "pairs", describe_lengths([len(ids) for ids, _ in rows]))


def draw_lengths(histogram: Sequence[Sequence[int]], count: int, *, seed: int) -> np.ndarray:
    """Lengths in tokens, int64 [count], in the shares of a histogram of `[tokens, rows]`."""
    tokens, rows = np.array(histogram, dtype=np.int64).T
    return np.asarray(np.random.default_rng(seed).choice(tokens, size=count, p=rows / rows.sum()))


def blank_row(encoder: Encoder, length: int) -> TokenRow:
    """A row of so many tokens, all of them in the vocabulary."""
    ids, beside = encoder.encode([("a", "a")])[0]
    repeated = (ids * (length // len(ids) + 1))[:length]
    if "counts" in encoder.inputs.names:
        return repeated, beside
    return repeated, [0] * length if beside else []


def fixed_batch(encoder: Encoder, rows: int, tokens: int) -> dict[str, np.ndarray]:
    """A batch of one shape, without padding."""
    return encoder.collate([blank_row(encoder, tokens)] * rows)
