"""This process and its machine: signals, stdout, CPUs and GPUs, and optional packages."""

import contextlib
import gc
import importlib.abc
import os
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

from relabel.manifests.errors import MissingExtraError

OBJECTS_A_COLLECTION = 10_000
"""Python's own number is 700, and a sixth of the time of importing torch and transformers goes into collections. With
many more than this, dead tensors would pile up.
"""


_is_own = False


def own_process() -> None:
    """Say that this whole process is a command's: its libraries then load without what no command of ours uses of them,
    and their warnings of versions to come, about which its user can do nothing, are shown with `PYTHONWARNINGS` alone.

    scikit-learn and SciPy, for guessing tokens ahead and for losses of object detection, are 4 of transformers' 10
    seconds, and pandas, which pyarrow imports at its first array, a quarter of any command's start.
    """
    global _is_own
    _is_own = True
    sys.meta_path.insert(0, _NoPandasForArrow())
    gc.set_threshold(OBJECTS_A_COLLECTION)
    if not sys.warnoptions:
        warnings.simplefilter("ignore", FutureWarning)


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """Collect garbage as seldom within the block as a process of our own does: a run within another program, which has
    Python's own number, spends a sixth of its time on it otherwise.
    """
    before, *others = gc.get_threshold()
    if before:  # 0: the program collects none
        gc.set_threshold(max(before, OBJECTS_A_COLLECTION), *others)
    try:
        yield
    finally:
        gc.set_threshold(before, *others)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage within the block: importing makes next to none, and looks for it are a twelfth of a command's
    start. In a process of our own what was made within it is never looked through again, not at the end either.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if _is_own:
            gc.freeze()
        if was_enabled:
            gc.enable()


class _NoPandasForArrow(importlib.abc.MetaPathFinder):
    """Hides pandas from pyarrow's question whether an object is pandas', which comes from a call of ours since no
    module of relabel imports pandas; plug-ins, other libraries and `Table.to_pandas` of theirs find it.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name != "pandas":
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _package(frame) in ("importlib", "pyarrow"):
            frame = frame.f_back
        if frame is not None and _package(frame) == "relabel":
            raise ModuleNotFoundError("pyarrow needs no pandas here", name=name)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import `module`, or raise with the extra that brings it.

    Args:
        module: dotted name to import.
        extra: the extra of this distribution that installs it.
        purpose: who needs it, as the subject of the sentence (`The transformers engine`).
    Raises:
        MissingExtraError: the package is not installed.
        ModuleNotFoundError: the package is installed but one of its own imports is missing; that is its fault to show,
            not ours to hide.
    """
    try:
        package = importlib.import_module(module)
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.split(".")[0] != module.split(".")[0]:
            raise
        package_name = module.split(".")[0]
        raise MissingExtraError(
            f"{purpose} needs the package {package_name}: run `pip install 'relabel-ir[{extra}]'`."
        ) from exc
    is_own_process = any(isinstance(finder, _NoPandasForArrow) for finder in sys.meta_path)
    if module == "transformers" and is_own_process:
        answers = dict.fromkeys(("is_sklearn_available", "is_scipy_available"), lambda: False)
        vars(importlib.import_module("transformers.utils")).update(answers)
    if module == "transformers" and not (sys.stdin and sys.stdin.isatty()):
        # no pipe may answer its question whether to run a model's own code: refused without asking
        setattr(importlib.import_module("transformers.dynamic_module_utils"), "TIME_OUT_REMOTE_CODE", 0)  # noqa: B010
    return package


