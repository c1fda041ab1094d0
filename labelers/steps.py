"""A step of `route` as its label keeps it, JSON: what was unfolded, shown and answered. And the way back: which answer
it tells.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from labelers.actions import ANSWER, Actions, write_actions
from labelers.replays import Recalled
from labelers.subtree import Subtree
from manifests.asks import Answer, Ask
from manifests.errors import VerdictError
from manifests.formats import OptionLines

NODES_FIELD = "nodes"
"""What the texts of nodes are called in the prompt."""


def step_json(heading: int | None, subtree: Subtree, texts: Iterable[str], actions: Actions) -> str:
    """One ask and its answer.

    Args:
        heading: that was unfolded for it; None for what a passage lights.
        texts: of the nodes, as shown. Their characters tell which it was of several asks with ever shorter texts.
    """
    held: dict[str, Any] = {
        "expanded": heading,
        "lit": sorted(subtree.lit),
        "chars": _num_chars(texts),
        "answers": actions.answers,
        "expands": actions.expands,
        "refused": actions.refused,
        "expelled": actions.expelled,
    }
    return json.dumps(held)


def recall_step(text: str, ask: Ask) -> Recalled:
    """The answer to an ask that a step tells. Of a line that was expelled it holds no text: another one that is not
    legal takes its place.

    Raises:
        VerdictError: an action is about a node that has none in this ask.
    """
    step, turn = json.loads(text), ask.messages[-1]
    shown = (part for name, part in zip(turn.fields, turn.parts[1::2], strict=True) if name == NODES_FIELD)
    if step.get("chars") != _num_chars(shown):  # labels of the first versions do not say
        return Recalled(Answer(0, "", "overlong"), "")
    assert ask.format is not None
    (options,) = ask.format.sections
    assert isinstance(options, OptionLines)
    has_actions = step["answers"] or step["expands"] or step["refused"]
    try:
        legal = write_actions([*step["answers"], *step["expands"]], options.options) if has_actions else ""
    except KeyError as exc:
        raise VerdictError("format", f"no action on node {exc} is legal") from exc
    return Recalled(Answer(0, "\n".join([legal, *[ANSWER] * step["expelled"]]), "stop"), legal)


def _num_chars(texts: Iterable[str]) -> int:
    return sum(map(len, texts))
