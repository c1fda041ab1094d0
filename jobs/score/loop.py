"""A score run: the job whose engine is a student, the rows of its distributions, and the loop over chunks.

The job is planned, locked, committed and proven as any other; only what labels differs: a student is given whole
chunks, sorted by length, and generates nothing.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Literal

import numpy as np

from relabel.distill.students.length_batches import batch_tokens_on
from relabel.distill.students.manifest import STUDENT_NAME
from relabel.distill.students.model import PairScorer, Scorer, TokenRow
from relabel.distill.students.spec import NODE_HEADS
from relabel.export.loader import OPENVINO
from relabel.jobs.job import Job
from relabel.jobs.run.chunks import ChunkWork, StageSeen
from relabel.jobs.run.counts import Progress
from relabel.jobs.run.session import CommitThreads
from relabel.jobs.run.stop import Stop
from relabel.jobs.score import students
from relabel.jobs.score.students import (
    STAGE,
    STUDENT,
    BundleArgs,
    Dtype,
    Identity,
    StudentArgs,
    StudentLabeler,
    StudentOptions,
    identify,
    start_bundle,
    start_student,
)
from relabel.jobs.settings import Places, resolved
from relabel.manifests.asks import Answer, Engine, EngineFacts, Request
from relabel.manifests.errors import ManifestError, UsageError
from relabel.manifests.files import Storage
from relabel.manifests.inputs import Dataset
from relabel.manifests.labels import Pair, PhiTable
from relabel.manifests.plan import fingerprint_parts
from relabel.manifests.reuse import stage_digests
from relabel.manifests.schemas import LabelRow, QuarantineRow
from relabel.manifests.specs import EngineSpec, JobSpec, validate_spec


class ScoreJob(Job):
    """A job whose engine is a student. Its plan says so, so that readers of its labels know."""

    __slots__ = ()

    def parts(self, dataset: Dataset) -> dict[str, Any]:
        """What the fingerprint is made of: the input, the student, and in what it computes."""
        engine, args = self.spec.engine, self.spec.engine.args.model_dump(mode="json")
        found = fingerprint_parts(
            dataset,
            limit=self.spec.input.limit,
            overlong=self.spec.input.overlong,
            labeler={"name": STUDENT, "grades": self.spec.labeler.grades},
            label_columns={column.name: column.kind for column in self.labeler.columns},
            templates={},
            stages=stage_digests(self.labeler.probe()),
            engine={
                "name": STUDENT,
                "args": {
                    key: value for key, value in args.items() if key not in engine.args.speed_only and value is not None
                },
            },
            model_digest=self.model_digest(),
            cut={"shards": self.spec.shards, "chunk_rows": self.spec.run.chunk_rows},
        )
        return {**found, "kind": STUDENT}


def _identify(path: str) -> Identity:
    if students.is_bundle(path):
        return students.identify_bundle(path)
    if not (Path(path) / STUDENT_NAME).exists():
        raise ManifestError(
            f"{path}: holds no {STUDENT_NAME}, so no student, and is no bundle. Give the output of `relabel distill` "
            f"or of `relabel export`; where a bundle was pulled to, {path}/current."
        )
    return students.identify(path)


def score_job(
    student: str,
    input: Sequence[str],
    to: str,
    storage: Storage,
    *,
    columns: Mapping[str, Any] | None = None,
    name: str | None = None,
    limit: int | None = None,
    shards: int = 1,
    chunk_rows: int = 2048,
    batch_tokens: int | None = None,
    device: str = "auto",
    dtype: Dtype | None = None,
    precision: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> ScoreJob:
    """The job of `relabel score`, whose options these are; None is the student's own.

    Args:
        student: folder of a student or a bundle.
        columns: by role; the student's where none are named.
        dtype: of a student alone; float32 by default.
        precision: of a bundle alone; the fastest that passed its gate by default.
        say: called with what was chosen for the user, in a line.
    Raises:
        ManifestError: no student or bundle there.
        ConfigError: a value is off.
        UsageError: an option that goes with the other of student and bundle; see `students.choose`.
        MissingExtraError: a bundle's provider is not to be had here.
    """
    identity = _identify(student)
    record = identity.record
    args: StudentArgs | BundleArgs
    if students.is_bundle(student):
        if dtype is not None:
            raise UsageError(
                f"--dtype {dtype}: {student} is a bundle, which computes in what it was exported in. Name one of its "
                "precisions with --precision."
            )
        choice = students.choose(student, device, precision)
        provider = choice.provider
        if precision is None:
            say(f"precision {choice.precision} on {provider}: {choice.reason}")
        args = BundleArgs(
            batch_tokens=batch_tokens or batch_tokens_on(provider),
            device=provider,
            precision=choice.precision,
            runtime=OPENVINO if provider == OPENVINO else None,
        )
    elif precision is not None:
        raise UsageError(
            f"--precision {precision}: {student} is a student, which computes in --dtype. Export it to a bundle to "
            "label in int8."
        )
    else:
        args = StudentArgs(batch_tokens=batch_tokens, device=device, dtype=dtype or "float32")
    own = {role: column for role, column in record.columns.items() if role not in ("gold", "context")}
    options = StudentOptions(name=STUDENT, grades=record.grades)
    values = {
        "name": name or record.name,
        "input": {"path": input, "columns": {**own, **(columns or {})}, "limit": limit},
        "labeler": options,
        "engine": EngineSpec(name=STUDENT, model=student, max_prompt_tokens=max(64, record.max_tokens), args=args),
        "output": to,
        "shards": shards,
        "run": {"chunk_rows": chunk_rows},
    }
    here = str(Path.cwd())
    spec = resolved(validate_spec(JobSpec, values, where="relabel score"), Places("relabel score", here, here))
    return ScoreJob(spec, StudentLabeler(options, record.heads), StudentEngine, f"relabel score {student}", storage)


def score_rows(
    pairs: Sequence[Pair],
    keys: Sequence[bytes | None],
    probs: Mapping[str, np.ndarray],
    tokens: Sequence[TokenRow],
    phi: PhiTable,
) -> list[LabelRow | QuarantineRow]:
    """Rows of a chunk from a student's distributions.

    The grade is the most probable one, the lower of equals. A row without finite probabilities at any head is
    quarantined: NaN's argmax is 0, and a failure is not a grade.

    Args:
        probs: by head, float32 [B, K].
    """
    relevance_BK = probs["relevance"]
    is_whole_B = np.all([np.isfinite(values_BK).all(axis=1) for values_BK in probs.values()], axis=0)
    grades = relevance_BK.argmax(axis=1).tolist()
    expected = (relevance_BK * np.arange(relevance_BK.shape[1], dtype=np.float64)).sum(axis=1).tolist()
    own = _node_columns(probs, phi, grades)
    rows: list[LabelRow | QuarantineRow] = []
    columns = (pairs, keys, grades, relevance_BK.tolist(), expected, own, tokens, is_whole_B.tolist())
    for pair, key, grade, row, mean, mine, token, is_whole in zip(*columns, strict=True):
        length = len(token.ids)
        if not is_whole:
            rows.append(
                QuarantineRow(
                    pair.row_id,
                    pair.query_id,
                    pair.doc_id,
                    "engine",
                    "the student's probabilities are NaN",
                    [],
                    length,
                    0,
                )
            )
            continue
        flags = ["document_truncated"] if token.is_cut else []
        ids = (pair.row_id, pair.query_id, pair.doc_id)
        rows.append(
            LabelRow(
                *ids, "ok", grade, row, None, mean, [], None, None, flags, None, length, 0, False, key, columns=mine
            )
        )
    return rows


def _node_columns(probs: Mapping[str, np.ndarray], phi: PhiTable, grades: list[int]) -> list[dict[str, Any]]:
    """Subject and attribute of students that have these heads, and what φ makes of the most probable scores."""
    columns: dict[str, list[Any]] = {}
    for name in NODE_HEADS:
        if name in probs:
            columns[name] = probs[name].argmax(axis=1).tolist()
            columns[f"{name}_probs"] = probs[name].tolist()
    if "subject" in columns and "attribute" in columns:
        by_rule = [phi[s][a] for s, a in zip(*(columns[name] for name in NODE_HEADS), strict=True)]
        columns |= {
            "phi_grade": by_rule,
            "phi_agrees": [one == grade for one, grade in zip(by_rule, grades, strict=True)],
        }
    return (
        [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        if columns
        else [{} for _ in grades]
    )


CHUNKS_AHEAD = 2
"""Chunks that wait, tokenized, for the student: enough that a GPU never waits for the tokenizer, few enough to keep
memory flat.
"""
CHECK_EVERY_S = 0.2


class StudentEngine(Engine):
    """A student, or a bundle, as the engine of a run: it labels whole chunks (`LabelsChunks`) and takes no asks.

    Raises:
        ManifestError: the files of student or bundle are not those of its manifest.
        ModelError, MissingExtraError: it can't be loaded, or not on this device.
    """

    def __init__(self, spec: EngineSpec, *, overlong: Literal["truncate", "quarantine"]) -> None:
        path = str(spec.model)
        self.scorer: PairScorer
        if isinstance(spec.args, BundleArgs):
            self.scorer, self._facts = start_bundle(path, spec.args)
        else:
            assert isinstance(spec.args, StudentArgs)
            student, self._facts = start_student(identify(path), spec.args)
            self.scorer = Scorer(student, batch_tokens=spec.args.batch_tokens)

    @staticmethod
    def model_digest(spec: EngineSpec) -> str:
        """The digest of the student, or of the bundle."""
        return _identify(str(spec.model)).digest

    @property
    def capacity(self) -> int:
        return 1

    def facts(self) -> EngineFacts:
        return self._facts

    def submit(self, request: Request) -> None:
        raise NotImplementedError("a student labels chunks, see `label_chunks`")

    def poll(self) -> list[Answer]:
        return []

    def close(self) -> None:
        """Nothing to free: the process ends with its student."""

    def label_chunks(
        self, chunks: Iterator[ChunkWork | None], commit: Callable[[ChunkWork], bool], **loop: Any
    ) -> bool:
        """See `LabelsChunks` and `ScoreLoop`."""
        return ScoreLoop(self.scorer, commit, **loop).run(chunks)


class ScoreLoop:
    """Scores chunks until they run out or a stop is asked for. A thread reads and tokenizes ahead, the main thread
    keeps the student busy, committers write.

    A chunk's rows are sorted by length together, its batches follow from it alone, and its order is restored when it is
    committed. So a run that was killed ends with the bytes of one that was not.

    Args:
        commit: makes a finished chunk durable; called in a thread; returns False if another worker was first.
        on_progress: called often, for progress display.
    """

    def __init__(
        self,
        scorer: PairScorer,
        commit: Callable[[ChunkWork], bool],
        *,
        progress: Progress,
        stop: Stop,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.scorer = scorer
        self.progress = progress
        self.stop = stop
        self.on_progress = on_progress
        self._has_committed = threading.Event()
        self._is_over = False
        self._commits = CommitThreads(commit, progress)
        self._seconds_a_chunk = 0.0

    def run(self, chunks: Iterator[ChunkWork | None]) -> bool:
        """Work through the chunks.

        Args:
            chunks: what to score, read in a thread; None means "nothing just now", and is asked again once others were
                committed.
        Returns:
            True if all of them were committed, False if a stop left some undone.
        Raises:
            InputError: rows can't be read; raised once the chunks before them are committed.
            StoreError, DiskFullError: as they come; chunks that were complete are committed.
        """
        gc.freeze()  # what torch and the student brought along is not collected again: 0.25 s a full collection
        with self._commits, ThreadPoolExecutor(1, thread_name_prefix="tokenize") as reader:
            ahead = deque(reader.submit(self._read, chunks) for _ in range(CHUNKS_AHEAD))
            try:
                is_done = self._score_all(ahead, lambda: reader.submit(self._read, chunks))
            finally:
                self._is_over = True
                self._has_committed.set()
                gc.unfreeze()
            self._settle(wait_for_all=True)
        return is_done

    def _read(self, chunks: Iterator[ChunkWork | None]) -> tuple[ChunkWork, list[TokenRow]] | None:
        """The next chunk, tokenized; None at the end. In a thread of its own."""
        while not self._is_over and self.stop.reason is None:
            work = next(chunks, _END)
            if work is _END:
                return None
            if work is not None:
                return work, self.scorer.encode([(pair.query, pair.document) for pair in work.pairs])
            self._has_committed.wait(CHECK_EVERY_S)
            self._has_committed.clear()
        return None

    def _score_all(self, ahead: deque[_Ahead], read_next: Callable[[], _Ahead]) -> bool:
        while True:
            self.stop.mind(self._seconds_a_chunk)
            if self.stop.reason is not None:
                return False
            if not wait([ahead[0]], timeout=CHECK_EVERY_S).done:
                self._settle(wait_for_all=False)
                self.on_progress()
                continue
            if (error := ahead[0].exception()) is not None:
                self._settle(wait_for_all=True)
                raise error
            if (item := ahead.popleft().result()) is None:
                return self.stop.reason is None
            ahead.append(read_next())
            if not self._score(*item):
                return False
            self._settle(wait_for_all=False)

    def _score(self, work: ChunkWork, tokens: list[TokenRow]) -> bool:
        """Score one chunk and hand it to a committer; False if a stop came that leaves no time for it."""
        started_s = time.perf_counter()
        work.started_s, work.started_clock = started_s, time.time()
        probs = self.scorer.score(tokens, self._counted)
        if probs is None:
            return False
        rows = score_rows(work.pairs, work.keys, probs, tokens, self.scorer.phi)
        work.rows = list(rows)
        work.left = 0
        num_tokens = sum(len(row.ids) for row in tokens)
        work.stages[STAGE] = StageSeen(len(rows), prompt_tokens=num_tokens)
        self._seconds_a_chunk = max(time.perf_counter() - started_s, 0.9 * self._seconds_a_chunk)
        lost = Counter(row.status for row in rows if row.status != "ok")
        self.progress.statuses.update(lost)
        self.progress.statuses["ok"] -= lost.total()
        self.progress.requests += len(rows)
        self.progress.prompt_tokens += num_tokens
        self._commits.add(work)
        return True

    def _counted(self, num_rows: int) -> bool:
        """After each batch: count its rows as good until their chunk is whole, and say whether it may be finished."""
        self.progress.pairs += num_rows
        self.progress.statuses["ok"] += num_rows
        self.on_progress()
        return not (self.stop.is_now or time.perf_counter() > self.stop.deadline_s)

    def _settle(self, *, wait_for_all: bool) -> None:
        if self._commits.settle(wait_for_all=wait_for_all):
            self._has_committed.set()


_END: Any = object()
_Ahead = Future[tuple[ChunkWork, list[TokenRow]] | None]
