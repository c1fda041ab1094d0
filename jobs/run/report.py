"""What an execution did, as a record: its JSON, its end table, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from relabel.jobs.output import Exit, grid
from relabel.jobs.run.allowance import AT_BUDGET
from relabel.jobs.run.progress import Live
from relabel.manifests.asks import EngineFacts
from relabel.manifests.budgets import BudgetState
from relabel.manifests.records import LEFT_OUT, plain
from relabel.manifests.run_folder import Tally
from relabel.manifests.run_manifest import CascadeAudit
from relabel.manifests.secrets import counted

if TYPE_CHECKING:
    from relabel.jobs.run.batches import BatchesOut
    from relabel.manifests.canaries import CanaryResult

ENDED_AT_BUDGET = "ended at its budget; everything that was committed is kept"
BUSY_SHOWN = 10
"""Numbers of locked shards that are listed."""


@dataclass(slots=True)
class InVain:
    """What an execution asked and discarded; `cost` is None where the engine names no price."""

    pairs: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    cost: float | None


@dataclass(slots=True)
class Kept:
    """Answers of chunks that stay open, which the next execution does not ask for again."""

    answers: int
    tokens: int


@dataclass(slots=True)
class ThisRun:
    """What an execution has committed, by the names of `Progress`.

    Args:
        in_vain: what else it asked.
        kept: what it asked and leaves to the next; None if it is nothing.
        costs: of an engine that is paid for.
    """

    pairs: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    reused: int
    statuses: dict[str, int]
    in_vain: InVain
    chunks_committed: int
    chunks_lost: int
    seconds: float
    kept: Kept | None = field(default=None, metadata=LEFT_OUT)
    costs: dict[str, Any] | None = field(default=None, metadata=LEFT_OUT)
    canary: CanaryResult | None = field(default=None, metadata=LEFT_OUT)

    def rows(self) -> list[tuple[str, str]]:
        """For the end table."""
        seconds = max(self.seconds, 1e-9)
        prompt = self.prompt_tokens
        output = self.output_tokens
        hits = f"{self.cached_tokens / prompt:.0%} of prompt tokens" if prompt else "none"
        return [
            ("this run", f"{counted(self.pairs, 'pair')} in {self.seconds:.1f} s, {self.pairs / seconds:,.1f} pairs/s"),
            ("tokens", f"{prompt:,} in, {output:,} out, {(prompt + output) / seconds:,.0f} tokens/s"),
            ("prefix hits", hits),
            *self._kept_rows(),
            *self._discarded_rows(),
        ]

    def _kept_rows(self) -> list[tuple[str, str]]:
        if self.kept is None:
            return []
        answers = counted(self.kept.answers, "answer")
        return [("kept", f"{answers} more of this run, {self.kept.tokens:,} tokens, for the next one")]

    def _discarded_rows(self) -> list[tuple[str, str]]:
        lost = self.in_vain
        if not lost.requests and not lost.pairs:
            return []
        tokens = lost.prompt_tokens + lost.output_tokens
        text = f"{counted(lost.pairs, 'pair')}, {lost.requests:,} asks, {tokens:,} tokens"
        if lost.cost is not None:
            text += f", {lost.cost:,.4f} in money"
        return [("discarded", text)]


@dataclass(slots=True)
class RunReport:
    """What an execution did, for the end table and `--output json`.

    Args:
        this_run: what this execution did.
        chunks: in the plan; live: what was begun here and not done, and what became of all answers.
        shards, busy_shards: the shards asked for, and those of them that other processes held.
        tally: the whole run, all workers together.
        rows: rows in the plan.
        input_rows: with those beyond `input.limit`.
        settled: quarantined rows that no retry asks, since their queries have labels; 0 until every chunk is in, and
            where a run had nothing to do.
        over_limit, failed_fraction: None until every chunk is in.
        stopped: why the run was cut short, if it was.
        too_near: of a deadline that left no time to ask anything, what would.
        seconds, engine_start_s: wall time of all, and of starting the engine.
        remarks: what the engine said when it started.
        engine_restarts: how often an engine that went down was started again; None where nobody watched over it.
        batches: with the provider, of an engine that hands asks over as batches.
        budget: of the output, where the job has one.
        cascade: who labelled the rows of a finished cascade.
        warnings: what a reader of this execution's labels should know, a sentence each.
        is_for_run: a retry has asked all that it may, and chunks are open that only `relabel run` begins.
        is_idle_fine: nothing to do exits with 0 (`--done-ok`).
        date: what `${date}` meant, if the job has it.
    """

    exit: Exit
    name: str
    output: str
    shards: list[int]
    busy_shards: list[int]
    tally: Tally
    rows: int
    input_rows: int
    chunks: int
    over_limit: bool | None
    failed_fraction: float | None
    this_run: ThisRun
    live: Live
    settled: int = 0
    stopped: str | None = None
    too_near: str | None = None
    seconds: float = 0.0
    engine_start_s: float = 0.0
    remarks: list[str] = field(default_factory=list)
    engine_restarts: int | None = None
    batches: BatchesOut | None = None
    budget: BudgetState | None = None
    is_for_run: bool = False
    cascade: CascadeAudit | None = None
    warnings: list[str] = field(default_factory=list)
    is_idle_fine: bool = False
    date: str | None = None

    @property
    def exit_code(self) -> Exit:
        """What the command exits with."""
        if self.is_idle_fine and self.exit is Exit.NOTHING_TO_DO:
            return Exit.DONE
        return self.exit

    @property
    def rows_open(self) -> int:
        return self.rows - self.tally.rows

    @property
    def has_done_nothing(self) -> bool:
        """Nothing was asked, and no chunk begun or committed."""
        did = self.this_run
        asked = did.requests + did.in_vain.requests
        return not asked and not did.chunks_committed and not self.live.begun_chunks

    @property
    def verdict(self) -> str:
        """How it ended, in a phrase."""
        if self.exit is Exit.DONE and self.rows_open > 0:
            return "these shards are done; other shards are open"
        if self.exit is Exit.GATE and self.stopped == AT_BUDGET:
            return ENDED_AT_BUDGET
        if self.exit is Exit.PARTIAL and self.is_for_run:
            return "partial; a retry leaves chunks alone that were never labelled"
        if self.too_near is not None:
            return "partial; its deadline was too near to ask anything"
        failed = self.failed_fraction or 0.0
        verdicts = {
            Exit.DONE: "done, every row accounted for",
            Exit.OVER_LIMIT: f"done, but {failed:.1%} of rows are quarantined, over the limit; everything is kept",
            Exit.LOCKED: "another process works on these shards",
            Exit.NOTHING_TO_DO: "nothing to do",
            Exit.GATE: "done, but the cheap labels lose more than cascade.alpha allows; everything is kept",
        }
        return verdicts.get(self.exit, "partial; run the same command again")

    def as_json(self) -> dict[str, Any]:
        """An execution's result."""
        result = {
            "exit_code": int(self.exit_code),
            "output": self.output,
            "shards": self.shards,
            "busy_shards": self.busy_shards,
            "rows": self.rows,
            "labelled": self.tally.labelled,
            "reused": self.tally.reused,
            "quarantined": self.tally.num_quarantined,
            "quarantined_by_status": self.tally.quarantined,
            "rows_open": self.rows_open,
            "open": {
                "chunks": self.chunks - self.tally.chunks_done,
                "begun_chunks": self.live.begun_chunks,
                "begun_rows": self.live.begun_rows,
                "rows_in": self.live.rows_in,
            },
            "answers": {"accepted": self.live.accepted, "refused": dict(self.live.refused)},
            "failed_fraction": self.failed_fraction,
            "over_limit": self.over_limit,
            "stopped": self.stopped,
            "this_run": plain(self.this_run),
            "stages": self.tally.stages,
            "remarks": self.remarks,
            "warnings": self.warnings,
            "engine_start_s": round(self.engine_start_s, 3),
            "seconds": round(self.seconds, 3),
        }
        if self.batches is not None:
            result["batches"] = plain(self.batches)
        if self.too_near is not None:
            result["too_near"] = self.too_near
        if self.engine_restarts is not None:
            result["engine_restarts"] = self.engine_restarts
        if self.budget is not None:
            result["budget"] = plain(self.budget)
        if self.cascade is not None:
            result["cascade"] = plain(self.cascade)
        return result

    def lines(self) -> list[str]:
        """The end table."""
        tally = self.tally
        if self.exit is Exit.NOTHING_TO_DO:
            share = "all" if self.rows == tally.rows else "these"
            counts = f"{tally.labelled:,} labelled, {tally.reused:,} reused, {tally.num_quarantined:,} quarantined"
            return [f"{self.name}: nothing to do, {share} shards are done ({counts}).", *self.settled_lines()]
        rows = self._state_rows()
        if self.too_near is not None:
            rows.append(("stopped", self.too_near))
        elif self.rows_open and self.stopped is not None and self.stopped != AT_BUDGET:
            is_deadline = self.stopped.startswith("--")
            left_out = ": what may be answered too late was not asked" if is_deadline else ""
            rows.append(("stopped", f"{self.stopped}{left_out}"))
        rows += [
            *self.this_run.rows(),
            *self._open_rows(),
            *self._stage_rows(),
        ]
        if self.batches is not None:
            rows.append(("batches", self.batches.text))
        if self.this_run.canary is not None:
            rows.append(("canary", self.this_run.canary.text))
        if self.budget is not None:
            rows.append(("budget", self.budget.text))
        if self.cascade is not None:
            rows.append(("cascade", self.cascade.text))
        if self.engine_restarts is not None:
            rows.append(("engine restarts", f"{self.engine_restarts:,}"))
        is_partial = self.rows_open > 0
        labels = f"so far in {self.output}/labels" if is_partial else f"listed in {self.output}/manifest.json"
        rows.append(("labels", labels))
        rows += [("warning", text) for text in self.warnings]
        return [f"{self.name}: {self.verdict}", *grid(rows).split("\n")]

    def _state_rows(self) -> list[tuple[str, str]]:
        tally = self.tally
        quarantined = f"{tally.num_quarantined:,}"
        if tally.quarantined:
            by_status = ", ".join(f"{count:,} {status}" for status, count in sorted(tally.quarantined.items()))
            quarantined += f" ({by_status})"
        return [
            ("rows", f"{limited(self.rows, self.input_rows)}, {self.rows_open:,} open"),
            ("labelled", f"{tally.labelled:,}"),
            ("reused", f"{tally.reused:,}"),
            ("quarantined", quarantined),
        ]

    def _open_rows(self) -> list[tuple[str, str]]:
        num_open = self.chunks - self.tally.chunks_done
        if not num_open:
            return []
        live = self.live
        text = f"{num_open:,} of {self.chunks:,} chunks"
        if not live.begun_chunks:
            return [("open", text)]
        text += f"; {live.begun_chunks:,} begun here, {live.rows_in:,} of their {live.begun_rows:,} rows in"
        return [("open", text), ("answers", live.answers_text())]

    def _stage_rows(self) -> list[tuple[str, str]]:
        stages = self.tally.stages
        is_of_this_run = sum(counts["asks"] for counts in stages.values()) == self.this_run.requests
        scope = "" if is_of_this_run else " in all"
        return [
            (f"  {stage}", f"{counts['asks']:,} asks, {counts['output_tokens']:,} tokens out{scope}")
            for stage, counts in stages.items()
        ]

    def settled_lines(self) -> list[str]:
        """Why a retry leaves rows in quarantine, and what to do; nothing where it leaves none."""
        if not self.settled:
            return []
        return [
            f"Not asked again: {counted(self.settled, 'quarantined row')}. Their queries have labels, and the rows of "
            "a query take theirs from one answer. To label them, change what their status and reason name (too little "
            "room: labeler.window_tokens) and run the job into a new output."
        ]

    def advice(self, job_file: str, same_job: str) -> list[str]:
        """What to do next.

        Args:
            same_job: words of a command line that name this very job, with its overrides and its date.
        """
        lines = list[str]()
        askable = self.tally.num_quarantined - self.settled
        if self.exit is Exit.OVER_LIMIT:
            retry = f"; after fixing the cause: relabel retry {same_job}" if askable else ""
            lines.append(f"See {self.output}/quarantine{retry}. Or raise run.max_failed_fraction.")
        elif self.exit is Exit.DONE and askable:
            rows = counted(askable, "row")
            lines.append(f"{rows} in {self.output}/quarantine; to ask again: relabel retry {same_job}")
        if self.exit in (Exit.DONE, Exit.OVER_LIMIT):
            lines += self.settled_lines()
        if self.is_for_run:
            lines.append(f"Label them with: relabel run {same_job}")
        if self.exit is Exit.GATE and self.stopped == AT_BUDGET:
            lines.append(beyond_budget(job_file))
        elif self.exit is Exit.GATE:
            lines.append(
                "The calibration queries are no fair sample of the input, or ids mean other texts there. Label a new "
                "sample of the input's queries with the teacher, and run the job into a new output."
            )
        if self.busy_shards:
            lines.append(locked_text(self.busy_shards))
        if self.live.begun_chunks:
            see = f"; those that were refused are listed in {self.output}/refused" if self.live.refused else ""
            lines.append(f"Answers of unfinished chunks are kept and not asked again{see}")
        return lines


def locked_text(shards: Sequence[int]) -> str:
    """Which shards other processes hold: the first few by number."""
    shown = [str(number) for number in shards[:BUSY_SHOWN]]
    if len(shards) > BUSY_SHOWN:
        shown.append("…")
    return f"locked by other workers: {counted(len(shards), 'shard')}: {', '.join(shown)}"


def limited(rows: int, input_rows: int) -> str:
    """How many rows a job labels, and of how many where it has a limit."""
    return f"{rows:,}" if rows == input_rows else f"{rows:,} of {input_rows:,} (input.limit)"


def beyond_budget(job_file: str) -> str:
    """How to go on where a budget is used up."""
    return (
        f"To go on, raise run.max_tokens or run.max_cost in {job_file} or its --set, and run the command again. Until "
        "then it ends here, before an engine is started."
    )


def engine_text(labeler: str, facts: EngineFacts) -> str:
    """Who asks whom, in a line."""
    device = f"{facts.device}, {facts.dtype}" if facts.dtype else facts.device
    who = facts.model if labeler == facts.family else f"{labeler} asks {facts.model}"  # a student has no labeler
    return f"{who} on {facts.details.get('runtime', facts.family)} {facts.version} ({device})"
