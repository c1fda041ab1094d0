"""A copy of a training's checkpoints at a URL, so that another machine goes on where this one was lost. Importing it
does not load torch.

    URL/leases/training.json         held by the training that writes there
        training.json                whose checkpoints they are
        rollouts/step-000120.parquet what a checkpoint names, before it
        checkpoint-000120/…          its digests last: a checkpoint that has them is whole

Checkpoints are copied while the training goes on. What can't be copied is reported, and tried again with the next one:
the training does not depend on it.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from relabel.distill.training.output import (
    RECORD_NAME,
    Start,
    checkpoint_name,
    list_checkpoints,
    step_of,
    sync_files,
)
from relabel.manifests.errors import RelabelError, StaleRunError
from relabel.manifests.files import Storage
from relabel.manifests.store import Store, digest_of_blocks, open_run_store

DIGESTS = "digests.json"
LEASE = "training"
LOOK_S = 1.0
"""Between looks for a new checkpoint: a step that is worth a checkpoint takes longer."""
BLOCK_BYTES = 1 << 20


class Mirror:
    """The copy at one URL, of the checkpoints in one folder.

    Args:
        url: a path will do, on a file system that outlives this machine.
        folder: of the checkpoints, here.
        report: called with what is copied or can't be, a line each.
    """

    def __init__(self, url: str, storage: Storage, folder: Path, report: Callable[[str], None]) -> None:
        self._url = url
        self._store: Store = open_run_store(url, storage)
        self._folder = folder
        self._report = report
        self._sent = set[str]()

    @contextmanager
    def held(self, start: Start) -> Iterator[None]:
        """Nobody else writes there meanwhile. A training that is resumed gets what this folder lacks, one that starts
        over removes what is there, and new checkpoints are copied until the end.

        Raises:
            LockHeldError: another training writes there.
            StaleRunError: checkpoints are there, and the training is neither resumed nor started over.
            StoreError: the storage can't be reached.
        """
        lease = self._store.lock(LEASE, f"the checkpoints at {self._url}")
        lease.acquire()
        try:
            self._prepare(start)
            is_over = threading.Event()
            sender = threading.Thread(target=self._follow, args=(is_over,), name="mirror", daemon=True)
            sender.start()
            try:
                yield
            finally:
                is_over.set()
                sender.join()
        finally:
            lease.release()

    def _prepare(self, start: Start) -> None:
        steps = self._whole_steps()
        if start == "restart":
            for name in self._names():
                self._store.remove(name)
        elif steps and start == "new":
            raise StaleRunError(
                f"{self._url}: {checkpoint_name(steps[-1])} of a training is there. Continue with --resume, start over "
                "with --restart, or name another `train.mirror`."
            )
        elif steps and (not self._own() or step_of(self._own()[-1]) < steps[-1]):
            self._fetch(steps[-1])

    def _names(self) -> list[str]:
        """All files there but locks."""
        return [name for name in self._store.names("") if not name.startswith("leases/")]

    def _own(self) -> list[Path]:
        return list_checkpoints(self._folder)

    def _whole_steps(self) -> list[int]:
        """Steps of the checkpoints that are whole there, in order."""
        found = [re.fullmatch(rf"checkpoint-(\d+)/{re.escape(DIGESTS)}", name) for name in self._names()]
        return sorted(int(match[1]) for match in found if match is not None)

    def _fetch(self, step: int) -> None:
        """Bring a checkpoint and what it names here; its digests are checked when it is loaded."""
        self._report(f"fetching {checkpoint_name(step)} from {self._url}")
        scratch = self._folder / f".part-{checkpoint_name(step)}"
        shutil.rmtree(scratch, ignore_errors=True)
        for name in self._names():
            top, _, rest = name.partition("/")
            if top == checkpoint_name(step):
                self._fetch_file(name, scratch / rest)
            elif not top.startswith("checkpoint-"):
                self._fetch_file(name, self._folder / name)
        sync_files(scratch)
        scratch.rename(self._folder / checkpoint_name(step))

    def _fetch_file(self, name: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for block in self._store.blocks(name, 0):
                file.write(block)

    def _follow(self, is_over: threading.Event) -> None:
        """Copy each new checkpoint, the last one too after the training has ended."""
        last = -1
        while True:
            ends = is_over.wait(LOOK_S)
            own = self._own()
            if own and step_of(own[-1]) != last:
                last = step_of(own[-1])
                try:
                    self._send(own[-1])
                except FileNotFoundError:  # it has gone to make room for a later one
                    last = -1
                except RelabelError as exc:
                    self._report(f"train.mirror: {own[-1].name} was not copied ({exc}) The training goes on.")
            if ends and (not own or step_of(own[-1]) == last):
                return

    def _send(self, checkpoint: Path) -> None:
        """Copy a checkpoint: what it names, its files, its digests; then remove those that are no longer kept here."""
        parts = [path for path in sorted(self._folder.glob("*/step-*.parquet")) if path.parent != checkpoint]
        files = [path for path in sorted(checkpoint.iterdir()) if path.name != DIGESTS]
        for path in [*parts, self._folder / RECORD_NAME, *files, checkpoint / DIGESTS]:
            self._send_file(path)
        kept = {path.name for path in self._own()} | {checkpoint.name}
        gone = [name for name in self._names() if name.startswith("checkpoint-")]
        # a checkpoint without digests is not whole, so they go first
        for name in sorted(gone, key=lambda name: not name.endswith(DIGESTS)):
            if name.partition("/")[0] not in kept:
                self._store.remove(name)

    def _send_file(self, path: Path) -> None:
        name = path.relative_to(self._folder).as_posix()
        if name in self._sent:  # a file below the folder of the checkpoints never changes
            return
        with path.open("rb") as file:
            held = digest_of_blocks(iter(lambda: file.read(BLOCK_BYTES), b""), _unheard)
        self._store.put_file(name, path, held, _unheard)
        self._sent.add(name)


def mirror_of(
    url: str | None, storage: Storage, folder: Path, report: Callable[[str], None]
) -> Callable[[Start], AbstractContextManager[None]] | None:
    """What `train_into` takes as `mirrored`; None where no URL is named.

    Raises:
        MissingExtraError, StoreError: no way to that kind of storage from here.
    """
    return None if url is None else Mirror(url, storage, folder, report).held


def _unheard(_: int) -> None:
    """Nobody shows how far a copy is."""
