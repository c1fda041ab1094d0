"""`method: sft`: supervised fine-tuning on answers, with parts of the reasoning masked at random: rows answered in
verified runs or by gold, rebuilt turn by turn with the labeler's own prompts, as token ids, and their loss."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from relabel.distill.students.examples import (
    GoldGrades,
    ProvenRun,
    load_gold,
    open_proven_run,
    read_pairs,
    refuse_twice,
    rejoin,
)
from relabel.distill.students.spec import LearnedGold, LearnedLabels
from relabel.distill.teachers.res_rag import load_evidence_queries, whole_queries
from relabel.distill.teachers.rollouts import Span, token_parts
from relabel.distill.teachers.spec import SftGold, SftSpec, TeacherData, TeacherSpec
from relabel.distill.teachers.teaching import (
    ReportLine,
    TeacherBase,
    TeacherTrainer,
    Trained,
    TrainingEstimate,
    check_teacher_base,
    load_model,
    shard_decoder,
    train_learner,
)
from relabel.distill.training.loop import SupervisedLearner, plan_batches
from relabel.distill.training.output import TrainingPlace
from relabel.labelers.engines.grammars import GrammarCompiler
from relabel.labelers.engines.tokens import DecisionPlaces, Overlong
from relabel.labelers.evidence_set import EVIDENCE_SET, rendered_sets
from relabel.labelers.registry import Labeler, labeler_class, options_of_run
from relabel.labelers.verdicts import Reader
from relabel.manifests.asks import (
    Answer,
    Ask,
    Choice,
    Distribution,
    JsonIndices,
    Sampling,
    Section,
    closing_of,
    opening_of,
)
from relabel.manifests.errors import ConfigError, InputError, RelabelError, VerdictError
from relabel.manifests.files import Storage
from relabel.manifests.gold import check_scale
from relabel.manifests.label_keys import AnswerKeys, stage_digests
from relabel.manifests.labels import ANSWERS, Label, LabelRow, Pair, label_rows
from relabel.manifests.models import resolve_model
from relabel.manifests.plan import shard_row_ids
from relabel.manifests.rows import open_run_input
from relabel.manifests.run_labels import read_labels
from relabel.manifests.specs import LabelerOptions

# ------------------------------------------------------------------------------
# What a teacher learns from: rows that a labeler has answered, of proven runs, with the labeler that asked them; rows
# with trusted grades alone; or whole questions with the chunks that are wanted.


class AnsweredRow(NamedTuple):
    """One row.

    Args:
        label: what the labeler made of it; None where there is a grade alone.
        grade: of the label, or the trusted one.
        source: number of its run.
        sets: of a whole question, the chunks chosen of each document; it is one for all rows of its query.
    """

    pair: Pair
    grade: int
    label: LabelRow | None = None
    source: int = 0
    sets: tuple[tuple[int, ...], ...] | None = None


@dataclass
class AnsweredRows:
    """All rows that are learned from.

    Args:
        is_preliminary: the first grade alone is learned.
        shared: of each run, how the answers that rows of a query shared are keyed, and their texts by key.
        dropped: rows left out so far, by reason.
    """

    labeler: Labeler
    options: LabelerOptions
    is_preliminary: bool = False
    rows: list[AnsweredRow] = field(default_factory=list)
    shared: list[tuple[AnswerKeys, Mapping[bytes, str]]] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    runs: list[LearnedLabels] = field(default_factory=list)
    gold: LearnedGold | None = None
    notes: list[str] = field(default_factory=list)


def load_answered_rows(spec: SftSpec, storage: Storage) -> AnsweredRows:
    """Read runs and gold.

    Raises:
        ConfigError: runs of several labelers, or of another than the spec's, or one whose answers can't be rebuilt.
        InputError: a source is off, or nothing is left.
        ManifestError: a run is unfinished, over its limit, damaged, or its inputs changed.
    """
    data = spec.data
    opened = [open_proven_run(source.path, storage, allow_over_limit=source.allow_over_limit) for source in data.runs]
    options = _options(spec, opened)
    answered = AnsweredRows(labeler_class(options.name)(options), options, data.answer == "preliminary")
    if data.gold is not None and data.gold.sets is not None:
        _add_sets(answered, data.gold, data.gold.sets, storage)
        return answered
    if options.name == EVIDENCE_SET and data.gold is not None:
        raise ConfigError(
            f"data.gold: grades say nothing of the chunks that {options.name} chose. Name the column that does, as "
            "data.gold.sets, without runs; or leave gold out."
        )
    gold = None if data.gold is None else load_gold(data.gold, storage, is_learned=not opened, key="data.gold")
    if options.name != EVIDENCE_SET:
        check_learnable(answered, has_answers=bool(opened))
    if gold is not None and not opened:
        graded = zip(gold.pairs, gold.grades, strict=True)
        answered.rows = [AnsweredRow(pair, grade) for pair, grade in graded if grade is not None]
        grades = {row.grade for row in answered.rows}
        check_scale(grades, options.grades, where=gold.source.path, option="data.gold.map")
        answered.dropped += Counter({"without a trusted grade": len(gold.pairs) - len(answered.rows)})
    for run in opened:
        _add_run(answered, run, gold, storage)
    refuse_twice(answered.runs, key="data.runs")
    if gold is not None:
        answered.gold = replace(gold.about, graded_rows=len(answered.rows))
    if not answered.rows:
        listed = ", ".join(f"{count:,} rows {reason}" for reason, count in answered.dropped.items())
        paths = ", ".join(run.root for run in opened)
        if not opened and data.gold is not None:
            paths = f"{data.gold.path}, `{data.gold.grade}`"
        raise InputError(f"{paths}: no answer to learn from: {listed or 'no label'}.")
    return answered


def _options(spec: SftSpec, runs: Sequence[ProvenRun]) -> LabelerOptions:
    """The options of the spec's labeler, or of the one that asked all runs.

    Raises:
        ConfigError: they are not of one labeler.
    """
    options = spec.labeler or options_of_run(runs[0].plan.parts, runs[0].manifest.spec, where=runs[0].root)
    for run in runs:
        labeler = run.plan.facts.labeler
        if (labeler.name, labeler.grades) != (options.name, options.grades):
            raise ConfigError(
                f"{run.root}: is of labeler {labeler.name} with {labeler.grades} grades, and one teacher learns the "
                f"answers of one labeler, here {options.name} with {options.grades}. Name runs of one, and leave "
                "`labeler` out or name the same."
            )
    return options


def check_learnable(answered: AnsweredRows, *, has_answers: bool) -> None:
    """
    Args:
        has_answers: of runs; else there are grades alone.
    Raises:
        ConfigError: the labeler's answers can't be rebuilt from what there is.
    """
    name = answered.options.name
    labeler = answered.labeler
    asks = labeler.probe()
    tags: list[str] = []
    for ask in asks:
        if ask.format is not None:
            tags += [section.tag for section in ask.format.sections]
    if labeler.reads.siblings or ("" in tags and not labeler.recalls) or not answered.options.grades:
        raise ConfigError(
            f"labeler {name}: its answers can't be put together again from label files, so no teacher learns them."
        )
    first = asks[0].format
    has_first_grade = first is not None and isinstance(first.sections[0], Choice) and len(asks) == 1
    if answered.is_preliminary and not has_first_grade:
        raise ConfigError(f"data.answer: preliminary, and the answers of {name} do not begin with a grade.")
    if not has_answers and tags and not answered.is_preliminary:
        way = "Set data.answer: preliminary, or name" if has_first_grade else "Name"
        raise ConfigError(
            f"data.gold: holds grades, and an answer of {name} has {', '.join(tags) or 'lines'} as well. "
            f"{way} data.runs with such answers, or a labeler that answers with the grade alone (direct)."
        )


def _add_sets(answered: AnsweredRows, gold: SftGold, column: str, storage: Storage) -> None:
    """Whole questions with the sets of a column.

    Source: RES-RAG (section 3.4.1, the warm-up on heuristic labels).

    Raises:
        ConfigError: the labeler chooses no chunks.
        InputError: the file can't be read, or has no set.
    """
    if answered.options.name != EVIDENCE_SET:
        raise ConfigError(f"data.gold.sets: labeler {answered.options.name} chooses no chunks; want {EVIDENCE_SET}.")
    queries, dataset = load_evidence_queries(
        gold.path,
        gold.columns,
        column,
        answered.labeler,
        storage,
    )
    wanted = [query for query in queries if query.sets]
    if not wanted:
        raise InputError(f"{gold.path}: no query with chunks in `{column}`. There is nothing to learn from.")
    answered.rows = [AnsweredRow(query.pair, int(any(query.sets)), sets=query.sets) for query in wanted]
    answered.dropped += Counter({"queries without chunks wanted": len(queries) - len(wanted)})
    answered.gold = LearnedGold(
        path=gold.path,
        grade=None,
        sets=column,
        document=dataset.columns.document,
        rows=dataset.rows,
        graded_rows=len(wanted),
    )


def _add_run(answered: AnsweredRows, run: ProvenRun, gold: GoldGrades | None, storage: Storage) -> None:
    ours = stage_digests(answered.labeler.probe())
    if run.plan.parts.get("stages", ours) != ours:
        answered.notes.append(
            f"{run.root}: was asked with other prompts than the labeler's own here; its answers are learned under "
            "these. Set labeler.templates and options as its job had them, if that is not meant."
        )
    rows = chain.from_iterable(label_rows(read_labels(run.folder, file)) for file in run.manifest.labels)
    labelled = [row for row in rows if row.status == "ok" and row.grade is not None]
    dataset = open_run_input(run.root, run.plan, storage, reads=answered.labeler.reads)
    columns = {name: [getattr(row, name) for row in labelled] for name in ("row_id", "query_id", "doc_id")}
    pairs = rejoin(columns, dataset, run.root)
    number = len(answered.runs)
    answered.runs.append(run.about(weight=1.0, labels=len(labelled)))
    if answered.options.name == EVIDENCE_SET:
        chosen = {row.row_id: row.columns["selected"] for row in labelled}
        for shard in run.plan.shards:  # holds whole queries, as they were asked: a limit may have cut one
            for pair in whole_queries(read_pairs(dataset, shard_row_ids(run.folder.store, shard))):
                ids = [sibling.row_id for sibling in pair.siblings]
                if not chosen.keys().isdisjoint(ids):  # a row without a label gave nothing
                    sets = tuple(tuple(chosen.get(row_id) or ()) for row_id in ids)
                    answered.rows.append(AnsweredRow(pair, int(any(sets)), source=number, sets=sets))
        return
    trusted = [row.grade for row in labelled]
    if gold is not None:
        trusted = gold.of(run.plan, pairs)
        seen = {grade for grade in trusted if grade is not None}
        check_scale(seen, answered.options.grades, where=gold.source.path, option="data.gold.map")
    for row, pair, grade in zip(labelled, pairs, trusted, strict=True):
        if grade is None or grade != row.grade:
            reason = "without a trusted grade" if grade is None else "with another grade than the trusted one"
            answered.dropped[reason] += 1
        else:
            answered.rows.append(AnsweredRow(pair, grade, row, number))
    texts: dict[bytes, str] = {}
    for file in run.manifest.answers or ():
        table = run.folder.table(file, ANSWERS, ["key", "text"])
        texts.update(zip(table["key"].to_pylist(), table["text"].to_pylist(), strict=True))
    answered.shared.append((AnswerKeys(run.plan.parts), texts))


# ------------------------------------------------------------------------------
# What a labeler asked about a row and what it was answered, rebuilt from the label: the labeler's own generator
# asks, and its own reader reads what is put together here. A row whose label does not come out of that again is no
# example.


GRADES = ("preliminary", "score")
"""Sections that are decisions on the grade: always learned."""


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
    """A row that gives no example; `args[0]` is why, a phrase to follow a count of rows."""


def turns_of(answered: AnsweredRows, row: AnsweredRow) -> list[AnsweredTurn]:
    """All asks about a row with their answers.

    Raises:
        UnlearnableError: an answer is not there, can't be read, or reads as another label.
    """
    generator = answered.labeler.label(row.pair)
    ask = next(generator)
    if answered.is_preliminary:
        assert ask.format is not None
        first = ask.format.sections[0]
        grade = row.grade if row.label is None else row.label.columns.get(first.tag)
        if grade is None:
            raise UnlearnableError("without a first grade")
        return [AnsweredTurn(ask, (opening_of(first), str(grade), closing_of(first)))]
    turns: list[AnsweredTurn] = []
    num_answered = 0
    try:
        while True:
            turn, answer = _turn(answered, row, ask, num_answered)
            if turn is not None:
                turns.append(turn)
            num_answered += answer.finish != "overlong"
            ask = generator.send(answer)
    except VerdictError as exc:
        raise UnlearnableError("whose answer can't be read") from exc
    except StopIteration as end:
        if row.label is not None and not _is_same(end.value, row.label):
            raise UnlearnableError("whose answer reads as another label") from None
    return turns


def _turn(answered: AnsweredRows, row: AnsweredRow, ask: Ask, number: int) -> tuple[AnsweredTurn | None, Answer]:
    """What is learned of an answer, and the answer; nothing of one that a router recalls without a legal line.

    Args:
        number: of earlier asks that were answered.
    Raises:
        VerdictError: the answer is not in the ask's format.
    """
    if answered.labeler.recalls:
        assert row.label is not None
        answer, completion = answered.labeler.recall({"grade": row.grade, **row.label.columns}, ask, number)
        if not completion or answer.finish == "overlong":
            return None, answer
        return AnsweredTurn(ask, ("", completion, "")), answer
    if ask.format is None:
        (decision,) = ask.decisions
        if not 0 <= row.grade < len(decision.labels):
            raise UnlearnableError("whose grade is off the scale")
        probs = tuple(float(grade == row.grade) for grade in range(len(decision.labels)))
        answer = Answer(0, "", "stop", {decision.name: Distribution(probs, 0.0)})
        return AnsweredTurn(ask, (decision.labels[row.grade],), label=row.grade), answer
    reader = Reader(ask.format)
    if ask.shared_by is None:
        answer = Answer(0, own_text(row, ask.format.sections), "stop")
        reader.read(answer)
        return _tagged_turn(ask, reader, answer.text), answer
    for text in shared_texts(answered, row, ask):
        answer = Answer(0, text, "stop")
        intent = reader.read(answer).get("intent")
        if row.label and row.label.intent in (None, intent):
            return _tagged_turn(ask, reader, text), answer
    raise UnlearnableError("whose query's first answer was not kept")


def _tagged_turn(ask: Ask, reader: Reader, text: str) -> AnsweredTurn:
    """A turn answered by sections; what is between two of them goes with the later one."""
    reasoning: list[Span] = []
    start = 0
    for section in reader.format.sections:
        closing = closing_of(section)
        end = text.index(closing) + len(closing)
        if section.tag not in GRADES:
            reasoning.append((start, end))
        start = end
    return AnsweredTurn(ask, reader.turn_parts(text), tuple(reasoning))


def own_text(row: AnsweredRow, sections: Sequence[Section]) -> str:
    """An answer put together from its label's columns; a section that they hold nothing of is `none`."""
    assert row.label is not None
    label = row.label
    own = row.label.columns
    contents = {name: "none" if value is None else str(value) for name, value in own.items()}
    for name in ("subject", "attribute"):
        if own.get(name) is not None:
            contents[f"{name}_score"] = str(own[name])
    contents["think"] = label.reasoning or ""
    contents["intent"] = label.intent or ""
    contents["extract"] = "\n".join(str(span["text"]) for span in label.evidence) or "none"
    contents["score"] = str(label.grade)
    tagged = [f"{opening_of(section)}{contents.get(section.tag, '')}{closing_of(section)}" for section in sections]
    return "\n".join(tagged)


