"""Joins over whole columns against loops over rows: pairs that come again, nulls, other scales, Parquet's kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relabel.manifests.files import Storage
from relabel.manifests.gold import Qrels, grades_by_pair
from relabel.manifests.label_sets import LabelPart, gather
from relabel.manifests.metrics.comparison import match_rows
from relabel.manifests.schemas import ids_of, texts_of
from relabel.manifests.tables import as_ids, load_columns, read_grades

PAIRS = st.tuples(st.sampled_from(["q", "r", ""]), st.sampled_from(["a", "b", "\ud800", "é"]))
QRELS = st.lists(st.tuples(PAIRS, st.none() | st.integers(-1, 3)), max_size=14)
FEW = settings(max_examples=60, deadline=None)


def qrels_of(rows: list[tuple[tuple[str, str], int | None]]) -> Qrels:
    ids = (ids_of(pair[side] for pair, _ in rows) for side in (0, 1))
    return Qrels("g.txt", *ids, pa.array([grade for _, grade in rows], pa.int64()))


def held(rows: list[tuple[tuple[str, str], int | None]]) -> dict[tuple[str, str], list[int]]:
    found: dict[tuple[str, str], list[int]] = {}
    for pair, grade in rows:
        found.setdefault(pair, []).extend([] if grade is None else [grade])
    return found


@FEW
@given(QRELS, st.sampled_from(["mean", "first"]))
def test_each_pair_has_the_grade_that_a_loop_over_rows_gives_it(rows: list[Any], rule: Any) -> None:
    found, expected = grades_by_pair(qrels_of(rows), rule), held(rows)
    settled = {
        pair: (grades[0] if rule == "first" else (2 * sum(grades) + len(grades)) // (2 * len(grades)))
        for pair, grades in expected.items()
        if grades
    }
    wanted = [*expected, ("q", "nowhere"), ("nowhere", "a"), ("r", "b")]
    assert found.grades_of(wanted) == [settled.get(pair) for pair in wanted]
    places = found.places(ids_of(query for query, _ in wanted), ids_of(doc for _, doc in wanted))
    assert [place >= 0 for place in places] == [pair in expected for pair in wanted]
    assert sorted(zip(*map(texts_of, found.pair_ids), strict=True)) == sorted(expected)
    assert (found.num_repeated, found.num_null) == (len(rows) - len(expected), sum(grade is None for _, grade in rows))
    assert found.num_conflicts == sum(len(set(grades)) > 1 for grades in expected.values())


@FEW
@given(st.lists(PAIRS, max_size=12), st.lists(PAIRS, max_size=12))
def test_rows_are_matched_as_a_loop_matches_them(first: list[Any], second: list[Any]) -> None:
    sides = [
        gather(
            [LabelPart(pa.array(range(len(pairs)), pa.int64()), pa.array([0] * len(pairs), pa.int64()), *ids)],
            grades=2,
            where="here",
        )
        for pairs in (first, second)
        for ids in [[ids_of(pair[side] for pair in pairs) for side in (0, 1)]]
    ]
    left = {pair: [place for place, other in enumerate(second) if other == pair] for pair in second}
    expected = [(place, left[pair].pop(0)) for place, pair in enumerate(first) if left.get(pair)]
    found = match_rows(*sides, is_same_input=False)
    assert list(zip(found.teacher.tolist(), found.student.tolist(), strict=True)) == expected
    assert found.num_repeated == len(expected) - len({first[place] for place, _ in expected})


@pytest.mark.parametrize(
    "column",
    [
        pa.array([7, 10], pa.int16()),
        pa.array(["7", "10"]),
        pa.array(["7", "10"], pa.large_string()),
        pa.array(["7", "10"]).dictionary_encode(),
        pa.array([7, 10]).dictionary_encode(),
    ],
)
def test_ids_are_their_text_whatever_parquet_calls_them(tmp_path: Path, column: pa.Array) -> None:
    pq.write_table(pa.table({"id": column}), tmp_path / "a.parquet", row_group_size=1)
    found = load_columns(str(tmp_path / "a.parquet"), lambda names: names, Storage())["id"]
    assert texts_of(as_ids(found, path="a", name="id")) == ["7", "10"]
    assert read_grades(found).values.to_pylist() == [7, 10]
