"""Answers of earlier outputs that rows of a query share, found by their key."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from relabel.manifests.asks import Answer, Distribution
from relabel.manifests.runs.earlier_outputs import EarlierOutput
from relabel.manifests.schemas import (
    ANSWERS,
    AnswerRow,
)
from relabel.manifests.storage.concurrency import map_concurrent


class KnownAnswers:
    """Answers that rows shared in earlier outputs, by key."""

    def __init__(self, outputs: Sequence[EarlierOutput]) -> None:
        self._rows: dict[bytes, AnswerRow] = {}
        for earlier in outputs:
            if not earlier.is_readable:
                continue
            read = functools.partial(earlier.folder.table, schema=ANSWERS)
            for table in map_concurrent(earlier.folder.store, read, earlier.found.answers):
                for values in zip(*(column.to_pylist() for column in table.columns), strict=True):
                    row = AnswerRow(*values)
                    self._rows.setdefault(row.key, row if row.origin else row._replace(origin=earlier.plan.fingerprint))

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def find(self, key: bytes) -> AnswerRow | None:
        return self._rows.get(key)


def answer_of(row: AnswerRow) -> Answer:
    """A kept answer as an engine would give it; its request is nobody's."""
    distributions = {one["name"]: Distribution(tuple(one["probs"]), one["outside_mass"]) for one in row.distributions}
    finish: Any = row.finish
    return Answer(-1, row.text, finish, distributions, row.prompt_tokens, row.output_tokens, 0, "", tuple(row.flags))


def answer_row(key: bytes, stage: str, answer: Answer) -> AnswerRow:
    """An answer as it is kept."""
    distributions = [
        {"name": name, "probs": list(found.probs), "outside_mass": found.outside_mass}
        for name, found in answer.distributions.items()
    ]
    return AnswerRow(
        key,
        stage,
        answer.text,
        answer.finish,
        distributions,
        answer.prompt_tokens,
        answer.output_tokens,
        list(answer.flags),
        None,
    )
