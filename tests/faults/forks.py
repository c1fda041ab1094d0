"""Commands in forks of one warm parent: a process that has imported everything and started nothing is forked for each,
which costs hundredths of a second where a fresh interpreter costs a whole one.

The parent is multiprocessing's fork server. It runs no thread (fsspec's loop begins when a child opens its store), so
that a fork of it is as good as a fresh process.
"""

import contextlib
import gc
import importlib
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver, get_context
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any, Literal, NamedTuple

WARM = (
    "relabel.jobs.cli",
    "relabel.jobs.commands.labeling",
    "relabel.jobs.commands.planning",
    "relabel.jobs.commands.status",
    "relabel.jobs.run.label",
    "relabel.jobs.logs",
    "relabel.labelers.engines.fake",
    "relabel.labelers.evidence",
    "relabel.manifests.store",
    "relabel.manifests.objects",
    "pyarrow.parquet",
    "rich.progress",
    "s3fs",
    "aiobotocore.session",
)
HEAVY = (
    *WARM,
    "torch",
    "transformers",
    "onnx",
    "onnxruntime",
    "torch.onnx",
    "onnxscript",
    "polars",
    "relabel.jobs.commands.label",
    "relabel.jobs.score",
    "relabel.jobs.commands.train",
    "relabel.distill.students.distillation",
    "relabel.distill.students.losses",
    "relabel.distill.students.networks",
    "relabel.jobs.commands.train",
    "relabel.distill.teachers.teaching",
    "relabel.distill.teachers.sft",
    "relabel.jobs.commands.bundles",
    "relabel.export.exporting",
    "relabel.jobs.report.build",
    "relabel.jobs.commands.label_sets",
)
TEACHING = (
    *WARM,
    "torch",
    "transformers",
    "matplotlib.backends.backend_svg",
    "relabel.jobs.commands.train",
    "relabel.distill.teachers.teaching",
    "relabel.distill.teachers.grpo",
    "relabel.distill.teachers.grpo_trainer",
)
"""TRL's trainer alone takes ten seconds on a machine that is busy."""
STALL_S = 240.0
"""How long any child may take on a machine that is busy with other things, seconds."""

_context = get_context("forkserver")
_context.set_forkserver_preload(list(WARM))
_heavy = forkserver.ForkServer()
_heavy.set_forkserver_preload(list(HEAVY))
_teaching = forkserver.ForkServer()
_teaching.set_forkserver_preload(list(TEACHING))
_servers = {"heavy": _heavy, "teaching": _teaching}
_is_looking = threading.Lock()
"""An exit code can be read once. Starting a process looks at all that were started before, from whichever thread: two
that look at once leave one of them with 255.
"""


Parent = Literal["light", "heavy", "teaching"]


class Setup(NamedTuple):
    """What a child does before its commands: a function of a module that only children need, by name, and its
    arguments.
    """

    module: str
    function: str
    arguments: tuple[Any, ...] = ()


class Ended(NamedTuple):
    """What became of a child.

    Args:
        code: its exit code; -9 if it was killed.
        codes: exit codes of the commands that it ended.
        text: all that it said.
    """

    code: int
    codes: list[int]
    text: str

    def __str__(self) -> str:
        return f"exit {self.code}, commands {self.codes}: {self.text[-1500:]}"


class Child:
    """A running fork. `pid` is its own."""

    def __init__(
        self,
        calls: Sequence[Sequence[str | Path]],
        variables: Mapping[str, str],
        setup: Setup | None,
        *,
        parent: Parent = "light",
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="relabel-fork-")
        plain = [[str(word) for word in call] for call in calls]
        self._process = _context.Process(target=_live, args=(plain, dict(variables), self._folder.name, setup))
        with _is_looking, _forked_from(_servers[parent]) if parent in _servers else contextlib.nullcontext():
            self._process.start()
        self.pid = self._process.pid

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it still lives."""
        with contextlib.suppress(ProcessLookupError):  # it ended by itself meanwhile
            if self.is_alive():
                os.kill(self.pid, number)

    def is_alive(self) -> bool:
        with _is_looking:
            return self._process.is_alive()

    def text(self) -> str:
        """What it said so far."""
        path = Path(self._folder.name, "said")
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, stall_s: float = STALL_S) -> Ended:
        """Wait for its end; one that does not end is killed, and fails the test."""
        wait_for([self._process.sentinel], stall_s)
        is_stuck = self.is_alive()
        if is_stuck:
            self.send(signal.SIGKILL)
        with _is_looking:
            self._process.join()
        codes = Path(self._folder.name, "codes")
        ended = Ended(
            self._process.exitcode or 0,
            list(map(int, codes.read_text().split())) if codes.exists() else [],
            self.text(),
        )
        self._process.close()
        self._folder.cleanup()
        assert not is_stuck, f"still there after {stall_s:.0f} s: {ended}"
        return ended


def start(
    *calls: Sequence[str | Path],
    variables: Mapping[str, str] | None = None,
    setup: Setup | None = None,
    parent: Parent = "light",
) -> Child:
    """Begin `relabel` commands, one after the other, in one fork.

    Args:
        parent: what is forked: `heavy` has imported torch and onnxruntime too, `teaching` torch and TRL. Either begins
            at its first call.
    """
    return Child(calls, variables or {}, setup, parent=parent)


def call(
    *calls: Sequence[str | Path],
    variables: Mapping[str, str] | None = None,
    setup: Setup | None = None,
    parent: Parent = "light",
) -> Ended:
    """The same, to the end."""
    return start(*calls, variables=variables, setup=setup, parent=parent).wait()


@contextlib.contextmanager
def _forked_from(server: forkserver.ForkServer) -> Iterator[None]:
    """multiprocessing knows one fork server; while the block runs it is this one."""
    earlier = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = server.connect_to_new_process
    try:
        yield
    finally:
        forkserver.connect_to_new_process = earlier


def _live(calls: list[list[str]], variables: dict[str, str], folder: str, setup: Setup | None) -> None:
    gc.freeze()  # or every collection looks at all that the parent imported: 0.4 s each with TRL
    os.environ.update(variables)
    said = os.open(f"{folder}/said", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(said, stream.fileno())
    from relabel.jobs.cli import main

    if setup is not None:
        getattr(importlib.import_module(setup.module), setup.function)(*setup.arguments)
    code: Any = 0
    for arguments in calls:
        try:
            main(arguments)
        except SystemExit as end:
            code = end.code
        with Path(f"{folder}/codes").open("a") as file:
            file.write(f"{code}\n")
    sys.exit(code)
