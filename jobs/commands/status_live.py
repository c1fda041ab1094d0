"""`status --live`: follows a run by its receipts and by what its workers say of themselves."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from relabel.jobs.exits import Exit
from relabel.jobs.running.forecast import DoneSoFar, expected_of, left_s, left_text
from relabel.jobs.running.live import Live
from relabel.jobs.running.live_files import WorkerState, live_states
from relabel.manifests.errors import ManifestError
from relabel.manifests.runs.kept_estimates import load_estimate
from relabel.manifests.runs.ranges import Range
from relabel.manifests.runs.run_folder import RunFolder
from relabel.manifests.storage.run_stores import shard_lock_name

LOOK_EVERY_S = 2.0
LINE_EVERY_S = 10.0
"""Between two looks where nothing is drawn over: in a log."""


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """A worker's state as it is shown; `age_s` since it was written."""

    age_s: float
    is_stale: bool
    state: WorkerState


@dataclass(frozen=True, slots=True)
class LiveStatus:
    """One look at a run; the fields of the JSON of `status --live` in their order.

    Args:
        chunks_done: committed.
        rows_done: of them.
        is_held: a worker is at a shard, whether it has said anything yet or not.
        left_s: seconds until all rows are done, at the workers' rate: low, middle, high; None while nothing tells.
    """

    name: str
    output: str
    rows: int
    rows_done: int
    chunks: int
    chunks_done: int
    is_held: bool
    workers: list[WorkerLine]
    left_s: Range | None

    @property
    def is_done(self) -> bool:
        return self.chunks_done == self.chunks

    @property
    def goes_on(self) -> bool:
        return not self.is_done and self.is_held

    @property
    def exit(self) -> Exit:
        """`PARTIAL` where rows are open and nobody works on them."""
        return Exit.DONE if self.is_done or self.is_held else Exit.PARTIAL


def look(folder: RunFolder) -> LiveStatus:
    """From one listing of receipts, the live files, and locks where these prove no worker."""
    plan, attempts = folder.plan, folder.attempts_of_all()
    rows_done = sum(plan.shards[shard].chunks[chunk] for shard, done in attempts.items() for chunk in done)
    states = [WorkerLine(round(one.age_s, 1), one.is_stale, one) for one in live_states(folder.store)]
    heard = [line.state for line in states if not line.is_stale]
    is_open = (number for number, shard in enumerate(plan.shards) if len(attempts.get(number, ())) < len(shard.chunks))
    return LiveStatus(
        name=plan.name,
        output=folder.store.root,
        rows=plan.rows,
        rows_done=rows_done,
        chunks=plan.num_chunks,
        chunks_done=sum(map(len, attempts.values())),
        is_held=not all(state.tells_nothing for state in heard)
        or any(folder.store.is_locked(shard_lock_name(number)) for number in is_open),
        workers=states,
        left_s=_left_s(folder, heard, plan.rows - rows_done) if heard else None,
    )


def _left_s(folder: RunFolder, heard: list[WorkerState], rows_open: int) -> Range | None:
    expected, live = None, Live()
    with contextlib.suppress(ManifestError):
        estimate = load_estimate(folder.store)
        expected = None if estimate is None else expected_of(estimate)
    for state in heard:
        live.add(state.live)
    work = live.work._replace(prefill_s=live.work.prefill_s / len(heard), decode_s=live.work.decode_s / len(heard))
    done = DoneSoFar(
        seconds=max(state.seconds for state in heard),
        rows=sum(state.pairs for state in heard),
        in_flight=live.in_flight,
        answers=sum(state.requests for state in heard),
        refused=live.refused.total(),
        answered_tokens=sum(state.prompt_tokens + state.output_tokens for state in heard),
        work=work,
    )
    return left_s(done.rows + rows_open, done, expected)


def live_text(found: LiveStatus) -> str:
    """A look, for people."""
    if found.is_done:
        state = "every chunk is committed"
    elif found.is_held:
        state = f"ETA {left_text(found.left_s)}"
    else:
        state = "no worker: run the same command again"
    lines = [
        f"{found.name}: {found.rows_done:,} of {found.rows:,} rows committed, {found.chunks_done:,} of "
        f"{found.chunks:,} chunks · {state} · {found.output}"
    ]
    for line in found.workers:
        live, seconds = line.state.live, max(line.state.seconds, 1e-9)
        prompt = max(live.work.prefilled_tokens, line.state.prompt_tokens) / seconds
        output = max(live.work.decoded_tokens, line.state.output_tokens) / seconds
        age = f"{line.age_s:,.0f} s ago"
        if line.is_stale:
            age = f"stale, last heard of {age}: it is gone, or its engine has been at one step since"
        lines.append(
            f"  {line.state.worker} ({age}): {line.state.pairs:,} pairs, {live.in_flight:,} in flight, "
            f"{live.answers_text()} · {prompt:,.0f} prompt + {output:,.0f} output tokens/s"
        )
        if live.last_refused is not None:
            lines.append(f"    last refused: {live.last_refused.line()}")
    if found.is_held and not found.workers:
        lines.append("  a worker holds shards and has said nothing yet: its engine is starting")
    return "\n".join(lines)


def follow(folder: RunFolder, show: Callable[[LiveStatus], None]) -> LiveStatus:
    """Look again and again, until nobody is at the run any more; returns the last look."""
    every_s = LOOK_EVERY_S if sys.stdout.isatty() else LINE_EVERY_S
    while (found := look(folder)).goes_on:
        show(found)
        time.sleep(every_s)
    show(found)
    return found
