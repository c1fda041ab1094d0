"""`method: res-rag`: a teacher learns to choose evidence from what a frozen generator answers from it. The questions
with their chunks, the generator with its cache, the joint reward, and the method.

The loss is GRPO's, over answers that a grammar holds; see `grpo_trainer.py`. A kept answer of the generator is the
engine's own text, and is parsed again: a hit gives what asking again would. Failures of the engine are not kept.

Source: RES-RAG (sections 3.3 and 3.4, equations 8 to 14).
"""

import contextlib
import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from relabel.distill.students.examples import in_words_of_the_spec, read_pairs
from relabel.distill.students.spec import LearnedGold
from relabel.distill.teachers.grpo import GrpoTeacher, logger
from relabel.distill.teachers.rewards import GoldRow, GoldRows, Score
from relabel.distill.teachers.rollouts import Dialogues, FirstPrompt, Rollout
from relabel.distill.teachers.spec import EvidenceGold, GeneratorSpec, ResRagSpec
from relabel.distill.teachers.teaching import ReportLine, TeacherBase, Trained
from relabel.labelers.chunks import CHUNKS, chunk_texts
from relabel.labelers.engines.grammars import GrammarCompiler
from relabel.labelers.registry import Labeler, engine_class
from relabel.labelers.short_answers import ShortAnswers
from relabel.labelers.verdicts import index_lists_of
from relabel.manifests.asks import Answer, Ask, Engine, JsonIndices, Request
from relabel.manifests.errors import EngineCrashError, InputError, RelabelError, VerdictError
from relabel.manifests.evidence_sets import PAPER_WEIGHTS, RewardWeights, evidence_reward, token_f1
from relabel.manifests.files import Storage
from relabel.manifests.gold import GOLD_CHUNKS, further_of_input
from relabel.manifests.inputs import Dataset, open_dataset
from relabel.manifests.labels import InputColumn, Pair
from relabel.manifests.records import digest_of
from relabel.manifests.specs import Columns, InputSpec
from relabel.manifests.store import LocalStore

JSONLD = InputColumn("jsonld", "list<string>", "What the page says of itself.")


@dataclass(frozen=True, slots=True)
class EvidenceRow(GoldRow):
    """A question; its pair is its first row, with all rows as siblings.

    Args:
        sets: of each row the numbers of the wanted chunks, most important first; none where no row names any. Where
            the first prompt is known, of each document that is shown.
        answers: all that are wanted.
    """

    sets: tuple[tuple[int, ...], ...] = ()
    answers: tuple[str, ...] = ()

    @property
    def ask(self) -> Ask:
        """What is asked of it, as far as the prompt has room."""
        assert self.first is not None
        return self.first.ask

    @property
    def shown(self) -> JsonIndices:
        """Which documents are shown, and how many chunks of each."""
        assert self.ask.format is not None
        (section,) = self.ask.format.sections
        assert isinstance(section, JsonIndices)
        return section


def load_evidence_queries(
    path: str, columns: Columns, sets: str, labeler: Labeler, storage: Storage, *, answers: str | None = None
) -> tuple[list[EvidenceRow], Dataset]:
    """Whole queries, wherever their rows lie, in the order of their first rows; and what was read.

    Args:
        sets, answers: columns.
    Raises:
        InputError: the file can't be read, lacks a column, or a set names a chunk that its document does not have.
    """
    reads = labeler.reads
    wanted = () if answers is None else (InputColumn(answers, "list<string>", "The answers wanted.", True),)
    # whole queries are put together here
    reads = reads._replace(columns=(*reads.columns, JSONLD, *wanted), siblings=False)
    with in_words_of_the_spec("data.gold"):
        dataset = open_dataset(InputSpec(path=(path,), columns=columns), storage, reads=reads)
    further = further_of_input(
        [file.path for file in dataset.files], [GOLD_CHUNKS._replace(name=sets)], storage, where=path
    )
    if sets not in further:
        raise InputError(
            f"{path}: no column `{sets}` with the chunks that are wanted. `relabel pairs similar` writes `similar`; "
            "name another as `data.gold.sets`."
        )
    firsts = whole_queries(read_pairs(dataset, np.arange(dataset.rows)))
    queries = [
        _query(
            first,
            further[sets],
            path=path,
            column=sets,
            answers=answers,
        )
        for first in firsts
    ]
    return queries, dataset


