"""Which node of the graph each token of an answer of `graph-grpo` belongs to."""

from __future__ import annotations

from relabel.distill.teachers.answer_tokens import AnswerTokens
from relabel.distill.teachers.rollout_files import NODES
from relabel.distill.teachers.rollouts import Rollout
from relabel.distill.teachers.segments import NO_PART, Span, token_parts
from relabel.labelers.verdicts import Reader

NODE_OF_TAG = {
    "preliminary": "r",
    "query_subject": "q_s",
    "query_attribute": "q_a",
    "product_subject": "p_s",
    "product_attribute": "p_a",
    "subject_score": "s",
    "attribute_score": "a",
    "score": "r",
}
"""The first grade is a grade too."""


def segments_of(rollout: Rollout, tokens: AnswerTokens, *, template: int = NO_PART) -> list[int]:
    """The node of each completion token, by its place in `NODES`.

    All tokens of a rollout without a readable label are the grade's: nobody can say which of them went wrong.

    Args:
        template: what tags, white space and the end belong to: `NO_PART`, or a node.
    """
    if rollout.label is None:
        return [NODES.index("r")] * len(rollout.completion_ids)
    segments = [NO_PART] * len(rollout.completion_ids)
    for turn in rollout.turns:
        assert turn.ask.format is not None
        spans: dict[int, list[Span]] = {}
        for tag, span in Reader(turn.ask.format).spans(turn.text).items():
            spans.setdefault(NODES.index(NODE_OF_TAG[tag]), []).append(span)
        opened = turn.text.removesuffix(tokens.text(turn.ids)).encode()  # by the chat template
        parts = token_parts([opened, *tokens.pieces(turn.ids)], spans)[1:]
        whose = [template if part == NO_PART else part for part in parts]
        segments[turn.start : turn.start + len(turn.ids)] = whose
    return segments
