"""What a bundle's manifest says of the student in it: what its readers rely on. The manifest may hold more, and who
seals it anew takes all of it along.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from export.bundles import MANIFEST_NAME, Bundle
from export.token_lengths import TokenLengths
from manifests.errors import ManifestError
from manifests.records import checked, fault_of


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """A model of a bundle.

    Args:
        path: of the graph, relative to the bundle.
        format: `onnx`, or `tensorrt`.
        files: the graph and the data beside it.
    """

    path: str
    format: str
    precision: str
    files: list[str]


@dataclass(frozen=True, kw_only=True)
class EngineFile(ModelFile):
    """A TensorRT engine.

    Args:
        flavour: `tensorrt` or `tensorrt_rtx`; `tensorrt` its version.
        capability: compute capability that it was built for.
        gpu: that it was built on; None where it was built for another.
        profile: shapes (rows, tokens) that it takes: least, tuned for, most.
        is_compared: whether it stood the parity gate; it is built after.
    """

    flavour: str
    tensorrt: str
    capability: str
    gpu: str | None = None
    profile: list[tuple[int, int]]
    is_compared: bool = False


@dataclass(frozen=True, kw_only=True)
class StudentInputs:
    """Of the loader's contract what others rely on.

    Args:
        names: of the graph's inputs.
        columns: as `manifests.specs.Columns` takes them.
        lengths: of the pairs that the student was tested on.
    """

    max_tokens: int
    names: list[str]
    columns: dict[str, Any]
    lengths: TokenLengths


@dataclass(frozen=True)
class StudentOrigin:
    """The student that a bundle was made of."""

    digest: str


@dataclass(frozen=True)
class BundleLineage:
    """What a bundle was made of."""

    student: StudentOrigin


@dataclass(frozen=True, kw_only=True)
class StudentFacts:
    """A bundle's student.

    Args:
        grades: K of its relevance head.
        heads: grades by head.
    """

    grades: int
    heads: dict[str, int]
    inputs: StudentInputs
    models: list[EngineFile | ModelFile]
    lineage: BundleLineage


def student_facts(bundle: Bundle) -> StudentFacts:
    """The student that a bundle's manifest describes.

    Raises:
        ManifestError: it describes none, or otherwise; names the key.
    """
    try:
        return checked(StudentFacts, bundle.facts)
    except ValueError as exc:
        raise ManifestError(
            f"{bundle.folder}/{MANIFEST_NAME}: describes no student as this relabel writes it ({fault_of(exc)}). "
            "Give a bundle that `relabel export` made."
        ) from exc
