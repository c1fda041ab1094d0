"""Leases: which worker holds a shard on object storage, by the clock of the store."""

from __future__ import annotations

import json
import logging
import os
import random
import secrets
import threading
import time
from dataclasses import asdict, dataclass, replace

from relabel.manifests.errors import LockHeldError, RelabelError, StoreError
from relabel.manifests.files import HERE
from relabel.manifests.objects import ConditionFailedError, Objects, Retries
from relabel.manifests.records import checked, read_in_threads, readable_json

logger = logging.getLogger(__name__)

LEASE_VERSION = 1
RELEASE_S = 3.0
"""How long giving a lease back is tried: an end that is held up costs more than a lease that dies by itself."""
WAIT_S = (0.2, 1.0)
"""Bounds of the pause between two reads of a lease that is waited for."""


@read_in_threads
@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """What a lease says.

    Args:
        nonce: drawn by the holder, so that its own success after a lost reply is distinguished from another's.
        ttl_s: it is dead when it was not written for longer than this.
        renewals: times that it was renewed; makes every write differ from the one before.
    """

    epoch: int
    worker: str
    nonce: str
    ttl_s: float
    renewals: int = 0
    is_released: bool = False
    version: int = LEASE_VERSION


class Lease:
    """A lock kept as an object.

    A thread of its own renews it while it is held, so that a store that is slow, or hangs for one lease, costs no other
    its renewal. The thread is a daemon and no pool's, since a pool is waited for: by its owner, and by the interpreter
    at its exit.

    Args:
        key: where the lease lies.
        what: what is locked, for messages.
        ttl_s: time to live of the lease, if this process gets it.
        retries: of what is done before and after it is held.
    """

    def __init__(self, objects: Objects, key: str, what: str, ttl_s: float, retries: Retries) -> None:
        self.key = key
        self.what = what
        self._objects = objects
        self._retries = retries
        self._mine = LeaseRecord(0, f"{HERE}-{os.getpid()}", secrets.token_hex(8), ttl_s)
        self._tag: str | None = None
        self._renewed_s = 0.0
        self._guard = threading.Lock()
        self._let_go = threading.Event()
        self.is_lost = False

    @property
    def epoch(self) -> int:
        """How many holders there were, this one included."""
        return self._mine.epoch

    @property
    def ttl_s(self) -> float:
        """Time to live, seconds."""
        return self._mine.ttl_s

    def acquire(self, *, waits: bool = False) -> None:
        """Take the lease: create it, or replace one that is released or dead.

        Args:
            waits: until its holder lets go or is dead, instead of failing at once.
        Raises:
            LockHeldError: it is alive in other hands.
            StoreUnreachableError, StoreError: as the storage says.
        """
        while True:
            try:
                self._take()
            except LockHeldError:
                if not waits:
                    raise
                time.sleep(random.uniform(*WAIT_S))
                continue
            self._let_go = threading.Event()
            threading.Thread(target=self._keep, args=(self._let_go,), name="lease", daemon=True).start()
            return

    def renew(self) -> None:
        """Say that the holder lives. Sets `is_lost` if another has the lease by now, or no renewal came through for too
        long.
        """
        with self._guard:
            if self._tag is None or self.is_lost:
                return
            before = self._mine
            try:
                self._write(replace(before, renewals=before.renewals + 1), self._tag, Retries(limit_s=before.ttl_s / 3))
            except LockHeldError:
                self.is_lost = True
                logger.warning(
                    "%s: another worker took it over, since it was not renewed for %g s", self.what, before.ttl_s
                )
            except RelabelError as exc:
                logger.warning("%s: its lease could not be renewed (%s)", self.what, exc)
            finally:  # whatever a renewal failed of, another may have taken the lease over by now
                self.is_lost = self.is_lost or time.monotonic() - self._renewed_s > self.ttl_s

    def release(self) -> None:
        """Mark the lease as free, so that nobody waits for its death; safe to call twice. The epoch stays: it only
        rises.
        """
        self._let_go.set()
        with self._guard:
            tag, self._tag = self._tag, None
            if tag is None or self.is_lost:
                return
            try:
                self._write(replace(self._mine, is_released=True), tag, Retries(limit_s=RELEASE_S, tries=3))
            except RelabelError as exc:  # it dies by itself
                logger.info("%s: its lease could not be given back (%s)", self.what, exc)
            self._tag = None

    def is_alive(self) -> bool:
        """Whether anybody holds it now."""
        found = self._read()
        return found is not None and not self._is_free(found[0])

    def _keep(self, let_go: threading.Event) -> None:
        while not let_go.wait(self.ttl_s / 3):
            try:
                self.renew()
            except Exception:  # nobody waits for this thread: it says so itself, and `renew` counted the time
                logger.exception("%s: its lease could not be renewed", self.what)

    def _take(self) -> None:
        found = self._read()
        if found is None:
            self._write(replace(self._mine, epoch=1), None, self._retries)
            return
        record, tag = found
        if not self._is_free(record):
            raise LockHeldError(
                f"{self.what} is being worked on by {record.worker} ({self.key}). Try again when it has ended."
            )
        if not record.is_released:
            logger.warning(
                "%s: %s did not renew its lease for over %g s; taking over", self.what, record.worker, record.ttl_s
            )
        self._write(replace(self._mine, epoch=record.epoch + 1, renewals=0, is_released=False), tag, self._retries)

    def _write(self, record: LeaseRecord, tag: str | None, retries: Retries) -> None:
        """Put a record over the version `tag` (None: where there is none).

        Raises:
            LockHeldError: another was faster. A refusal that our own write caused (its reply was lost) is no refusal.
        """
        data = readable_json(asdict(record))

        def put() -> str:
            try:
                return self._objects.put(self.key, data, is_new=tag is None, tag=tag)
            except FileNotFoundError:  # somebody removed the lease that was to be replaced
                return self._objects.put(self.key, data, is_new=True)

        try:
            new_tag = retries.call(put, f"{self.what}: writing its lease")
        except ConditionFailedError as exc:
            found = self._read()
            if found is None or found[0] != record:
                who = found[0].worker if found else "another worker"
                raise LockHeldError(
                    f"{self.what} is being worked on by {who} ({self.key}). Try again when it has ended."
                ) from exc
            new_tag = found[1]
        self._mine, self._tag, self._renewed_s = record, new_tag, time.monotonic()

    def _read(self) -> tuple[LeaseRecord, str] | None:
        try:
            found = self._retries.call(lambda: self._objects.get(self.key), f"{self.what}: reading its lease")
        except FileNotFoundError:
            return None
        try:
            return checked(LeaseRecord, json.loads(found.data)), found.tag
        except ValueError as exc:
            raise StoreError(f"{self.key}: not a lease. Remove it; work that is committed is safe.") from exc

    def _is_free(self, record: LeaseRecord) -> bool:
        if record.is_released:
            return True
        try:
            return (
                self._retries.call(lambda: self._objects.age_s(self.key), f"{self.what}: reading its lease")
                > record.ttl_s
            )
        except FileNotFoundError:
            return True
