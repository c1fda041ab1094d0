"""A student as a labeler: its options, and the columns that its labels have."""

from __future__ import annotations

from collections.abc import Collection, Generator
from typing import ClassVar, Literal

from relabel.distill.students.heads import NODE_HEADS
from relabel.distill.students.length_batches import CPU_BATCH_TOKENS
from relabel.manifests.asks import DOCUMENT_FIELD, Answer, Ask, Decision, Message
from relabel.manifests.labels import Label, LabelColumn, Pair
from relabel.manifests.specs import EngineArgs, LabelerOptions

STAGE = "score"
Dtype = Literal["float32", "bfloat16", "float16"]


class StudentOptions(LabelerOptions):
    """The `labeler` of a score run: its scale is the student's."""


class StudentArgs(EngineArgs):
    """Options of scoring."""

    speed_only: ClassVar[frozenset[str]] = frozenset({"batch_tokens", "device"})

    batch_tokens: int | None = None
    """Tokens of a batch, padding included; by default what suits the device. Changes the last bits of a score at
    most.
    """
    device: str = "auto"
    """What torch calls it; `auto` is a GPU where one is."""
    dtype: Dtype = "float32"
    """In what the student computes."""


class BundleArgs(EngineArgs):
    """Options of scoring with a bundle. An int8 answer depends on its batch, so the size of batches is no matter of
    speed alone.
    """

    speed_only: ClassVar[frozenset[str]] = frozenset({"device"})

    batch_tokens: int = CPU_BATCH_TOKENS
    """Tokens of a batch, padding included."""
    device: str = "cpu"
    """The provider: `cpu`, `cuda` or `openvino`."""
    precision: str = "fp32"
    """Of the bundle's ONNX models, or in what OpenVINO computes."""
    runtime: Literal["openvino"] | None = None
    """Where it is not onnxruntime: answers of the two differ, so a run has one of them."""


def _declared(heads: Collection[str]) -> tuple[LabelColumn, ...]:
    """What a student with these heads says beside the grade."""
    found = []
    for name in NODE_HEADS:
        if name in heads:
            found += [
                LabelColumn(name, "int8", f"The most probable {name} score, 0 to 4."),
                LabelColumn(f"{name}_probs", "list<float32>", "Its distribution over the five scores."),
            ]
    if set(NODE_HEADS) <= set(heads):
        found += [
            LabelColumn("phi_grade", "int8", "The grade by the rule map: φ(subject, attribute)."),
            LabelColumn("phi_agrees", "bool", "Whether that is the grade."),
        ]
    return tuple(found)


class StudentLabeler:
    """What a score run asks, as labelers say it: one decision a pair, on query and document alone. Estimates walk it;
    the score loop reads pairs by the chunk instead.
    """

    Options: ClassVar[type[LabelerOptions]] = StudentOptions
    uses_context = False

    def __init__(self, options: StudentOptions, heads: Collection[str]) -> None:
        self.columns = _declared(heads)
        self._decisions = (Decision("relevance", "", tuple(map(str, range(options.grades)))),)

    @property
    def template_digests(self) -> dict[str, str]:
        return {}

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        """One ask, whose answer holds no text but the distribution."""
        answer = yield self._ask(pair)
        distribution = answer.distributions["relevance"]
        return Label(distribution.argmax, distribution, flags=list(answer.flags))

    def probe(self) -> list[Ask]:
        return [self._ask(Pair(0, "q", "how to prune roses", "d", "Cut back to an outward bud in late winter."))]

    def _ask(self, pair: Pair) -> Ask:
        message = Message("user", ("", pair.query, "", pair.document, ""), ("query", DOCUMENT_FIELD))
        return Ask(STAGE, (message,), None, 0, self._decisions)
