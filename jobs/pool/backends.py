"""Choice of a backend for a session: this process, a supervisor with worker processes, or Ray."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from relabel.jobs.pool.processes import choose_gpus, gpu_groups, visible_gpus
from relabel.jobs.run.execution import label
from relabel.jobs.run.results import RunReport
from relabel.jobs.run.session import Session, look_at_all_every_s
from relabel.manifests.asks import EngineFacts
from relabel.manifests.errors import StoreUnreachableError, UsageError
from relabel.manifests.specs import gpus_of
from relabel.manifests.store import map_concurrent, shard_lock_name

# ------------------------------------------------------------------------------
# What other commands commit of the run that a pool is at, for the pool's line of progress.


HEARD_AFTER_S = 1.0
"""What workers of the pool have committed is heard of by then, seconds."""


class OtherCommands:
    """Lists the receipts now and then; what the pool's own workers have not committed of them is others'.

    The workers' word comes later than their receipts: what they have told by the time of the listing is the least that
    is theirs of it, and what they have told a while later is the most.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._every_s = look_at_all_every_s(session.opened.plan)
        self._next_s = time.monotonic() + self._every_s
        self._listed: tuple[int, int] | None = None

    def update(self) -> None:
        """Look, if it is time to."""
        now = time.monotonic()
        if now < self._next_s:
            return
        progress, left = self._session.progress, self._session.left
        if self._listed is not None:
            listed, told = self._listed
            progress.others.saw_in_all(listed - progress.rows_committed, listed - told)
            self._listed, self._next_s = None, now + self._every_s
            return
        self._next_s = now + HEARD_AFTER_S
        with contextlib.suppress(StoreUnreachableError):  # whoever has to do with the labels says so
            told, seen = progress.rows_committed, self._session.opened.folder.attempts_of_all()
            done = (left.done_since(shard, seen.get(shard, {})) for shard in self._session.shards)
            self._listed = sum(sum(rows.values()) for rows in done), told


# ------------------------------------------------------------------------------
# Who does a session's work: this process, a worker process for each GPU under its watch, or actors that Ray places.


BACKENDS = ("local", "ray")


@dataclass(frozen=True, slots=True)
class WorkerPool:
    """What was asked for on the command line.

    Args:
        gpus: `all` or numbers; a worker for each, or for as many as the engine spreads over.
        workers: number of workers, where GPUs do not say it.
        address: of the Ray cluster.
    """

    gpus: str | None = None
    workers: int | None = None
    backend: str = "local"
    address: str | None = None

    @property
    def may_be_many(self) -> bool:
        """Whether more than one process may write."""
        return self.gpus is not None or self.backend == "ray" or (self.workers or 1) > 1

    def check(self) -> None:
        """Whether these go together.

        Raises:
            UsageError: they do not.
        """
        if self.gpus is not None and self.workers is not None:
            raise UsageError(
                "--gpus and --workers: give one of them. --gpus starts a worker for each GPU, --workers as many as "
                "it says."
            )
        if self.backend == "ray" and self.gpus is not None:
            raise UsageError(
                "--gpus is for this machine alone; Ray gives out the cluster's GPUs itself. --workers N limits their "
                "number."
            )
        if self.backend != "ray" and self.address is not None:
            raise UsageError("--address names a Ray cluster: add --backend ray.")


def gpus_each(session: Session) -> int:
    """GPUs that one engine of this job spreads over."""
    return gpus_of(session.opened.job.spec.engine.args)


def _is_held_by_others(session: Session) -> bool:
    """Whether another command works on every shard that this one names and that has work: then this is an overlapping
    tick.

    A command that names no shards is one more worker, and helps.
    """
    store = session.opened.store
    open_shards = [] if session.helps else session.left.open_shards()
    # asked at once: the first that is free settles it, but a slow store with many held ones is asked many
    some = max(1, store.readers)
    return bool(open_shards) and all(
        all(map_concurrent(store, store.is_locked, map(shard_lock_name, open_shards[start : start + some])))
        for start in range(0, len(open_shards), some)
    )


def label_with(
    pool: WorkerPool,
    session: Session,
    *,
    on_progress: Callable[[], None],
    say: Callable[[str], None],
    on_engine: Callable[[EngineFacts, list[str]], None],
) -> RunReport:
    """Have a session's work done by a worker pool, and conclude the run.

    Raises:
        MissingExtraError: no such GPU, or no Ray, here.
        EngineLostError: see `Supervisor.run`.
    """
    if _is_held_by_others(session):
        # which finds that out under the locks, and starts nothing
        return label(session, on_progress=on_progress, on_engine=on_engine)
    spec = session.opened.job.spec
    if pool.may_be_many and spec.run.single_writer:
        raise UsageError(
            "run.single_writer vouches for one process, and --gpus, --backend ray and --workers above 1 start "
            "several. Drop one."
        )
    if pool.backend != "ray" and pool.gpus is None and pool.workers is None:
        return label(session, on_progress=on_progress, on_engine=on_engine)
    others = OtherCommands(session)

    def on_pool_progress() -> None:
        others.update()
        on_progress()

    if pool.backend == "ray":
        from relabel.jobs.pool.ray_backend import label_on_ray

        return label_on_ray(
            session,
            workers=pool.workers,
            address=pool.address,
            gpus_each=gpus_each(session),
            on_progress=on_pool_progress,
            say=say,
        )
    from relabel.jobs.pool.processes import cpu_slots, gpu_slots
    from relabel.jobs.pool.supervisor import Supervisor

    if pool.workers is not None:
        slots = cpu_slots(pool.workers)
    else:
        assert pool.gpus is not None
        chosen = choose_gpus(pool.gpus, visible_gpus())
        groups = gpu_groups(chosen, gpus_each(session))
        if spare := len(chosen) - sum(map(len, groups)):
            say(
                f"note: {spare} of {len(chosen)} GPUs stay idle: engine.args.tensor_parallel_size is "
                f"{gpus_each(session)}"
            )
        slots = gpu_slots(groups)
    return Supervisor(session, slots, say=say, on_progress=on_pool_progress).run()