def _is_same(read: Label, row: LabelRow) -> bool:
    """Whether a label is the same as a stored one, distributions left out."""
    for name, value in read.columns.items():
        if not name.endswith(("_probs", "_outside_mass")) and value != row.columns.get(name):
            return False
    if read.grade != row.grade:
        return False
    if (read.intent or None) != (row.intent or None) or (read.reasoning or None) != (row.reasoning or None):
        return False
    spans = [(span["start"], span["end"]) for span in row.evidence]
    return [(span.start, span.end) for span in read.evidence] == spans


MOST_ROUNDS = 3
"""Rounds of `relabel retry` whose shared answers are searched."""


def shared_texts(answered: AnsweredRows, row: AnsweredRow, ask: Ask) -> Iterator[str]:
    """What rows of the query shared as the answer to an ask: no file has in which sample and at which attempt."""
    if row.label is None:
        return
    keys, texts = answered.shared[row.source]
    options = answered.options
    drawn = Sampling(max(ask.sampling.temperature, options.retry_temperature), ask.sampling.top_p)
    for attempt, sample, retries in product(range(options.attempts), range(options.samples), range(MOST_ROUNDS + 1)):
        key = keys.key(replace(ask, sampling=drawn) if attempt else ask, retries, sample, attempt)
        if key in texts:
            yield texts[key]


