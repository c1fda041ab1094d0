"""Who does a session's work: this process, a worker process for each GPU, or actors that Ray places."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relabel.jobs.pool.supervisor import (
    VISIBLE,
    Ended,
    Supervisor,
    WorkerProcess,
    choose_gpus,
    gpu_groups,
    is_any_free,
    visible_gpus,
    without_spec,
)
from relabel.jobs.run.execution import label
from relabel.jobs.run.results import RunReport
from relabel.jobs.run.session import Session
from relabel.manifests.asks import EngineFacts
from relabel.manifests.errors import MissingExtraError, UsageError
from relabel.manifests.files import is_url
from relabel.manifests.process import require, stdout_apart, usable_cores
from relabel.manifests.secrets import counted
from relabel.manifests.specs import gpus_of, secret_variables


@dataclass(frozen=True, slots=True)
class WorkerPool:
    """What was asked for on the command line.

    Args:
        gpus: `all` or numbers; a worker for each, or for as many as the engine spreads over.
        workers: number of workers, without GPUs of their own.
        address: of the Ray cluster.
    Raises:
        UsageError: these do not go together.
    """

    gpus: str | None = None
    workers: int | None = None
    backend: str = "local"
    address: str | None = None

    def __post_init__(self) -> None:
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
    environment = without_spec(os.environ)
    if pool.gpus is None:
        workers = pool.workers or 1
        places = {f"w{number}": dict[str, str]() for number in range(workers)}
        if workers > 1:  # threads of one model wait for each other at every layer
            environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // workers)))
    else:
        chosen = choose_gpus(pool.gpus, visible_gpus())
        groups = gpu_groups(chosen, each)
        if spare := len(chosen) - sum(map(len, groups)):
            say(f"note: {spare} of {len(chosen)} GPUs stay idle: engine.args.tensor_parallel_size is {each}")
        places = {f"gpu{'+'.join(group)}": {VISIBLE: ",".join(group)} for group in groups}
    for name, gpus in places.items():
        supervisor.add(name, functools.partial(WorkerProcess, environment=environment | gpus))
    return supervisor.run()


# ------------------------------------------------------------------------------
# Workers as Ray actors.

PASSED_ON = ("AWS_", "FSSPEC_", "HF_", "NCCL_", "OMP_", "PYTHONSAFEPATH", "RELABEL_", "VLLM_")
"""Variables that workers get from the driver, with those that hold the engine's secrets."""
MAX_RESTARTS = 64
"""How often Ray places one actor again. A cluster of machines that come and go loses one now and then; more is a fault
of its own.
"""
CONNECT_S = 10.0


class WorkerActor(WorkerProcess):
    """A worker on whichever node Ray chose. If the node is lost, Ray makes the actor again on another one, and so the
    worker starts again.

    Args:
        environment: the driver's variables. An argument of the actor and no `runtime_env`, which Ray writes to its
            logs.
        folder: the driver's working directory, so that relative paths mean the same; entered if it exists.
    """

    def __init__(self, words: list[str], spec: bytes, environment: dict[str, str], folder: str) -> None:
        if Path(folder).is_dir():
            os.chdir(folder)
        super().__init__(words, spec, {**os.environ, **environment})


class _RayWorker:
    """An actor as the supervisor sees it: one call of each method is under way at a time."""

    def __init__(
        self, words: list[str], spec: bytes, *, ray: Any, kind: Any, environment: dict[str, str], folder: str
    ) -> None:
        self._ray = ray
        self._actor = kind.remote(words, spec, environment, folder)
        self._calls: dict[str, Any] = {}

    def _found(self, name: str) -> Any:
        """What a method returned; None while its call is under way."""
        if name not in self._calls:
            self._calls[name] = getattr(self._actor, name).remote()
        if not self._ray.wait([self._calls[name]], timeout=0)[0]:
            return None
        return self._ray.get(self._calls.pop(name))

    def lines(self) -> list[str]:
        with contextlib.suppress(self._ray.exceptions.RayError):  # the actor is gone
            return self._found("lines") or []
        return []

    def ended(self) -> Ended | None:
        try:
            found: Ended | None = self._found("ended")
        except self._ray.exceptions.RayActorError:
            message = f"Ray could not keep an actor up: {MAX_RESTARTS} restarts, or no node to go to."
            return Ended("", -signal.SIGKILL, {"error": MissingExtraError.__name__, "message": message}, [])
        if found is not None:
            self.kill()  # which frees its GPUs
        return found

    def terminate(self) -> None:
        self._actor.terminate.remote()

    def kill(self) -> None:
        self._ray.kill(self._actor)


