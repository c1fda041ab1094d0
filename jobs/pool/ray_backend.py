"""`--backend ray`: Ray places a worker for each GPU of a cluster, places it again when its node is lost, and this
process concludes.

An actor is a supervisor of one worker process (`supervise.py`), so that a crash of an engine, a row that brings it down
and a hung device are dealt with on the node as they are without Ray; what Ray adds is the nodes. Receipts stay the
truth: an actor that is placed again, or called twice, finds what is committed and goes on with the rest. The driver may
die at any time; run the same command again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from relabel.jobs.environment import fill_in_region, keep_environment
from relabel.jobs.job import open_run
from relabel.jobs.pool.messages import Assignment, Done, Fails, assign, deadline_of, show
from relabel.jobs.pool.processes import Slot
from relabel.jobs.pool.supervisor import GRACE_S, Results, Supervisor
from relabel.jobs.run.counts import Progress
from relabel.jobs.run.results import RunReport
from relabel.jobs.run.session import Session
from relabel.jobs.run.stop import Stop
from relabel.manifests.errors import EngineLostError, MissingExtraError, ModelError, RelabelError
from relabel.manifests.files import is_url
from relabel.manifests.process import require, stdout_apart
from relabel.manifests.secrets import counted, redacted
from relabel.manifests.specs import secret_variables

PURPOSE = "--backend ray"
PASSED_ON = ("AWS_", "FSSPEC_", "HF_", "NCCL_", "OMP_", "PYTHONSAFEPATH", "RELABEL_", "VLLM_")
"""Variables that workers get from the driver, beside those that hold the engine's secrets."""
MAX_RESTARTS = 64
"""How often Ray places one actor again. A cluster of machines that come and go loses one now and then; more is a fault
of its own.
"""
LISTEN_S = 0.25
LOOK_EVERY_S = 10.0
"""How often the receipts are counted while actors are under way, seconds: one that can't be placed must not hold up a
run that is done.
"""
CONNECT_S = 10.0
AGAIN_S = 2.0
"""Before an actor that found nothing free looks again, seconds."""


class Look(NamedTuple):
    """An actor's counts since it was placed (`life` names the placing), and the lines since the last look."""

    life: str
    done: Done
    lines: list[str]


class Work(NamedTuple):
    """What came of an actor's work: what its worker did, the error that ended it, or why it stopped early."""

    results: Results
    failure: Fails | None
    stopped: str | None
    look: Look


class WorkerActor:
    """What an actor holds: one supervised worker, on whichever node Ray chose.

    Args:
        environment: the driver's variables, for this process and its worker. An argument of the actor and no
            `runtime_env`, which Ray writes to its logs.
        folder: the driver's working directory, so that relative paths mean the same; gone to where it exists.
    """

    def __init__(self, assignment: dict[str, Any], environment: dict[str, str], folder: str) -> None:
        if Path(folder).is_dir():
            os.chdir(folder)
        os.environ.update(environment)  # this process reads and writes the store too, not its workers alone
        keep_environment(os.environ)
        fill_in_region(os.environ)  # the node may name one where the driver's machine does not
        self._assignment = Assignment(**assignment)
        self._environment = dict(os.environ)
        self._life = secrets.token_hex(8)
        self._past = Done()
        self._supervisor: Supervisor | None = None
        self._stop = Stop(deadline_of(self._assignment))
        self._lines: list[str] = []
        self._guard = threading.Lock()

    def work(self) -> Work:
        """Work until nothing is left that can be done here. What relabel raises on purpose is part of the result."""
        supervisor = failure = None
        try:
            session = self._session()
            slot = Slot(self._assignment.name, {})
            supervisor = self._supervisor = Supervisor(session, [slot], environment=self._environment, say=self._say)
            supervisor.work()
        except (RelabelError, RuntimeError) as exc:
            failure = Fails.of(exc)
        results = supervisor.results if supervisor is not None else Results()
        return Work(results, failure, self._stop.reason, self.look())

    def look(self) -> Look:
        """Counts since the actor was placed, and the lines since the last look."""
        with self._guard:
            lines, self._lines = self._lines, []
        done = Done()
        done.add(self._past)
        for one in self._supervisor.done() if self._supervisor is not None else ():
            done.add(one)
        return Look(self._life, done, lines)

    def stop(self, reason: str) -> None:
        """Begin no chunk any more."""
        self._stop.drain(reason)

    def _session(self) -> Session:
        before = self.look()
        self._past, self._lines, self._supervisor = before.done, before.lines, None
        assignment = self._assignment
        return Session(
            open_run(assignment.job(self._environment), may_plan=False),
            assignment.shards,
            is_retry=assignment.is_retry,
            stop=self._stop,
            progress=Progress(),
            retries=assignment.round() if assignment.is_retry else None,
            execution=assignment.execution,
        )

    def _say(self, line: str) -> None:
        with self._guard:
            self._lines.append(redacted(line))


