"""Labels in columns, as they lie in Arrow: of a run, of a file, on another scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from relabel.manifests.errors import InputError
from relabel.manifests.inputs.table_files import Column
from relabel.manifests.judging.further_columns import columns_taken
from relabel.manifests.judging.qrels import GradeMap, mapped


@dataclass(frozen=True)
class LabelPart:
    """Some labels, in columns.

    Args:
        row_ids: rows of the run's input, or of the file.
        grades: null where a row has no label.
        query_ids, doc_ids: None where the file names none.
        probs: lists of floats.
        samples: lists of grades, null for one that failed.
        columns: further ones, by name (`further_columns`): of the labels, and of gold once they are joined.
    """

    row_ids: pa.Int64Array
    grades: pa.Int64Array
    query_ids: pa.LargeBinaryArray | None = None
    doc_ids: pa.LargeBinaryArray | None = None
    probs: pa.LargeListArray | None = None
    samples: pa.LargeListArray | None = None
    columns: Mapping[str, pa.Array] = field(default_factory=dict)

    @property
    def own(self) -> dict[str, pa.Array | None]:
        """All but the further columns, by name."""
        return {name: column for name, column in vars(self).items() if name != "columns"}

    def taken(self, rows: pa.Array) -> LabelPart:
        """Some rows, by their places."""
        own = {name: column and column.take(rows) for name, column in self.own.items()}
        return LabelPart(**own, columns=columns_taken(self.columns, rows))

    def beside(self, columns: Mapping[str, pa.Array]) -> LabelPart:
        """With further columns of the same rows."""
        return replace(self, columns={**self.columns, **columns}) if columns else self


def put_together(parts: Sequence[LabelPart]) -> LabelPart:
    """Parts as one; a column that some lack is null there."""
    if len(parts) == 1:
        return parts[0]
    own, further = _side_by_side([part.own for part in parts]), _side_by_side([part.columns for part in parts])
    sizes = [len(part.grades) for part in parts]
    return LabelPart(
        **{name: _concatenated(held, sizes) for name, held in own.items()},
        columns={name: _concatenated(held, sizes) for name, held in further.items()},
    )


def _side_by_side(parts: Sequence[Mapping[str, pa.Array | None]]) -> dict[str, list[pa.Array | None]]:
    """Of each column that any part has, what all of them have of it."""
    names = dict.fromkeys(name for part in parts for name, column in part.items() if column is not None)
    return {name: [part.get(name) for part in parts] for name in names}


def _concatenated(held: Sequence[pa.Array | None], sizes: Sequence[int]) -> pa.Array:
    kinds = {column.type for column in held if column is not None}
    kind = kinds.pop() if len(kinds) == 1 else pa.large_list(pa.float64())
    return pa.concat_arrays(
        [
            pa.nulls(size, kind) if column is None else column.cast(kind)
            for column, size in zip(held, sizes, strict=True)
        ]
    )


def run_part(
    row_id: pa.Array,
    query_id: pa.Array,
    doc_id: pa.Array,
    grade: pa.Array,
    probs: pa.Array,
    samples: pa.Array,
    **further: pa.Array,
) -> LabelPart:
    """The columns of a run's label files that judging needs; `further` ones are of its labeler."""
    return LabelPart(
        row_id,
        grade.cast(pa.int64()),
        query_id.cast(pa.large_binary()),
        doc_id.cast(pa.large_binary()),
        _kept(probs.cast(pa.large_list(pa.float32()))),
        _kept(_grades_of(samples)),
        further,
    )


def _kept(lists: pa.LargeListArray) -> pa.LargeListArray | None:
    """Lists, or None where no row has one."""
    return lists if lists.null_count < len(lists) else None


def _grades_of(samples: pa.Array) -> pa.LargeListArray:
    """The grades of samples that are records, or that are grades."""
    held = samples.type.value_type
    grades = pc.list_flatten(samples)
    return _refilled(samples, pc.struct_field(grades, "grade") if pa.types.is_struct(held) else grades)


def _refilled(lists: pa.Array, grades: pa.Array) -> pa.LargeListArray:
    """The same lists, of whole numbers, from what is in all of them; null is an empty one."""
    sizes = pc.list_value_length(lists).fill_null(0).to_numpy()
    return pa.LargeListArray.from_arrays(np.append(0, np.cumsum(sizes)).astype(np.int64), grades.cast(pa.int64()))


