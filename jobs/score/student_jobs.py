"""A student as the engine of a run: which student it is, the job that scores with it, and the rows that come of its
distributions.

The job is cut, locked, committed and proven like any other; only what asks differs (`score_loop.py`): a student is
asked whole chunks at a time, sorted by length, and generates nothing.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import numpy as np

from distill.students.specs import NODE_HEADS
from distill.students.student_manifest import StudentFiles
from distill.students.students import (
    BATCH_TOKENS,
    StudentModel,
    StudentRecord,
    load_student,
    read_student,
    student_file_names,
    student_files,
)
from distill.students.texts import TokenRow
from jobs.fetching.folders import fetch_folder
from jobs.planning.job_files import Job
from jobs.planning.spec_places import Places, resolved
from labelers.engines.registry import EngineClass
from labelers.registry import declared_columns
from manifests.asks import DOCUMENT_FIELD, Answer, Ask, Decision, EngineFacts, Message
from manifests.digests import digest_of, sha256_bytes
from manifests.errors import ManifestError, MissingExtraError, ModelError
from manifests.extras import require
from manifests.inputs.dataset import Dataset
from manifests.labels import Label, LabelColumn, Pair
from manifests.phi import PhiTable
from manifests.records import checked
from manifests.runs.fingerprints import fingerprint_parts
from manifests.runs.label_keys import stage_digests
from manifests.schemas import LabelRow, QuarantineRow
from manifests.specs import EngineArgs, EngineSpec, JobSpec, LabelerOptions, validate_spec
from manifests.storage.context import Storage
from manifests.storage.filesystems import is_url
from manifests.storage.url_files import read_url

STUDENT = "student"
"""Of a score run: its engine, its labeler and the kind of its plan."""
STAGE = "score"
MANIFEST_NAME = "manifest.json"
Dtype = Literal["float32", "bfloat16", "float16"]


class StudentOptions(LabelerOptions):
    """The `labeler` of a score run: its scale is the student's."""


class StudentArgs(EngineArgs):
    """Options of scoring."""

    speed_only: ClassVar[frozenset[str]] = frozenset({"batch_tokens", "device"})

    batch_tokens: int = BATCH_TOKENS
    """Tokens of a batch, padding included. Changes the last bits of a score at most."""
    device: str = "auto"
    """What torch calls it; `auto` is a GPU where one is."""
    dtype: Dtype = "float32"
    """In what the student computes."""


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


@dataclass(frozen=True)
class Identity:
    """Which student it is, by its record and manifest, without a look at its weights.

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
    file = Path(path) / MANIFEST_NAME
    try:
        data = file.read_bytes()
        named = checked(StudentFiles, json.loads(data)).files
        found = student_file_names(path)
        unnamed = [name for name in found if name not in named]
        missing = sorted(set(named) - set(found))
        files = {name: named[name] for name in found if name in named}
    except FileNotFoundError as exc:
        raise ManifestError(
            f"{path}: a student without {MANIFEST_NAME}: its training has not ended. Run `relabel distill` again."
        ) from exc
    except (OSError, ValueError) as exc:
        raise ManifestError(
            f"{file}: does not name all of the student's files. Restore the folder from a copy, or train again."
        ) from exc
    if missing:
        raise ManifestError(
            f"{path}: {', '.join(missing)} of its {MANIFEST_NAME} is missing. Restore the folder from a copy, or "
            "train again."
        )
    if unnamed:
        raise ManifestError(
            f"{file}: does not name all of the student's files: {', '.join(unnamed)} did not come from its training. "
            "Move it away, restore the folder from a copy, or train again."
        )
    return Identity(path, record, files, sha256_bytes(data))


def local_student(reference: str, storage: Storage, *, cache_dir: Path) -> str:
    """The folder of a student: as it was named, or fetched from a URL into the cache, where it lies by the digest of
    its manifest, so that a student that was trained again is another one.

    Raises:
        ManifestError: no finished student lies at the URL.
        ModelError: it can't be fetched.
    """
    if not is_url(reference):
        return reference
    try:
        data = read_url(f"{reference.rstrip('/')}/{MANIFEST_NAME}", storage)
    except FileNotFoundError as exc:
        raise ManifestError(
            f"{reference}: holds no {MANIFEST_NAME}, so no finished student. Give a copy of `relabel distill`'s output."
        ) from exc
    slot = cache_dir / "students" / sha256_bytes(data)[:32]

    def check(folder: Path) -> None:
        if (folder / MANIFEST_NAME).read_bytes() != data:
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
    changed = sorted(name for name in identity.files if held[name] != identity.files[name])
    if changed:
        raise ManifestError(
            f"{identity.path}: {', '.join(changed)} changed since the student was trained (the sha256 is not the "
            "manifest's). Restore the folder from a copy, or train again."
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


class ScoreJob(Job):
    """A job whose engine is a student. Its plan says so, so that readers of its labels know."""

    __slots__ = ()

    def parts(self, dataset: Dataset) -> dict[str, Any]:
        """What the fingerprint is made of: the input, the student, and in what it computes."""
        engine, args = self.spec.engine, self.spec.engine.args.model_dump(mode="json")
        found = fingerprint_parts(
            dataset,
            limit=self.spec.input.limit,
            overlong=self.spec.input.overlong,
            labeler={"name": STUDENT, "grades": self.spec.labeler.grades},
            label_columns={column.name: column.kind for column in declared_columns(self.labeler, name=STUDENT)},
            templates={},
            stages=stage_digests(self.labeler.probe()),
            engine={
                "name": STUDENT,
                "args": {key: value for key, value in args.items() if key not in engine.args.speed_only},
            },
            model_digest=identify(str(engine.model)).digest,
            cut={"shards": self.spec.shards, "chunk_rows": self.spec.run.chunk_rows},
        )
        return {**found, "kind": STUDENT}


@dataclass(frozen=True)
class ScoreRequest:
    """What `relabel score` was given; None is the student's own."""

    student: str
    input: tuple[str, ...]
    columns: Mapping[str, Any]
    output: str
    name: str | None
    limit: int | None
    shards: int
    chunk_rows: int
    batch_tokens: int
    device: str
    dtype: str


