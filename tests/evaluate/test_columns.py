"""Joins over whole columns against loops over rows: pairs that come again, nulls, other scales, Parquet's kinds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage
from relabel.manifests.gold import Qrels, grades_by_pair
from relabel.manifests.label_sets import LabelPart, file_distributions, file_samples, gather, map_labels, put_together
from relabel.manifests.metrics.comparison import match_rows
from relabel.manifests.metrics.judged import distributions, sample_counts
from relabel.manifests.schemas import codes_of, ids_of, pair_codes, texts_of
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
@given(QRELS)
def test_pairs_in_conflict_are_named_in_the_files_order(rows: list[Any]) -> None:
    conflicts = [(pair, grades) for pair, grades in held(rows).items() if len(set(grades)) > 1]
    if not conflicts:
        assert grades_by_pair(qrels_of(rows), "error").num_conflicts == 0
        return
    with pytest.raises(InputError) as caught:
        grades_by_pair(qrels_of(rows), "error")
    named = [f"query {q}, document {d}: {', '.join(map(str, grades))}" for (q, d), grades in conflicts[:5]]
    assert f"{len(conflicts)} pairs have several" in str(caught.value)
    assert f"({'; '.join(named)}{'; …' if len(conflicts) > 5 else ''})" in str(caught.value)


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


def test_codes_follow_the_order_of_code_points_and_halves_of_surrogates_are_text() -> None:
    texts = ["b", "\ud800", "é", "", "b", "\U0001f600", "z"]
    codes, names = codes_of(ids_of(texts))
    assert texts_of(names) == sorted(set(texts))
    assert [texts_of(names)[code] for code in codes] == texts
    assert len(set(pair_codes(ids_of("aab"), ids_of("xyx")).tolist())) == 3


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


def test_ids_that_are_neither_text_nor_whole_numbers_are_refused() -> None:
    for values in ([1.0, 2.5], [2.0**60], [True, False], [["a"]]):
        column = pa.chunked_array([pa.array(values)])
        with pytest.raises(InputError, match=r"^a: column `id` holds"):
            as_ids(column, path="a", name="id")
    assert texts_of(as_ids(pa.chunked_array([pa.array([1.0, -2.0])]), path="a", name="id")) == ["1", "-2"]


def test_text_that_is_no_utf8_names_the_file(tmp_path: Path) -> None:
    broken = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers())
    pq.write_table(pa.table({"id": broken}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet: column `id`.*UTF-8"):
        load_columns(str(tmp_path / "a.parquet"), lambda names: names, Storage())


def test_a_number_beyond_64_bits_is_no_grade() -> None:
    for column in ([1, 2**70], pa.chunked_array([pa.array([1, 2**63], pa.uint64())])):
        found = read_grades(column)
        assert found.values.to_pylist() == [1, None]
        assert found.unreadable is not None
        assert (found.unreadable.rows, found.unreadable.first) == (1, 1)


@pytest.mark.parametrize("is_arrow", [True, False])
def test_mapped_labels_add_the_mass_and_keep_what_is_null(is_arrow: bool) -> None:
    rows: list[Any] = [[0.1, 0.2, 0.3, 0.4], None, [0.25, 0.25, 0.25, 0.25]]
    drawn: list[Any] = [[{"grade": 3}, {"grade": None}], [], None]
    probs, samples = (pa.chunked_array([pa.array(one)]) if is_arrow else one for one in (rows, drawn))
    part = LabelPart(
        pa.array([0, 1, 2]),
        pa.array([3, None, 0]),
        probs=file_distributions(probs, "f"),
        samples=file_samples(samples, "f"),
    )
    found = map_labels(part, {0: 0, 1: 1, 2: 1, 3: 2}, where="f")
    assert found.grades.to_pylist() == [2, None, 0]
    merged = distributions(found.probs, 3, where="f")
    assert merged is not None
    assert merged[[0, 2]] == pytest.approx(np.array([[0.1, 0.5, 0.4], [0.25, 0.5, 0.25]]))
    assert np.isnan(merged[1]).all()
    correct, count = sample_counts(found.samples, np.array([2, 2, 2]))
    assert correct is not None
    assert count is not None
    assert (correct.tolist(), count.tolist()) == ([1, 0, 0], [2, 0, 0])


@pytest.mark.parametrize(
    ("read", "rows"),
    [
        (file_distributions, [[0.5, None], []]),
        (file_distributions, [["a"], "high"]),
        (file_samples, [["a"], "high", 5, [True]]),
    ],
)
def test_lists_that_are_none_are_distinguished_from_nothing(read: Callable[..., Any], rows: list[Any]) -> None:
    for row in rows:
        for column in ([None, row], pa.chunked_array([pa.array([None, row])])):
            with pytest.raises(InputError, match=r"column `(probs|samples)` holds"):
                read(column, "f")


def test_parts_that_lack_a_column_are_put_together_with_those_that_have_it() -> None:
    numbers = pa.array([0, 1])
    few = LabelPart(numbers, numbers)
    more = LabelPart(
        numbers,
        numbers,
        ids_of("ab"),
        ids_of("xy"),
        pa.array([[0.5, 0.5], None], pa.large_list(pa.float32())),
        pa.array([[1], []], pa.large_list(pa.int64())),
    )
    other = LabelPart(numbers, numbers, probs=pa.array([[1.0, 0.0], None], pa.large_list(pa.float64())))
    found = put_together([few, more, other])
    assert found.row_ids.to_pylist() == [0, 1] * 3
    assert found.query_ids.to_pylist() == [None, None, b"a", b"b", None, None]
    assert found.probs.to_pylist() == [None, None, [0.5, 0.5], None, [1.0, 0.0], None]
    assert found.samples.to_pylist() == [None, None, [1], [], None, None]