def choices(labeler: Labeler, row: AnsweredRow) -> Iterator[AnsweredTurn]:
    """A question with its answer, with fewer and fewer chunks shown, as a run would ask it while its prompt is too
    long.
    """
    walk = labeler.label(row.pair)
    with contextlib.suppress(StopIteration, VerdictError):
        ask = next(walk)
        while True:
            assert ask.format is not None
            (section,) = ask.format.sections
            assert isinstance(section, JsonIndices)
            if any(section.mosts):
                yield AnsweredTurn(ask, ("", rendered_sets(section, row.sets or ()), ""))
            ask = walk.send(Answer(0, "", "overlong"))


# ------------------------------------------------------------------------------
# Turns as token ids: the prompt as an engine encodes it, then the answer, and which of its tokens are reasoning.


REASONING = 0


class Example(NamedTuple):
    """One prompt with its answer, packed: five bytes a token, where a list would take eight and more.

    Args:
        ids: of both.
        is_reasoning: of each token of the answer, the last ones of `ids`: 1 or 0.
        row: number of the row that it is of.
    """

    ids: array[int]
    is_reasoning: bytes
    row: int

    @property
    def num_answer(self) -> int:
        """Tokens of the answer."""
        return len(self.is_reasoning)


class AnswerExamples(NamedTuple):
    """All examples; rows that gave none are counted by reason."""

    examples: list[Example]
    dropped: Counter[str]


