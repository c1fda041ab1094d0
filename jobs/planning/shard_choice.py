"""Which shards a worker takes: `--shard 3/64`, `--shard auto` under a scheduler, or none for whatever is free."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from relabel.manifests.errors import UsageError

SHARD_COUNT_VARIABLE = "RELABEL_SHARD_COUNT"
"""Number of workers, for schedulers that give an index and no count (a Kubernetes Indexed Job)."""


def choose_shards(text: str | None, num_shards: int, environment: Mapping[str, str] = os.environ) -> list[int]:
    """Shards of the plan that a worker takes: those j with j mod count = index.

    Args:
        text: `index/count` (0-based), `auto`, or None for all.
        num_shards: shards in the plan.
    Raises:
        UsageError: not of that form, an index outside 0..count-1, or `auto` where no scheduler tells.
    """
    if text is None:
        return list(range(num_shards))
    index, count = worker_of(text, environment)
    return list(range(index, num_shards, count))


def worker_of(text: str, environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Which worker of how many this is.

    Args:
        text: `index/count` (0-based), or `auto`.
    Returns:
        The index, from 0, and the count.
    Raises:
        UsageError: as `choose_shards`.
    """
    if text == "auto":
        index, count = _from_scheduler(environment)
        source = f"the scheduler's {index}/{count}"
    else:
        match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
        if match is None:
            raise UsageError(f"--shard {text}: want INDEX/COUNT, counted from 0 (the first of four is 0/4), or auto.")
        index, count = int(match[1]), int(match[2])
        source = f"--shard {text}"
    if count < 1:
        raise UsageError(f"{source}: the count must be at least 1; 0/1 takes every shard.")
    if index >= count:
        raise UsageError(
            f"{source}: the index must be one of 0 to {count - 1} (the last of {count} is {count - 1}/{count})."
        )
    return index, count


def _from_scheduler(environment: Mapping[str, str]) -> tuple[int, int]:
    if "SLURM_ARRAY_TASK_ID" in environment:
        number = _number(environment, "SLURM_ARRAY_TASK_ID")
        if SHARD_COUNT_VARIABLE in environment:
            # one failed task submitted again is an array of its own; the count says what it was part of
            return number, _number(environment, SHARD_COUNT_VARIABLE)
        first = _number(environment, "SLURM_ARRAY_TASK_MIN", 0)
        last = _number(environment, "SLURM_ARRAY_TASK_MAX")
        step = max(1, _number(environment, "SLURM_ARRAY_TASK_STEP", 1))
        if (number - first) % step or not first <= number <= last:
            raise UsageError(f"--shard auto: Slurm's task {number} does not fit its array {first}-{last}:{step}.")
        count = (last - first) // step + 1
        if _number(environment, "SLURM_ARRAY_TASK_COUNT", count) != count:
            raise UsageError(
                f"--shard auto: Slurm's array {first}-{last}:{step} has gaps, so that some shards would fall to no "
                f"task. Submit the whole array 0-{count - 1}, or give INDEX/COUNT."
            )
        return (number - first) // step, count
    for index_name, count_name in (
        ("AWS_BATCH_JOB_ARRAY_INDEX", "AWS_BATCH_JOB_ARRAY_SIZE"),
        ("JOB_COMPLETION_INDEX", None),
    ):
        if index_name in environment:
            for name in (SHARD_COUNT_VARIABLE, count_name):
                if name is not None and name in environment:
                    return _number(environment, index_name), _number(environment, name)
            raise UsageError(
                f"--shard auto: {index_name} gives an index but no count. Set {SHARD_COUNT_VARIABLE} to the number of "
                "workers."
            )
    raise UsageError(
        "--shard auto: no scheduler's variable is set (SLURM_ARRAY_TASK_ID, AWS_BATCH_JOB_ARRAY_INDEX, "
        "JOB_COMPLETION_INDEX). Give INDEX/COUNT."
    )


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    try:
        number = int(text or "")
    except ValueError:
        number = -1
    if number < 0:
        what = "is not set" if text is None else f"is {text!r}, which is not a count"
        raise UsageError(f"--shard auto: the variable {name} {what}. Give INDEX/COUNT, for instance --shard 3/64.")
    return number
