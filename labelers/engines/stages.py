"""What can be known of a labeler's asks before the first row: where its decisions are taken, whether its prompts leave
room for a document, and whether a later stage goes on from the tokens of an earlier one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from relabel.labelers.engines.decisions import resolve_labels
from relabel.labelers.engines.sequences import DecisionPlace, TokenSequence
from relabel.labelers.engines.tokens import Overlong, Prompt, PromptEncoder, extends
from relabel.manifests.asks import Answer, Ask, Decision, Request
from relabel.manifests.errors import ConfigError
from relabel.manifests.formats import closing_of


class DecisionPlaces:
    """The places of decisions for one tokenizer; each decision's label tokens are looked up once."""

    def __init__(self, encoder: PromptEncoder, *, tokenizer_name: str) -> None:
        self._encoder = encoder
        self._tokenizer_name = tokenizer_name
        self._known: dict[Decision, DecisionPlace] = {}

    def of(self, ask: Ask) -> list[DecisionPlace]:
        """The places of an ask's decisions.

        Raises:
            ModelError: a decision's labels are not one distinct token each.
        """
        for decision in ask.decisions:
            if decision not in self._known:
                label_ids = resolve_labels(self._encoder, decision, tokenizer_name=self._tokenizer_name)
                self._known[decision] = DecisionPlace(decision.name, decision.marker.encode(), label_ids)
        return [self._known[decision] for decision in ask.decisions]


def stage_remarks(encoder: PromptEncoder, asks: Sequence[Ask], max_prompt: Callable[[Ask], int]) -> list[str]:
    """What a user should hear about a labeler's stages, each a sentence.

    Raises:
        ConfigError: a stage has no room for its own instructions, so that every row would end as overlong.
    """
    remarks: list[str] = []
    for ask in asks:
        room = max_prompt(ask)
        remarks += encoder.remarks(ask)
        prompt = encoder.encode(ask, max_prompt_tokens=max(room, 0))
        if isinstance(prompt, Overlong):
            raise ConfigError(
                f"stage {ask.stage!r} can't be asked: beside the {ask.max_tokens} tokens that its answer may take "
                f"there is room for {max(room, 0)} tokens of prompt, and its instructions need more. Lower "
                "labeler.max_think_tokens or labeler.max_text_tokens, raise engine.max_prompt_tokens, or take a "
                "model with a longer context."
            )
    for earlier, later in itertools.pairwise(asks):
        if later.messages[: len(earlier.messages)] == earlier.messages and len(later.messages) > len(earlier.messages):
            remarks += _check_extends(encoder, earlier, later)
    return remarks


def admit(
    request: Request,
    encoder: PromptEncoder,
    places: DecisionPlaces,
    *,
    max_prompt_tokens: int,
    matcher: Callable[[Prompt], Any] | None,
) -> TokenSequence | Answer:
    """Make a request ready to run, or answer it here because its prompt does not fit.

    Args:
        matcher: makes what holds the answer to its format, for the prompt as the model will see it; None leaves the
            answer free.
    """
    ask = request.ask
    prompt = encoder.encode(ask, max_prompt_tokens=max_prompt_tokens)
    if isinstance(prompt, Overlong):
        return overlong_answer(request, prompt)
    return TokenSequence(
        request,
        np.array(prompt.ids, dtype=np.int64),
        ask.max_tokens,
        places.of(ask),
        prefill=prompt.begins.encode(),
        is_prefill_shown=not ask.prefill,
        num_prefill=prompt.num_prefill,
        matcher=matcher(prompt) if matcher is not None else None,
        closing=closing_tag(ask),
        flags=("document_truncated",) if prompt.cut_document is not None else (),
    )


def overlong_answer(request: Request, prompt: Overlong) -> Answer:
    """The answer to a request whose prompt does not fit."""
    room = f"{prompt.max_prompt_tokens} fit, and nothing but the document may be cut"
    detail = f"the prompt has {prompt.num_tokens} tokens or more, {room}"
    return Answer(request.id, "", "overlong", prompt_tokens=prompt.num_tokens, detail=detail)


def quotable(ask: Ask, prompt: Prompt) -> str | None:
    """What a constrained quotation may come from: the document as far as the model was shown it."""
    source, seen = ask.fragment_source, prompt.cut_document
    return seen if source is not None and seen is not None and source.startswith(seen) else source


def closing_tag(ask: Ask) -> bytes:
    """What ends an answer of the ask's format; empty where it has none."""
    return closing_of(ask.format.sections[-1]).encode() if ask.format is not None and ask.format.sections else b""


def _check_extends(encoder: PromptEncoder, earlier: Ask, later: Ask) -> list[str]:
    """Whether the later prompt begins with the earlier one and its answer, token for token."""
    number = len(earlier.messages)
    turn, opened = later.messages[number], encoder.opened_for(earlier)
    if opened:  # as an answer in the opened thought begins
        turn = turn._replace(parts=(turn.parts[0].replace(opened.strip(), opened, 1), *turn.parts[1:]))
    first = encoder.encode_messages(earlier.messages)
    whole = first + encoder.encode_text(turn.text.removeprefix(opened))
    second = encoder.encode_messages((*later.messages[:number], turn, *later.messages[number + 1 :]))
    if extends(whole, second):
        return []
    dropped = "rewrites the turn before" if extends(first, second) else "renders the earlier turns anew"
    return [
        f"Stage {later.stage!r} does not continue the tokens of stage {earlier.stage!r}: the chat template {dropped}, "
        "so less of what was cached of the first prompt is used."
    ]
