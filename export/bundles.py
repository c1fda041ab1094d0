"""A bundle: a folder with a student ready to deploy, sealed by its `manifest.json`. The names that its files may have,
and how it takes its place atomically and is recovered after a kill."""

from __future__ import annotations

import glob
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BeforeValidator, Field

from relabel.distill.students.manifest import LearnedGold, LearnedLabels
from relabel.distill.students.spec import KINDS, KindName
from relabel.distill.training.output import BaseModelUsed
from relabel.export import puller
from relabel.export.loader import LEAST_ONNXRUNTIME
from relabel.export.puller import AGAIN as FULL
from relabel.export.puller import GATE, LOCKED, MANIFEST, MISSING, USAGE, File, Refused, entries_in, fault_among
from relabel.manifests.errors import (
    DiskFullError,
    GateError,
    LockHeldError,
    ManifestError,
    MissingExtraError,
    RelabelError,
    StaleRunError,
    UsageError,
)
from relabel.manifests.files import FileLock, held_temp, remove_abandoned, translate_errors
from relabel.manifests.labels import PhiTable
from relabel.manifests.process import check_interrupted
from relabel.manifests.records import LEFT_OUT, read_record, readable_json, sha256_file
from relabel.manifests.specs import Fraction, Spec
from relabel.manifests.store import LocalStore, sync_folder

# ------------------------------------------------------------------------------
# A bundle: a folder with a student ready to deploy, sealed by its `manifest.json`. The names that its files may
# have, and how it takes its place atomically and is recovered after a kill.


MANIFEST_NAME = MANIFEST
MAX_MANIFEST_BYTES = puller.RECORD_BYTES
RecordT = TypeVar("RecordT")
OWN_KEYS = ("kind", "format", "files")
"""Keys of the manifest that `seal_bundle` writes itself."""
VERSION_DIGITS = 16
_ERRORS: dict[int, type[RelabelError]] = {
    USAGE: UsageError,
    MISSING: MissingExtraError,
    GATE: GateError,
    FULL: DiskFullError,
    LOCKED: LockHeldError,
}


@contextmanager
def translate_refusals(note: str = "") -> Iterator[None]:
    """Turn what the puller refuses into relabel's error of the same exit code; a note ends its message."""
    try:
        yield
    except Refused as exc:
        raise _ERRORS.get(exc.code, ManifestError)(exc.text + note) from exc


# A bundle: one folder with a student ready to deploy, and `manifest.json`, which says what every file in it must be.
#
# `seal_bundle` writes the manifest last; `open_bundle` believes a folder only after it checked each name, size and
# digest. The manifest holds no time, so that the same files and facts make the same bytes, and so the same version.


@dataclass(frozen=True, slots=True)
class Bundle:
    """A folder that was checked against its manifest.

    Args:
        folder: where it lies.
        facts: the whole manifest.
        files: what it lists; the manifest itself is not among them.
        manifest: the manifest as a file.
    """

    folder: Path
    facts: Mapping[str, Any]
    files: tuple[File, ...]
    manifest: File

    @property
    def name(self) -> str:
        """What the bundle calls itself, the default of where it is published."""
        return str(self.facts["name"])

    @property
    def own_facts(self) -> dict[str, Any]:
        """The manifest but for what `seal_bundle` writes itself: to seal the bundle again."""
        return {key: value for key, value in self.facts.items() if key not in OWN_KEYS}

    @property
    def version(self) -> str:
        """Its version by default: the first digits of its manifest's sha256."""
        return self.manifest.sha256[:VERSION_DIGITS]

    @property
    def all_files(self) -> tuple[File, ...]:
        """Every file to be moved, the manifest last."""
        return (*self.files, self.manifest)