def make_examples(answered: AnsweredRows, base: TeacherBase, *, max_tokens: int) -> AnswerExamples:
    """Examples of all rows; what rows of a query share is one example.

    Args:
        max_tokens: of prompt and answer.
    Raises:
        ModelError: the grades are not one token each.
    """
    dropped: Counter[str] = Counter()
    learned = _learned(answered, base, dropped, max_tokens=max_tokens)
    return AnswerExamples([example for _, example in learned], dropped)


def _learned(
    answered: AnsweredRows, base: TeacherBase, dropped: Counter[str], *, max_tokens: int
) -> Iterator[tuple[AnsweredTurn, Example]]:
    """Turns with their examples, in the order of the rows; why rows have none is counted in `dropped`."""
    encoder = AnswerEncoder(base)
    seen: set[tuple[str, bytes]] = set()
    for number, row in enumerate(answered.rows):
        try:
            if row.sets is not None:
                made = [encoder.longest_of(choices(answered.labeler, row), row, number, max_tokens=max_tokens)]
            else:
                made = [
                    (turn, encoder.encode(turn, row, number, max_tokens=max_tokens)) for turn in turns_of(answered, row)
                ]
        except UnlearnableError as exc:
            dropped[exc.args[0]] += 1
            continue
        for turn, example in made:
            key = turn.ask.stage, hashlib.sha256(example.ids.tobytes()).digest()
            if turn.ask.shared_by is None or key not in seen:
                seen.add(key)
                yield turn, example


