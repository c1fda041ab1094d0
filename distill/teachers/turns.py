"""What a labeler asked about a row and what it was answered, made anew from the label: the labeler's own generator
asks, and its own reader reads what is put together here. A row whose label does not come out of that again is no
example.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from relabel.distill.teachers.answered_rows import AnsweredRow, AnsweredRows
from relabel.distill.teachers.shared_answers import shared_texts
from relabel.labelers.evidence_set import EVIDENCE_SET
from relabel.labelers.registry import Labeler, declared_reads
from relabel.labelers.replays import Recalls
from relabel.labelers.verdicts import Reader
from relabel.manifests.asks import Answer, Ask, Distribution
from relabel.manifests.errors import ConfigError, RelabelError, VerdictError
from relabel.manifests.formats import Choice, closing_of, opening_of
from relabel.manifests.labels import Label
from relabel.manifests.schemas import LabelRow
from relabel.manifests.specs import LabelerOptions

GRADES = ("preliminary", "score")
"""Sections that are decisions on the grade: always learned."""

Span = tuple[int, int]


class AnsweredTurn(NamedTuple):
    """One ask with its answer.

    Args:
        parts: the answer, template text (tags) and data by turns; for an ask without a format its label alone.
        reasoning: characters [start, end) of it that are no grade.
        label: number of the decision's label, for an ask without a format.
    """

    ask: Ask
    parts: tuple[str, ...]
    reasoning: tuple[Span, ...] = ()
    label: int | None = None


class UnlearnableError(RelabelError):
    """A row that gives no example; `args[0]` is why, in words that a count goes before."""


def check_learnable(options: LabelerOptions, labeler: Labeler, *, has_answers: bool, is_preliminary: bool) -> None:
    """
    Args:
        has_answers: of runs; else there are grades alone.
        is_preliminary: the first grade alone is learned.
    Raises:
        ConfigError: the labeler's answers can't be made anew from what there is.
    """
    name, asks = options.name, labeler.probe()
    tags = [section.tag for ask in asks if ask.format is not None for section in ask.format.sections]
    if name == EVIDENCE_SET:
        raise ConfigError(f"labeler {name}: grades name no chunks. Name the column that does, as data.gold.sets.")
    is_untold = "" in tags and not isinstance(labeler, Recalls)
    if declared_reads(labeler, name=name).siblings or is_untold or not options.grades:
        raise ConfigError(
            f"labeler {name}: its answers can't be put together again from label files, so no teacher learns them."
        )
    first = asks[0].format
    has_first_grade = first is not None and isinstance(first.sections[0], Choice) and len(asks) == 1
    if is_preliminary and not has_first_grade:
        raise ConfigError(f"data.answer: preliminary, and the answers of {name} do not begin with a grade.")
    if not has_answers and tags and not is_preliminary:
        way = "Set data.answer: preliminary, or name" if has_first_grade else "Name"
        raise ConfigError(
            f"data.gold: holds grades, and an answer of {name} has {', '.join(tags) or 'lines'} as well. "
            f"{way} data.runs with such answers, or a labeler that answers with the grade alone (direct)."
        )


def turns_of(answered: AnsweredRows, row: AnsweredRow, *, is_preliminary: bool) -> list[AnsweredTurn]:
    """All asks about a row with their answers.

    Raises:
        UnlearnableError: an answer is not there, can't be read, or reads as another label.
    """
    generator = answered.labeler.label(row.pair)
    ask = next(generator)
    if is_preliminary:
        return [_preliminary(ask, row)]
    turns: list[AnsweredTurn] = []
    num_answered = 0
    try:
        while True:
            if isinstance(answered.labeler, Recalls):
                turn, answer = _recalled(answered.labeler, row, ask, num_answered)
            else:
                turn = _turn(answered, row, ask)
                answer = _answer(turn)
            turns += [turn] if turn is not None else []
            num_answered += answer.finish != "overlong"
            ask = generator.send(answer)
    except VerdictError as exc:
        raise UnlearnableError("whose answer can't be read") from exc
    except StopIteration as end:
        if row.label is not None and not _is_same(end.value, row.label):
            raise UnlearnableError("whose answer reads as another label") from None
    return turns


def _preliminary(ask: Ask, row: AnsweredRow) -> AnsweredTurn:
    assert ask.format is not None
    first = ask.format.sections[0]
    said = row.grade if row.label is None else row.label.columns.get(first.tag)
    if said is None:
        raise UnlearnableError("without a first grade")
    return AnsweredTurn(ask, (opening_of(first), str(said), closing_of(first)))


def _recalled(labeler: Recalls, row: AnsweredRow, ask: Ask, number: int) -> tuple[AnsweredTurn | None, Answer]:
    """What a labeler's labels tell themselves; nothing is learned of an answer without a legal line."""
    assert row.label is not None
    answer, completion = labeler.recall({"grade": row.grade, **row.label.columns}, ask, number)
    is_learned = completion and answer.finish != "overlong"
    return AnsweredTurn(ask, ("", completion, "")) if is_learned else None, answer


