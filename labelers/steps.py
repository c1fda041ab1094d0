"""A step of `route` as its label keeps it, JSON: what was unfolded, shown and answered. And the way back: which answer
it tells.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from relabel.labelers.actions import ANSWER, Actions, write_actions
from relabel.labelers.replays import Recalled
from relabel.labelers.subtree import Subtree
from relabel.manifests.asks import Answer, Ask
from relabel.manifests.errors import VerdictError
from relabel.manifests.formats import OptionLines
from relabel.manifests.records import checked, plain

NODES_FIELD = "nodes"
"""What the texts of nodes are called in the prompt."""


@dataclass(frozen=True)
class RouteStep:
    """One ask and its answer.

    Args:
        expanded: heading that was unfolded for it; None for what a passage lights.
        lit: content that was shown.
        chars: of all nodes' texts as shown: which of several asks with ever shorter texts it was. None in labels of
            the first versions.
        answers, expands: nodes of legal actions, in the order written.
        expelled: lines meant as an action that were not legal.
    """

    expanded: int | None
    lit: tuple[int, ...]
    answers: tuple[int, ...]
    expands: tuple[int, ...]
    refused: bool
    expelled: int
    chars: int | None = None


def read_step(text: str) -> RouteStep:
    """The step that a label keeps.

    Raises:
        ValueError: it is none.
    """
    return checked(RouteStep, json.loads(text))


def step_json(heading: int | None, subtree: Subtree, texts: Iterable[str], actions: Actions) -> str:
    """A step as a label keeps it.

    Args:
        heading: that was unfolded; None for what a passage lights.
        texts: of the nodes, as shown.
    """
    lit, said = tuple(sorted(subtree.lit)), (actions.answers, actions.expands, actions.refused, actions.expelled)
    return json.dumps(plain(RouteStep(heading, lit, *said, _num_chars(texts))))


def recall_step(text: str, ask: Ask) -> Recalled:
    """The answer to an ask that a step tells. Of a line that was expelled it holds no text: another one that is not
    legal takes its place.

    Raises:
        VerdictError: an action is about a node that has none in this ask.
    """
    step, turn = read_step(text), ask.messages[-1]
    shown = (part for name, part in zip(turn.fields, turn.parts[1::2], strict=True) if name == NODES_FIELD)
    if step.chars != _num_chars(shown):
        return Recalled(Answer(0, "", "overlong"), "")
    assert ask.format is not None
    (options,) = ask.format.sections
    assert isinstance(options, OptionLines)
    has_actions = step.answers or step.expands or step.refused
    try:
        legal = write_actions([*step.answers, *step.expands], options.options) if has_actions else ""
    except KeyError as exc:
        raise VerdictError("format", f"no action on node {exc} is legal") from exc
    return Recalled(Answer(0, "\n".join([legal, *[ANSWER] * step.expelled]), "stop"), legal)


def _num_chars(texts: Iterable[str]) -> int:
    return sum(map(len, texts))
