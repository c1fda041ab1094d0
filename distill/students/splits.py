"""Which side a query falls on: train, dev or test, by a hash of the query alone.

So all rows of a query stay together, however many runs and files they come from, and a query never changes sides when
data is added.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from relabel.distill.students.data_facts import SplitSide
from relabel.manifests.digests import digest_of

TRAIN, DEV, TEST = 0, 1, 2
SIDES = ("train", "dev", "test")
_PRECISION = 2.0**64


def split_queries(keys: Sequence[str], *, dev: float, test: float, seed: int) -> np.ndarray:
    """The side of each key: int8 [N], 0 train, 1 dev, 2 test.

    Args:
        keys: query ids (or folded query texts), one a row; equal keys get equal sides.
        dev, test: expected shares of the distinct keys.
    """
    side_of: dict[str, int] = {}
    for key in keys:
        if key not in side_of:
            place = (
                int.from_bytes(hashlib.sha256(f"{seed}\0{key}".encode("utf-8", "surrogatepass")).digest()[:8], "big")
                / _PRECISION
            )
            side_of[key] = TEST if place < test else DEV if place < test + dev else TRAIN
    return np.array([side_of[key] for key in keys], dtype=np.int8)


def folded(text: str) -> str:
    """A query's text as a key: case folded, runs of white space one blank."""
    return " ".join(text.casefold().split())


def describe_split(keys: Sequence[str], side_N: np.ndarray) -> tuple[dict[str, SplitSide], str]:
    """Rows and queries of each side, by its name, and a digest of which query lies where, for the manifest."""
    queries: list[set[str]] = [set(), set(), set()]
    for key, side in zip(keys, side_N.tolist(), strict=True):
        queries[side].add(key)
    sides = {name: SplitSide(int((side_N == side).sum()), len(queries[side])) for side, name in enumerate(SIDES)}
    return sides, digest_of([sorted(keys_of) for keys_of in queries])


def leaking_queries(keys: Sequence[str], texts: Sequence[str], side_N: np.ndarray) -> dict[str, int]:
    """By side, how many queries of dev and test have the text of a training query: ids that keep such queries apart
    leak.

    Args:
        texts: each row's query text, folded.
    """
    sides = side_N.tolist()
    seen = {text for text, side in zip(texts, sides, strict=True) if side == TRAIN}
    rows = list(zip(keys, texts, sides, strict=True))
    return {SIDES[side]: len({key for key, text, of in rows if of == side and text in seen}) for side in (DEV, TEST)}
