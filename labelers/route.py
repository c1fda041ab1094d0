"""`route`: select the passages of a document that answer a question and the headings to unfold next, after aligning
each retrieved passage with the document."""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from relabel.labelers.prompts import BUILT_IN, Prompts
from relabel.labelers.registry import Labeler, Recalled
from relabel.labelers.review import CHARS_PER_DOCUMENT, CHARS_PER_TOKEN, SHRINK
from relabel.labelers.verdicts import Reader, token_budget, unreadable
from relabel.manifests.asks import Answer, AnswerFormat, Ask, OptionLines, Sampling
from relabel.manifests.errors import InputError, VerdictError
from relabel.manifests.labels import COLUMN, InputColumn, Label, LabelColumn, Node, Pair, Span, Tree, read_tree
from relabel.manifests.process import require
from relabel.manifests.records import checked, plain
from relabel.manifests.specs import LabelerOptions

# ------------------------------------------------------------------------------
# The part of a document's tree that a router sees: all headings, and the content that is lit just now.
#
# Source: RDR2 (papers, section 3.2 and appendix A.1): first a retrieved passage with its neighbours; then, heading by
# heading, content that was not lit before in its place. The subtree keeps its size, and ids stay those of the tree.


@dataclass(frozen=True)
class Subtree:
    """A value: `light` and `expand` give another.

    Args:
        lit: ids of the content that is visible now.
        seen: ids of all content that is or was.
    """

    tree: Tree = field(repr=False)
    lit: frozenset[int] = frozenset()
    seen: frozenset[int] = frozenset()

    def light(self, matched: Iterable[int]) -> Subtree:
        """With these content nodes lit, and nothing else but their siblings, ancestors and descendants: their content
        siblings, all content that those hold, and content that holds them.
        """
        found: set[int] = set()
        for parent, id in {self.tree.nodes[id].parent: id for id in matched}.items():
            found |= self._holding(id) | self.own_content(parent)
        return self._lit(found)

    def expand(self, heading: int) -> Subtree:
        """With the heading's own content lit, as far as none of it was before, in place of what is lit now; the same
        subtree where there is no such content.
        """
        new = self.own_content(heading) - self.seen
        above = {holder for id in new for holder in self._holding(id)}
        return self._lit(new | above) if new else self

    def own_content(self, heading: int) -> frozenset[int]:
        """Content below a node with no heading in between; of a heading without any, that of its subheadings."""
        found: set[int] = set()
        waiting = [heading]
        while waiting:
            children = self.tree.children[waiting.pop()]
            own = {id for child in children for id in self._content_in(child)}
            found |= own
            waiting += () if own else children
        return frozenset(found)

    @cached_property
    def visible(self) -> tuple[Node, ...]:
        """All headings and what is lit, in document order."""
        return tuple(node for node in self.tree.nodes if self.is_visible(node.id))

    def is_visible(self, id: int) -> bool:
        """Whether there is such a node, and it is a heading or lit."""
        return 0 <= id < len(self.tree.nodes) and (not self.tree.nodes[id].is_content or id in self.lit)

    @cached_property
    def collapsed(self) -> frozenset[int]:
        """Headings below which nothing is lit; that there is something to light is not shown, so it does not count."""
        above = {holder.id for id in self.lit for holder in self.tree.ancestors(id)}
        return frozenset(node.id for node in self.tree.nodes if not node.is_content) - above

    def render(self) -> str:
        """A line for each visible node, `id: text`, a tab before it for each level."""
        return "\n".join("\t" * node.level + f"{node.id}: {one_line(node.text)}" for node in self.visible)

    def _lit(self, found: Iterable[int]) -> Subtree:
        lit = frozenset(found)
        return Subtree(self.tree, lit, self.seen | lit)

    def _holding(self, id: int) -> set[int]:
        return {node.id for node in self.tree.ancestors(id) if node.is_content}

    def _content_in(self, id: int) -> Iterator[int]:
        """The node and all below it; nothing of a heading."""
        waiting = [id]
        while waiting:
            id = waiting.pop()
            if self.tree.nodes[id].is_content:
                yield id
                waiting += self.tree.children[id]


def one_line(text: str) -> str:
    """A text whose line breaks and other white space are single spaces."""
    return " ".join(text.split())


# ------------------------------------------------------------------------------
# A router's answer: one action a line, on nodes of the subtree that it was shown.
#
# Source: RDR2 (papers, section 3.3): `[ANSWER] id: prefix` takes a content node, `[EXPAND] id: prefix` unfolds a
# collapsed heading, `[REFUSE]` is alone. The prefix ties the id to its text; what counts as one is ours.