def whole_queries(pairs: Sequence[Pair]) -> list[Pair]:
    """The first row of each query, with all its rows as siblings, wherever they lie."""
    by_query: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_query.setdefault(pair.query_id, []).append(pair._replace(siblings=()))
    return [rows[0]._replace(siblings=tuple(rows)) for rows in by_query.values()]


def _query(first: Pair, numbers: pa.Array, *, path: str, column: str, answers: str | None) -> EvidenceRow:
    rows = first.siblings
    wanted_of = [numbers[pair.row_id].as_py() for pair in rows]
    for pair, wanted in zip(rows, wanted_of, strict=True):
        most = len(pair.columns.get(CHUNKS.name, ()))
        off = [number for number in wanted or () if not 1 <= number <= most]
        if off:
            raise InputError(
                f"{path}: row {pair.row_id}: column `{column}` names chunk {off[0]} of document {pair.doc_id}, which "
                f"has {most} chunks, numbered from 1. Both columns must come from the same chunks."
            )
    sets: tuple[tuple[int, ...], ...] = ()
    if any(wanted is not None for wanted in wanted_of):
        sets = tuple(tuple(wanted or ()) for wanted in wanted_of)
    named: list[tuple[str, ...]] = []
    if answers is not None:
        named = [tuple(pair.columns.get(answers, ())) for pair in rows]
    return EvidenceRow(
        first,
        {"grade": None},
        path,
        sets=sets,
        answers=next(filter(None, named), ()),
    )


def load_evidence_rows(source: EvidenceGold, labeler: Labeler, dialogues: Dialogues, storage: Storage) -> GoldRows:
    """Read the questions, and leave out those that can't be rewarded or asked.

    Raises:
        InputError: as `load_evidence_queries`.
    """
    queries, dataset = load_evidence_queries(
        source.path,
        source.columns,
        source.sets,
        labeler,
        storage,
        answers=source.answers,
    )
    rows: list[GoldRow] = []
    dropped = Counter[str]()
    for query in queries:
        if not query.answers:
            dropped["queries without an answer wanted"] += 1
            continue
        if not query.sets:
            dropped["queries without chunks wanted"] += 1
            continue
        first = dialogues.first_prompt(query.pair)
        if first is None:
            dropped["queries whose prompt does not fit"] += 1
            continue
        row = row_of(query, first)
        if row is None:
            dropped["queries without a chunk to choose"] += 1
            continue
        rows.append(row)
    about = LearnedGold(
        path=source.path,
        grade=None,
        sets=source.sets,
        answers=source.answers,
        document=dataset.columns.document,
        rows=dataset.rows,
        graded_rows=len(rows),
    )
    return GoldRows(about, rows, dropped)


def row_of(query: EvidenceRow, first: FirstPrompt) -> EvidenceRow | None:
    """The question as it is asked; None where no chunk is shown. Its label is that of the first document with chunks:
    one of which nothing is shown has none.
    """
    row = replace(query, first=first)
    mosts = row.shown.mosts
    number = next((number for number, most in enumerate(mosts) if most), None)
    if number is None:
        return None
    pair = query.pair.siblings[number]._replace(siblings=query.pair.siblings)
    sets: list[tuple[int, ...]] = []
    for wanted, most in zip(query.sets, mosts, strict=False):
        sets.append(tuple(chunk for chunk in wanted if chunk <= most))
    return replace(row, pair=pair, sets=tuple(sets))


MOST_CRASHES = 3
"""Times in a row that the engine may go down without an answer before the training ends."""
ANSWER_TIMEOUT_S = 1800.0
"""An engine that gives no answer for so many seconds has gone down."""


class Evidence(NamedTuple):
    """What the generator is given: a question, chosen chunks' texts, and how the pages describe themselves."""

    query: str
    texts: tuple[str, ...]
    jsonld: tuple[str, ...] = ()


