"""Who does a session's work: this process, a worker process for each GPU, or actors that Ray places."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass

from relabel.jobs.pool.processes import VISIBLE, WorkerProcess, choose_gpus, gpu_groups, visible_gpus
from relabel.jobs.pool.ray_backend import ray_workers
from relabel.jobs.pool.supervisor import Supervisor, is_any_free, without_spec
from relabel.jobs.run.execution import label
from relabel.jobs.run.results import RunReport
from relabel.jobs.run.session import Session
from relabel.manifests.asks import EngineFacts
from relabel.manifests.errors import UsageError
from relabel.manifests.specs import gpus_of


@dataclass(frozen=True, slots=True)
class WorkerPool:
    """What was asked for on the command line.

    Args:
        gpus: `all` or numbers; a worker for each, or for as many as the engine spreads over.
        workers: number of workers, without GPUs of their own.
        address: of the Ray cluster.
    """

    gpus: str | None = None
    workers: int | None = None
    backend: str = "local"
    address: str | None = None

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


def label_with(
    pool: WorkerPool,
    session: Session,
    *,
    on_progress: Callable[[], None],
    say: Callable[[str], None],
    on_engine: Callable[[EngineFacts, list[str]], None],
) -> RunReport:
    """Have a session's work done, by this process or by a pool, and conclude the run.

    Raises:
        MissingExtraError: no such GPU, or no Ray, here.
        EngineLostError: every worker was given up.
    """
    is_pool = pool.backend == "ray" or pool.gpus is not None or pool.workers is not None
    open_shards = session.left.open_shards() if is_pool else []
    if not is_pool or (open_shards and not is_any_free(session, open_shards)):  # which finds that out under the locks
        return label(session, on_progress=on_progress, on_engine=on_engine)
    spec = session.opened.job.spec
    if spec.run.single_writer and (pool.backend == "ray" or pool.gpus is not None or (pool.workers or 1) > 1):
        raise UsageError(
            "run.single_writer vouches for one process, and --gpus, --backend ray and --workers above 1 start "
            "several. Drop one."
        )
    supervisor = Supervisor(session, say=say, on_progress=on_progress)
    each = gpus_of(spec.engine.args)
    if pool.backend == "ray":
        with ray_workers(supervisor, workers=pool.workers, address=pool.address, gpus_each=each):
            return supervisor.run()
    if pool.gpus is None:
        places = {f"w{number}": dict[str, str]() for number in range(pool.workers or 1)}
    else:
        chosen = choose_gpus(pool.gpus, visible_gpus())
        groups = gpu_groups(chosen, each)
        if spare := len(chosen) - sum(map(len, groups)):
            say(f"note: {spare} of {len(chosen)} GPUs stay idle: engine.args.tensor_parallel_size is {each}")
        places = {f"gpu{'+'.join(group)}": {VISIBLE: ",".join(group)} for group in groups}
    environment = without_spec(os.environ)
    for name, gpus in places.items():
        supervisor.add(name, functools.partial(WorkerProcess, environment=environment | gpus))
    return supervisor.run()
