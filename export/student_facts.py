"""What a bundle's manifest says of the student in it: what its readers rely on. The manifest may hold more, and who
seals it anew takes all of it along.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from relabel.distill.students.student_section import KindName
from relabel.export.bundles import MANIFEST_NAME, Bundle
from relabel.export.token_lengths import TokenLengths
from relabel.manifests.phi import PhiTable
from relabel.manifests.records import LEFT_OUT, read_record


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
        is_compared: whether it was compared by the parity gate; it is built after.
    """

    flavour: str
    tensorrt: str
    capability: str
    gpu: str | None = None
    profile: list[tuple[int, int]]
    is_compared: bool = False


@dataclass(frozen=True, kw_only=True)
class InputContract:
    """What the bundle's loader must know to turn texts into the tokens that the student saw in training.

    Args:
        tokenizer: its file.
        names: of the graph's inputs.
        columns: of the student's input, as `manifests.specs.Columns` takes them.
        prompt, prompt_ids: of a decoder, its three pieces and their tokens; of a logistic student, text before a query.
    """

    kind: KindName
    tokenizer: str
    max_tokens: int
    names: list[str]
    padding_side: str
    pad_id: int
    pad_type_id: int
    truncation_side: str
    columns: dict[str, Any]
    prompt: list[str] | None = field(default=None, metadata=LEFT_OUT)
    prompt_ids: list[list[int]] | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True, kw_only=True)
class StudentInputs(InputContract):
    """The contract, and the lengths of the pairs that the student was tested on."""

    lengths: TokenLengths


@dataclass(frozen=True)
class BaseReference:
    """The model that a student starts from."""

    reference: str
    digest: str


@dataclass(frozen=True)
class StudentOrigin:
    """The student that a bundle was made of; older ones name no model."""

    digest: str
    name: str
    model: BaseReference | None = None


@dataclass(frozen=True, kw_only=True)
class TrainedLabels:
    """Labels that the student was trained on: of a run, or a file, which has neither labeler nor fingerprint."""

    path: str
    kind: str
    labels: int
    name: str | None = None
    labeler: str | None = None
    fingerprint: str | None = None
    manifest_sha256: str | None = None

    @property
    def maker(self) -> str:
        """What made them, in words."""
        if self.kind == "run":
            return f"labeler {self.labeler}, fingerprint `{(self.fingerprint or '')[:12]}`"
        return "a label file"


@dataclass(frozen=True)
class GoldOrigin:
    """Trusted grades that the student was trained or judged by."""

    path: str
    grade: str | None


@dataclass(frozen=True)
class BundleLineage:
    """What a bundle was made of."""

    student: StudentOrigin
    labels: list[TrainedLabels] | None = None
    gold: GoldOrigin | None = None


@dataclass(frozen=True)
class BundleLicence:
    """The bundle's own, where it is stated, and the reference of the model that the student starts from."""

    bundle: str | None
    model: str | None


@dataclass(frozen=True)
class BundleMaker:
    """The version of relabel that made a bundle."""

    relabel: str


@dataclass(frozen=True, kw_only=True)
class StudentFacts:
    """A bundle's student.

    Args:
        name: of the bundle.
        grades: K of its relevance head.
        heads: grades by head; `temperature` what calibrated each, where something did.
        phi: the rule map, where there are heads beside relevance.
    """

    name: str
    grades: int
    heads: dict[str, int]
    temperature: dict[str, float] | None = None
    phi: PhiTable | None = None
    inputs: StudentInputs
    models: list[EngineFile | ModelFile]
    lineage: BundleLineage
    licence: BundleLicence
    made_by: BundleMaker

    def __post_init__(self) -> None:
        if self.heads.get("relevance", 0) < 2 or min(self.heads.values()) < 1:
            raise ValueError("`heads` gives relevance no grades to choose from")


def student_facts(bundle: Bundle) -> StudentFacts:
    """The student that a bundle's manifest describes.

    Raises:
        ManifestError: it describes none, or otherwise; names the key.
    """
    return read_student_facts(bundle.facts, f"{bundle.folder}/{MANIFEST_NAME}")


def read_student_facts(held: Mapping[str, Any], where: str) -> StudentFacts:
    """The same of a manifest's facts.

    Raises:
        ManifestError: see `student_facts`.
    """
    what = "describes no student as this relabel writes it"
    return read_record(StudentFacts, held, where, what, "Give a bundle that `relabel export` made.")
