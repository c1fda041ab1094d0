"""`route`: which passages of a document answer a question, and which headings to unfold next; for each retrieved
passage, and again for what each unfolded heading brings to light.

Source: RDR2 (papers, section 3 and appendix A.1). The sentences are ours.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from relabel.labelers.alignment import align, content_at
from relabel.labelers.prompts import BUILT_IN, Prompts
from relabel.labelers.registry import EXAMPLE, Labeler, Recalled
from relabel.labelers.showing import CHARS_PER_DOCUMENT, CHARS_PER_TOKEN, SHRINK
from relabel.labelers.subtrees import (
    ANSWER,
    OPTION_CHARS,
    OPTION_WORDS,
    REFUSE,
    Subtree,
    one_line,
    options_of,
    read_actions,
)
from relabel.labelers.verdicts import Reader, token_budget, unreadable
from relabel.manifests.asks import Answer, AnswerFormat, Ask, OptionLines, Sampling
from relabel.manifests.errors import InputError, VerdictError
from relabel.manifests.labels import InputColumn, Label, LabelColumn, Pair, Span
from relabel.manifests.records import checked, plain
from relabel.manifests.specs import LabelerOptions
from relabel.manifests.trees import COLUMN, Node, read_tree

TREE = InputColumn(COLUMN, "list<node>", "The document's tree, as `relabel pairs tree` writes it.", True)
PASSAGES = InputColumn("passages", "list<string>", "Passages of the document that were retrieved, the best first.")


class RouteOptions(LabelerOptions):
    """Options of `route`."""

    grades: Literal[3] = 3
    """Three: some node answers (2), none does and a heading was to be unfolded (1), neither (0)."""
    passages: int = Field(5, ge=1, le=100)
    """Most passages of a document that are read, each with a subtree of its own."""
    expansions: int = Field(5, ge=0, le=100)
    """Most headings of a document that are unfolded, each asked about again; 0 asks once a passage."""
    expelled: Literal["quarantine", "keep"] = "quarantine"
    """What becomes of an answer with a line that is no legal action: it is asked again and in the end quarantined; or
    the line is left out and counted.
    """
    window_tokens: int = Field(7000, ge=256)
    """Room for nodes, at four characters a token; longer texts are cut. Where `engine.max_prompt_tokens` is less, that
    is the limit.
    """


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


class Route(Labeler):
    """Asks for actions on a document's tree. Flags: `passage_not_found`, `document_truncated` (a node's text),
    `expelled`, `collapsed` (an answer without a line that is an action), and the answer's own.
    """

    Options: ClassVar[type[LabelerOptions]] = RouteOptions
    columns = (
        LabelColumn("answer_ids", "list<int32>", "Ids of the nodes that answer, in the order given."),
        LabelColumn("expand_ids", "list<int32>", "Ids of the headings that were to be unfolded, in the order given."),
        LabelColumn("refused", "bool", "Whether it was said that nothing answers, and nothing was to be unfolded."),
        LabelColumn("expelled", "int32", "Lines meant as an action that were not legal, where those are kept."),
        LabelColumn("steps", "list<string>", "Each ask as JSON: what was unfolded, lit, answered and to be unfolded."),
    )
    input_columns = (TREE, PASSAGES)
    recalls = True

    def __init__(self, options: RouteOptions) -> None:
        self._options = options
        self._room = options.window_tokens * CHARS_PER_TOKEN
        self._prompts = Prompts(BUILT_IN / "route", options.templates)
        self._system = self._prompts.turn("system", "system.j2", data=(), settings={"words": OPTION_WORDS}).message()
        self.probe()  # a bad template fails here
        self.template_digests = self._prompts.digests

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        """An ask for each passage that lights other content than those before, and one for each heading unfolded.

        Raises:
            VerdictError: the tree is not of the document; an answer has a line that is no legal action, where those
                are not kept, or nothing else.
        """
        try:
            subtree = Subtree(read_tree(pair.columns.get(TREE.name, ()), pair.document))
        except InputError as exc:
            raise VerdictError("format", str(exc)) from exc
        flags: dict[str, None] = {}
        matches: dict[tuple[int, ...], None] = {}
        for passage in pair.columns.get(PASSAGES.name, ())[: self._options.passages]:
            piece = align(passage, pair.document)
            matched = content_at(subtree.tree, piece) if piece is not None else []
            if matched:
                matches[tuple(matched)] = None
            else:
                flags["passage_not_found"] = None
        steps: list[RouteStep] = []
        left = self._options.expansions
        for ids in matches or [()]:
            subtree = subtree.light(ids)
            waiting: list[int | None] = [None]
            while waiting:
                heading = waiting.pop(0)
                if heading is not None:
                    unfolded = subtree.expand(heading)
                    if unfolded is subtree or not left:
                        continue
                    subtree = unfolded
                    left -= 1
                steps.append((yield from self._step(pair, subtree, heading, flags)))
                waiting += steps[-1].expands
        answers = _each_once(step.answers for step in steps)
        expands = _each_once(step.expands for step in steps)
        columns = {
            "answer_ids": answers,
            "expand_ids": expands,
            "refused": not answers and not expands and any(step.refused for step in steps),
            "expelled": sum(step.expelled for step in steps),
            "steps": [json.dumps(plain(step)) for step in steps],
        }
        answering = [subtree.tree.nodes[id] for id in answers]
        evidence = tuple(Span(node.start, node.end, node.text) for node in answering)
        grade = 2 if answers else int(bool(expands))
        return Label(
            grade,
            None,
            columns,
            evidence,
            flags=list(flags),
        )

    def recall(self, row: Mapping[str, Any], ask: Ask, number: int) -> Recalled:
        """What a step of a label answers; see `Labeler.recall`. A line that was expelled, whose text it does
        not hold, is replaced by another one that is not legal.
        """
        if number >= len(row["steps"]):
            raise VerdictError("format", "the label has fewer steps than are asked")
        step = read_step(row["steps"][number])
        turn = ask.messages[-1]
        fields = zip(turn.fields, turn.parts[1::2], strict=True)
        if step.chars != sum(len(text) for name, text in fields if name == NODES_FIELD):
            return Recalled(Answer(0, "", "overlong"), "")
        assert ask.format is not None
        (section,) = ask.format.sections
        assert isinstance(section, OptionLines)
        option_of = {int(option.split(" ")[1].rstrip(":")): option for option in section.options}
        try:
            legal = "\n".join(option_of[id] for id in (*step.answers, *step.expands))
        except KeyError as exc:
            raise VerdictError("format", f"no action on node {exc} is legal") from exc
        if not legal and step.refused:
            legal = REFUSE
        lines = [legal, *itertools.repeat(ANSWER, step.expelled)]
        return Recalled(Answer(0, "\n".join(lines), "stop"), legal)

    def probe(self) -> list[Ask]:
        text = EXAMPLE.document
        heading = Node(
            id=0,
            type="structure",
            level=0,
            text="Roses",
            start=0,
            end=0,
            parent=-1,
        )
        content = Node(
            id=1,
            type="content",
            level=1,
            text=text,
            start=0,
            end=len(text),
            parent=0,
        )
        subtree = Subtree(read_tree([heading._asdict(), content._asdict()], text)).light([1])
        return [self._ask(EXAMPLE.query, subtree, _view(subtree, self._room).texts)]

    def _step(
        self, pair: Pair, subtree: Subtree, heading: int | None, flags: dict[str, None]
    ) -> Generator[Ask, Answer, RouteStep]:
        """One ask; another with shorter texts while the engine finds it too long.

        Args:
            heading: that was unfolded; None for what a passage lights.
        """
        view = _view(subtree, self._room)
        ask = self._ask(pair.query, subtree, view.texts)
        answer = yield ask
        while answer.finish == "overlong":
            shorter = _view(subtree, int(view.num_chars * SHRINK))
            if shorter == view:
                break
            view = shorter
            ask = self._ask(pair.query, subtree, view.texts)
            answer = yield ask
        assert ask.format is not None
        actions = read_actions(Reader(ask.format).read(answer)[""], subtree)
        if actions.fault is not None and self._options.expelled == "quarantine":
            raise unreadable(answer, actions.fault)
        if view.is_cut:
            flags["document_truncated"] = None
        if actions.expelled:
            flags["expelled"] = None
        elif not (actions.answers or actions.expands or actions.refused):
            flags["collapsed"] = None
        flags |= dict.fromkeys(answer.flags)
        return RouteStep(
            expanded=heading,
            lit=tuple(sorted(subtree.lit)),
            answers=actions.answers,
            expands=actions.expands,
            refused=actions.refused,
            expelled=actions.expelled,
            chars=sum(map(len, view.texts)),
        )

    def _ask(self, query: str, subtree: Subtree, texts: tuple[str, ...]) -> Ask:
        marks = ["\t" * node.level + str(node.id) for node in subtree.visible]
        turn = self._prompts.turn(
            "user",
            "user.j2",
            data=("query", NODES_FIELD),
            settings={"marks": marks},
            counts={NODES_FIELD: len(marks)},
        )
        format = AnswerFormat((OptionLines(options_of(subtree), REFUSE),))
        return Ask(
            "route",
            (self._system, turn.message(query, *texts)),
            format,
            token_budget(format),
            sampling=Sampling(self._options.temperature, self._options.top_p),
        )


def _each_once(ids: Iterable[tuple[int, ...]]) -> list[int]:
    return list(dict.fromkeys(itertools.chain.from_iterable(ids)))


class _View(NamedTuple):
    """The texts of a subtree's nodes as a prompt shows them, the room that they take, and whether one is cut."""

    texts: tuple[str, ...]
    num_chars: int
    is_cut: bool


def _view(subtree: Subtree, room: int) -> _View:
    """The texts of a subtree's nodes, all cut to one length, so that they fit. What an action's prefix needs stays in
    any case.
    """
    lines = [one_line(node.text) for node in subtree.visible]
    longest = max(map(len, lines))
    most_chars = longest
    while True:
        texts = tuple(line[:most_chars] for line in lines)
        num_chars = sum(map(len, texts)) + CHARS_PER_DOCUMENT * len(texts)
        if num_chars <= room or most_chars <= OPTION_CHARS:
            return _View(texts, num_chars, most_chars < longest)
        most_chars = max(OPTION_CHARS, int(most_chars * SHRINK))
