"""Making a model in a place of its own: one that is finished is found, what is another's is refused, and what is made
is whole or not there. `manifest.json` is written last: a folder without one holds no finished model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from relabel.distill.training.disk_errors import sync_files, writing
from relabel.distill.training.model_manifests import StoredManifest
from relabel.distill.training.output_locations import OutputLocation
from relabel.distill.training.ownership import check_claim, claim, claimed, finished, note_claim, tidy
from relabel.distill.training.unfinished import TrainingRecord
from relabel.manifests import failpoints
from relabel.manifests.digests import readable_json
from relabel.manifests.errors import ConfigError, StaleRunError
from relabel.manifests.interruptions import check_interrupted
from relabel.manifests.models.references import ResolvedModel
from relabel.manifests.records import plain
from relabel.manifests.runs.run_manifest import MANIFEST_NAME
from relabel.manifests.storage.local_run_store import LocalRunStore

Start = Literal["new", "resume", "restart"]
"""`new` refuses to touch what an earlier training left; `resume` goes on with it, and begins where there is nothing;
`restart` throws it away.
"""

ManifestT = TypeVar("ManifestT")


@dataclass(frozen=True)
class Left:
    """What earlier calls left.

    Args:
        done: manifest of this spec's model where it belongs.
        waiting: manifest of this spec's model where it was trained, if it goes elsewhere and that is still to be done.
        is_replacing: whether another model may be replaced, because this call is a --restart or goes on with one.
    """

    done: StoredManifest | None
    waiting: StoredManifest | None
    is_replacing: bool

    @property
    def found(self) -> StoredManifest | None:
        """The manifest of this spec's model, if it is finished."""
        return self.done or self.waiting


def refuse_own_base(location: OutputLocation, base: ResolvedModel, *, key: str) -> None:
    """
    Args:
        key: the spec's, that names the base.
    Raises:
        ConfigError: the model would be written over the one that it starts from; killed on the way, neither would be
            left. Or into it: that would change its digest, and a killed training could not go on.
    """
    folder, own = location.folder.resolve(), base.path.resolve()
    if folder == own:
        raise ConfigError(f"`output` and `{key}` are the same folder ({location.output}). Name another `output`.")
    if own in folder.parents:
        raise ConfigError(f"`output` ({location.output}) lies in `{key}`, the model to start from. Name another place.")


def look(location: OutputLocation, record: TrainingRecord, start: Start) -> Left:
    """See what an earlier call left.

    Raises:
        StaleRunError: the model of another spec, which this call may not replace.
    """
    # here first: what is delivered between the two looks is found by the second
    here = location.local_manifest() if location.url else None
    waiting = finished(here, record, start, location, str(location.folder))
    is_ours = claimed(location.checkpoints) == (record.fingerprint, True) and (start == "resume" or waiting is not None)
    done = location.manifest()
    if is_ours and done is not None and (waiting is None or done.data != waiting.data):
        done = None  # the one that a --restart is to replace: it was killed, and goes on
    done = finished(done, record, start, location, location.output)
    return Left(done, waiting, is_replacing=is_ours or start == "restart")


def foresee(location: OutputLocation, record: TrainingRecord, start: Start) -> StoredManifest | None:
    """What `making` would come upon, without a lock and without a trace: the finished model, or nothing in its way.

    Raises:
        StaleRunError: the model or checkpoints of another spec, or checkpoints that nobody said what to do with.
        StoreError: nothing can be written there.
    """
    found = look(location, record, start).found
    if found is None:
        check_claim(location, record, start)
        location.check_writable()
    return found


def conclude(location: OutputLocation, left: Left, record: TrainingRecord, start: Start, *, is_writer: bool) -> Left:
    """End without training: the model is where it belongs, or only waits here to be copied there.

    Args:
        is_writer: False in all but the first of several processes that train together.
    Raises:
        StaleRunError: another call started over meanwhile.
    """
    if left.waiting is None:
        if is_writer:
            tidy(location, record.fingerprint)
        return left
    if not is_writer:
        return left
    with location.locked():
        now = look(location, record, start)  # again: somebody may have had the lock until now
        if now.found is None:
            raise StaleRunError(
                f"{location.folder}: another call started over there meanwhile. Try again when it has ended."
            )
        if now.waiting is not None and now.done is None:
            location.deliver(is_replacing=now.is_replacing)
        elif now.waiting is not None:
            location.forget()
    return now


@contextmanager
def making(location: OutputLocation, record: TrainingRecord, start: Start) -> Iterator[None]:
    """Hold the place while a model is trained and written there; then bring it to where it goes.

    Raises:
        LockHeldError: another process trains there.
        StaleRunError: another call finished this model meanwhile, or checkpoints of another one are there.
    """
    with location.locked() as make_sure:
        left = look(location, record, start)  # again: somebody may have finished one meanwhile
        if left.found is not None:
            raise StaleRunError(
                f"{location.output}: another call finished this {location.product.kind} meanwhile. The same command "
                "again finds it."
            )
        claim(location, record, start, is_replacing=left.is_replacing)
        yield
        make_sure()
        location.deliver(is_replacing=left.is_replacing)


def finish(location: OutputLocation, fingerprint: str, write: Callable[[Path], ManifestT]) -> ManifestT:
    """Write the folder: the manifest of a model that is replaced goes first, the new one comes last.

    Args:
        write: writes all files but the manifest, and returns that as a record.
    """
    failpoints.hit("before_model")
    folder = location.folder
    (folder / MANIFEST_NAME).unlink(missing_ok=True)
    if location.url is None:  # nothing is left to be replaced: the next manifest here is this model's
        note_claim(location.checkpoints, fingerprint, is_replacing=False)
    with writing(folder, location.checkpoints):
        manifest = write(folder)
        sync_files(folder)
    check_interrupted()
    LocalRunStore(folder).put(MANIFEST_NAME, readable_json(plain(manifest)))
    return manifest