ANSWER, EXPAND, REFUSE = "[ANSWER]", "[EXPAND]", "[REFUSE]"
LEAST_WORDS = 3
"""Words of a prefix, at least; all of a text that has fewer."""
OPTION_WORDS = 5
"""Words of the prefixes that a grammar admits."""
_WORD_CHARS = 40
_WORD = re.compile(rf"[\u3040-\u30ff\u3400-\u9fff]|[^\s<\u3040-\u30ff\u3400-\u9fff]{{1,{_WORD_CHARS}}}")
"""What is between spaces or `<`, which begins the control tokens of many models, so that no prefix wants it; each
character of Chinese and Japanese, which have no spaces; 40 characters at most.
"""
OPTION_CHARS = OPTION_WORDS * (_WORD_CHARS + 1)
"""Longest prefix that a grammar admits."""
_ACTION = re.compile(r"(\[ANSWER\]|\[EXPAND\]) (0|[1-9][0-9]{0,8}):(?:\s+(.*))?", re.DOTALL)


class Actions(NamedTuple):
    """What an answer says.

    Args:
        answers, expands: ids of the nodes of legal actions, each once, in the order written.
        refused: it says `[REFUSE]` and no action that is legal.
        expelled: lines that are meant as an action and are not legal.
        fault: why the first line that is no legal action is none, whether meant as one or not; None without such lines.
    """

    answers: tuple[int, ...]
    expands: tuple[int, ...]
    refused: bool
    expelled: int
    fault: str | None

    @property
    def is_collapsed(self) -> bool:
        """Whether no line is an action, legal or not."""
        return not (self.answers or self.expands or self.refused or self.expelled)


def options_of(subtree: Subtree) -> tuple[str, ...]:
    """The legal actions, each with a prefix of `OPTION_WORDS` words."""
    found = []
    for node in subtree.visible:
        if node.is_content or node.id in subtree.collapsed:
            text = one_line(node.text)
            words = list(itertools.islice(_WORD.finditer(text), OPTION_WORDS))
            prefix = one_line(text[: words[-1].end()].replace("<", " ")) if words else ""
            found.append(f"{ANSWER if node.is_content else EXPAND} {node.id}: {prefix}".rstrip())
    return tuple(found)


def write_actions(ids: Iterable[int], options: Sequence[str]) -> str:
    """The legal actions on these nodes as `options_of` writes them, a line each; `[REFUSE]` where there are none.

    Raises:
        KeyError: no option is about a node.
    """
    option_of = {int(option.split(" ")[1].rstrip(":")): option for option in options}
    return "\n".join(option_of[id] for id in ids) or REFUSE


def read_actions(text: str, subtree: Subtree) -> Actions:
    """Read an answer line by line; blank lines say nothing."""
    ids: dict[str, dict[int, None]] = {ANSWER: {}, EXPAND: {}}
    faults: list[str] = []
    expelled = num_refusals = 0
    for line in filter(None, map(str.strip, text.split("\n"))):
        if line == REFUSE:
            num_refusals += 1
        elif fault := _fault(line, subtree):
            faults.append(f"{fault}: {line[:60]!r}")
            expelled += line.startswith((ANSWER, EXPAND, REFUSE))
        else:
            kind, _, rest = line.partition(" ")
            ids[kind][int(rest.partition(":")[0])] = None
    has_actions = any(ids.values())
    if num_refusals and has_actions:
        faults.append(f"{REFUSE} is given together with actions")
        expelled, num_refusals = expelled + num_refusals, 0
    if not (has_actions or num_refusals or faults):
        faults.append("there is no action")
    fault = faults[0] if faults else None
    return Actions(tuple(ids[ANSWER]), tuple(ids[EXPAND]), num_refusals > 0, expelled, fault)


def _fault(line: str, subtree: Subtree) -> str | None:
    said = _ACTION.fullmatch(line)
    if said is None:
        return "no action"
    kind, id, prefix = said[1], int(said[2]), said[3] or ""
    if not subtree.is_visible(id):
        return f"node {id} is not visible"
    node = subtree.tree.nodes[id]
    if kind == ANSWER and not node.is_content:
        return f"node {id} is a heading, which answers nothing"
    if kind == EXPAND and id not in subtree.collapsed:
        return f"node {id} is no collapsed heading"
    words, wanted = _words(prefix), _words(node.text)
    if words != wanted[: len(words)] or len(words) < min(LEAST_WORDS, len(wanted)):
        return f"the text does not begin that of node {id}"
    return None


def _words(text: str) -> list[str]:
    """Case, white space and how an accented letter is written do not count."""
    return [unicodedata.normalize("NFC", word).casefold() for word in _WORD.findall(text)]