class Generated(NamedTuple):
    """What it made of it.

    Args:
        answers: best first; none where the evidence does not suffice or the answer could not be read.
        fault: `""`, or why there is nothing to read: `engine` is the generator's failure, all else (`format`,
            `truncated`, `overlong`, `refused`) is an answer that can't be used.
    """

    answers: tuple[str, ...]
    fault: str = ""


class Generator:
    """A generator with its kept answers. The engine starts with `start`, or with the first question that is not kept.

    Args:
        folder: where answers are kept.
        secrets: what the engine's options name, by option.
        start: makes the engine; the spec's own by default.
    """

    def __init__(
        self,
        spec: GeneratorSpec,
        folder: Path,
        *,
        secrets: Mapping[str, Any] | None = None,
        start: Callable[[], Engine] | None = None,
    ) -> None:
        self._spec = spec
        self._folder = folder
        self._secrets = dict(secrets or {})
        self._start = start or self._started
        self._answers = ShortAnswers()
        self._identity = identity_of(spec, self._answers)
        self._engine: Engine | None = None
        self._crashes = 0
        self._ids = 0

    def start(self) -> list[str]:
        """Start the engine; its remarks.

        Raises:
            ModelError, MissingExtraError, ConfigError: it can't start here.
        """
        if self._engine is not None:
            return []
        self._engine = self._start()
        try:
            return self._engine.prepare(self._answers.probe())
        except BaseException:
            self.close()
            raise

    def answer(self, questions: Sequence[Evidence]) -> list[Generated]:
        """What it answers to each; equal ones are asked once.

        Raises:
            EngineCrashError: the engine goes down time after time.
        """
        keys = {question: digest_of([self._identity, list(question)]) for question in questions}
        known = {key: self._kept(key) for key in keys.values()}
        asks = {key: self._answers.ask(*question) for question, key in keys.items() if known[key] is None}
        if asks:
            known |= self._ask(asks)
        for key in asks:
            answer = known[key]
            if answer is not None and answer.finish != "error":
                self._keep(key, answer)
        return [self._read(known[keys[question]]) for question in questions]

    def close(self) -> None:
        """Free the engine's device and memory."""
        engine = self._engine
        self._engine = None
        if engine is not None:
            engine.close()

    def _started(self) -> Engine:
        named = {"secrets": self._secrets} if self._secrets else {}  # only engines that name some take them
        return engine_class(self._spec.name)(self._spec, overlong="quarantine", **named)

    def _ask(self, asks: Mapping[str, Ask]) -> dict[str, Answer]:
        """Answers by key, those that came."""
        answers: dict[str, Answer] = {}
        try:
            self.start()
            for key, answer in self._polled(asks):
                answers[key] = answer
        except EngineCrashError as exc:
            self._crashes = 0 if answers else self._crashes + 1
            with contextlib.suppress(EngineCrashError):
                self.close()
            if self._crashes >= MOST_CRASHES:
                raise EngineCrashError(
                    f"the generator went down {MOST_CRASHES} times in a row without an answer: {exc} The last whole "
                    "checkpoint is kept: mend `generator`, and continue with --resume."
                ) from exc
            logger.warning("the generator went down; %d rollouts are dropped: %s", len(asks) - len(answers), exc)
        else:
            self._crashes = 0
        return answers

    def _polled(self, asks: Mapping[str, Ask]) -> Iterable[tuple[str, Answer]]:
        assert self._engine is not None
        waiting = list(asks)
        open_keys = dict[int, str]()
        last_s = time.monotonic()
        while waiting or open_keys:
            while waiting and self._engine.capacity:
                key = waiting.pop(0)
                self._ids += 1
                open_keys[self._ids] = key
                # of what is asked alone: the order in which rollouts come does not shift it
                self._engine.submit(Request(self._ids, asks[key], self._spec.seed ^ int(key[:15], 16)))
            for answer in self._engine.poll():
                last_s = time.monotonic()
                yield open_keys.pop(answer.request_id), answer
            if time.monotonic() - last_s > ANSWER_TIMEOUT_S:
                raise EngineCrashError(f"the generator gave no answer for {ANSWER_TIMEOUT_S:.0f} s.")

    def _read(self, answer: Answer | None) -> Generated:
        if answer is None:
            return Generated((), "engine")
        try:
            return Generated(tuple(self._answers.read(answer)))
        except VerdictError as exc:
            return Generated((), exc.status)

    def _keep(self, key: str, answer: Answer) -> None:
        values = {"text": answer.text, "finish": answer.finish, "detail": answer.detail}
        LocalStore(self._folder).put(f"{key[:2]}/{key}.json", json.dumps(values).encode(), is_synced=False)

    def _kept(self, key: str) -> Answer | None:
        """A kept answer; None where there is none, or its file is damaged: it is then asked again."""
        try:
            values = json.loads((self._folder / key[:2] / f"{key}.json").read_bytes())
            return Answer(0, values["text"], values["finish"], detail=values["detail"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def identity_of(spec: GeneratorSpec, answers: ShortAnswers) -> str:
    """Digest of all that decides its answers but for what is asked: engine, options, model, prompt."""
    engine = spec.model_dump(mode="json", exclude={"model": True, "cache": True, "args": set(spec.args.speed_only)})
    return digest_of(
        {
            "engine": engine,
            "model": engine_class(spec.name).model_digest(spec),
            "templates": answers.template_digests,
        }
    )


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
        self._generator = generator
        self._weights = weights

    def scores(self, rollouts: Sequence[Rollout], rows: Sequence[GoldRow]) -> list[Score]:
        """What each earned, all asked together, those of other processes too; NaN where the generator failed. An answer
        that is cut off has chosen nothing and counts as one that exceeds every document's budget. Labels lose their
        grade, which is one document's where the answer is about all.
        """
        asked = cast("Sequence[EvidenceRow]", rows)
        choices = [chosen_of(rollout, row) for rollout, row in zip(rollouts, asked, strict=True)]
        questions: list[Evidence] = []
        for chosen, row in zip(choices, asked, strict=True):
            if chosen is not None:
                questions.append(evidence_of(chosen, row))
        answers = iter(answered_by_first(questions, self._generator.answer))
        scores: list[Score] = []
        for rollout, row, chosen in zip(rollouts, asked, choices, strict=True):
            if rollout.label is not None:
                rollout.label.grade = None
            if chosen is None:
                scores.append(self._cut_off(rollout))
            else:
                scores.append(self._score(rollout, row, chosen, next(answers)))
        return scores

    def _score(self, rollout: Rollout, row: EvidenceRow, chosen: Chosen, generated: Generated) -> Score:
        f1_ans = token_f1(generated.answers, row.answers) if generated.answers else None
        reward = evidence_reward(
            chosen,
            row.shown.mosts,
            row.sets,
            f1_ans,
            self._weights,
        )
        is_lost = generated.fault == "engine"
        num_chosen = sum(len(set(numbers)) for numbers in chosen)
        of_choice = {"f1_ret": reward.agreement, "penalty": reward.penalty}
        parts = {
            **_lengths(rollout),
            **of_choice,
            "chunks": float(num_chosen),
            "no_evidence_rate": float(not num_chosen),
            "generator_failed_rate": float(is_lost),
        }
        columns: dict[str, Any] = {**of_choice, "generator_fault": generated.fault or None}
        if is_lost:
            return Score(math.nan, parts=parts, columns=columns)
        parts |= {
            "usefulness": reward.usefulness,
            "f1_ans": f1_ans or 0.0,
            "no_answer_rate": float(not generated.answers and not generated.fault),
            "unreadable_answer_rate": float(bool(generated.fault)),
        }
        columns |= {"answers": list(generated.answers), "usefulness": reward.usefulness, "f1_ans": f1_ans}
        return Score(reward.reward, parts=parts, columns=columns)

    def _cut_off(self, rollout: Rollout) -> Score:
        worth = self._weights.empty_answer
        cost = self._weights.cost
        parts = {"usefulness": worth, "f1_ret": 0.0, "penalty": cost}
        return Score(
            min(self._weights.highest, max(self._weights.lowest, worth - cost)),
            parts={**_lengths(rollout), **parts},
            columns=parts,
        )


def answered_by_first(
    questions: Sequence[Evidence], answer: Callable[[Sequence[Evidence]], list[Generated]]
) -> list[Generated]:
    """What the generator answers to this process's questions. Of several processes that train together the first one
    asks for all, so that there is one engine, and one cache, whatever their number. All of them call this alike.

    Args:
        answer: called in the first process alone.
    """
    state = PartialState()
    if state.num_processes == 1:
        return answer(questions)
    counts = gather_object([len(questions)])
    asked = gather_object(list(questions))
    answers = answer(asked) if state.is_main_process else None
    (of_all,) = broadcast_object_list([answers])
    start = sum(counts[: state.process_index])
    return cast("list[Generated]", of_all[start : start + len(questions)])


def chosen_of(rollout: Rollout, row: EvidenceRow) -> Chosen | None:
    """The chunks chosen of each document, as written; None where the answer could not be read."""
    if rollout.label is None:
        return None
    return index_lists_of(rollout.turns[0].text.strip(), row.shown)


def evidence_of(chosen: Chosen, row: EvidenceRow) -> Evidence:
    """What the generator is given for a choice: chunks by document, in the order chosen, each once."""
    documents = row.pair.siblings[: len(chosen)]
    texts: list[str] = []
    jsonld: list[str] = []
    for numbers, document in zip(chosen, documents, strict=True):
        texts += chunk_texts(document, numbers)
        jsonld += document.columns.get(JSONLD.name, ())
    return Evidence(row.pair.query, tuple(texts), tuple(jsonld))


def _lengths(rollout: Rollout) -> dict[str, float]:
    return {"format_rate": float(rollout.label is not None), "response_tokens": float(rollout.num_own)}


ANSWERS = "generator"
"""Folder of the generator's kept answers, in the folder of the checkpoints."""


class ResRagTeacher(GrpoTeacher):
    """GRPO with RES-RAG's joint reward.

    Raises:
        ModelError, MissingExtraError: the generator can't be started here.
        InputError: no question can be learned from, or fewer than a step takes.
    """

    _spec: ResRagSpec
    columns = EVIDENCE_COLUMNS

    def __init__(self, spec: ResRagSpec, base: TeacherBase, storage: Storage) -> None:
        try:
            engine_class(spec.generator.name).check(spec.generator)
            self._identity = identity_of(spec.generator, ShortAnswers())
        except RelabelError as exc:  # an engine names the keys of a job's `engine`
            raise type(exc)(re.sub(r"\bengine\.(?=[a-z])", "generator.", str(exc))) from exc
        super().__init__(spec, base, storage)

    def _read_gold(self, labeler: Labeler, storage: Storage) -> GoldRows:
        return load_evidence_rows(self._spec.data.gold, labeler, self._dialogues, storage)

    def _learned(self, gold: GoldRows) -> list[Any]:
        return [[[row.sets, row.answers] for row in cast("list[EvidenceRow]", gold.rows)], self._identity]

    def train(self, checkpoints: Path, report: ReportLine) -> Trained:
        """As GRPO; the generator is started before the trainer, and closed after it."""
        cache = self._spec.generator.cache
        folder = Path(cache) if cache is not None else checkpoints / ANSWERS
        self._generator = Generator(self._spec.generator, folder, secrets=self.secrets)
        try:
            if self.is_first:  # it alone asks
                report("starting the generator")
                for remark in self._generator.start():
                    report(remark)
            return super().train(checkpoints, report)
        finally:
            self._generator.close()

    def _method(self) -> tuple[Any, dict[str, Any]]:
        from relabel.distill.teachers.grpo_trainer import GrammarMasks, HeldTrainer

        reward = self._spec.reward
        base = self._base
        weights = RewardWeights(
            cost=reward.eta,
            answer=reward.alpha_ans,
            retrieval=reward.alpha_ret,
            empty_answer=reward.gamma,
            lowest=reward.r_min,
            highest=reward.r_max,
        )
        masks = GrammarMasks(
            GrammarCompiler(base.tokenizer, vocab_size=max(len(base.tokenizer), base.vocab_size), eos_ids=base.end_ids)
        )
        return HeldTrainer, {
            "masks": masks,
            "scored": EvidenceJudge(self._generator, weights).scores,
            "lowest": weights.lowest,
        }
