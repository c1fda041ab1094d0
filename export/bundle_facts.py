"""A bundle's manifest and parity as records, and the model card rendered from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import jinja2
import numpy as np
from pydantic import Field

from relabel.distill.students.spec import KINDS, KindName, LearnedGold, LearnedLabels
from relabel.distill.training.output import BaseModelUsed
from relabel.export.bundles import MANIFEST_NAME, Bundle
from relabel.export.loader import DEFAULT_PRECISION, LEAST_ONNXRUNTIME, OPENVINO, ROUNDED, Inputs
from relabel.manifests.errors import UsageError
from relabel.manifests.phi import PhiTable
from relabel.manifests.records import LEFT_OUT, read_record


@dataclass(frozen=True)
class TokenLengths:
    """Lengths of pairs, in tokens.

    Args:
        rows: pairs that were counted.
        histogram: `[tokens, rows]`, short to long
    """

    rows: int
    p50: int
    p90: int
    p99: int
    max: int
    histogram: list[list[int]]


def describe_lengths(lengths: Sequence[int]) -> TokenLengths:
    """The distribution of some lengths, one at least."""
    p50, p90, p99 = (int(value) for value in np.ceil(np.percentile(lengths, [50, 90, 99])))
    tokens, rows = np.unique(lengths, return_counts=True)
    return TokenLengths(
        rows=len(lengths),
        p50=p50,
        p90=p90,
        p99=p99,
        max=int(max(lengths)),
        histogram=[list(pair) for pair in zip(tokens.tolist(), rows.tolist(), strict=True)],
    )


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """A model of a bundle.

    Args:
        path: of the graph, relative to the bundle.
        format: `onnx`, or `tensorrt`.
        files: the graph and its data file.
    """

    path: str
    format: str
    precision: str
    files: list[str]


@dataclass(frozen=True, kw_only=True)
class EngineFile(ModelFile):
    """A TensorRT engine; the parity gate does not compare it, since it is built after.

    Args:
        flavour: `tensorrt` or `tensorrt_rtx`; `tensorrt` its version.
        capability: compute capability that it was built for.
        profile: shapes (rows, tokens) that it takes: least, tuned for, most.
    """

    flavour: str
    tensorrt: str
    capability: str
    profile: list[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class StudentInputs(Inputs):
    """What the loader must know, and what others read with it.

    Args:
        columns: of the student's input, as `manifests.specs.Columns` takes them.
        lengths: of the pairs that the student was tested on.
    """

    kind: KindName
    columns: dict[str, Any]
    lengths: TokenLengths


@dataclass(frozen=True)
class StudentOrigin:
    """The student that a bundle was made of."""

    digest: str
    name: str
    model: BaseModelUsed | None = None


@dataclass(frozen=True)
class BundleLineage:
    """What a bundle was made of."""

    student: StudentOrigin
    labels: list[LearnedLabels] | None = None
    gold: LearnedGold | None = None


@dataclass(frozen=True, kw_only=True)
class StudentFacts:
    """A bundle's student.

    Args:
        name: of the bundle.
        grades: K of its relevance head.
        heads: grades by head; `temperature` what calibrated each, where something did.
        phi: the rule map, where there are heads other than relevance.
        default_precision: in which it answers where none is named; older manifests state none.
        licence: `bundle`, where it is stated; `model`, the reference of what the student starts from.
    """

    name: str
    grades: int
    heads: dict[str, int]
    temperature: dict[str, float] | None = None
    phi: PhiTable | None = None
    inputs: StudentInputs
    models: list[EngineFile | ModelFile]
    default_precision: str = DEFAULT_PRECISION
    lineage: BundleLineage
    licence: dict[str, str | None]
    made_by: dict[str, Any]


def student_facts(bundle: Bundle) -> StudentFacts:
    """The student that a bundle's manifest describes.

    Raises:
        ManifestError: it describes none, or otherwise; names the key.
    """
    return read_student_facts(bundle.facts, f"{bundle.folder}/{MANIFEST_NAME}")


def read_student_facts(facts: Mapping[str, Any], where: str) -> StudentFacts:
    """The same of a manifest's facts.

    Raises:
        ManifestError: see `student_facts`.
    """
    return read_record(
        StudentFacts,
        facts,
        where,
        "describes no student as this relabel writes it",
        "Give a bundle that `relabel export` made.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeFigures:
    """A model against the student in batches of one size.

    Args:
        max_abs: the largest |Δp| of any head.
        ordered: pairs of documents of one query that the student orders.
        tau: Kendall's, by query; None where the student orders no two documents of a query.
        flip_low, flip_high: bounds of `flip_share`, 95 %, over queries; absent with one query.
        tau_low, tau_high: its bounds, 95 %, over queries; absent with fewer than two.
        judged_by: whose grades macro F1 and nDCG are by: `gold`, `teacher`, or the student's own.
        f1_macro: of `student` and `model`, and `loss_points`, those that the model loses, with a 95 % interval over
            queries, `loss_low` to `loss_high`.
        ndcg: nDCG@10 of `student` and `model`, and the `loss`; None where no query can be ranked.
    """

    is_finite: bool
    max_abs: float
    flip_share: float
    flip_low: float | None = field(default=None, metadata=LEFT_OUT)
    flip_high: float | None = field(default=None, metadata=LEFT_OUT)
    tau: float | None
    tau_low: float | None = field(default=None, metadata=LEFT_OUT)
    tau_high: float | None = field(default=None, metadata=LEFT_OUT)
    ordered: int = 0
    judged_by: str
    judged_queries: int = 0
    f1_macro: dict[str, float]
    ndcg: Annotated[dict[str, float | None], Field(alias="ndcg@10")]


@dataclass(frozen=True, slots=True)
class ParityCheck:
    """A bound of a precision's gate, and the value that was compared with it."""

    check: str
    value: float
    bound: float
    has_passed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParity:
    """One model against the student.

    Args:
        checks: bounds of the precision's gate.
        doubts: as in `parity.doubts_of`, sentences.
        worst: the rows whose probabilities differ most: `source` and `row`, where it lies, `batch_size`, `is_flip`,
            `max_abs`, and both distributions, `student` and `model`, None for what is not finite.
    """

    precision: str
    rows: int
    queries: int
    is_weak: bool
    by_batch_size: Annotated[dict[str, SizeFigures], Field(min_length=1)]
    checks: list[ParityCheck]
    has_passed: bool
    doubts: list[str] = field(default_factory=list)
    worst: list[dict[str, Any]]

    @property
    def figures(self) -> list[SizeFigures]:
        """By batch size, as compared."""
        return list(self.by_batch_size.values())


