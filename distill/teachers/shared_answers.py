"""What rows of a query shared as the answer to an ask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from relabel.distill.teachers.answered_rows import AnsweredRow, AnsweredRows
from relabel.manifests.asks import Ask, Sampling
from relabel.manifests.runs.label_keys import AnswerKeys
from relabel.manifests.specs import LabelerOptions

MOST_ROUNDS = 3
"""Rounds of `relabel retry` whose shared answers are looked for."""


def shared_texts(answered: AnsweredRows, row: AnsweredRow, ask: Ask) -> Iterator[str]:
    """What rows of the query shared as the answer to an ask: in which sample and at which attempt, no file says."""
    if row.label is None:
        return
    keys = AnswerKeys(answered.parts[row.source])
    kept = answered.answers[row.source]
    options = answered.options
    for put, attempt in ((_asked_again(ask, options) if again else ask, again) for again in range(options.attempts)):
        for sample in range(options.samples):
            for retries in range(MOST_ROUNDS + 1):
                text = kept.get(keys.key(put, retries, sample, attempt))
                if text is not None:
                    yield text


def _asked_again(ask: Ask, options: LabelerOptions) -> Ask:
    drawn = ask.sampling
    return replace(ask, sampling=Sampling(max(drawn.temperature, options.retry_temperature), drawn.top_p))