class WhenUsed:
    """A module that is imported when something of it is first used: `pc = WhenUsed("pyarrow.compute")`. For one that
    takes a good part of a command's start and that most commands do without.
    """

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        """What the module holds under a name; kept, so that it is looked up once."""
        value = getattr(importlib.import_module(self._module), name)
        setattr(self, name, value)
        return value


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Version by distribution, of those that are installed."""
    from importlib.metadata import PackageNotFoundError, version  # a third of what `relabel run --help` imports

    versions = {}
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def cpu_flags() -> frozenset[str]:
    """The first core's flags by the kernel: `avx2`, `amx_bf16`, ...; empty where it does not list them (not Linux, or
    not x86).
    """
    return frozenset(_first_value(Path("/proc/cpuinfo"), "flags").split())


def device_names() -> list[str]:
    """The CPU with the number of usable cores, and each kind of NVIDIA GPU that the driver reports: machines of one
    kind have the same.
    """
    cpu = _first_value(Path("/proc/cpuinfo"), "model name")
    gpus = {_first_value(path, "Model") for path in Path("/proc/driver/nvidia/gpus").glob("*/information")}
    return [f"{cpu}, {usable_cores()} cores", *sorted(gpus)]


def _first_value(path: Path, name: str) -> str:
    """The value of the first line `name: …` of a file of the kernel; empty where there is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def multiplies_bfloat16(flags: Set[str]) -> bool:
    """Whether a CPU with these flags is faster in bfloat16 than in float32, and does not emulate it."""
    return not flags.isdisjoint(("amx_bf16", "avx512_bf16"))


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# SIGTERM or Ctrl-C that came while a command makes something.
#
# It raises KeyboardInterrupt wherever the program is just then. A library may swallow that, or make an error of its own
# of it (as Python does where a C extension is being imported), and what is made goes on as something else than an
# undisturbed call makes. So code that puts a made thing in its place checks here first.
#
# Code that can finish soon takes the first signal as a wish (`draining`); the second one raises. But where a
# launcher passes signals on, the first alone counts: who stops the launcher often signals its processes too, so that
# each gets it again, and the launcher itself kills those that take too long.

_signals = SimpleNamespace(
    came=False,
    wish=False,
    is_draining=False,
    notice="",
    has_launcher=False,
    is_term=False,
)
"""One for the process, as signals are; whether the last signal that counted was SIGTERM."""


class Terminated(KeyboardInterrupt):
    """SIGTERM came, and not Ctrl-C."""


def on_signal(number: int, _frame: FrameType | None) -> None:
    """The handler of a signal that interrupts.

    Raises:
        KeyboardInterrupt: but for the first signal while a command drains, and for what a launcher repeats.
    """
    # time does not show a repetition: it waits for the end of whatever torch is at, as long as a step
    if _signals.has_launcher and (_signals.wish or _signals.came):
        return
    _signals.is_term = number == signal.SIGTERM
    if _signals.is_draining and not _signals.wish:
        _signals.wish = True
        # not by print: the signal may have come in the middle of one
        os.write(2, _signals.notice.encode())
        return
    _signals.came = True
    raise interruption()


def interruption() -> KeyboardInterrupt:
    """What to raise for the signal that came."""
    return Terminated() if _signals.is_term else KeyboardInterrupt()


def check_interrupted() -> None:
    """Go on only where no interruption came.

    Raises:
        KeyboardInterrupt: one did, and a library made another error of it.
    """
    if _signals.came:
        raise interruption()


@contextlib.contextmanager
def draining(notice: str = "") -> Iterator[None]:
    """Take the first signal as a wish to stop soon, see `is_stop_wished`.

    Args:
        notice: written to stderr when it comes.
    Raises:
        KeyboardInterrupt: at the end of the block, if there was one.
    """
    _signals.is_draining = True
    _signals.notice = notice
    try:
        yield
    finally:
        _signals.is_draining = False
    if _signals.wish:
        raise interruption()


def is_stop_wished() -> bool:
    """Whether a signal came that `draining` took as a wish."""
    return bool(_signals.wish)


def forget_interruptions(*, has_launcher: bool = False) -> None:
    """Forget signals, where a command begins.

    Args:
        has_launcher: another process passes signals on to this one, and ends it.
    """
    vars(_signals).update(came=False, wish=False, is_term=False, has_launcher=has_launcher)


@contextlib.contextmanager
def stdout_apart() -> Iterator[None]:
    """Send what is written to this process's stdout, and to that of processes it starts, to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