def seal_bundle(folder: Path, facts: Mapping[str, Any]) -> Bundle:
    """Write the manifest over what lies in a folder; an earlier manifest is replaced.

    Args:
        facts: `name` and `lineage`, and any further sections (heads, inputs, parity, licence …), as plain JSON
            values without times.
    Raises:
        ManifestError: a file's name, or something other than a plain file, cannot be in a bundle; a fact is missing or
            not JSON.
    """
    if taken := [key for key in OWN_KEYS if key in facts]:
        raise ManifestError(f"{folder}: the key `{taken[0]}` of a bundle's manifest is not free.")
    LocalStore(folder).sweep("")
    names = [name for name in _names_in(folder) if name != MANIFEST_NAME]
    files = [File(name, (folder / name).stat().st_size, sha256_file(folder / name)) for name in names]
    held = {"kind": "bundle", "format": 1, **facts, "files": [file._asdict() for file in files]}
    try:
        data = readable_json(held)
    except (TypeError, ValueError) as exc:
        raise ManifestError(f"{folder}: a fact of the bundle can't be written as JSON ({exc}).") from exc
    read_manifest(data, f"{folder}/{MANIFEST_NAME}")
    LocalStore(folder).put(MANIFEST_NAME, data)
    return open_bundle(folder, check_bytes=False)


def _names_in(folder: Path) -> list[str]:
    """Names of all files below a folder, sorted; refuses what no manifest can describe."""
    with translate_errors("list", folder):
        found = list(entries_in(folder))
        if odd := [path for path in found if not stat.S_ISREG(path.lstat().st_mode)]:
            raise ManifestError(f"{odd[0]}: a link, a special file or an empty folder has no place in a bundle.")
    return sorted(path.relative_to(folder).as_posix() for path in found)


def open_bundle(folder: Path, *, check_bytes: bool = True) -> Bundle:
    """Check a folder against its manifest: the same files, no more and no fewer, each with its size and digest.

    Args:
        check_bytes: also read every file and compare its sha256; otherwise names and sizes alone.
    Raises:
        ManifestError: says what is missing, strange or damaged.
    """
    path = folder / MANIFEST_NAME
    try:
        with translate_errors("read", path, is_missing_fine=True):
            if not path.is_file() and path.exists():
                raise ManifestError(f"{path}: is not a plain file. Export or pull the bundle again.")
            if path.stat().st_size > MAX_MANIFEST_BYTES:
                raise ManifestError(f"{path}: too big to be a manifest.")
            data = path.read_bytes()
    except FileNotFoundError as exc:
        raise ManifestError(
            f"{folder}: no {MANIFEST_NAME} there, so no bundle. Give the folder that an export wrote."
        ) from exc
    with translate_refusals(), translate_errors("read", folder):
        facts, files = puller.read_manifest(data, str(path))
        if fault := fault_among(folder, files, reads=check_bytes):
            raise ManifestError(f"{fault}. Export, seal or pull the bundle again.")
    return Bundle(folder, facts, tuple(files[:-1]), files[-1])


@translate_refusals()
def read_manifest(data: bytes, where: str) -> tuple[dict[str, Any], tuple[File, ...]]:
    """A manifest's facts, and the files that it lists, everything checked that can be without the files.

    Raises:
        ManifestError: it is damaged, hostile, or of another format.
    """
    facts, files = puller.read_manifest(data, where)
    return facts, tuple(files[:-1])


# ------------------------------------------------------------------------------
# A bundle's place: a new bundle is made in a hidden folder next to it and switched in, under a lock.
#
# The switch is two renames, old one away and new one in, since no rename replaces a folder that holds something. A kill
# between them leaves the old bundle whole under a hidden name; `put_back` brings it back, and every command that works
# on the place calls that first. What is new lies in a folder of its maker's own (`new_folder_for`), and is on the disk,
# not only in its cache, before it takes the place.


OLD, LOCK, MAKING = "relabel-old", "relabel-lock", "relabel-making"
ABANDONED_S = 86400.0
"""Age at which what another machine was making is nobody's any more, seconds: no engine takes that long to build."""


def hidden_name(folder: Path, ending: str) -> Path:
    """A hidden name of ours next to a bundle: `.bundle.relabel-old`."""
    return folder.with_name(f".{folder.name}.{ending}")


