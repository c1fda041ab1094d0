"""Choices of evidence to learn: whole questions with the chunks that are wanted.

Source: RES-RAG (papers, section 3.4.1, the warm-up on heuristic labels).
"""

from __future__ import annotations

from collections.abc import Iterator

from relabel.distill.students.data_facts import LearnedGold
from relabel.distill.teachers.answered_rows import AnsweredRow, AnsweredRows
from relabel.distill.teachers.evidence_queries import load_evidence_queries
from relabel.distill.teachers.sft_spec import SftGold
from relabel.distill.teachers.turns import AnsweredTurn
from relabel.labelers.chunks import rendered_sets
from relabel.labelers.evidence_set import EVIDENCE_SET
from relabel.labelers.registry import labeler_class
from relabel.manifests.asks import Answer
from relabel.manifests.errors import ConfigError, InputError, VerdictError
from relabel.manifests.formats import JsonIndices
from relabel.manifests.specs import LabelerOptions
from relabel.manifests.storage.context import Storage


def load_sets(options: LabelerOptions, gold: SftGold, storage: Storage) -> AnsweredRows:
    """Questions with the sets of a column.

    Raises:
        ConfigError: the labeler chooses no chunks.
        InputError: the file can't be read, or has no set.
    """
    if options.name != EVIDENCE_SET:
        raise ConfigError(f"data.gold.sets: labeler {options.name} chooses no chunks; want {EVIDENCE_SET}.")
    assert gold.sets is not None
    found = AnsweredRows(labeler_class(options.name)(options), options)
    loaded = load_evidence_queries(gold.path, gold.columns, gold.sets, found.labeler, storage)
    for query in loaded.queries:
        if query.sets is None:
            found.dropped["queries without chunks wanted"] += 1
        else:
            found.rows.append(AnsweredRow(query.pair, int(any(query.sets)), sets=query.sets))
            found.names.append((gold.path, query.pair.row_id))
    if not found.rows:
        raise InputError(f"{gold.path}: no query with chunks in `{gold.sets}`. There is nothing to learn from.")
    found.gold = LearnedGold(
        path=gold.path, grade=None, sets=gold.sets, rows=loaded.dataset.rows, graded_rows=len(found.rows)
    )
    return found


def choices(answered: AnsweredRows, row: AnsweredRow) -> Iterator[AnsweredTurn]:
    """A question with its answer, with fewer and fewer chunks shown, as a run would ask it while its prompt is too
    long.
    """
    assert row.sets is not None
    walk = answered.labeler.label(row.pair)
    try:
        ask = next(walk)
        while True:
            assert ask.format is not None
            (section,) = ask.format.sections
            assert isinstance(section, JsonIndices)
            if any(section.mosts):
                yield AnsweredTurn(ask, ("", rendered_sets(section, row.sets), ""))
            ask = walk.send(Answer(0, "", "overlong"))
    except (StopIteration, VerdictError):
        return