@contextlib.contextmanager
def ray_workers(supervisor: Supervisor, *, workers: int | None, address: str | None, gpus_each: int) -> Iterator[None]:
    """Give a supervisor workers on a Ray cluster while the block runs.

    Args:
        workers: number of actors; by default as many as the cluster's GPUs allow.
        address: `auto`, `ray://…`, or None for `RAY_ADDRESS`, else a cluster of this machine's own.
    Raises:
        MissingExtraError: no Ray here, no cluster there, or no GPU in it.
    """
    ray = require("ray", extra="ray", purpose="--backend ray")
    session = supervisor.session
    if not session.left.open_shards():
        yield
        return
    with stdout_apart(), _joined(ray, address):
        gpus = int(ray.cluster_resources().get("GPU", 0))
        nodes = sum(node["Alive"] for node in ray.nodes())
        count = workers if workers is not None else gpus // gpus_each
        if count == 0:
            raise MissingExtraError(
                f"--backend ray: the cluster has {counted(gpus, 'GPU')}, and an engine of this job wants {gpus_each}. "
                "Add nodes, or run on CPUs with --workers N."
            )
        output = session.opened.job.spec.output
        if nodes > 1 and not is_url(output):
            supervisor.say(
                f"note: {nodes} nodes write to {output}: it must be one folder that all of them see, such as NFS; "
                "else use s3://"
            )
        kind = ray.remote(WorkerActor).options(
            num_cpus=1,
            num_gpus=gpus_each if gpus else 0,
            max_restarts=MAX_RESTARTS,
            max_task_retries=MAX_RESTARTS,
        )
        environment, folder = passed_on(supervisor, os.environ), str(Path.cwd())
        start = functools.partial(_RayWorker, ray=ray, kind=kind, environment=environment, folder=folder)
        for number in range(count):
            supervisor.add(f"r{number}", start)

        of_each = f" with {counted(gpus_each, 'GPU')} each" if gpus else ""
        supervisor.say(f"asked Ray for {counted(count, 'actor')}{of_each} on {counted(nodes, 'node')}")
        yield


def passed_on(supervisor: Supervisor, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that workers on other nodes need, the engine's secrets among them."""
    secret_names = set(secret_variables(supervisor.session.opened.job.spec.engine.args).values())
    found = without_spec(environment)
    return {name: value for name, value in found.items() if name.startswith(PASSED_ON) or name in secret_names}


@contextlib.contextmanager
def _joined(ray: Any, address: str | None) -> Iterator[None]:
    """Be part of the cluster while the block runs. Ray's own handlers of signals do not stay: ours drain."""
    if ray.is_initialized():
        yield
        return
    where = address or os.environ.get("RAY_ADDRESS") or "this machine"
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        # whether something listens at an address: Ray itself would try for minutes
        host, colon, port = where.removeprefix("ray://").rpartition(":")
        if colon and port.isdigit():
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
        # Ray puts the working directory of this moment first on its workers' path: they get one that they have there
        # anyhow
        with warnings.catch_warnings(), contextlib.chdir(Path(ray.__file__).parent / "_private" / "workers"):
            warnings.simplefilter("ignore", FutureWarning)  # of Ray's own next defaults
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                include_dashboard=None if address else False,
            )
    except (OSError, RuntimeError, ValueError) as exc:  # a ConnectionError is an OSError
        raise MissingExtraError(
            f"--backend ray: no Ray cluster at {where}. Start one with `ray start --head`, or check --address."
        ) from exc
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    try:
        yield
    finally:
        ray.shutdown()