@dataclass(frozen=True, slots=True)
class Parity:
    """All models of a bundle against its student, by a `ParitySpec`."""

    spec: dict[str, Any]
    provider: str
    onnxruntime: str
    models: Annotated[list[ModelParity], Field(min_length=1)]


def read_parity(section: Any, where: str) -> Parity:
    """The section `parity` of a bundle's manifest.

    Args:
        where: the manifest, for messages.
    Raises:
        ManifestError: it is damaged; names the key.
    """
    return read_record(
        Parity,
        section,
        where,
        "its parity is not as this relabel writes it",
        "Restore it from a copy.",
    )


CARD_NAME = "README.md"


def render_card(template: str, **values: Any) -> str:
    """Markdown of a template in `export/templates`."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("relabel.export"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return made.get_template(template).render(values)


def render_bundle_card(student: StudentFacts, parity: Parity) -> str:
    """A bundle's model card."""
    head, *rows = parity_rows(parity)
    return render_card(
        "bundle.md",
        student=student,
        does=KINDS[student.inputs.kind].does.capitalize(),
        onnxruntime=LEAST_ONNXRUNTIME,
        parity=parity,
        compared_on=compared_on(parity),
        head=head,
        rows=rows,
        undecided=undecided_lines(parity),
    )


def parity_rows(parity: Parity) -> list[list[str]]:
    """The parity table: a row a precision, with the worst batch size's figure in each column; the first row is the
    head.
    """
    rows = [["precision", "max abs Δp", "flips (95 %)", "tau", "F1 loss, points (95 %)", "nDCG@10 loss", "gate"]]
    for model in parity.models:
        max_abs = max(figure.max_abs for figure in model.figures)
        flips = max(model.figures, key=lambda figure: figure.flip_share)
        flip_text = f"{flips.flip_share:.2%}"
        if flips.flip_low is not None:
            flip_text += f" ({flips.flip_low:.2%} to {flips.flip_high:.2%})"
        worst_f1 = max((figure.f1_macro for figure in model.figures), key=lambda f1: f1["loss_points"])
        taus = [figure.tau for figure in model.figures if figure.tau is not None]
        losses = [figure.ndcg["loss"] for figure in model.figures]
        known_losses = [loss for loss in losses if loss is not None]
        rows.append(
            [
                model.precision,
                f"{max_abs:.1e}",
                flip_text,
                f"{min(taus):.4f}" if taus else "–",
                "{loss_points:+.2f} ({loss_low:+.2f} to {loss_high:+.2f})".format_map(worst_f1),
                f"{max(known_losses, key=abs):+.4f}" if known_losses else "–",
                verdict(model),
            ]
        )
    return rows


def verdict(model: ModelParity) -> str:
    """What the gate came to for a model: `passed`, `undecided` or `REFUSED`."""
    if not model.has_passed:
        return "REFUSED"
    return "undecided" if model.doubts else "passed"


def undecided_lines(parity: Parity) -> list[str]:
    """A sentence for each doubt about a model that passed."""
    lines = []
    for model in parity.models:
        if model.has_passed:
            lines += [f"{model.precision} is undecided: {doubt}." for doubt in model.doubts]
    return lines


class ChosenPrecision(NamedTuple):
    """A precision, the provider that it is taken on, and why, in words."""

    precision: str
    reason: str
    provider: str


def choose_precision(parity: Parity, provider: str, wish: str, why: str = "named") -> ChosenPrecision:
    """The precision to label with, where its gate did not refuse it.

    Args:
        wish: the precision that is named, or the bundle's default.
        why: it is wished for.
    Raises:
        UsageError: no model of that precision passed a gate.
    """
    passed = {model.precision: model for model in parity.models if model.has_passed}
    if provider == OPENVINO:
        passed |= {name: passed[source] for name, source in ROUNDED.items() if source in passed}
    if wish not in passed:
        raise UsageError(f"--precision {wish}: those of this bundle that passed their gate are {', '.join(passed)}.")
    doubts = passed[wish].doubts
    if doubts:
        why += f"; its gate is undecided: {'; '.join(doubts)}"
    return ChosenPrecision(wish, why, provider)


def compared_on(parity: Parity) -> str:
    """The pairs and batch sizes that the models were compared on, and who judged, as a sentence begun."""
    first = parity.models[0]
    sizes = ", ".join(map(str, parity.spec["batch_sizes"]))
    return (
        f"On {first.rows:,} real pairs of {first.queries:,} queries, in batches of {sizes}, on {parity.provider} "
        f"(onnxruntime {parity.onnxruntime}); macro F1 and nDCG by {first.figures[0].judged_by}."
    )