# ------------------------------------------------------------------------------
# A step of `route` as its label keeps it, JSON: what was unfolded, shown and answered. And the way back: which answer
# it holds.


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
    """The answer to an ask that a step holds. Of a line that was expelled it holds no text: another one that is not
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


# ------------------------------------------------------------------------------
# Where in a document a retrieved passage comes from: exactly where its text is, else where the document
# reads most like it.
#
# Source: RDR2 (papers, section 3.3): a window of the passage's length slides over the document, and the one at the
# least edit distance is taken. A retriever cuts and cleans pages in its own way, so passages are seldom verbatim in
# them.


MOST_CHARS = 1000
"""A longer passage is searched by its beginning: time grows with the product of both lengths."""
_MOST_WINDOWS = 40
"""Windows that are compared to each passage's length of document. Prose takes a tenth of it; in a text that repeats
itself without end, all windows are near, and the search stops at the nearest so far.
"""


class PassagePlace(NamedTuple):
    """A piece of the document, `document[start:end]`, and its edit distance to the passage, or to its first
    `MOST_CHARS` characters; 0 where it is all of the document.
    """

    start: int
    end: int
    distance: int


def align(passage: str, document: str) -> PassagePlace | None:
    """The window of the passage's length that is nearest to it; the first of equals. All of the document for a passage
    that is as long or longer; None where more than half of the passage would have to be changed: two texts of one
    language that have nothing to do with each other are at about three quarters.

    Raises:
        MissingExtraError: the passage is not in the document verbatim, and rapidfuzz is not installed.
    """
    if len(passage) >= len(document):
        return PassagePlace(0, len(document), 0)
    start = document.find(passage)
    if start >= 0:
        return PassagePlace(start, start + len(passage), 0)
    found = _nearest(passage[:MOST_CHARS], document, last=len(document) - len(passage))
    return PassagePlace(found[0], found[0] + len(passage), found[1]) if found else None


def _nearest(passage: str, document: str, *, last: int) -> tuple[int, int] | None:
    """Start and distance of the first window, none after `last`, at the least Levenshtein distance, half of the
    passage at most.

    A window moved by one character loses one and gains one, so its distance changes by two at most: from a window that
    is far off, those that can't be better are stepped over.
    """
    rapidfuzz = require("rapidfuzz", extra="pairs", purpose="Finding a passage that is not there verbatim")
    distance = rapidfuzz.distance.Levenshtein.distance
    length = len(passage)
    best_start, best = -1, length // 2 + 1
    at = 0
    for _ in range(_MOST_WINDOWS * len(document) // length):
        if at > last:
            break
        found = distance(passage, document[at : at + length])
        if found < best:
            best_start, best = at, found
        at += (found - best) // 2 + 1
    return (best_start, best) if best_start >= 0 else None


def content_at(tree: Tree, place: PassagePlace) -> list[int]:
    """Ids of the content nodes that a place lies in, in order: of which more lies there than the edits explain; where
    there is none, the one of which most does.

    So a passage that was cut a character early or late, or is a few characters off at its ends, has no more nodes than
    the passage itself.
    """
    overlaps = {
        node.id: min(node.end, place.end) - max(node.start, place.start) for node in tree.nodes if node.is_content
    }
    found = [id for id, overlap in overlaps.items() if overlap > place.distance + 1]
    most = max(overlaps, key=overlaps.__getitem__, default=None)
    return found or ([] if most is None or overlaps[most] <= 0 else [most])


# ------------------------------------------------------------------------------
# `route`: which passages of a document answer a question, and which headings to unfold next; for each retrieved
# passage, and again for what each unfolded heading brings to light.
#
# Source: RDR2 (papers, section 3 and appendix A.1). The sentences are ours.


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


class View(NamedTuple):
    """The texts of a subtree's nodes as they are shown, the room that they take, and whether one was cut."""

    texts: tuple[str, ...]
    num_chars: int
    is_cut: bool


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
        self._prompts = Prompts(BUILT_IN / "route", options.templates)
        self._system = self._prompts.turn("system", "system.j2", data=(), settings={"words": OPTION_WORDS}).message()
        self._sampling = Sampling(options.temperature, options.top_p)
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
        said: list[Actions] = []
        steps: list[str] = []
        left = self._options.expansions
        for matched in self._matches(pair, subtree.tree, flags):
            subtree = subtree.light(matched)
            waiting: list[int | None] = [None]
            while waiting:
                if (heading := waiting.pop(0)) is not None:
                    unfolded = subtree.expand(heading)
                    if unfolded is subtree or not left:
                        continue
                    subtree, left = unfolded, left - 1
                actions, texts = yield from self._step(pair, subtree, flags)
                waiting += actions.expands
                said.append(actions)
                steps.append(step_json(heading, subtree, texts, actions))
        return _label(subtree.tree, said, steps, flags)

    def recall(self, row: Mapping[str, Any], ask: Ask, number: int) -> Recalled:
        """What a step of a label answers; see `Labeler.recall`."""
        if number >= len(row["steps"]):
            raise VerdictError("format", "the label has fewer steps than are asked")
        return recall_step(row["steps"][number], ask)

    def probe(self) -> list[Ask]:
        text = "Cut back to an outward bud in late winter."
        nodes = (Node(0, "structure", 0, "Roses", 0, 0, -1), Node(1, "content", 1, text, 0, len(text), 0))
        subtree = Subtree(read_tree([node._asdict() for node in nodes], text)).light([1])
        return [self._ask("how to prune roses", subtree, _view(subtree, self._room), _format(subtree))]

    @property
    def _room(self) -> int:
        return self._options.window_tokens * CHARS_PER_TOKEN

    def _matches(self, pair: Pair, tree: Tree, flags: dict[str, None]) -> Iterator[list[int]]:
        """Content that each passage lies in, none twice; nothing once where there is no such content."""
        found: dict[tuple[int, ...], None] = {}
        for passage in pair.columns.get(PASSAGES.name, ())[: self._options.passages]:
            place = align(passage, pair.document)
            matched = content_at(tree, place) if place is not None else []
            if matched:
                found[tuple(matched)] = None
            else:
                flags["passage_not_found"] = None
        yield from map(list, found or {(): None})

    def _step(
        self, pair: Pair, subtree: Subtree, flags: dict[str, None]
    ) -> Generator[Ask, Answer, tuple[Actions, tuple[str, ...]]]:
        """One ask; another with shorter texts while the engine finds it too long. Also gives the texts
        of the nodes as shown.
        """
        view = _view(subtree, self._room)
        format = _format(subtree)
        while (answer := (yield self._ask(pair.query, subtree, view, format))).finish == "overlong":
            before, view = view, _view(subtree, int(view.num_chars * SHRINK))
            if view == before:
                break
        content = Reader(format).read(answer)[""]
        actions = read_actions(content, subtree)
        if actions.fault is not None and self._options.expelled == "quarantine":
            raise unreadable(answer, actions.fault)
        held = {"document_truncated": view.is_cut, "expelled": actions.expelled, "collapsed": actions.is_collapsed}
        flags |= dict.fromkeys([*(flag for flag, holds in held.items() if holds), *answer.flags])
        return actions, view.texts

    def _ask(self, query: str, subtree: Subtree, view: View, format: AnswerFormat) -> Ask:
        marks = ["\t" * node.level + str(node.id) for node in subtree.visible]
        counts = {NODES_FIELD: len(marks)}
        turn = self._prompts.turn(
            "user", "user.j2", data=("query", NODES_FIELD), settings={"marks": marks}, counts=counts
        )
        messages = (self._system, turn.message(query, *view.texts))
        return Ask("route", messages, format, token_budget(format), sampling=self._sampling)


