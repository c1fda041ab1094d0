"""A bundle that labels: which one a job means, and the scorer behind it, on the bundle's own tokens and ONNX model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from relabel.distill.students.length_batches import length_batches
from relabel.distill.students.student_record import STUDENT_NAME, StudentRecord
from relabel.distill.students.token_rows import TokenRow
from relabel.export.bench.fastest import ChosenPrecision, choose_precision
from relabel.export.bench.measurements import measurements_of
from relabel.export.bundles import MANIFEST_NAME, open_bundle
from relabel.export.contracts import LOADER
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
from relabel.export.parity_records import read_parity
from relabel.export.sessions import provider_here
from relabel.export.student_facts import student_facts
from relabel.jobs.score.student_identity import STUDENT, Identity
from relabel.jobs.score.student_labeler import BundleArgs
from relabel.manifests.asks import EngineFacts
from relabel.manifests.digests import digest_of
from relabel.manifests.errors import GateError, ManifestError, MissingExtraError, ModelError, UsageError
from relabel.manifests.extras import installed_versions
from relabel.manifests.phi import DEFAULT_PHI, PhiTable
from relabel.manifests.records import plain

# B rows, K grades

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
    """Read a bundle's manifest, and hold names and sizes of its files against it.

    Its digest is over what decides an answer: graphs, tokenizer, contract. A page or a card that is written anew leaves
    it as it is.

    Raises:
        ManifestError: a file is missing, strange or damaged, or the manifest describes no student.
    """
    bundle = open_bundle(Path(path), check_bytes=False)
    facts = student_facts(bundle)
    deciding = {facts.inputs.tokenizer, *(name for model in facts.models for name in model.files)}
    files = {file.path: file.sha256 for file in bundle.files if file.path in deciding}
    contract = {key: value for key, value in plain(facts.inputs).items() if key != "lengths"}
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


def choose(path: str, device: str, precision: str | None) -> tuple[str, ChosenPrecision]:
    """The provider and the precision to label with, see `choose_precision`. OpenVINO computes from the file in fp32,
    which then has to have passed its gate.

    Raises:
        UsageError: no such provider, or precision.
        MissingExtraError: it is not to be had here.
        ManifestError: the bundle's parity or latency is damaged.
    """
    if device not in ("auto", "cpu", "cuda", OPENVINO):
        raise UsageError(f"--device {device}: a bundle runs on auto, cpu, cuda or openvino.")
    hint, refused = None, list[str]()
    if device == OPENVINO:
        try:
            device, hint, refused = choose_openvino(precision, cpu_flags())
        except BundleError as exc:
            raise UsageError(f"--precision {precision}: {exc}") from exc
    provider = provider_here(device, option="--device", purpose=PURPOSE)
    bundle = open_bundle(Path(path), check_bytes=False)
    where = f"{path}/{MANIFEST_NAME}"
    measured = (facts for facts in measurements_of(bundle) if any(one.provider == provider for one in facts.models))
    parity, latency = read_parity(bundle.facts.get("parity"), where), next(measured, None)
    if hint is not None:
        choose_precision(parity, None, "cpu", "fp32")
        return provider, ChosenPrecision(hint, f"this CPU has {AMX}")
    choice = choose_precision(parity, latency, provider, precision)
    return provider, choice._replace(reason="; ".join([choice.reason, *refused]))


class BundleScorer:
    """An ONNX model of a bundle at work; batches follow from a block of rows alone, as `Scorer`'s do.

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
        """Token rows; a logistic student's counts stand where others have segments."""
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

    OpenVINO's answers are held against the reference pairs before the first label: its gate is this machine's.

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
        _check_openvino(student)
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


def _check_openvino(student: Student) -> None:
    try:
        checked = check_answers(student)
    except BundleError as exc:
        raise ManifestError(f"--device {OPENVINO}: {exc}") from exc
    if not checked.has_passed:
        raise GateError(f"{checked}")
