"""What a child of `forks` does to itself before its commands: faults that have to be put inside the process.

Every function here runs in a fork that ends soon after, so that nothing is put back.
"""

import ast
import builtins
import errno
import io
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, ClassVar


def arm(place: str) -> None:
    """Be killed at a failpoint, or before the change of the disk of a number (`change:7`)."""
    from relabel.manifests import failpoints
    from tests.killing import die_before_change

    name, _, number = place.partition(":")
    if name == "change":
        die_before_change(int(number))
    else:
        failpoints.arm(place)


def work_in(folder: str, function: str = "", *arguments: Any) -> None:
    """Make a folder the working directory, and then do another of these things."""
    os.chdir(folder)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    if function:
        globals()[function](*arguments)


def spoil_stream(name: str, how: str) -> None:
    """Stdout or stderr is full, closed, or a pipe whose reader has gone.

    Args:
        name: `stdout`, `stderr`.
        how: `full`, `closed`, `broken`.
    """
    descriptor = {"stdout": 1, "stderr": 2}[name]
    getattr(sys, name).flush()
    if how == "closed":
        os.close(descriptor)
        setattr(sys, name, None)  # as Python has it where it finds the descriptor closed
        setattr(sys, f"__{name}__", None)
        return
    if how == "full":
        spoilt = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, spoilt = os.pipe()
        os.close(reader)
    os.dup2(spoilt, descriptor)
    os.close(spoilt)


def note_hits(log: str) -> None:
    """Every failpoint that is come by is a line of a file."""
    from relabel.manifests import failpoints

    def hit(name: str) -> None:
        with Path(log).open("a") as file:
            file.write(f"{name}\n")

    failpoints.hit = hit


def note_trees(log: str) -> None:
    """Every syntax tree, and every check of records, that another thread than the main one builds is a line of a file;
    and threads read every output.
    """
    from relabel.manifests import records
    from relabel.manifests.store import LocalStore

    def note(what: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            with Path(log).open("a") as file:
                file.write(f"{what}\n{''.join(traceback.format_stack())}\n")

    compiles, adapts = builtins.compile, records.TypeAdapter

    def compile_(source: Any, filename: Any, mode: str, flags: int = 0, *arguments: Any, **options: Any) -> Any:
        if flags & ast.PyCF_ONLY_AST:
            note(source)
        return compiles(source, filename, mode, flags, *arguments, **options)

    def adapt(kind: Any) -> Any:
        note(kind)
        return adapts(kind)

    Path(log).touch()
    vars(builtins)["compile"], vars(records)["TypeAdapter"] = compile_, adapt
    LocalStore.readers = property(lambda self: 4, lambda self, count: None)  # type: ignore[assignment]


class _Calls:
    """Calls to the operating system about files below a folder, counted; the nth goes wrong."""

    TAKE_PATHS: ClassVar = (
        "link",
        "replace",
        "rename",
        "unlink",
        "remove",
        "mkdir",
        "scandir",
        "listdir",
        "stat",
        "open",
        "rmdir",
    )
    TAKE_DESCRIPTORS: ClassVar = ("fsync", "write", "ftruncate")

    def __init__(self, folder: str, nth: int, how: str, log: str) -> None:
        self.folder, self.nth, self.how, self.log = os.path.realpath(folder), nth, how, log
        self.count = 0
        self.descriptors: set[int] = set()

    def is_ours(self, thing: Any) -> bool:
        if isinstance(thing, int):
            try:
                return str(Path(f"/proc/self/fd/{thing}").readlink()).startswith(self.folder)
            except OSError:
                return False
        return str(thing).startswith(self.folder)

    def wrap(self, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def called(thing: Any, *more: Any, **options: Any) -> Any:
            if not self.is_ours(thing):
                return real(thing, *more, **options)
            self.count += 1
            if self.count != self.nth:
                return real(thing, *more, **options)
            Path(self.log).write_text(f"{name} {thing}")
            if self.how.endswith("after"):
                real(thing, *more, **options)
            self.go_wrong(name, str(thing))
            return None

        setattr(owner, name, called)

    def go_wrong(self, name: str, thing: str) -> None:
        if self.how.startswith("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        number = errno.ENOSPC if self.how.startswith("full") else errno.EIO
        raise OSError(number, os.strerror(number), thing)


def fail_file_call(folder: str, nth: int, how: str, log: str) -> None:
    """The nth call about a file below a folder goes wrong.

    Args:
        how: `error`, `full` or `kill`, a space, `before` or `after` it acted.
        log: gets the call that went wrong, or the number of calls there were if it never came.
    """
    calls = _Calls(folder, nth, how, log)
    for name in (*_Calls.TAKE_PATHS, *_Calls.TAKE_DESCRIPTORS):
        calls.wrap(os, name)
    for module in (io, builtins):
        calls.wrap(module, "open")
    from multiprocessing.util import Finalize  # a fork leaves without what atexit holds

    Finalize(None, lambda: calls.count < nth and Path(log).write_text(f"calls {calls.count}"), exitpriority=1)