CONVERSATIONS_NAME = "conversations.jsonl"


def export_conversations(spec: TeacherSpec, storage: Storage, folder: Path, *, cache_dir: Path | None = None) -> int:
    """Write the conversations that a spec's teacher would learn as chat JSONL, in TRL's form of prompt and completion;
    nothing is trained.

    Returns:
        How many there are.
    Raises:
        ConfigError: the method samples its answers itself, or the file is there already.
        RelabelError: as `train_teacher`, before it trains.
    """
    if not isinstance(spec, SftSpec):
        raise ConfigError(f"--export: `method: {spec.method}` samples its answers itself; only sft learns given ones.")
    file = folder / CONVERSATIONS_NAME
    scratch = folder / f".{CONVERSATIONS_NAME}"
    if file.exists():
        raise ConfigError(f"{file}: is there already. Name another folder, or remove it.")
    base = check_teacher_base(spec, resolve_model(spec.init, cache_dir=cache_dir))
    answered = load_answered_rows(spec, storage)
    learned = _learned(answered, base, Counter(), max_tokens=spec.train.max_tokens)
    count = 0
    folder.mkdir(parents=True, exist_ok=True)
    with scratch.open("w", encoding="utf-8") as target:
        for turn, example in learned:
            pair = answered.rows[example.row].pair
            chat: dict[str, Any] = {
                "prompt": [{"role": message.role, "content": message.text} for message in turn.ask.messages],
                "completion": [{"role": "assistant", "content": turn.ask.prefill + "".join(turn.parts)}],
            }
            if spec.chat_template_kwargs:
                chat["chat_template_kwargs"] = spec.chat_template_kwargs
            chat |= {"query_id": pair.query_id, "doc_id": pair.doc_id, "stage": turn.ask.stage}
            target.write(json.dumps(chat, ensure_ascii=False) + "\n")
            count += 1
    scratch.replace(file)
    return count