def file_distributions(column: Column, path: str) -> pa.LargeListArray | None:
    """The column `probs` of a file.

    Raises:
        InputError: a row holds no list of numbers.
    """
    if isinstance(column, pa.ChunkedArray):
        held = column.combine_chunks()
        if _is_list_of(held.type, pa.types.is_floating) and _is_filled(held):
            return _kept(held.cast(pa.large_list(held.type.value_type)))
        column = held.to_pylist()
    for row in column:
        if row is not None and not (
            isinstance(row, list) and row and all(isinstance(value, int | float) for value in row)
        ):
            raise InputError(
                f"{path}: column `probs` holds {str(row)[:60]!r}; a list of probabilities a row is wanted."
            )
    floats = [None if row is None else list(map(float, row)) for row in column]
    return _kept(pa.array(floats, pa.large_list(pa.float64())))


def _is_list_of(kind: pa.DataType, is_wanted: Callable[[pa.DataType], bool]) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind)) and is_wanted(kind.value_type)


def _is_filled(lists: pa.Array) -> bool:
    """Whether no list is empty or holds null."""
    return bool(pc.min(pc.list_value_length(lists)).as_py() != 0 and pc.list_flatten(lists).null_count == 0)


def file_samples(column: Column, path: str) -> pa.LargeListArray | None:
    """The column `samples` of a file.

    Raises:
        InputError: a row holds no list of grades, or of records with a grade.
    """
    if isinstance(column, pa.ChunkedArray):
        held = column.combine_chunks()
        if _is_list_of(held.type, _is_grade):
            return _kept(_grades_of(held))
        column = held.to_pylist()
    found = []
    for row in column:
        samples = [] if row is None else row if isinstance(row, list) else ["no list"]
        values = [sample.get("grade") if isinstance(sample, dict) else sample for sample in samples]
        if not all(value is None or (type(value) is int and abs(value) < 2**63) for value in values):
            raise InputError(f"{path}: column `samples` holds {str(row)[:60]!r}; a list of grades a row is wanted.")
        found.append(values)
    return _kept(pa.array(found, pa.large_list(pa.int64())))


def _is_grade(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return kind.get_field_index("grade") >= 0 and _is_grade(kind.field("grade").type)
    return bool(pa.types.is_signed_integer(kind))


def map_labels(part: LabelPart, label_map: GradeMap | None, *, where: str) -> LabelPart:
    """Labels, samples and distributions on another scale: the mass of grades that fall together is added.

    Raises:
        InputError: a label that the map does not name.
    """
    if label_map is None:
        return part
    option = "--map-labels"
    grades = mapped(part.grades, label_map, where=where, option=option)
    samples = part.samples and _refilled(
        part.samples, mapped(pc.list_flatten(part.samples), label_map, where=where, option=option)
    )
    probs = part.probs and _merged(part.probs, label_map, where=where, option=option)
    return replace(part, grades=grades, samples=samples, probs=probs)


def _merged(probs: pa.LargeListArray, label_map: GradeMap, *, where: str, option: str) -> pa.LargeListArray:
    """Distributions whose places are mapped."""
    size_N = pc.list_value_length(probs).fill_null(0).to_numpy()
    row_M = pc.list_parent_indices(probs).to_numpy()
    place_M = np.arange(len(row_M)) - (np.cumsum(size_N) - size_N)[row_M]
    new_K = mapped(
        pa.array(range(size_N.max(initial=0)), pa.int64()), label_map, where=f"{where}, distributions", option=option
    ).to_numpy()
    grades = max(label_map.values()) + 1
    mass_M = pc.list_flatten(probs).to_numpy(zero_copy_only=False)
    merged_NK = np.bincount(row_M * grades + new_K[place_M], mass_M, minlength=len(probs) * grades)
    has_N = size_N > 0
    offsets = pa.array(np.append(0, np.cumsum(has_N * grades)), mask=np.append(~has_N, False))
    return pa.LargeListArray.from_arrays(offsets, merged_NK.reshape(-1, grades)[has_N].ravel())
