"""What an execution came to, for people and as JSON."""

from __future__ import annotations

from typing import Any

from relabel.jobs import log_format
from relabel.jobs.exits import Exit
from relabel.jobs.output import table
from relabel.jobs.running.canary import CanaryResult, canary_text
from relabel.jobs.running.conclusions import AskedInVain, RunReport
from relabel.manifests.asks import EngineFacts
from relabel.manifests.plurals import counted
from relabel.manifests.records import plain

ENDED_AT_BUDGET = "ended at its budget; everything that was committed is kept"


def report_json(report: RunReport) -> dict[str, Any]:
    """An execution's result."""
    return {
        "exit_code": int(report.exit),
        "output": report.output,
        "shards": report.shards,
        "busy_shards": report.busy_shards,
        "rows": report.rows,
        "labelled": report.tally.labelled,
        "reused": report.tally.reused,
        "quarantined": report.tally.num_quarantined,
        "quarantined_by_status": report.tally.quarantined,
        "rows_open": report.rows - report.tally.rows,
        "open": _open_json(report),
        "answers": {"accepted": report.left.accepted, "refused": dict(report.left.refused)},
        "failed_fraction": report.failed_fraction,
        "over_limit": report.over_limit,
        "stopped": report.stopped,
        "this_run": report.did.as_json(),
        "stages": report.tally.stages,
        "remarks": report.remarks,
        "engine_start_s": round(report.engine_start_s, 3),
        "seconds": round(report.seconds, 3),
        **as_json(report),
        **({} if report.budget is None else {"budget": plain(report.budget)}),
    }


def engine_text(labeler: str, facts: EngineFacts) -> str:
    """Who asks whom, in a line."""
    device = f"{facts.device}, {facts.dtype}" if facts.dtype else facts.device
    return f"{labeler} asks {facts.model} on {facts.family} {facts.version} ({device})"


def report_text(report: RunReport) -> str:
    """The end table."""
    did, tally = report.did, report.tally
    by_status = ", ".join(f"{count:,} {status}" for status, count in sorted(tally.quarantined.items()))
    if report.exit is Exit.NOTHING_TO_DO:
        share = "all" if report.rows == tally.rows else "these"
        counts = f"{tally.labelled:,} labelled, {tally.reused:,} reused, {tally.num_quarantined:,} quarantined"
        return "\n".join(
            [f"{report.name}: nothing to do, {share} shards are done ({counts}).", *_settled_lines(report)]
        )
    seconds = max(did.seconds, 1e-9)
    prompt = did.prompt_tokens
    rows = [
        ("rows", f"{report.rows:,}, {report.rows - tally.rows:,} open"),
        ("labelled", f"{tally.labelled:,}"),
        ("reused", f"{tally.reused:,}"),
        ("quarantined", f"{tally.num_quarantined:,}" + (f" ({by_status})" if by_status else "")),
        ("this run", f"{did.pairs:,} pairs in {did.seconds:.1f} s, {did.pairs / seconds:,.1f} pairs/s"),
        ("tokens", f"{prompt:,} in, {did.output_tokens:,} out, {(prompt + did.output_tokens) / seconds:,.0f} tokens/s"),
        ("prefix hits", f"{did.cached_tokens / prompt:.0%} of prompt tokens" if prompt else "none"),
    ]
    rows += in_vain_rows(did.in_vain)
    rows += _open_rows(report)
    scope = "" if sum(counts["asks"] for counts in tally.stages.values()) == did.requests else " in all"
    rows += [
        (f"  {stage}", f"{counts['asks']:,} asks, {counts['output_tokens']:,} tokens out{scope}")
        for stage, counts in tally.stages.items()
    ]
    if did.canary is not None:
        rows.append(("canary", canary_text(CanaryResult(**did.canary))))
    if report.budget is not None:
        rows.append(("budget", report.budget.text))
    if report.engine_restarts is not None:
        rows.append(("engine restarts", f"{report.engine_restarts:,}"))
    is_finished = report.rows == tally.rows
    rows.append(
        ("labels", f"listed in {report.output}/manifest.json" if is_finished else f"so far in {report.output}/labels")
    )
    return f"{report.name}: {verdict(report)}\n" + table(rows)


