"""What a choice of evidence earns: the generator's answer from it, its agreement with the wanted sets, and its cost.

Source: RES-RAG (papers, equations 8 to 14).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import pyarrow as pa

from relabel.distill.teachers.evidence_queries import JSONLD, EvidenceRow
from relabel.distill.teachers.generators import Evidence, Generated, Generator
from relabel.distill.teachers.rollouts import Rollout
from relabel.distill.teachers.scores import GoldRow, Score
from relabel.labelers.chunks import chunk_texts
from relabel.labelers.section_values import index_lists_of
from relabel.manifests.metrics.answers import token_f1
from relabel.manifests.metrics.evidence_sets import PAPER_WEIGHTS, EvidenceReward, RewardWeights, evidence_reward

EVIDENCE_COLUMNS = (
    pa.field("answers", pa.list_(pa.string())),
    pa.field("usefulness", pa.float64()),
    pa.field("f1_ans", pa.float64()),
    pa.field("f1_ret", pa.float64()),
    pa.field("penalty", pa.float64()),
    pa.field("generator_fault", pa.string()),
)
"""What rollouts.parquet also has: the generator's answers, U, F1_ans, F1_ret, P, and why there is no answer."""

Chosen = list[list[int]]


class EvidenceJudge:
    """Scores choices of chunks.

    Args:
        generator: answers the questions.
        weights: of the reward's parts.
    """

    def __init__(self, generator: Generator, weights: RewardWeights = PAPER_WEIGHTS) -> None:
        self._generator, self._weights = generator, weights

    @property
    def lowest(self) -> float:
        """The least reward."""
        return self._weights.lowest

    def scores(self, rollouts: Sequence[Rollout], rows: Sequence[GoldRow]) -> list[Score]:
        """What each earned, all asked together; NaN where the generator failed. An answer that is cut off has chosen
        nothing and counts as one that exceeds every document's budget. Labels lose their grade, which is one document's
        where the answer is about all.
        """
        asked = cast("Sequence[EvidenceRow]", rows)
        chosen = [chosen_of(rollout, row) for rollout, row in zip(rollouts, asked, strict=True)]
        wanted = [evidence_of(one, row) for one, row in zip(chosen, asked, strict=True) if one is not None]
        answers = iter(self._generator.answer(wanted))
        for rollout in rollouts:
            if rollout.label is not None:
                rollout.label.grade = None
        return [
            self._cut_off(rollout) if one is None else self._score(rollout, row, one, next(answers))
            for rollout, row, one in zip(rollouts, asked, chosen, strict=True)
        ]

    def _score(self, rollout: Rollout, row: EvidenceRow, chosen: Chosen, said: Generated) -> Score:
        f1_ans = token_f1(said.answers, row.answers) if said.answers else None
        found = evidence_reward(chosen, row.shown.mosts, row.sets, f1_ans, self._weights)
        is_lost = said.fault == "engine"
        num_chosen = sum(len(set(one)) for one in chosen)
        parts = {
            **_lengths(rollout),
            "f1_ret": found.agreement,
            "penalty": found.penalty,
            "chunks": float(num_chosen),
            "no_evidence_rate": float(not num_chosen),
            "generator_failed_rate": float(is_lost),
        }
        columns: dict[str, Any] = {
            "f1_ret": found.agreement,
            "penalty": found.penalty,
            "generator_fault": said.fault or None,
        }
        if is_lost:
            return Score(math.nan, parts=parts, columns=columns)
        parts |= {
            "usefulness": found.usefulness,
            "f1_ans": f1_ans or 0.0,
            "no_answer_rate": float(not said.answers and not said.fault),
            "unreadable_answer_rate": float(bool(said.fault)),
        }
        columns |= {"answers": list(said.answers), "usefulness": found.usefulness, "f1_ans": f1_ans}
        return Score(found.reward, parts=parts, columns=columns)

    def _cut_off(self, rollout: Rollout) -> Score:
        weights = self._weights
        found = EvidenceReward(
            min(weights.highest, max(weights.lowest, weights.empty_answer - weights.cost)),
            weights.empty_answer,
            0.0,
            weights.cost,
        )
        parts = {"usefulness": found.usefulness, "f1_ret": 0.0, "penalty": found.penalty}
        return Score(found.reward, parts={**_lengths(rollout), **parts}, columns=parts)


def chosen_of(rollout: Rollout, row: EvidenceRow) -> Chosen | None:
    """The chunks chosen of each document, as written; None where the answer could not be read."""
    return None if rollout.label is None else index_lists_of(rollout.turns[0].text.strip(), row.shown)


def evidence_of(chosen: Chosen, row: EvidenceRow) -> Evidence:
    """What the generator is given for a choice: chunks by document, in the order chosen, each once."""
    documents = row.pair.siblings[: len(chosen)]
    texts = [text for one, document in zip(chosen, documents, strict=True) for text in chunk_texts(document, one)]
    jsonld = [text for document in documents for text in document.columns.get(JSONLD.name, ())]
    return Evidence(row.pair.query, tuple(texts), tuple(jsonld))


def _lengths(rollout: Rollout) -> dict[str, float]:
    return {"format_rate": float(rollout.label is not None), "response_tokens": float(rollout.num_own)}
