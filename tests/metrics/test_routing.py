"""The metrics of `route`, each against a count by hand; what is undefined, and rows of other labelers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from relabel.manifests.metrics.evaluation import evaluate
from relabel.manifests.metrics.judged import Judged

KINDS = {
    "answer_ids": pa.list_(pa.int32()),
    "expand_ids": pa.list_(pa.int32()),
    "refused": pa.bool_(),
    "expelled": pa.int32(),
    "gold_answer_ids": pa.large_list(pa.int64()),
    "gold_expand_ids": pa.large_list(pa.int64()),
}
NAMES = ("answer_f1", "expand_precision", "refusal_accuracy", "expelled_mean", "collapse_rate")
Row = tuple[list[int] | None, list[int] | None, bool | None, int | None, list[int] | None, list[int] | None]

ROWS: list[Row] = [
    ([3, 5], [], False, 0, [5], []),  # F1 2/3
    ([], [7, 8], False, 1, [9, 10], [8]),  # F1 0, precision 1/2
    ([4], [], False, 2, [4], [2]),  # F1 1, precision 0: none was to be unfolded
    ([], [], True, 0, [], []),  # refused, rightly
    ([6], [], False, 0, [], []),  # gold refuses, it answers
    ([], [], False, 0, [], []),  # collapsed; has neither
    ([], [], False, 3, None, None),  # gold says nothing; all lines were expelled
    (None, None, None, None, [1], [1]),  # of another labeler
]


def values(rows: list[Row], without: str = "") -> dict[str, tuple[float | None, int]]:
    columns = {
        name: pa.array([row[place] for row in rows], kind)
        for place, (name, kind) in enumerate(KINDS.items())
        if name != without
    }
    count = np.arange(len(rows))
    judged = Judged(3, 0 * count, 0 * count, count, len(rows), count, None, None, None, columns=columns)
    figures: dict[str, Any] = evaluate(judged, resamples=0).figures
    return {name: (figures[name].value, figures[name].over) for name in NAMES if name in figures}


def test_each_is_what_a_count_by_hand_gives() -> None:
    assert values(ROWS) == {
        "answer_f1": (pytest.approx((2 / 3 + 0 + 1) / 3), 3),
        "expand_precision": (pytest.approx((1 / 2 + 0) / 2), 2),
        "refusal_accuracy": (pytest.approx(2 / 3), 3),
        "expelled_mean": (pytest.approx(6 / 7), 7),
        "collapse_rate": (pytest.approx(1 / 7), 7),
    }


def test_what_gold_does_not_say_is_not_measured() -> None:
    assert values(ROWS, "gold_answer_ids").keys() == {"expand_precision", "expelled_mean", "collapse_rate"}
    assert values(ROWS, "gold_expand_ids").keys() == {"answer_f1", "expelled_mean", "collapse_rate"}
    assert values(ROWS[5:6])["answer_f1"] == (None, 0)
    assert values(ROWS[7:])["collapse_rate"] == (None, 0)
