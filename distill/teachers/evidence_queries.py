"""Questions with all their documents' chunks, the chunks that are wanted of each, and the answers that are wanted: what
a chooser of evidence learns from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from relabel.distill.students.data_facts import LearnedGold
from relabel.distill.students.gold import in_words_of_the_spec
from relabel.distill.students.pair_texts import read_pairs
from relabel.distill.teachers.gold_rows import GoldRows
from relabel.distill.teachers.res_rag_spec import EvidenceGold
from relabel.distill.teachers.rollouts import Dialogues, FirstPrompt
from relabel.distill.teachers.scores import GoldRow
from relabel.labelers.chunks import CHUNKS
from relabel.labelers.evidence_set import EVIDENCE_SET
from relabel.labelers.registry import Labeler, declared_reads
from relabel.manifests.asks import Ask
from relabel.manifests.errors import InputError
from relabel.manifests.formats import JsonIndices
from relabel.manifests.inputs.dataset import Dataset, open_dataset
from relabel.manifests.judging.further_columns import GOLD_CHUNKS
from relabel.manifests.judging.gold_columns import further_of_input
from relabel.manifests.labels import InputColumn, Pair
from relabel.manifests.specs import Columns, InputSpec
from relabel.manifests.storage.context import Storage

JSONLD = InputColumn("jsonld", "list<string>", "What the page says of itself.")


class EvidenceQuery(NamedTuple):
    """One question.

    Args:
        pair: its first row, with all rows as siblings.
        sets: of each row the numbers of the wanted chunks, most important first; None where no row has any said.
        answers: all that are wanted.
    """

    pair: Pair
    sets: tuple[tuple[int, ...], ...] | None
    answers: tuple[str, ...] = ()


class EvidenceQueries(NamedTuple):
    """All questions of a source, in the order of their first rows; and what was read."""

    queries: list[EvidenceQuery]
    dataset: Dataset


@dataclass(frozen=True, slots=True)
class EvidenceRow(GoldRow):
    """A question to train on.

    Args:
        sets: wanted chunks of each document that is shown.
        answers: wanted answers.
    """

    sets: tuple[tuple[int, ...], ...] = ()
    answers: tuple[str, ...] = ()

    @property
    def ask(self) -> Ask:
        """What is asked of it, as far as the prompt has room."""
        assert self.first is not None
        return self.first.ask

    @property
    def shown(self) -> JsonIndices:
        """Which documents are shown, and how many chunks of each."""
        assert self.ask.format is not None
        (section,) = self.ask.format.sections
        assert isinstance(section, JsonIndices)
        return section


def load_evidence_queries(
    path: str, columns: Columns, sets: str, labeler: Labeler, storage: Storage, *, answers: str | None = None
) -> EvidenceQueries:
    """Read whole queries, wherever their rows lie.

    Args:
        sets, answers: columns.
    Raises:
        InputError: the file can't be read, lacks a column, or a set names a chunk that its document does not have.
    """
    reads = declared_reads(labeler, name=EVIDENCE_SET)
    wanted = () if answers is None else (InputColumn(answers, "list<string>", "The answers wanted.", True),)
    reads = reads._replace(
        columns=(*reads.columns, JSONLD, *wanted), siblings=False
    )  # whole queries are put together here
    with in_words_of_the_spec("data.gold"):
        dataset = open_dataset(InputSpec(path=(path,), columns=columns), storage, reads=reads)
    column = GOLD_CHUNKS._replace(name=sets)
    held = further_of_input([file.path for file in dataset.files], [column], storage, where=path)
    if sets not in held:
        raise InputError(
            f"{path}: no column `{sets}` with the chunks that are wanted. `relabel pairs similar` writes `similar`; "
            "name another as `data.gold.sets`."
        )
    pairs = read_pairs(dataset, np.arange(dataset.rows), readings=None)
    found = [_query(pair, held[sets], path=path, column=sets, answers=answers) for pair in whole_queries(pairs)]
    return EvidenceQueries(found, dataset)


def whole_queries(pairs: Sequence[Pair]) -> list[Pair]:
    """The first row of each query, with all its rows as siblings, wherever they lie."""
    by_query: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_query.setdefault(pair.query_id, []).append(pair._replace(siblings=()))
    return [rows[0]._replace(siblings=tuple(rows)) for rows in by_query.values()]


def _query(first: Pair, numbers: pa.Array, *, path: str, column: str, answers: str | None) -> EvidenceQuery:
    rows = first.siblings
    said = [numbers[pair.row_id].as_py() for pair in rows]
    for pair, wanted in zip(rows, said, strict=True):
        most = len(pair.columns.get(CHUNKS.name, ()))
        off = [number for number in wanted or () if not 1 <= number <= most]
        if off:
            raise InputError(
                f"{path}: row {pair.row_id}: column `{column}` names chunk {off[0]} of document {pair.doc_id}, which "
                f"has {most} chunks, numbered from 1. Both columns must come from the same chunks."
            )
    sets = None if all(one is None for one in said) else tuple(tuple(one or ()) for one in said)
    named = () if answers is None else (tuple(pair.columns.get(answers, ())) for pair in rows)
    return EvidenceQuery(first, sets, next(filter(None, named), ()))


def chosen_in(chosen: Mapping[int, Sequence[int] | None], pairs: Sequence[Pair]) -> list[EvidenceQuery]:
    """Questions with the choices that a run made, those that have any; a row without a label gave nothing.

    Args:
        chosen: numbers of chunks by row id, of the rows with a label.
        pairs: of whole queries, as the run asked them.
    """
    found = []
    for pair in whole_queries(pairs):
        rows = [sibling.row_id for sibling in pair.siblings]
        if not chosen.keys().isdisjoint(rows):
            found.append(EvidenceQuery(pair, tuple(tuple(chosen.get(row) or ()) for row in rows)))
    return found


def load_evidence_rows(source: EvidenceGold, labeler: Labeler, dialogues: Dialogues, storage: Storage) -> GoldRows:
    """Read the questions, and leave out those that can't be rewarded or asked.

    Raises:
        InputError: as `load_evidence_queries`, or no question is left.
    """
    loaded = load_evidence_queries(source.path, source.columns, source.sets, labeler, storage, answers=source.answers)
    about = LearnedGold(
        path=source.path, grade=None, sets=source.sets, answers=source.answers, rows=loaded.dataset.rows
    )
    found = GoldRows(about, dropped=Counter())
    for query in loaded.queries:
        if not query.answers:
            found.dropped["queries without an answer wanted"] += 1
        elif query.sets is None:
            found.dropped["queries without chunks wanted"] += 1
        elif (first := dialogues.first_prompt(query.pair)) is None:
            found.dropped["queries whose prompt does not fit"] += 1
        elif (row := row_of(query, query.sets, first, source.path)) is None:
            found.dropped["queries without a chunk to choose"] += 1
        else:
            found.rows.append(row)
    if not found.rows:
        listed = ", ".join(f"{count:,} {reason}" for reason, count in found.dropped.items())
        raise InputError(f"{source.path}: no question to learn from: {listed}.")
    found.about = replace(about, graded_rows=len(found.rows))
    return found


def row_of(
    query: EvidenceQuery, sets: tuple[tuple[int, ...], ...], first: FirstPrompt, source: str
) -> EvidenceRow | None:
    """The question as it is asked; None where no chunk is shown. Its label is that of the first document with chunks:
    one of which nothing is shown has none.
    """
    row = EvidenceRow(query.pair, {"grade": None}, source, first, answers=query.answers)
    mosts = row.shown.mosts
    place = next((place for place, most in enumerate(mosts) if most), None)
    if place is None:
        return None
    pair = query.pair.siblings[place]._replace(siblings=query.pair.siblings)
    wanted = tuple(tuple(n for n in one if n <= most) for one, most in zip(sets, mosts, strict=False))
    return replace(row, pair=pair, sets=wanted)