def _turn(answered: AnsweredRows, row: AnsweredRow, ask: Ask) -> AnsweredTurn:
    if ask.format is None:
        (decision,) = ask.decisions
        if not 0 <= row.grade < len(decision.labels):
            raise UnlearnableError("whose grade is off the scale")
        return AnsweredTurn(ask, (decision.labels[row.grade],), label=row.grade)
    if ask.shared_by is None:
        assert row.label is not None
        said = said_in(row.label)
        text = "\n".join(f"{opening_of(s)}{said.get(s.tag, '')}{closing_of(s)}" for s in ask.format.sections)
        return _read_turn(ask, text)
    for text in shared_texts(answered, row, ask):
        turn = _read_turn(ask, text)
        if row.label is None or row.label.intent in (None, Reader(ask.format).read(_answer(turn)).get("intent")):
            return turn
    raise UnlearnableError("whose query's first answer was not kept")


def _read_turn(ask: Ask, text: str) -> AnsweredTurn:
    """
    Raises:
        VerdictError: the text is not in the ask's format.
    """
    assert ask.format is not None
    reader = Reader(ask.format)
    reader.read(Answer(0, text, "stop"))
    spans = []
    at = 0
    for section in ask.format.sections:  # what is between two sections goes with the later one
        end = text.index(closing_of(section)) + len(closing_of(section))
        if section.tag not in GRADES:
            spans.append((at, end))
        at = end
    return AnsweredTurn(ask, reader.turn_parts(text), tuple(spans))


def said_in(label: LabelRow) -> dict[str, str]:
    """What each section of an answer says, by tag, as far as the label's columns tell; `none` where they hold
    nothing.
    """
    own: Mapping[str, Any] = label.columns
    found = {name: "none" if value is None else str(value) for name, value in own.items()}
    found |= {f"{name}_score": str(own[name]) for name in ("subject", "attribute") if own.get(name) is not None}
    extract = "\n".join(str(span["text"]) for span in label.evidence)
    return found | {
        "think": label.reasoning or "",
        "intent": label.intent or "",
        "extract": extract or "none",
        "score": str(label.grade),
    }


def _answer(turn: AnsweredTurn) -> Answer:
    if turn.label is None:
        return Answer(0, "".join(turn.parts), "stop")
    (decision,) = turn.ask.decisions
    probs = tuple(float(number == turn.label) for number in range(len(decision.labels)))
    return Answer(0, "", "stop", {decision.name: Distribution(probs, 0.0)})


def _is_same(read: Label, held: LabelRow) -> bool:
    """Whether a label says what another one does, distributions left out."""
    own = all(
        value == held.columns.get(name)
        for name, value in read.columns.items()
        if not name.endswith(("_probs", "_outside_mass"))
    )
    evidence = [(span.start, span.end) for span in read.evidence]
    return (
        own
        and read.grade == held.grade
        and (read.intent or None) == (held.intent or None)
        and (read.reasoning or None) == (held.reasoning or None)
        and evidence == [(span["start"], span["end"]) for span in held.evidence]
    )