class AnswerEncoder:
    """Makes turns into token ids, for one model."""

    def __init__(self, base: TeacherBase) -> None:
        self._base = base
        self._places = DecisionPlaces(base.encoder, tokenizer_name=base.resolved.reference)

    def encode(self, turn: AnsweredTurn, row: AnsweredRow, number: int, *, max_tokens: int) -> Example:
        """One example.

        Raises:
            UnlearnableError: there is no room for it, or the evidence is in what was cut off the document.
        """
        if turn.label is not None:
            (decision,) = self._places.of(turn.ask)
            answer = [decision.label_ids[turn.label]]
            is_reasoning = [False]
        else:
            opened = self._base.encoder.opened_for(turn.ask).strip()  # in the prompt already
            answer = self._base.encoder.encode_answer((turn.parts[0].removeprefix(opened), *turn.parts[1:]))
            pieces = [opened.encode(), *map(self._compiler.token_bytes, answer)]
            is_reasoning = [part == REASONING for part in token_parts(pieces, {REASONING: turn.reasoning})[1:]]
            answer = [*answer, self._base.end_id]
            is_reasoning = [*is_reasoning, False]
        prompt = self._base.encoder.encode(turn.ask, max_prompt_tokens=max_tokens - len(answer))
        if isinstance(prompt, Overlong):
            raise UnlearnableError(f"too long for {max_tokens} tokens")
        seen = prompt.cut_document
        if seen is not None and row.label and any(str(span["text"]) not in seen for span in row.label.evidence):
            raise UnlearnableError("whose evidence is where the document was cut off")
        return Example(array("i", prompt.ids + answer), bytes(is_reasoning), number)

    def longest_of(
        self, turns: Iterable[AnsweredTurn], row: AnsweredRow, number: int, *, max_tokens: int
    ) -> tuple[AnsweredTurn, Example]:
        """The first turn that there is room for, of ever shorter ones.

        Raises:
            UnlearnableError: there is room for none.
        """
        for turn in turns:
            with contextlib.suppress(UnlearnableError):
                return turn, self.encode(turn, row, number, max_tokens=max_tokens)
        raise UnlearnableError(f"too long for {max_tokens} tokens, or without a chunk")

    @functools.cached_property
    def _compiler(self) -> GrammarCompiler:
        """Knows each token's bytes; takes a second to make, and grades alone do without."""
        base = self._base
        return GrammarCompiler(base.tokenizer, vocab_size=base.vocab_size, eos_ids=[base.end_id])


