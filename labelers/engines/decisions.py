"""Decisions: which token each label is at its place in the answer, and what the raw logits there say about them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from relabel.labelers.engines.tokens import PromptEncoder
from relabel.manifests.asks import Decision, Distribution
from relabel.manifests.errors import ModelError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def resolve_labels(encoder: PromptEncoder, decision: Decision, *, tokenizer_name: str) -> tuple[int, ...]:
    """The token that each of a decision's labels is (or begins with) right after the marker, in the order of the
    labels.

    The marker's tokens and those of marker + label are compared: what is added is the label's. Where the tokenizer
    merges the marker's end with the label (`>2` as one token), the label is looked up on its own, since distributions
    are always taken after the marker's own tokens. Of a label of several tokens the first one counts, if no other
    label begins with it.

    Raises:
        ModelError: two labels do not differ in their first token; names the tokenizer, the labels and their ids.
    """
    sequences = [_label_ids(encoder, decision.marker, label) for label in decision.labels]
    firsts = [ids[0] if ids else None for ids in sequences]
    if None in firsts or len(set(firsts)) < len(firsts):
        seen = "; ".join(f"{label!r} is {ids}" for label, ids in zip(decision.labels, sequences, strict=True))
        raise ModelError(
            f"tokenizer of {tokenizer_name}: the labels of decision {decision.name!r} are not one distinct token each "
            f"after {decision.marker!r}: {seen}. Choose labels that begin with different tokens."
        )
    return tuple(token for token in firsts if token is not None)


def _label_ids(encoder: PromptEncoder, marker: str, label: str) -> list[int]:
    before, after = encoder.encode_text(marker), encoder.encode_text(marker + label)
    if len(after) > len(before) and after[: len(before)] == before:
        return after[len(before) :]
    alone = encoder.encode_text(label)
    if len(alone) == 1 and encoder.decode(alone) == label:
        return alone
    spelled = encoder.vocabulary.get(label)
    if spelled is not None and spelled not in encoder.control_ids and encoder.decode([spelled]) == label:
        return [spelled]
    return alone


def distribution(logits_V: NDArray[np.float32], label_ids: tuple[int, ...]) -> Distribution:
    """Probabilities of the labels, from the raw logits at their place.

    Args:
        logits_V: the model's logits over its whole vocabulary, float32, before any grammar's mask and without
            temperature.
        label_ids: one vocabulary id for each label.
    Returns:
        probs: softmax over the label logits alone. outside_mass: 1 - (the labels' mass in the full softmax), clipped to
            0..1.
    """
    wide = logits_V.astype(np.float64)
    top = float(wide.max())
    log_total = top + float(np.log(np.exp(wide - top).sum()))
    labels = wide[list(label_ids)]
    weights = np.exp(labels - labels.max())
    inside = float(np.exp(labels - log_total).sum())
    return Distribution(tuple(float(p) for p in weights / weights.sum()), min(max(1.0 - inside, 0.0), 1.0))


def distribution_of_logprobs(logprobs: Sequence[float]) -> Distribution:
    """Probabilities of the labels, from their log-probabilities in the full softmax of the raw logits, one for each
    label.
    """
    masses = [math.exp(logprob) for logprob in logprobs]
    top = max(logprobs)
    weights = [math.exp(logprob - top) for logprob in logprobs]  # relative to the top, since all masses may underflow
    total = sum(weights)
    return Distribution(tuple(weight / total for weight in weights), min(max(1.0 - sum(masses), 0.0), 1.0))
