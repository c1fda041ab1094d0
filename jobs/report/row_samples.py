"""Rows picked as if at random, the same ones for the same row ids."""

from __future__ import annotations

from collections import Counter

import numpy as np

from relabel.manifests.runs.receipts import FileRef

SEED = 7


class RowSample:
    """Picks rows as if at random, the same ones for the same row ids: those whose hash is smallest, by status."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._files: list[tuple[str, FileRef]] = []
        self._held: dict[str, list[np.ndarray]] = {}
        self.counts: Counter[str] = Counter()

    def add(self, kind: str, file: FileRef, status: str, row_ids_N: np.ndarray) -> None:
        """Rows of one status in one file."""
        if not self._files or self._files[-1] != (kind, file):
            self._files.append((kind, file))
        self.counts[status] += len(row_ids_N)
        order_N = hash_rows(row_ids_N)
        found = np.stack(
            [order_N, row_ids_N.astype(np.uint64), np.full(len(row_ids_N), len(self._files) - 1, dtype=np.uint64)]
        )
        parts = self._held.setdefault(status, [])
        parts.append(found)
        if sum(part.shape[1] for part in parts) > 4 * self._most:
            self._held[status] = [_smallest(np.concatenate(parts, axis=1), self._most)]

    def chosen(self) -> dict[str, list[tuple[int, FileRef]]]:
        """Row ids and their files, by kind of file."""
        found: dict[str, list[tuple[int, FileRef]]] = {"labels": [], "quarantine": []}
        for status, most in shares(dict(self.counts), self._most).items():
            for _, row, place in _smallest(np.concatenate(self._held[status], axis=1), most).T.tolist():
                kind, file = self._files[place]
                found[kind].append((row, file))
        return found


def shares(counts: dict[str, int], most: int) -> dict[str, int]:
    """How many rows of each status to show: all where they fit, else by their share, but some of each.

    Args:
        counts: rows by status, each above 0.
        most: in all; more where there are more statuses than that.
    """
    if sum(counts.values()) <= most:
        return counts
    floor = max(1, most // (4 * len(counts)))
    found = {status: min(count, floor) for status, count in counts.items()}
    left, open_rows = max(0, most - sum(found.values())), sum(counts.values()) - sum(found.values())
    return {status: have + left * (counts[status] - have) // open_rows for status, have in found.items()}


def hash_rows(row_ids_N: np.ndarray) -> np.ndarray:
    """Row ids in an order that looks random: uint64 [N]. SplitMix64 (Steele et al. 2014), from our seed."""
    with np.errstate(over="ignore"):
        mixed_N = row_ids_N.astype(np.uint64) + np.uint64(SEED) * np.uint64(0x9E3779B97F4A7C15)
        mixed_N = (mixed_N ^ (mixed_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed_N = (mixed_N ^ (mixed_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(mixed_N ^ (mixed_N >> np.uint64(31)))


def _smallest(held: np.ndarray, most: int) -> np.ndarray:
    """The columns with the smallest first entries; where those tie, with the smallest row id."""
    return held[:, np.lexsort((held[1], held[0]))[:most]]
