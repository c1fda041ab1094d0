"""Students and bundles as labelers: options, identity, and the scorer that computes their distributions."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from relabel.distill.students.length_batches import CPU_BATCH_TOKENS, length_batches
from relabel.distill.students.manifest import STUDENT_NAME, StudentFiles, StudentRecord, read_student
from relabel.distill.students.model import StudentModel, TokenRow, load_student, student_files
from relabel.distill.students.spec import NODE_HEADS
from relabel.export.bundle_facts import ChosenPrecision, choose_precision, read_parity, student_facts
from relabel.export.bundles import MANIFEST_NAME, open_bundle
from relabel.export.exporters import LOADER
from relabel.export.loader import (
    AMX,
    HINTS,
    OPENVINO,
    PROVIDERS,
    BundleError,
    Student,
    check_answers,
    check_files,
    choose_openvino,
    cpu_flags,
    read_manifest,
)
from relabel.export.parity import provider_here
from relabel.jobs.delivery import fetch_folder
from relabel.jobs.job import cache_dir
from relabel.labelers.registry import Labeler
from relabel.manifests.asks import DOCUMENT_FIELD, Answer, Ask, Decision, EngineFacts, Message
from relabel.manifests.errors import GateError, ManifestError, MissingExtraError, ModelError, UsageError
from relabel.manifests.files import Storage, is_url
from relabel.manifests.labels import DEFAULT_PHI, Label, LabelColumn, Pair, PhiTable
from relabel.manifests.models import default_cache_dir
from relabel.manifests.process import installed_versions, require
from relabel.manifests.records import checked, digest_of, sha256_bytes
from relabel.manifests.specs import EngineArgs, LabelerOptions
from relabel.manifests.store import read_url

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
    """What a student with these heads gives with the grade."""
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


class StudentLabeler(Labeler):
    """A score run as a labeler: one decision a pair, on query and document alone. Estimates use it; the score loop
    reads pairs by the chunk instead.
    """

    Options: ClassVar[type[LabelerOptions]] = StudentOptions

    def __init__(self, options: StudentOptions, heads: Collection[str]) -> None:
        super().__init__(options)
        self.columns = _declared(heads)
        self._decisions = (Decision("relevance", "", tuple(map(str, range(options.grades)))),)

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


STUDENT = "student"
"""Of a score run: its engine, its labeler and the kind of its plan."""
_MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True)
class Identity:
    """Which student it is, by its record and manifest; its weights are not read.

    Args:
        files: sha256 of each file that decides what it answers, as the manifest has it.
        manifest_sha256: of its `manifest.json`.
    """

    path: str
    record: StudentRecord
    files: dict[str, str]
    manifest_sha256: str

    @property
    def digest(self) -> str:
        """What `student_digest` gives for files that are those of the manifest."""
        return digest_of(self.files)


def identify(path: str) -> Identity:
    """Read a student's record and manifest.

    Raises:
        ManifestError: the folder holds no student, or no manifest that names its files.
    """
    record = read_student(path)
    file = Path(path) / _MANIFEST_NAME
    try:
        data = file.read_bytes()
        files = checked(StudentFiles, json.loads(data)).files
    except FileNotFoundError as exc:
        raise ManifestError(
            f"{path}: a student without {_MANIFEST_NAME}: its training has not ended. Run `relabel distill` again."
        ) from exc
    except (OSError, ValueError) as exc:
        raise ManifestError(
            f"{file}: does not name the student's files. Restore the folder from a copy, or train again."
        ) from exc
    return Identity(path, record, files, sha256_bytes(data))


def local_student(reference: str, storage: Storage) -> str:
    """The folder of a student: as it was named, or fetched from a URL into the cache, under the digest of its manifest,
    so that a student that was trained again is another one.

    Raises:
        ManifestError: there is no finished student at the URL.
        ModelError: it can't be fetched.
    """
    if not is_url(reference):
        return reference
    try:
        data = read_url(f"{reference.rstrip('/')}/{_MANIFEST_NAME}", storage)
    except FileNotFoundError as exc:
        raise ManifestError(
            f"{reference}: holds no {_MANIFEST_NAME}, so no finished student. "
            "Give a copy of `relabel distill`'s output."
        ) from exc
    slot = (cache_dir() or default_cache_dir()) / "students" / sha256_bytes(data)[:32]

    def check(folder: Path) -> None:
        if (folder / _MANIFEST_NAME).read_bytes() != data:
            raise ModelError(f"{reference}: replaced while it was fetched. Run again, once it stays as it is.")

    if not slot.is_dir():
        fetch_folder(reference, slot, check, storage)
    return str(slot)


def start_student(identity: Identity, args: StudentArgs) -> tuple[StudentModel, EngineFacts]:
    """Load the student on its device, and say what it is.

    Raises:
        ManifestError: a file is not the one that its manifest names.
        MissingExtraError: torch or the device is absent.
    """
    held = student_files(identity.path)
    changed = sorted(name for name in held.keys() | identity.files if held.get(name) != identity.files.get(name))
    if changed:
        raise ManifestError(
            f"{identity.path}: {', '.join(changed)} changed since the student was trained (no file of it, missing, or "
            "its sha256 is not the manifest's). Restore the folder from a copy, or train again."
        )
    torch = require("torch", extra="cpu", purpose="relabel score")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise MissingExtraError(
            f"--device {device}: torch finds no GPU here. Leave --device out, or run on a machine that has one."
        )
    try:
        student = load_student(identity.path, device=device)
    except RuntimeError as exc:  # torch's word for a device it does not know
        raise MissingExtraError(
            f"--device {device}: torch can't use it ({exc}). `relabel doctor` shows what is here."
        ) from exc
    student.module.to(getattr(torch, args.dtype))
    details = {
        "kind": identity.record.kind,
        "manifest_sha256": identity.manifest_sha256,
        "temperature": identity.record.temperature,
    }
    facts = EngineFacts(
        STUDENT,
        version("torch"),
        identity.record.name,
        identity.digest,
        device=device,
        dtype=args.dtype,
        details=details,
    )
    return student, facts


PURPOSE = "relabel score of a bundle"


def is_bundle(path: str) -> bool:
    """Whether a folder is a bundle's and no student's, whole or not."""
    folder = Path(path)
    if (folder / STUDENT_NAME).exists():
        return False
    try:
        return bool(json.loads((folder / MANIFEST_NAME).read_bytes())["kind"] == "bundle")
    except (OSError, ValueError, KeyError, TypeError):
        return (folder / LOADER).is_file()


def identify_bundle(path: str) -> Identity:
    """Read a bundle's manifest, and check names and sizes of its files.

    Its digest is over what decides an answer: graphs, tokenizer, contract. A new page or model card does not change it.

    Raises:
        ManifestError: a file is missing, strange or damaged, or the manifest describes no student.
    """
    bundle = open_bundle(Path(path), check_bytes=False)
    facts = student_facts(bundle)
    deciding = {facts.inputs.tokenizer, *(name for model in facts.models for name in model.files)}
    files = {file.path: file.sha256 for file in bundle.files if file.path in deciding}
    contract = {key: value for key, value in bundle.facts["inputs"].items() if key != "lengths"}
    record = StudentRecord(
        version=1,
        kind=facts.inputs.kind,
        name=facts.name,
        heads=facts.heads,
        max_tokens=facts.inputs.max_tokens,
        columns=facts.inputs.columns,
        temperature=facts.temperature or {},
        phi=facts.phi or DEFAULT_PHI,
    )
    return Identity(path, record, {**files, "inputs": digest_of(contract)}, bundle.manifest.sha256)


def choose(path: str, device: str, precision: str | None) -> ChosenPrecision:
    """The provider and the precision to label with, see `choose_precision` and, of OpenVINO, `choose_openvino`. The
    file that it computes from has to have passed its gate.

    Raises:
        UsageError: no such provider, or precision.
        MissingExtraError: it is not to be had here.
        ManifestError: the bundle's parity is damaged.
    """
    if device not in ("auto", "cpu", "cuda", OPENVINO):
        raise UsageError(f"--device {device}: a bundle runs on auto, cpu, cuda or openvino.")
    bundle = open_bundle(Path(path), check_bytes=False)
    parity = read_parity(bundle.facts.get("parity"), f"{path}/{MANIFEST_NAME}")
    why, refused = "named", list[str]()
    if device == OPENVINO:
        wish, held = precision, {model.precision for model in parity.models}
        try:
            device, precision, refused = choose_openvino(wish, cpu_flags(), held)
        except BundleError as exc:
            raise UsageError(f"--precision {wish}: {exc}") from exc
        if wish is None:
            why = f"this CPU has {AMX if precision == 'bf16' else 'VNNI'}"
    provider = provider_here(device, option="--device", purpose=PURPOSE)
    choice = choose_precision(parity, provider, precision, why)
    return choice._replace(reason="; ".join([choice.reason, *refused]))


class BundleScorer:
    """Scores with an ONNX model of a bundle; batches follow from a block of rows alone, as `Scorer`'s do.

    Args:
        student: the bundle's own loader.
        phi: of its manifest.
        batch_tokens: tokens of a batch, padding included.
    """

    def __init__(self, student: Student, phi: PhiTable, *, batch_tokens: int) -> None:
        self.phi = phi
        self._student = student
        self._batch_tokens = batch_tokens

    def encode(self, pairs: Sequence[tuple[str, str]]) -> list[TokenRow]:
        """Token rows; a logistic student has counts where others have segments."""
        return [TokenRow(*row) for row in self._student.encoder.encode_marked(pairs)]

    def score(
        self, rows: Sequence[TokenRow], on_progress: Callable[[int], bool] = lambda _: True
    ) -> dict[str, np.ndarray] | None:
        """Calibrated distributions by head, float32 [B, K], in the order of the rows; None if `on_progress` gave up.

        Raises:
            ModelError: onnxruntime can't run the model on a batch.
        """
        heads = self._student.heads
        found = {name: np.empty((len(rows), grades), dtype=np.float32) for name, grades in heads.items()}
        for places in length_batches([len(row.ids) for row in rows], self._batch_tokens):
            batch = self._student.encoder.collate([(rows[place].ids, rows[place].types or []) for place in places])
            try:
                values = self._student.session.run(list(heads), batch)
            except Exception as exc:  # onnxruntime's errors share no class but this
                raise ModelError(
                    f"{self._student.folder}: onnxruntime can't run {self._student.precision} on {len(places)} pairs "
                    f"({str(exc)[:300]}). Take smaller batches (--batch-tokens), or another --precision."
                ) from exc
            for name, values_BK in zip(heads, values, strict=True):
                found[name][places] = values_BK
            if not on_progress(len(places)):
                return None
        return found


def start_bundle(path: str, args: BundleArgs) -> tuple[BundleScorer, EngineFacts]:
    """Prove a bundle's bytes, open its model, and say what it is.

    OpenVINO's answers to the reference pairs are checked before the first label: its gate is this machine's.

    Raises:
        ManifestError: a file is not the one that the manifest names, or openvino is asked for and no pairs are sealed.
        MissingExtraError: the runtime or the provider is absent.
        GateError: openvino answers the reference pairs otherwise than at export.
    """
    identity, bundle = identify_bundle(path), open_bundle(Path(path), check_bytes=False)
    provider = provider_here(args.device, option="--device", purpose=PURPOSE)
    try:
        check_files(bundle.folder.resolve(), read_manifest(bundle.folder.resolve()))
    except BundleError as exc:
        raise ManifestError(f"{path}: is not the bundle that its manifest names, and labels nothing. {exc}") from exc
    try:
        student = Student(bundle.folder, provider=provider, precision=args.precision, check_digests=False)
    except BundleError as exc:
        raise MissingExtraError(f"--device {args.device}: {exc}") from exc
    is_openvino = provider == OPENVINO
    if is_openvino:
        try:
            parity = check_answers(student)
        except BundleError as exc:
            raise ManifestError(f"--device {OPENVINO}: {exc}") from exc
        if not parity.has_passed:
            raise GateError(f"{parity}")
    details = {
        "runtime": OPENVINO if is_openvino else PROVIDERS[provider],
        **({"precision_hint": HINTS[student.precision], "has_amx": AMX in cpu_flags()} if is_openvino else {}),
        "bundle": bundle.version,
        "student": student_facts(bundle).lineage.student.digest,
        "manifest_sha256": identity.manifest_sha256,
    }
    facts = EngineFacts(
        STUDENT,
        installed_versions([OPENVINO])[OPENVINO] if is_openvino else _onnxruntime_version(),
        identity.record.name,
        identity.digest,
        device=provider,
        dtype=args.precision,
        details=details,
    )
    return BundleScorer(student, identity.record.phi, batch_tokens=args.batch_tokens), facts


def _onnxruntime_version() -> str:
    import onnxruntime

    return str(onnxruntime.__version__)