def _view(subtree: Subtree, room: int) -> View:
    """Texts cut to one length, so that all fit; what an action's prefix needs stays in any case."""
    lines = [one_line(node.text) for node in subtree.visible]
    most_chars = longest = max(map(len, lines))
    while True:
        texts = tuple(line[:most_chars] for line in lines)
        num_chars = sum(map(len, texts)) + CHARS_PER_DOCUMENT * len(texts)
        if num_chars <= room or most_chars <= OPTION_CHARS:
            return View(texts, num_chars, most_chars < longest)
        most_chars = max(OPTION_CHARS, int(most_chars * SHRINK))


def _format(subtree: Subtree) -> AnswerFormat:
    return AnswerFormat((OptionLines(options_of(subtree), REFUSE),))


def _label(tree: Tree, said: list[Actions], steps: list[str], flags: dict[str, None]) -> Label:
    answers = list(dict.fromkeys(id for actions in said for id in actions.answers))
    expands = list(dict.fromkeys(id for actions in said for id in actions.expands))
    columns = {
        "answer_ids": answers,
        "expand_ids": expands,
        "refused": not answers and not expands and any(actions.refused for actions in said),
        "expelled": sum(actions.expelled for actions in said),
        "steps": steps,
    }
    nodes = (tree.nodes[id] for id in answers)
    evidence = tuple(Span(node.start, node.end, node.text) for node in nodes)
    return Label(2 if answers else int(bool(expands)), None, columns, evidence, flags=list(flags))
