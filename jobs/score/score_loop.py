"""The loop of a score run: a thread reads and tokenizes chunks ahead, the main thread keeps the student busy,
committers write.

A chunk is the unit of everything: its rows are sorted by length together, its batches follow from it alone, and its
order is restored when it is committed. So a run that was killed ends with the bytes of one that was not.
"""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from relabel.distill.students.score import PairScorer, Scorer
from relabel.distill.students.token_rows import TokenRow
from relabel.jobs.running.chunks import ChunkWork
from relabel.jobs.running.commits import CommitThreads
from relabel.jobs.running.conclusions import RunReport, conclude
from relabel.jobs.running.counts import Progress
from relabel.jobs.running.live import StageSeen
from relabel.jobs.running.sessions import Session
from relabel.jobs.running.stops import Stop, start_unless_stopped
from relabel.jobs.score.bundle_scorer import start_bundle
from relabel.jobs.score.student_identity import identify, start_student
from relabel.jobs.score.student_jobs import score_rows
from relabel.jobs.score.student_labeler import STAGE, BundleArgs, StudentArgs
from relabel.manifests.asks import EngineFacts

CHUNKS_AHEAD = 2
"""Chunks that wait, tokenized, for the student: enough that a GPU never waits for the tokenizer, few enough to keep
memory flat.
"""
LOOK_EVERY_S = 0.2


class _Prepared(NamedTuple):
    work: ChunkWork
    rows: list[TokenRow]


class ScoreLoop:
    """Scores chunks until they run out or a stop is asked for.

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
        self._ahead: queue.Queue[_Prepared | BaseException | None] = queue.Queue(CHUNKS_AHEAD)
        self._is_over = threading.Event()
        self._has_committed = threading.Event()
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
        reader = threading.Thread(target=self._prepare, args=(chunks,), name="tokenize", daemon=True)
        gc.freeze()  # what torch and the student brought along is not looked through again: 0.25 s a full collection
        with self._commits:
            reader.start()
            try:
                is_done = self._score_all()
            finally:
                self._is_over.set()
                reader.join()
                gc.unfreeze()
            self._settle(wait_for_all=True)
        return is_done

    def _prepare(self, chunks: Iterator[ChunkWork | None]) -> None:
        """Read and tokenize ahead; the thread's one fault, whatever it is, is handed to the main thread in its turn."""
        last: BaseException | None = None
        try:
            for work in chunks:
                if self._is_over.is_set() or self.stop.reason is not None:
                    break
                if work is None:
                    self._has_committed.wait(LOOK_EVERY_S)
                    self._has_committed.clear()
                    continue
                rows = self.scorer.encode([(pair.query, pair.document) for pair in work.pairs])
                self._hand_over(_Prepared(work, rows))
        except BaseException as exc:  # noqa: BLE001 (raised again by the main thread, see `_score_all`)
            last = exc
        self._hand_over(last)

    def _hand_over(self, item: _Prepared | BaseException | None) -> None:
        while not self._is_over.is_set():
            try:
                self._ahead.put(item, timeout=LOOK_EVERY_S)
                return
            except queue.Full:
                continue

    def _score_all(self) -> bool:
        while True:
            self.stop.mind(self._seconds_a_chunk)
            if self.stop.reason is not None:
                return False
            try:
                item = self._ahead.get(timeout=LOOK_EVERY_S)
            except queue.Empty:
                self._settle(wait_for_all=False)
                self.on_progress()
                continue
            if item is None:
                return self.stop.reason is None
            if isinstance(item, BaseException):
                self._settle(wait_for_all=True)
                raise item
            if not self._score(item):
                return False
            self._settle(wait_for_all=False)

    def _score(self, item: _Prepared) -> bool:
        """Score one chunk and hand it to a committer; False if a stop came that leaves no time for it."""
        work, tokens = item
        started_s = time.perf_counter()
        work.started_s, work.started_clock = started_s, time.time()
        probs = self.scorer.score(tokens, self._goes_on)
        if probs is None:
            return False
        rows = score_rows(work.pairs, work.keys, probs, tokens, self.scorer.phi)
        work.rows = list(rows)
        work.left = 0
        num_tokens = sum(len(row.ids) for row in tokens)
        work.stages[STAGE] = StageSeen(len(rows), prompt_tokens=num_tokens)
        self._seconds_a_chunk = max(time.perf_counter() - started_s, 0.9 * self._seconds_a_chunk)
        progress = self.progress
        lost = Counter(row.status for row in rows if row.status != "ok")
        progress.statuses.update(lost)
        progress.statuses["ok"] -= lost.total()
        progress.requests += len(rows)
        progress.prompt_tokens += num_tokens
        self._commits.add(work)
        return True

    def _goes_on(self, num_rows: int) -> bool:
        """After each batch: count, draw, and say whether the chunk may still be finished."""
        self._count(num_rows)
        self.on_progress()
        return not (self.stop.is_now or time.perf_counter() > self.stop.deadline_s)

    def _count(self, num_rows: int) -> None:
        """Rows as good until their chunk is whole: only then is it known which are not."""
        self.progress.pairs += num_rows
        self.progress.statuses["ok"] += num_rows

    def _settle(self, *, wait_for_all: bool) -> None:
        if self._commits.settle(wait_for_all=wait_for_all):
            self._has_committed.set()


def score(
    session: Session,
    *,
    on_progress: Callable[[], None] = lambda: None,
    on_engine: Callable[[EngineFacts], None] = lambda _: None,
) -> RunReport:
    """Do a session's work and finish the run if it was the last of it.

    Args:
        on_progress: called often while rows are scored.
        on_engine: called once, when the student is loaded.
    Raises:
        ManifestError: the files of student or bundle are not those of its manifest.
        ModelError, MissingExtraError: it can't be loaded, or not on this device.
    """
    started_s = time.perf_counter()
    start_s = 0.0
    try:
        if session.reach() and (begun := start_unless_stopped(session.stop, lambda: _start(session))) is not None:
            scorer, session.facts = begun
            start_s = time.perf_counter() - started_s
            on_engine(session.facts)
            session.progress.started_s = time.perf_counter()
            ScoreLoop(
                scorer, session.commit, progress=session.progress, stop=session.stop, on_progress=on_progress
            ).run(session.chunks())
    finally:
        session.close()
    report = conclude(session)
    report.seconds = time.perf_counter() - started_s
    report.engine_start_s = start_s
    return report


def _start(session: Session) -> tuple[PairScorer, EngineFacts]:
    """What the job's args are of: a student, or a bundle."""
    engine = session.opened.job.spec.engine
    args, path = engine.args, str(engine.model)
    if isinstance(args, BundleArgs):
        return start_bundle(path, args)
    assert isinstance(args, StudentArgs)
    student, facts = start_student(identify(path), args)
    return Scorer(student, batch_tokens=args.batch_tokens), facts
