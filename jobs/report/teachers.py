"""A teacher's folder as a report reads it: its manifest, its digest as a model, and its rollouts."""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from relabel.distill.students.students import NOT_THE_MODEL
from relabel.distill.teachers.rollout_files import ROLLOUT_SCHEMA, ROLLOUTS_NAME
from relabel.distill.teachers.teacher_manifest import TeacherManifest
from relabel.manifests.digests import sha256_bytes
from relabel.manifests.errors import ManifestError
from relabel.manifests.models.references import default_cache_dir, digest_of_files, directory_digest
from relabel.manifests.storage.filesystems import is_url, place_of, scheme_of
from relabel.manifests.storage.run_store_ports import RunStore, read_if_there


@dataclass
class TeacherArtifact:
    """A teacher's folder."""

    path: str
    store: RunStore
    manifest: TeacherManifest
    name: str

    @property
    def folder(self) -> Path | None:
        """Where it lies on this machine; None at a URL."""
        is_here = not is_url(self.path) or scheme_of(self.path) in ("file", "local")
        return Path(place_of(self.path)) if is_here else None

    @cached_property
    def digest(self) -> str:
        """What a run calls the model: over all files of the folder, as they are now. At a URL the weights are believed
        to be those that the manifest names, and are not read.
        """
        if self.folder is not None:
            return directory_digest(self.folder, cache_dir=default_cache_dir())
        files = dict(self.manifest.files or {})
        for name in NOT_THE_MODEL:
            if (data := read_if_there(self.store, name)) is not None:
                files[name] = sha256_bytes(data)
        return digest_of_files(files)

    def rollouts(self) -> list[pq.ParquetFile]:
        """All that it wrote while it was trained by reinforcement, in one file; none where there was none.

        Raises:
            ManifestError: the file can't be read.
        """
        try:
            source: Any = None if self.folder is None else self.folder / ROLLOUTS_NAME
            found = pq.ParquetFile(io.BytesIO(self.store.read(ROLLOUTS_NAME)) if source is None else source)
        except FileNotFoundError:
            return []
        except (pa.ArrowException, OSError) as exc:
            raise self._unreadable() from exc
        if not is_rollouts(found):
            raise self._unreadable()
        return [found]

    def _unreadable(self) -> ManifestError:
        return ManifestError(f"{self.path}/{ROLLOUTS_NAME}: not readable as rollouts. Restore the folder from a copy.")


def is_rollouts(file: pq.ParquetFile) -> bool:
    """Whether a file has the columns of rollouts; a method may have further ones."""
    return all(field in file.schema_arrow for field in ROLLOUT_SCHEMA)