def _open_json(report: RunReport) -> dict[str, Any]:
    """What is not committed, and how much of it was begun in this execution."""
    left = report.left
    return {
        "chunks": report.chunks - report.tally.chunks_done,
        "begun_chunks": left.begun_chunks,
        "begun_rows": left.begun_rows,
        "rows_in": left.rows_in,
    }


def _open_rows(report: RunReport) -> list[tuple[str, str]]:
    """Lines of the end table about what is open; none where nothing is."""
    left, num_open = report.left, report.chunks - report.tally.chunks_done
    if not num_open:
        return []
    begun = f"; {left.begun_chunks:,} begun here, {left.rows_in:,} of their {left.begun_rows:,} rows in"
    rows = [("open", f"{num_open:,} of {report.chunks:,} chunks" + (begun if left.begun_chunks else ""))]
    if left.begun_chunks:
        rows.append(("answers", left.answers_text()))
    return rows


def in_vain_rows(lost: AskedInVain) -> list[tuple[str, str]]:
    """A line of the end table about what was asked in vain; none where nothing was."""
    if not lost.requests and not lost.pairs:
        return []
    cost = f", {lost.cost:,.4f} in money" if lost.cost is not None else ""
    tokens = lost.prompt_tokens + lost.output_tokens
    return [("asked in vain", f"{lost.pairs:,} pairs, {lost.requests:,} asks, {tokens:,} tokens{cost}")]


def verdict(report: RunReport) -> str:
    """How an execution ended, in a phrase."""
    match report.exit:
        case Exit.DONE if report.rows == report.tally.rows:
            return "done, every row accounted for"
        case Exit.DONE:
            return "these shards are done; other shards are open"
        case Exit.OVER_LIMIT:
            return f"done, but {report.failed_fraction:.1%} of rows are quarantined, over the limit; everything is kept"
        case Exit.LOCKED:
            return "another process works on these shards"
        case Exit.NOTHING_TO_DO:
            return "nothing to do"
        case Exit.GATE:
            return ENDED_AT_BUDGET
        case _ if report.is_for_run:
            return "partial; a retry leaves chunks alone that were never labelled"
        case _:
            return "partial; run the same command again"


def _settled_lines(report: RunReport) -> list[str]:
    """Why a retry leaves rows in quarantine, and what to do; nothing where it leaves none."""
    if not report.settled:
        return []
    return [
        f"{report.settled:,} quarantined rows are not asked again: their queries have labels, and the rows of a query "
        "take theirs from one answer. To label them, change what their status and reason name (too little room: "
        "labeler.window_tokens) and run the job into a new output."
    ]


def beyond_budget(job_file: str) -> str:
    """How to go on where a budget is used up."""
    return (
        f"To go on, raise run.max_tokens or run.max_cost in {job_file}, and run the same command again. Until then "
        "it ends here, before an engine is started."
    )


def advise(report: RunReport, job_file: str, same_job: str) -> None:
    """What to do next, on stderr.

    Args:
        same_job: words of a command line that name this very job, with its overrides and its date.
    """
    lines = []
    askable = report.tally.num_quarantined - report.settled
    if report.exit is Exit.OVER_LIMIT:
        retry = f"; after fixing the cause: relabel retry {same_job}" if askable else ""
        lines.append(f"See {report.output}/quarantine{retry}. Or raise run.max_failed_fraction.")
    elif askable and report.exit is Exit.DONE:
        lines.append(f"{askable:,} rows in {report.output}/quarantine; ask them again with: relabel retry {same_job}")
    if report.exit in (Exit.DONE, Exit.OVER_LIMIT):
        lines += _settled_lines(report)
    if report.is_for_run:
        lines.append(f"Label them with: relabel run {same_job}")
    if report.exit is Exit.GATE:
        lines.append(beyond_budget(job_file))
    if report.busy_shards:
        lines.append(f"locked by other workers: {counted(len(report.busy_shards), 'shard')}: {report.busy_shards[:10]}")
    if report.left.begun_chunks:
        see = f"; those that were refused: relabel ask --refused {same_job}" if report.left.refused else ""
        lines.append(f"Answers of unfinished chunks are kept and not asked again{see}")
    for line in lines:
        log_format.say(line, event="advice")


def as_json(report: RunReport) -> dict[str, Any]:
    """What a worker pool adds to a result."""
    return {} if report.engine_restarts is None else {"engine_restarts": report.engine_restarts}