# ------------------------------------------------------------------------------
# Supervised fine-tuning: batches of answers with some of their reasoning masked, and their loss.
#
# Not TRL's SFTTrainer: what it adds (chat templates, packing, its own preparation of a data set) is what has to come
# from the labeler and the engine here, and its import takes ten times as long.


# B rows, T tokens, C tokens of the longest answer, V vocabulary

IGNORED = -100
"""Label of a token that is not learned, as torch has it."""


class MaskedCollator:
    """Example numbers become a batch of tensors, padded on the left, so that all answers end at the last place.

    Args:
        mask: ρ, chance of a token of the reasoning not to be learned.
        seed: what is masked follows from it, the epoch, the example's number and the token's place alone.
        pad_id: any id; padding is masked.
    """

    def __init__(self, examples: Sequence[Example], *, mask: float, seed: int, pad_id: int | None) -> None:
        self._examples = examples
        self._mask = mask
        self._seed = seed
        self._pad_id = pad_id or 0

    def learned(self, number: int, epoch: int = 0) -> np.ndarray:
        """Which tokens of an example's answer are learned in an epoch, bool [C]."""
        reasoning = np.frombuffer(self._examples[number].is_reasoning, dtype=bool)
        return ~reasoning | (np.random.default_rng([self._seed, epoch, number]).random(len(reasoning)) >= self._mask)

    def __call__(self, numbers: Sequence[int], epoch: int = 0) -> dict[str, Any]:
        """The batch of these examples: `input_ids`, `attention_mask`, `position_ids` [B, T], `labels` [B, C] of the
        last C places, and `rows` [B].
        """
        chosen = [self._examples[number] for number in numbers]
        width = max(len(example.ids) for example in chosen)
        longest = max(example.num_answer for example in chosen)
        ids_BT = torch.full((len(chosen), width), self._pad_id)
        mask_BT = torch.zeros((len(chosen), width), dtype=torch.int64)
        labels_BC = torch.full((len(chosen), longest), IGNORED)
        for row, (number, example) in enumerate(zip(numbers, chosen, strict=True)):
            ids = torch.from_numpy(np.array(example.ids, dtype=np.int64))
            ids_BT[row, width - len(ids) :] = ids
            mask_BT[row, width - len(ids) :] = 1
            answer = ids[len(ids) - example.num_answer :]
            is_learned = torch.from_numpy(self.learned(number, epoch))
            labels_BC[row, longest - len(answer) :] = torch.where(is_learned, answer, IGNORED)
        return {
            "input_ids": ids_BT,
            "attention_mask": mask_BT,
            "position_ids": (mask_BT.cumsum(1) - 1).clamp(min=0),
            "labels": labels_BC,
            "rows": torch.tensor(list(numbers)),
        }


def answer_loss(model: Any, batch: dict[str, Any]) -> Tensor:
    """Sum of the cross-entropies of a batch's learned tokens, float32 [].

    The logits are the model's own, at the places before the answers' tokens alone.
    """
    labels_BC = batch["labels"]
    tokens = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    width = labels_BC.shape[1] + 1
    last = batch["input_ids"].shape[1]
    # places, and not their number: of a slice that is not contiguous, torch multiplies each row by a copy of the output
    # matrix (8 rows of 60 tokens, SmolLM2-135M: 3.0 s a step for 2.6 s)
    places = torch.arange(last - width, last, device=labels_BC.device)
    logits_BCV = model(**tokens, use_cache=False, logits_to_keep=places).logits[:, -width:-1]
    return nn.functional.cross_entropy(
        logits_BCV.to(torch.get_default_dtype()).flatten(0, 1),
        labels_BC.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )


class AnswerLoss:
    """The mean of `answer_loss` over the learned tokens of an optimizer step."""

    def amounts(self, batch: dict[str, Any]) -> Tensor:
        """Learned tokens [1]."""
        return (batch["labels"] != IGNORED).sum()[None]

    def shares(self, model: Any, batch: dict[str, Any], totals_P: Tensor) -> dict[str, Tensor]:
        """A batch's share of the step's loss."""
        return {"loss": answer_loss(model, batch) / totals_P[0]}