def score_job(request: ScoreRequest, storage: Storage) -> ScoreJob:
    """The job behind a request: the student's columns unless others are named.

    Raises:
        ManifestError: no student there.
        ConfigError: a value is off.
    """
    identity = identify(request.student)
    record = identity.record
    own = {role: column for role, column in record.columns.items() if role not in ("gold", "context")}
    options = StudentOptions(name=STUDENT, grades=record.grades)
    values = {
        "name": request.name or record.name,
        "input": {"path": request.input, "columns": {**own, **request.columns}, "limit": request.limit},
        "labeler": options,
        "engine": EngineSpec(
            name=STUDENT,
            model=request.student,
            max_prompt_tokens=max(64, record.max_tokens),
            args=StudentArgs(
                batch_tokens=request.batch_tokens, device=request.device, dtype=cast(Dtype, request.dtype)
            ),
        ),
        "output": request.output,
        "shards": request.shards,
        "run": {"chunk_rows": request.chunk_rows},
    }
    here = str(Path.cwd())
    spec = resolved(validate_spec(JobSpec, values, where="relabel score"), Places("relabel score", here, here))
    labeler = StudentLabeler(options, record.heads)
    # `start_student` stands for the class
    return ScoreJob(spec, labeler, cast(EngineClass, None), f"relabel score {request.student}", storage)


def score_rows(
    pairs: Sequence[Pair],
    keys: Sequence[bytes | None],
    probs: Mapping[str, np.ndarray],
    tokens: Sequence[TokenRow],
    phi: PhiTable,
) -> list[LabelRow | QuarantineRow]:
    """Rows of a chunk from a student's distributions.

    The grade is the most probable one, the lower of equals. A row without finite probabilities at any head is
    quarantined: NaN's argmax is 0, and a failure is not a grade.

    Args:
        probs: by head, float32 [B, K].
    """
    relevance_BK = probs["relevance"]
    is_whole_B = np.all([np.isfinite(values_BK).all(axis=1) for values_BK in probs.values()], axis=0)
    grades = relevance_BK.argmax(axis=1).tolist()
    expected = (relevance_BK * np.arange(relevance_BK.shape[1], dtype=np.float64)).sum(axis=1).tolist()
    own = _node_columns(probs, phi, grades)
    rows: list[LabelRow | QuarantineRow] = []
    columns = (pairs, keys, grades, relevance_BK.tolist(), expected, own, tokens, is_whole_B.tolist())
    for pair, key, grade, row, mean, mine, token, is_whole in zip(*columns, strict=True):
        length = len(token.ids)
        if not is_whole:
            rows.append(
                QuarantineRow(
                    pair.row_id,
                    pair.query_id,
                    pair.doc_id,
                    "engine",
                    "the student's probabilities are NaN",
                    [],
                    length,
                    0,
                )
            )
            continue
        flags = ["document_truncated"] if token.is_cut else []
        ids = (pair.row_id, pair.query_id, pair.doc_id)
        rows.append(
            LabelRow(
                *ids, "ok", grade, row, None, mean, [], None, None, flags, None, length, 0, False, key, columns=mine
            )
        )
    return rows


def _node_columns(probs: Mapping[str, np.ndarray], phi: PhiTable, grades: list[int]) -> list[dict[str, Any]]:
    """Subject and attribute of students that have these heads, and what φ makes of the most probable scores."""
    columns: dict[str, list[Any]] = {}
    for name in NODE_HEADS:
        if name in probs:
            columns[name] = probs[name].argmax(axis=1).tolist()
            columns[f"{name}_probs"] = probs[name].tolist()
    if "subject" in columns and "attribute" in columns:
        by_rule = [phi[s][a] for s, a in zip(*(columns[name] for name in NODE_HEADS), strict=True)]
        columns |= {
            "phi_grade": by_rule,
            "phi_agrees": [one == grade for one, grade in zip(by_rule, grades, strict=True)],
        }
    return (
        [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        if columns
        else [{} for _ in grades]
    )
