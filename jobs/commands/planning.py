"""What `plan` does once its options are read; apart from what `run` does, which loads the run loop."""

import functools
import time
from contextlib import nullcontext

from relabel.jobs import logs
from relabel.jobs.commands.options import sigterm_ends
from relabel.jobs.job import JobSource, open_run
from relabel.jobs.output import emit
from relabel.jobs.planning import plan_result, trial_of
from relabel.jobs.run.estimate import estimate_run, probe_rates
from relabel.jobs.written_again import refuse_other_texts


def plan_and_report(source: JobSource, *, probe: bool, output: str) -> int:
    """Plan a job if nobody has, estimate it, and print both. With `--set`, the plan is a trial: it is not kept."""
    started_s = time.perf_counter()
    job = source.load()
    opening = trial_of(job) if source.overrides else nullcontext(open_run(job))
    with opening as opened:
        refuse_other_texts(opened, may_write=not source.overrides)
        ask = functools.partial(probe_rates, opened, write=logs.write) if probe else None
        with sigterm_ends():
            estimate = estimate_run(opened, ask)
        result = plan_result(opened, estimate, seconds=time.perf_counter() - started_s)
    return emit(result, output)