@dataclass(slots=True)
class Actor:
    """An actor as the driver knows it.

    Args:
        call: its `work` under way.
        again_s: when to call it again, on `time.perf_counter`.
        looks: its `look` under way.
        lives: what it counted, by the life it counted it in: one that is placed again begins at nothing.
        error: why it was given up.
    """

    name: str
    handle: Any
    call: Any = None
    again_s: float | None = 0.0
    looks: Any = None
    lives: dict[str, Done] = field(default_factory=dict)
    error: Exception | None = None


def label_on_ray(
    session: Session,
    *,
    workers: int | None,
    address: str | None,
    gpus_each: int,
    on_progress: Callable[[], None],
    say: Callable[[str], None],
) -> RunReport:
    """Have a session's work done by actors, and conclude the run.

    Args:
        workers: number of actors; by default as many as the cluster's GPUs allow.
        address: `auto`, `ray://…`, or None for `RAY_ADDRESS`, else a cluster of this machine's own.
    Raises:
        MissingExtraError: no Ray here, no cluster there, or no GPU in it.
        EngineLostError: every actor was given up.
    """
    ray = require("ray", extra="ray", purpose=PURPOSE)
    started = time.perf_counter()
    driver = Driver(ray, session, on_progress=on_progress, say=say)
    if session.left.open_shards():
        with stdout_apart(), _joined(ray, address):
            driver.place(workers, gpus_each)
            driver.watch_over()
    report = driver.results.report(session)
    report.seconds = time.perf_counter() - started
    return report


