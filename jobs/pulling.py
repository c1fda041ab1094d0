"""Bundles pulled once, or by following a channel until SIGTERM or Ctrl-C."""

import contextlib
import random
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from relabel.export import puller
from relabel.export.bundles import translate_refusals
from relabel.export.puller import Address, Progress, Pulled, ServingFolder, Trust
from relabel.manifests import failpoints
from relabel.manifests.errors import (
    RelabelError,
    TransientError,
)
from relabel.manifests.files import translate_errors
from relabel.manifests.store import Store

# ------------------------------------------------------------------------------
# Pulling: once, or following a channel until SIGTERM or Ctrl-C. Errors are reported, and the active version goes on.


JITTER = 0.1
"""Share of the interval by which a tick is early or late, so that a thousand servers do not ask at once."""


def pull_version(
    bundle_store: Store,
    address: Address,
    destination: ServingFolder,
    trust: Trust,
    progress: Progress,
    *,
    keep: int = 3,
    lifts_hold: bool = False,
    checks_parity: bool = False,
) -> Pulled:
    """`puller.pull` over a store of ours, its refusals as relabel's errors.

    Raises:
        ManifestError: there is no such bundle or version, or a record, a file or the destination is damaged or hostile.
        GateError: unsigned, signed by an untrusted key, older than what was seen already, or with answers that differ.
        MissingExtraError: its answers were to be checked, and onnxruntime is absent.
        LockHeldError: another pull to this destination is running.
        DiskFullError: no space for it.
        StoreError: store or disk fail.
    """

    def counted(what: str, count: int) -> None:
        if count:
            failpoints.hit("during_download")
        progress(what, count)

    with translate_refusals(f" {destination.unchanged}"), translate_errors("pull to", destination.folder):
        return puller.pull(
            bundle_store,
            address,
            destination,
            trust,
            counted,
            keep=keep,
            lifts_hold=lifts_hold,
            checks_parity=checks_parity,
        )


class StoppedError(TransientError):
    """A signal interrupted a pull; what came in is kept."""


@dataclass
class ChannelWatch:
    """What a watch did so far.

    Args:
        pulls: pulls that were begun.
        switches: versions that became active.
        refused: pulls that ended in an error.
        last_error: how the last pull that ended did; None where it went well.
        stopped_by: the signal, once there was one.
        is_pulling: a pull is under way, and may be interrupted.
    """

    pulls: int = 0
    switches: int = 0
    refused: int = 0
    stopped_by: signal.Signals | None = None
    last_error: RelabelError | None = None
    is_pulling: bool = False


def follow(
    pull_once: Callable[[], Pulled], destination: ServingFolder, every_s: float, write: Callable[[str], None]
) -> ChannelWatch:
    """Pull every so often until a signal ends it.

    A signal interrupts a pull wherever it is, in a long wait for a store too: a pull is made to be killed anywhere.

    Args:
        every_s: pause between pulls, seconds.
        write: called with each switch, and with what goes wrong, once for as long as it stays the same.
    """
    watch = ChannelWatch()
    asked = threading.Event()
    with _stopping(watch, asked):
        while not asked.is_set():
            watch.pulls += 1
            was = destination.serving()
            watch.is_pulling = True
            try:
                pulled = pull_once()
                watch.is_pulling = False
                watch.last_error = None
                if pulled.has_switched:
                    watch.switches += 1
                    write(str(pulled))
            except StoppedError:
                if destination.serving() != was:  # the switch was made, and the tidying up interrupted
                    watch.switches = watch.switches + 1
                    watch.last_error = None
                break
            except RelabelError as exc:
                watch.is_pulling = False
                watch.refused += 1
                if str(exc) != str(watch.last_error):
                    write(f"relabel: {exc}")
                watch.last_error = exc
            asked.wait(every_s * random.uniform(1 - JITTER, 1 + JITTER))
    return watch


@contextlib.contextmanager
def _stopping(watch: ChannelWatch, asked: threading.Event) -> Iterator[None]:
    def on_signal(number: int, _frame: Any) -> None:
        if asked.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        watch.stopped_by = signal.Signals(number)
        asked.set()
        if watch.is_pulling:
            watch.is_pulling = False
            raise StoppedError("stopped in the middle of a pull; what came in is kept")

    earlier = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