@contextmanager
def locked(folder: Path, *, waits: bool = False) -> Iterator[None]:
    """Hold a bundle's place. The lock's file stays when it is let go: a name that comes and goes would lock nothing.

    Args:
        waits: until its holder lets go, instead of failing at once.
    Raises:
        LockHeldError: a live process holds it.
        StoreError: the folder above can't be written.
    """
    lock = FileLock(hidden_name(folder, LOCK), f"The bundle {folder}")
    lock.acquire(waits=waits)
    try:
        yield
    finally:
        lock.release()


def put_back(folder: Path) -> None:
    """Bring back a bundle that a kill within `switch` left next to its place; nothing where the place is taken.

    Raises:
        LockHeldError: a live process is switching just now.
        StoreError: the folder above can't be written.
    """
    old = hidden_name(folder, OLD)
    if folder.exists() or not old.is_dir():
        return
    with locked(folder), translate_errors("put back", folder):
        if not folder.exists() and old.is_dir():
            old.rename(folder)


def made_before(
    target: Path, read: Callable[[Path], tuple[RecordT, Any]], recipe: Any, *, is_replacing: bool, what: str
) -> RecordT | None:
    """What is at a place already, if this very recipe made it; None where it may be made.

    Args:
        read: what is there, and the recipe that made it.
        what: is to be made, for messages.
    Raises:
        StaleRunError: something else is there.
    """
    put_back(target)
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return None
    try:
        found, made_by = read(target)
    except (ManifestError, OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise StaleRunError(
            f"{target}: holds something that is no whole {what} ({exc}). Name another --to, or move it away."
        ) from exc
    if made_by == recipe:
        return found
    if is_replacing:
        return None
    raise StaleRunError(f"{target}: holds another {what}. Name another --to, or replace it with --replace.")


@contextmanager
def new_folder_for(folder: Path) -> Iterator[Path]:
    """An empty folder next to a bundle's place, to make a bundle in and to `switch` it from; gone when the body ends,
    however it does.

    Its name is this call's alone, so that two who make at one place share nothing. What killed processes left there
    goes.

    Raises:
        StoreError: the folder above can't be written.
    """
    making = hidden_name(folder, MAKING)
    for left in folder.parent.glob(f"{glob.escape(making.name)}-*"):
        remove_abandoned(left, older_s=ABANDONED_S)
    with ExitStack() as held:
        with translate_errors("write", making):
            folder.parent.mkdir(parents=True, exist_ok=True)
            part, _ = held.enter_context(held_temp(folder.parent, f"{making.name}-", is_folder=True))
        yield part


def switch(part: Path, folder: Path) -> None:
    """Let what was made ready take the place of what is there, if anything does. To be called with the place
    `locked`.

    Raises:
        KeyboardInterrupt: an interruption came while it was made.
    """
    check_interrupted()
    old = hidden_name(folder, OLD)
    for top, _, names in os.walk(part):
        for name in names:
            sync_folder(Path(top, name))
        sync_folder(Path(top))
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    try:
        part.rename(folder)
    except BaseException:
        if old.is_dir() and not folder.exists():
            old.rename(folder)
        raise
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def link_or_copy(source: str | Path, target: str | Path) -> str:
    """A second name for a file, or a copy where the disk has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return str(target)


# ------------------------------------------------------------------------------
# What a bundle's manifest and parity record say, as records, and the model card rendered from them.


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
    histogram: list[list[int]] | None = None


def describe_lengths(lengths: Sequence[int]) -> TokenLengths:
    """The distribution of some lengths, one at least."""
    p50, p90, p99 = (int(value) for value in np.ceil(np.percentile(lengths, [50, 90, 99])))
    tokens, rows = np.unique(lengths, return_counts=True)
    histogram = [list(pair) for pair in zip(tokens.tolist(), rows.tolist(), strict=True)]
    return TokenLengths(len(lengths), p50, p90, p99, int(max(lengths)), histogram)


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


@dataclass(frozen=True)
class BundleLicence:
    """The bundle's own, where it is stated, and the reference of the model that the student starts from."""

    bundle: str | None
    model: str | None


@dataclass(frozen=True, kw_only=True)
class StudentFacts:
    """A bundle's student.

    Args:
        name: of the bundle.
        grades: K of its relevance head.
        heads: grades by head; `temperature` what calibrated each, where something did.
        phi: the rule map, where there are heads other than relevance.
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
    made_by: dict[str, Any]

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


@dataclass(frozen=True, slots=True)
class F1Loss:
    """Macro F1 of both, and the points of it that a model loses against the student, with a 95 % interval over
    queries.
    """

    student: float
    model: float
    loss_points: float
    loss_low: float
    loss_high: float


@dataclass(frozen=True, slots=True)
class NdcgLoss:
    """nDCG@10 of both; None where no query can be ranked."""

    student: float | None
    model: float | None
    loss: float | None


@dataclass(frozen=True, slots=True)
class OrderCounts:
    """Pairs of documents of one query: those that the student orders by more than the margin, and all."""

    ordered: int
    of: int
    margin: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeFigures:
    """A model against the student in batches of one size.

    Args:
        max_abs: the largest |Δp|.
        tau: Kendall's, by query; None where the student orders no two documents of a query.
        flip_low, flip_high: bounds of `flip_share`, 95 %, over queries; absent with one query.
        tau_low, tau_high: its bounds, 95 %, over queries; absent with fewer than two.
        judged_by: whose grades macro F1 and nDCG are by: `gold`, `teacher`, or the student's own.
    """

    is_finite: bool
    max_abs: float
    max_abs_by_head: dict[str, float]
    flips: int
    flip_share: float
    flip_share_by_head: dict[str, float]
    flip_low: float | None = field(default=None, metadata=LEFT_OUT)
    flip_high: float | None = field(default=None, metadata=LEFT_OUT)
    tau: float | None
    tau_low: float | None = field(default=None, metadata=LEFT_OUT)
    tau_high: float | None = field(default=None, metadata=LEFT_OUT)
    orders: OrderCounts | None = field(default=None, metadata=LEFT_OUT)
    judged_by: str
    judged_rows: int
    judged_queries: int = 0
    f1_macro: F1Loss
    ndcg: Annotated[NdcgLoss, Field(alias="ndcg@10")]


@dataclass(frozen=True, slots=True)
class ParityCheck:
    """One bound of a precision's gate."""

    check: str
    value: float
    bound: float
    has_passed: bool


@dataclass(frozen=True, slots=True)
class WorstRow:
    """A row whose probabilities differ much: where it lies, and both distributions, None for what is not finite."""

    source: str
    row: int
    batch_size: int
    is_flip: bool
    max_abs: float | None
    student: list[float | None]
    model: list[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParity:
    """One model against the student.

    Args:
        could_lose: as in `parity.could_lose`.
        doubts: as in `parity.doubts_of`, sentences.
        worst: the rows that differ most.
    """

    precision: str
    rows: int
    queries: int
    is_weak: bool
    by_batch_size: Annotated[dict[str, SizeFigures], Field(min_length=1)]
    checks: list[ParityCheck]
    has_passed: bool
    could_lose: float | None = None
    doubts: list[str] = field(default_factory=list)
    worst: list[WorstRow]

    @property
    def figures(self) -> list[SizeFigures]:
        """By batch size, as compared."""
        return list(self.by_batch_size.values())

    @property
    def flip_share(self) -> float:
        """Of the worst batch size."""
        return max(one.flip_share for one in self.figures)


@dataclass(frozen=True, slots=True)
class ParityBounds:
    """Of the spec, what is shown with the figures; the manifest holds all of it."""

    min_pairs: int
    batch_sizes: list[int]
    int8_max_f1_loss: float | None = None


@dataclass(frozen=True, slots=True)
class Parity:
    """All models of a bundle against its student."""

    spec: ParityBounds
    provider: str
    onnxruntime: str
    models: Annotated[list[ModelParity], Field(min_length=1)]


def read_parity(held: Any, where: str) -> Parity:
    """The section `parity` of a bundle's manifest.

    Args:
        where: the manifest, for messages.
    Raises:
        ManifestError: it is damaged; names the key.
    """
    return read_record(Parity, held, where, "its parity is not as this relabel writes it", "Restore it from a copy.")


CARD_NAME = "README.md"


def render_bundle_card(student: StudentFacts, parity: Parity) -> str:
    """Markdown."""
    heads = ", ".join(f"{name} (grades 0 to {grades - 1})" for name, grades in student.heads.items())
    models = ", ".join(f"`{model.path}` ({model.precision})" for model in student.models)
    lines = [
        f"# {student.name}",
        "",
        (
            f"{KINDS[student.inputs.kind].does.capitalize()}. A student ({student.inputs.kind}), by `relabel export` "
            f"{student.made_by['relabel']}."
        ),
        "",
        f"- Answers: probabilities of {heads}; calibrated, in the graph.",
        f"- Reads at most {student.inputs.max_tokens} tokens of a pair; what is longer is cut.",
        f"- Models: {models}",
        f"- Licence: {student.licence.bundle or 'not stated; ask its authors before you ship it'}",
        "",
        "## Use",
        "",
        f"`load.py` needs numpy, onnxruntime ({LEAST_ONNXRUNTIME} or newer) and tokenizers, nothing else:",
        "",
        "```python",
        "from load import Student",
        "",
        'student = Student("path/of/this/folder")   # provider="cpu" or "cuda", precision="int8"',
        'probs = student.probabilities([("red shoe", "A red running shoe, size 9")])',
        'print(probs["relevance"])                  # float32 [pairs, grades]; rows sum to 1',
        "```",
        "",
        "Or from the command line: `python load.py --score pairs.tsv` takes lines of query, tab, document, and writes",
        "the score (0 to 1, to rank by), the expected grade (0 to the highest) and the most probable grade of each.",
        "",
        "## Parity with the student",
        "",
        *_parity(parity),
        "",
        "## Made of",
        "",
        *_lineage(student.lineage),
        "",
        (
            "It answers for texts like those that it saw, and inherits its teacher's mistakes: judge it with trusted "
            "grades before it decides"
        ),
        "anything.",
        "",
    ]
    return "\n".join(lines)


def parity_rows(parity: Parity) -> list[list[str]]:
    """The parity table: a row a precision, with the worst batch size's figure in each column; the first row is the
    head.
    """
    rows = [["precision", "max abs Δp", "flips (95 %)", "tau", "F1 loss, points (95 %)", "nDCG@10 loss", "gate"]]
    for one in parity.models:
        flips = max(one.figures, key=lambda figure: figure.flip_share)
        worst_f1 = max((figure.f1_macro for figure in one.figures), key=lambda f1: f1.loss_points)
        taus = [figure.tau for figure in one.figures if figure.tau is not None]
        losses = [figure.ndcg.loss for figure in one.figures if figure.ndcg.loss is not None]
        rows.append(
            [
                one.precision,
                f"{max(figure.max_abs for figure in one.figures):.1e}",
                f"{flips.flip_share:.2%}"
                + ("" if flips.flip_low is None else f" ({flips.flip_low:.2%} to {flips.flip_high:.2%})"),
                f"{min(taus):.4f}" if taus else "–",
                f"{worst_f1.loss_points:+.2f} ({worst_f1.loss_low:+.2f} to {worst_f1.loss_high:+.2f})",
                f"{max(losses, key=abs):+.4f}" if losses else "–",
                verdict(one),
            ]
        )
    return rows


def verdict(one: ModelParity) -> str:
    """What the gate says of a model: `passed`, `undecided` with the loss that it could have, or `REFUSED`."""
    if not one.has_passed:
        return "REFUSED"
    if one.could_lose is not None:
        return f"undecided: could lose {one.could_lose:.1f}"
    return "undecided: too little evidence" if one.doubts else "passed"


def undecided_lines(parity: Parity) -> list[str]:
    """A sentence for each model that passed and could yet lose more than the gate allows."""
    return [
        f"{one.precision} is undecided: on these {one.rows:,} pairs it could be as bad as {one.could_lose:.1f} points "
        f"of macro F1 (95 %), the bound is {parity.spec.int8_max_f1_loss:g}; {one.flip_share:.1%} of the grades flip. "
        "More pairs would decide, or a bound on flips (parity.int8_max_flips)."
        for one in parity.models
        if one.has_passed and one.could_lose is not None
    ] + [f"{one.precision} is undecided: {doubt}." for one in parity.models if one.has_passed for doubt in one.doubts]


def compared_on(parity: Parity) -> str:
    """The pairs and batch sizes that the models were compared on, and who judged, as a sentence begun."""
    first = parity.models[0]
    sizes = ", ".join(map(str, parity.spec.batch_sizes))
    return (
        f"On {first.rows:,} real pairs of {first.queries:,} queries, in batches of {sizes}, on {parity.provider} "
        f"(onnxruntime {parity.onnxruntime}); macro F1 and nDCG by {first.figures[0].judged_by}."
    )


def _parity(parity: Parity) -> list[str]:
    weak = f" Fewer than {parity.spec.min_pairs:,}: a weak result." if parity.models[0].is_weak else ""
    head, *rows = parity_rows(parity)
    return [
        f"{compared_on(parity)}{weak} Worst batch size each:",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
        *(line for sentence in undecided_lines(parity) for line in ("", sentence)),
    ]


def _lineage(lineage: BundleLineage) -> list[str]:
    student = lineage.student
    lines = [f"- Student `{student.name}`, digest `{student.digest[:16]}`"]
    if student.model:
        lines.append(f"- which starts from `{student.model.reference}` (digest `{student.model.digest[:16]}`)")
    for source in lineage.labels or ():
        run = f"labeler {source.labeler}, fingerprint `{(source.fingerprint or '')[:12]}`"
        lines.append(f"- Labels `{source.path}`: {source.labels:,} ({run if source.kind == 'run' else 'a label file'})")
    if lineage.gold:
        lines.append(f"- Trusted grades `{lineage.gold.path}`, column `{lineage.gold.grade}`")
    return lines


# ------------------------------------------------------------------------------
# Specs of an export and of a bench, checked key by key. Pure: no environment, no network, no disk.


Precision = Literal["fp32", "fp16", "bf16", "int8", "int8-static"]


def _split(value: object) -> object:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


COMMAS = BeforeValidator(_split)
"""A text is taken for a list with commas, as a flag gives it."""


class ParitySpec(Spec):
    """The gate that every exported model passes on real pairs, or no bundle is made."""

    min_pairs: int = Field(2000, ge=1)
    """Pairs to compare on, sampled as whole queries of the test split. With fewer all are used and the result is marked
    weak.
    """
    batch_sizes: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = (1, 7, 32)
    """Every pair is answered once in batches of each size: alone, in an odd company, and in a full one, padding
    included.
    """
    fp32_max_abs: float = Field(1e-4, gt=0.0)
    """Largest |Δp| of any head in fp32: two orders above what sums in another order cost."""
    fp16_max_flips: Fraction = 0.001
    """Share of pairs whose grade changes in fp16 and bf16."""
    fp16_min_tau: float = Field(0.999, ge=-1.0, le=1.0)
    """Least Kendall tau of a query's order in fp16 and bf16: 0.999 is one order in 2,000 reversed (see
    `export/parity.py`).
    """
    fp16_max_ndcg_loss: float = Field(0.001, ge=0.0)
    """nDCG@10 that an fp16 or bf16 may lose: orders below tau's margin count too where grades say which documents
    matter.
    """
    int8_max_f1_loss: float = Field(1.0, ge=0.0)
    """Points of macro F1 that an int8 may lose: refused when the 95 % interval of the loss lies wholly above. Where a
    part of it does, the pairs do not decide, and the model passes as `undecided`.
    """
    int8_max_flips: Fraction | None = None
    """Share of pairs whose grade may change in int8. None refuses none: what a flip costs hangs on what the grades are
    used for.
    """
    int8_min_tau: float = Field(0.5, ge=-1.0, le=1.0)
    """Least Kendall tau of a query's order in int8: refused when the 95 % interval lies wholly below, `undecided` where
    a part of it does. 0.5 is one order in four reversed; raise it for a ranker.
    """
    resamples: int = Field(1000, ge=100, le=100_000)
    """Resamples of queries for that interval."""
    worst: int = Field(10, ge=1, le=1000)
    """Rows to list, those that differ most."""
    seed: int = 0
    """Draws queries and resamples."""


class ExportSpec(Spec):
    """Options of `relabel export`."""

    formats: Annotated[tuple[str, ...], COMMAS] = ("onnx",)
    """Registered ones, see `export.bundle_formats`; `onnx` always comes along."""
    precisions: Annotated[tuple[Precision, ...], COMMAS] = ("fp32",)
    """fp32 is always exported: all others are made of it. int8-static is calibrated on pairs that are not compared."""
    logits: bool = False
    """Also raw logits, as outputs `<head>_logits`."""
    opset: int = Field(20, ge=18, le=24)
    """ONNX operator set; 20 is the first with Gelu."""
    triton: bool = False
    """Also a Triton model repository."""
    licence: str | None = None
    """SPDX expression of what may be done with the bundle."""
    reference_pairs: int = Field(32, ge=0, le=1000)
    """Pairs of those compared that are sealed into the bundle, with their texts and each model's answers, for
    `load.py --check`; 0 seals none.
    """
    parity: ParitySpec = ParitySpec()

    @property
    def onnx_precisions(self) -> tuple[Precision, ...]:
        """What is written as ONNX, fp32 first; bf16 is TensorRT's alone."""
        return ("fp32", *(name for name in dict.fromkeys(self.precisions) if name not in ("fp32", "bf16")))


Preset = Literal["grid", "table3", "serving"]
Positive = Annotated[int, Field(ge=1, le=1_000_000)]


class BenchSpec(Spec):
    """Options of `relabel bench`."""

    providers: Annotated[tuple[Literal["auto", "cpu", "cuda", "tensorrt", "openvino"], ...], COMMAS] = ("auto",)
    """`auto` is CUDA where this onnxruntime has it, else the CPU; `tensorrt` is an engine of the bundle that fits this
    machine; `openvino` is OpenVINO: the fp32 file in fp32 and bf16, and int8-static.
    """
    precisions: Annotated[tuple[str, ...], COMMAS] = ()
    """All that the bundle has by default."""
    presets: Annotated[tuple[Preset, ...], COMMAS] = ("grid",)
    """`grid`: batches by lengths, the shapes of public tables, single pairs by a Poisson process. `table3`: 1 to 10,000
    documents of one query. `serving`: a request is a query with 100 documents, by a Poisson process.
    """
    batches: Annotated[tuple[Positive, ...], COMMAS] = (1, 8, 32)
    """Rows of a closed-loop batch."""
    lengths: Annotated[tuple[Positive, ...], COMMAS] = ()
    """Tokens of a row; by default the 50th and 99th percentile of the workload's."""
    rates: Annotated[tuple[Annotated[float, Field(gt=0.0)], ...], COMMAS] = ()
    """Requests/s to offer; by default shares of what the model can do."""
    max_batch: int = Field(32, ge=1)
    """Pairs of a micro-batch; a request with more goes alone."""
    max_wait_ms: float = Field(2.0, ge=0.0)
    """How long the oldest request waits for company."""
    slo_ms: float | None = Field(None, gt=0.0)
    """Bound of p99 for which the highest rate is sought. `serving` seeks it for the mean as well, and bounds both by
    150 where none is named.
    """
    threads: int = Field(0, ge=0)
    """Of the CPU; 0 is every core that this process may use, or as many as its quota of CPU time keeps busy."""
    seconds: float = Field(120.0, gt=0.0)
    """For all measuring together. What does not fit is left out and said so."""
    seed: int = 0
    """Draws pairs, lengths and arrivals."""
