"""Actions of a Delta table's log, and what they come to."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from relabel.manifests.records import checked


@dataclass(frozen=True)
class DeltaFile:
    """An action that adds or removes a file."""

    path: str
    size: int | None = None
    deletion_vector: Annotated[dict[str, Any] | None, Field(alias="deletionVector")] = None
    is_data_change: Annotated[bool, Field(alias="dataChange")] = True

    @property
    def key(self) -> tuple[str, str]:
        """What makes it one file of the log: its path, and its deletion vector."""
        vector = self.deletion_vector or {}
        return self.path, "".join(str(vector.get(part)) for part in ("storageType", "pathOrInlineDv", "offset"))


@dataclass(frozen=True)
class DeltaProtocol:
    min_reader_version: Annotated[int, Field(alias="minReaderVersion")]
    reader_features: Annotated[list[str] | None, Field(alias="readerFeatures")] = None


@dataclass(frozen=True)
class DeltaSidecar:
    """A further Parquet file of a checkpoint."""

    path: str


@dataclass(frozen=True)
class _Column:
    name: str
    metadata: dict[str, Any]


@dataclass(frozen=True)
class _Schema:
    fields: list[_Column]


@dataclass(frozen=True)
class _Metadata:
    id: str
    schema_string: Annotated[str, Field(alias="schemaString")]
    configuration: dict[str, str | None] = field(default_factory=dict)

    def columns(self) -> dict[str, str]:
        """The name in the files of each column."""
        is_mapped = self.configuration.get("delta.columnMapping.mode", "none") != "none"
        key = "delta.columnMapping.physicalName"
        return {
            one.name: one.metadata.get(key, one.name) if is_mapped else one.name
            for one in checked(_Schema, json.loads(self.schema_string)).fields
        }


@dataclass
class DeltaState:
    """What the log says up to a version."""

    protocol: DeltaProtocol | None = None
    metadata: _Metadata | None = None
    files: dict[tuple[str, str], DeltaFile] = field(default_factory=dict)

    def take(self, actions: Iterable[dict[str, Any]]) -> None:
        """Go on by one commit or checkpoint."""
        added = []
        for action in actions:
            if (one := action.get("protocol")) is not None:
                self.protocol = checked(DeltaProtocol, one)
            if (one := action.get("metaData")) is not None:
                self.metadata = checked(_Metadata, {**one, "configuration": dict(one.get("configuration") or {})})
            if (one := action.get("remove")) is not None:
                self.files.pop(checked(DeltaFile, one).key, None)
            if (one := action.get("add")) is not None:
                added.append(checked(DeltaFile, one))
        self.files.update((file.key, file) for file in added)  # after what the same commit removed
