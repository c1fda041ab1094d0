"""The row that comes of a pair: a label or a row in quarantine, of all its trajectories."""

from __future__ import annotations

from typing import Any

from relabel.jobs.running.trajectories import OpenPair, Trajectory
from relabel.labelers.samples import merge_samples
from relabel.manifests.labels import Label, Pair
from relabel.manifests.schemas import LabelRow, QuarantineRow


def row_of(open_pair: OpenPair) -> LabelRow | QuarantineRow:
    """The row of a pair whose trajectories have all ended.

    With S samples a label needs more than half of them; the rest is flagged `samples_missing`. Tokens count every
    answer that the pair waited for, failed attempts and shared asks included.
    """
    pair = open_pair.pair
    outcomes = open_pair.outcomes
    if len(outcomes) == 1:
        only = outcomes[0]
        if only.label is None:
            return _quarantined(pair, outcomes)
        return _labelled(open_pair, only.label, None, only.prompt_tokens, only.output_tokens)
    outcomes.sort(key=lambda outcome: outcome.sample)
    labels = [outcome.label for outcome in outcomes if outcome.label is not None]
    if 2 * len(labels) <= len(outcomes):
        return _quarantined(pair, outcomes)
    merged = merge_samples(labels)
    if len(labels) < len(outcomes):
        merged.flags.append("samples_missing")
    return _labelled(
        open_pair,
        merged,
        [_sample(outcome) for outcome in outcomes],
        sum(outcome.prompt_tokens for outcome in outcomes),
        sum(outcome.output_tokens for outcome in outcomes),
    )


def _labelled(
    open_pair: OpenPair, label: Label, samples: list[dict[str, Any]] | None, prompt_tokens: int, output_tokens: int
) -> LabelRow:
    pair = open_pair.pair
    distribution = label.distribution
    return LabelRow(
        pair.row_id,
        pair.query_id,
        pair.doc_id,
        "ok",
        label.grade,
        distribution.probs if distribution else None,
        distribution.outside_mass if distribution else None,
        distribution.expected if distribution else None,
        [span._asdict() for span in label.evidence],
        label.intent,
        label.reasoning,
        label.flags,
        samples,
        prompt_tokens,
        output_tokens,
        False,
        open_pair.work.keys[open_pair.index],
        None,
        label.columns,
    )


def _sample(outcome: Trajectory) -> dict[str, Any]:
    if outcome.label is None:
        assert outcome.failure is not None
        return {"status": outcome.failure.status, "grade": None, "probs": None, "outside_mass": None}
    distribution = outcome.label.distribution
    return {
        "status": "ok",
        "grade": outcome.label.grade,
        "probs": list(distribution.probs) if distribution else None,
        "outside_mass": distribution.outside_mass if distribution else None,
    }


def _quarantined(pair: Pair, outcomes: list[Trajectory]) -> QuarantineRow:
    failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    return QuarantineRow(
        pair.row_id,
        pair.query_id,
        pair.doc_id,
        failures[0].status,
        failures[0].reason,
        [one for outcome in outcomes for one in outcome.tries or ()],
        sum(outcome.prompt_tokens for outcome in outcomes),
        sum(outcome.output_tokens for outcome in outcomes),
    )