class Driver:
    """Places actors and listens to them until the receipts say that all is done, or nobody can go on.

    Args:
        ray: the library.
    """

    def __init__(
        self, ray: Any, session: Session, *, on_progress: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        self.results = Results()
        self._ray = ray
        self._session = session
        self._on_progress = on_progress
        self._say = say
        self._actors: list[Actor] = []
        self._said: set[str] = set()
        self._is_ending = False
        self._place_one: Callable[[], None] = lambda: None
        self._gpus_each = 0

    def place(self, workers: int | None, gpus_each: int) -> None:
        """Ask Ray for the actors.

        Raises:
            MissingExtraError: neither GPUs nor a number of workers.
        """
        session, resources = self._session, self._ray.cluster_resources()
        gpus = int(resources.get("GPU", 0))
        count = workers if workers is not None else gpus // gpus_each
        if count == 0:
            raise MissingExtraError(
                f"--backend ray: the cluster has {counted(gpus, 'GPU')}, and an engine of this job wants {gpus_each}. "
                "Add nodes, or run on CPUs with --workers N."
            )
        output = session.opened.job.spec.output
        nodes = sum(node["Alive"] for node in self._ray.nodes())
        if nodes > 1 and not is_url(output):
            self._say(
                f"note: {nodes} nodes write to {output}: it must be one folder that all of them see, such as NFS; "
                "else use s3://"
            )
        actor_class = self._ray.remote(WorkerActor).options(
            num_cpus=1,
            num_gpus=gpus_each if gpus else 0,
            max_restarts=MAX_RESTARTS,
            max_task_retries=MAX_RESTARTS,
            max_concurrency=4,  # `look` and `stop` while `work` is under way
        )
        assignment, environment = assign(session), passed_on(session, os.environ)

        def place_one() -> None:
            name = f"r{len(self._actors)}"
            self._actors.append(
                Actor(name, actor_class.remote(asdict(assignment.named(name)), environment, str(Path.cwd())))
            )

        for _ in range(count):
            place_one()
        self._place_one = place_one
        self._gpus_each = gpus_each if workers is None else 0
        of_each = f" with {counted(gpus_each, 'GPU')} each" if gpus else ""
        self._say(f"asked Ray for {counted(count, 'actor')}{of_each} on {counted(nodes, 'node')}")

    def watch_over(self) -> None:
        """Call, listen, and call again, until nothing is left to do or to hope for.

        Raises:
            EngineLostError: every actor was given up.
            RelabelError: an error that another try would not fix.
        """
        next_look_s = time.perf_counter() + LOOK_EVERY_S
        try:
            while True:
                self._call_due()
                has_news = self._listen()
                self._heed_stop()
                self._count()
                self._on_progress()
                if has_news or time.perf_counter() >= next_look_s:
                    next_look_s = time.perf_counter() + LOOK_EVERY_S
                    if not self._session.left.open_shards():
                        self._listen(stall_s=AGAIN_S)
                        return
                    self._grow()
                if all(actor.call is None and (actor.again_s is None or self._is_ending) for actor in self._actors):
                    return
        finally:
            self._count()
            self.results.restarts += sum(max(0, len(actor.lives) - 1) for actor in self._actors)
            for actor in self._actors:
                self._ray.kill(actor.handle)

    def _grow(self) -> None:
        """Use the GPUs of nodes that came later."""
        if not self._gpus_each or self._is_ending:
            return
        room = int(self._ray.cluster_resources().get("GPU", 0)) // self._gpus_each - len(self._actors)
        for _ in range(room):
            self._place_one()
        if room > 0:
            self._say(f"the cluster has grown: asked Ray for {counted(room, 'actor')} more")

    def _call_due(self) -> None:
        for actor in self._actors:
            if (
                actor.call is None
                and actor.again_s is not None
                and not self._is_ending
                and time.perf_counter() >= actor.again_s
            ):
                actor.call = actor.handle.work.remote()
            if actor.call is not None and actor.looks is None:
                actor.looks = actor.handle.look.remote()

    def _listen(self, stall_s: float = LISTEN_S) -> bool:
        """Take what is ready; whether an actor has ended its work."""
        calls = {actor.call: actor for actor in self._actors if actor.call is not None}
        looks = {actor.looks: actor for actor in self._actors if actor.looks is not None}
        if not calls:
            time.sleep(LISTEN_S)
            return False
        self._ray.wait(list(calls), num_returns=len(calls), timeout=stall_s)
        ready, _ = self._ray.wait([*calls, *looks], num_returns=len(calls) + len(looks), timeout=0)
        for reference in ready:
            if reference in looks:
                looks[reference].looks = None
                with contextlib.suppress(self._ray.exceptions.RayError):  # the actor is gone; its `work` tells
                    self._look(looks[reference], self._ray.get(reference))
        ended = [calls[reference] for reference in ready if reference in calls]
        for actor in ended:
            self._end(actor)
        return bool(ended)

    def _look(self, actor: Actor, found: Look) -> None:
        actor.lives[found.life] = found.done
        for line in found.lines:
            if line.startswith("["):
                self._say(line)
            elif line not in self._said:  # what each of them says as it starts
                self._said.add(line)
                self._say(line)

    def _end(self, actor: Actor) -> None:
        call, actor.call, actor.again_s = actor.call, None, None
        try:
            found = self._ray.get(call)
        except self._ray.exceptions.RayActorError as exc:
            self._give_up(
                actor,
                EngineLostError(
                    f"actor {actor.name}: Ray could not keep it up, {MAX_RESTARTS} restarts or no node to go to."
                ),
                exc,
            )
            return
        self._look(actor, found.look)
        self.results.add(found.results)
        if found.failure is not None:
            error = found.failure.as_error()
            if not isinstance(error, EngineLostError | MissingExtraError | ModelError | RuntimeError):
                raise error
            self._give_up(actor, error)
        elif found.stopped is not None:
            self._session.stop.drain(found.stopped)
        else:
            actor.again_s = time.perf_counter() + AGAIN_S  # what others hold may be free by then

    def _give_up(self, actor: Actor, error: Exception, cause: Exception | None = None) -> None:
        actor.error = error
        if all(other.error is not None for other in self._actors):
            raise error from cause
        self.results.remarks[f"worker {actor.name} was given up: {error}"] = None
        self._say(f"worker {actor.name} is given up: {error}")

    def _heed_stop(self) -> None:
        stop = self._session.stop
        stop.mind(0.0)
        if stop.reason is None:
            return
        if not self._is_ending:
            self._is_ending = True
            for actor in self._actors:
                actor.handle.stop.remote(stop.reason)
        if stop.is_now or time.perf_counter() > stop.deadline_s + 2 * GRACE_S:
            for actor in self._actors:
                actor.call = None

    def _count(self) -> None:
        show(self._session.progress, [done for actor in self._actors for done in actor.lives.values()])


def passed_on(session: Session, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that workers on other nodes need, the engine's secrets among them."""
    secret_names = set(secret_variables(session.opened.job.spec.engine.args).values())
    return {name: value for name, value in environment.items() if name.startswith(PASSED_ON) or name in secret_names}


@contextlib.contextmanager
def _joined(ray: Any, address: str | None) -> Iterator[None]:
    """Be part of the cluster while the block runs. Ray's own handlers of signals do not stay: ours drain."""
    if ray.is_initialized():
        yield
        return
    where = address or os.environ.get("RAY_ADDRESS") or "this machine"
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        _reach(where)
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
            f"--backend ray: no Ray cluster at {where}. Start one with `ray start --head`, or look at --address."
        ) from exc
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    try:
        yield
    finally:
        ray.shutdown()


def _reach(where: str) -> None:
    """Whether anybody listens at an address: Ray itself would try for minutes.

    Raises:
        OSError: nobody does.
    """
    host, colon, port = where.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