# ------------------------------------------------------------------------------
# `method: sft`: a teacher learns to write answers, given the labeler's own prompts.
#
# The loss is a token's cross-entropy, over the answers' tokens that no mask leaves out, divided by their number in the
# optimizer step: −[log p(preliminary) + Σ_t m_t log p(c_t) + log p(final)] with m_t ~ Bernoulli(1 − ρ).
#
# Source: Graph-GRPO, equation 1 (random masking of the chain of thought).


class SftTrainer(TeacherTrainer):
    """Supervised fine-tuning on answers.

    Raises:
        ConfigError: the labeler's answers can't be rebuilt.
        InputError: a source is off, or no row gives an example.
        ManifestError: a run does not prove itself.
    """

    def __init__(self, spec: SftSpec, base: TeacherBase, storage: Storage) -> None:
        self._spec = spec
        self._base = base
        answered = load_answered_rows(spec, storage)
        examples, dropped = make_examples(answered, base, max_tokens=spec.train.max_tokens)
        listed = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
        if not examples:
            raise InputError(f"no row gives an example to learn from: {listed}.")
        self._examples = examples
        paths = [source.path for source in (*answered.runs, answered.gold) if source is not None]
        rows = [answered.rows[example.row] for example in examples]
        self._names = [(paths[row.source], row.pair.row_id) for row in rows]
        total = hashlib.sha256()
        for example in examples:
            total.update(f"{len(example.ids)} {example.num_answer}\n".encode())
            total.update(np.array(example.ids, dtype="<i4").tobytes())
            total.update(example.is_reasoning)
        self.digest = total.hexdigest()
        self.labeler = answered.options.model_dump(mode="json")
        self.templates = answered.labeler.template_digests
        self.notes = list(answered.notes)
        if listed:
            self.notes.append(f"rows left out: {listed}")
        self.data = TeacherData(
            runs=answered.runs,
            gold=answered.gold,
            rows=len(answered.rows) - dropped.total(),
            dropped=dict(sorted((answered.dropped + dropped).items())),
            examples=len(examples),
            tokens=sum(len(example.ids) for example in examples),
            answer_tokens=sum(example.num_answer for example in examples),
        )

    def estimate(self) -> TrainingEstimate:
        """What training would do."""
        train = self._spec.train
        data = self.data
        per_pass = math.ceil(data.examples / (train.batch_size * train.accumulation))
        steps = train.max_steps or max(1, math.ceil(train.epochs * per_pass))
        passes = steps / per_pass
        return TrainingEstimate(
            rows=data.rows,
            examples=data.examples,
            steps=steps,
            tokens=round(passes * data.tokens),
            answer_tokens=round(passes * data.answer_tokens),
        )

    def train(self, checkpoints: Path, report: ReportLine) -> Trained:
        """Train, resuming from the last whole checkpoint; with half the batch if memory runs out."""
        return train_learner(
            self._spec,
            checkpoints,
            report,
            functools.partial(self._learner, checkpoints, report),
            identity=self.identity,
        )

    def _learner(self, folder: Path, report: ReportLine, accelerator: Accelerator, halvings: int) -> SupervisedLearner:
        settings = self._spec.train
        examples = self._examples
        name = self._spec.name
        whole = functools.partial(load_model, self._spec, self._base)
        model = whole()
        if settings.strategy == "fsdp" and accelerator.num_processes > 1:
            shard_decoder(model, accelerator.device)
        return SupervisedLearner(
            accelerator,
            model,
            TrainingPlace(
                folder,
                settings.keep_checkpoints,
                report,
                self._names,
                name,
            ),
            settings,
            plan=plan_batches(
                [len(example.ids) for example in examples],
                np.arange(len(examples)),
                settings,
                accelerator,
                halvings,
            ),
            collate=MaskedCollator(
                examples, mask=settings.mask, seed=settings.seed, pad_id=self._base.tokenizer.pad_token_id
            ),
            step_loss=AnswerLoss(),
            whole=whole,
        )
