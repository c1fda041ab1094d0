"""A student as the engine of a run: which student it is, the job that scores with it, and the rows that come of its
distributions.

The job is cut, locked, committed and proven like any other; only what asks differs (`score_loop.py`): a student is
asked whole chunks at a time, sorted by length, and generates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from relabel.distill.students.heads import NODE_HEADS
from relabel.distill.students.length_batches import batch_tokens_on
from relabel.distill.students.student_record import STUDENT_NAME
from relabel.distill.students.token_rows import TokenRow
from relabel.export.destinations import is_destination
from relabel.export.loader import OPENVINO
from relabel.jobs.planning.jobs import Job
from relabel.jobs.planning.spec_places import Places, resolved
from relabel.jobs.score import bundle_scorer, student_identity
from relabel.jobs.score.student_identity import STUDENT, Identity
from relabel.jobs.score.student_labeler import BundleArgs, Dtype, StudentArgs, StudentLabeler, StudentOptions
from relabel.labelers.engines.registry import EngineClass
from relabel.labelers.registry import declared_columns
from relabel.manifests.errors import ManifestError, UsageError
from relabel.manifests.inputs.dataset import Dataset
from relabel.manifests.labels import Pair
from relabel.manifests.phi import PhiTable
from relabel.manifests.runs.fingerprints import fingerprint_parts
from relabel.manifests.runs.label_keys import stage_digests
from relabel.manifests.schemas import LabelRow, QuarantineRow
from relabel.manifests.spec_faults import validate_spec
from relabel.manifests.specs import EngineSpec, JobSpec
from relabel.manifests.storage.context import Storage


class ScoreJob(Job):
    """A job whose engine is a student. Its plan says so, so that readers of its labels know."""

    __slots__ = ()

    def model_digest(self) -> str:
        """The digest of the student, or of the bundle: no engine class knows them."""
        return _identify(str(self.spec.engine.model)).digest

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
                "args": {
                    key: value for key, value in args.items() if key not in engine.args.speed_only and value is not None
                },
            },
            model_digest=self.model_digest(),
            cut={"shards": self.spec.shards, "chunk_rows": self.spec.run.chunk_rows},
        )
        return {**found, "kind": STUDENT}


@dataclass(frozen=True)
class ScoreRequest:
    """What `relabel score` was given; None is the student's own.

    Args:
        student: folder of a student or a bundle.
        dtype: of a student alone; float32 by default.
        precision: of a bundle alone; the fastest that passed its gate by default.
    """

    student: str
    input: tuple[str, ...]
    columns: Mapping[str, Any]
    output: str
    name: str | None
    limit: int | None
    shards: int
    chunk_rows: int
    batch_tokens: int | None
    device: str
    dtype: str | None = None
    precision: str | None = None


def _identify(path: str) -> Identity:
    if bundle_scorer.is_bundle(path):
        return bundle_scorer.identify_bundle(path)
    if not (Path(path) / STUDENT_NAME).exists():
        serving = f"{path}/current" if is_destination(Path(path)) else "what serves in a folder that was pulled to"
        raise ManifestError(
            f"{path}: holds no {STUDENT_NAME}, so no student, and is no bundle. Give the output of `relabel distill` "
            f"or of `relabel export`, or {serving}."
        )
    return student_identity.identify(path)


def score_job(request: ScoreRequest, storage: Storage, say: Callable[[str], None] = lambda _: None) -> ScoreJob:
    """The job behind a request: the student's columns unless others are named.

    Args:
        say: called with what was chosen for the user, in a line.
    Raises:
        ManifestError: no student or bundle there.
        ConfigError: a value is off.
        UsageError: an option that goes with the other of student and bundle; see `bundle_scorer.choose`.
        MissingExtraError: a bundle's provider is not to be had here.
    """
    identity = _identify(request.student)
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
            args=_args(request, say),
        ),
        "output": request.output,
        "shards": request.shards,
        "run": {"chunk_rows": request.chunk_rows},
    }
    here = str(Path.cwd())
    spec = resolved(validate_spec(JobSpec, values, where="relabel score"), Places("relabel score", here, here))
    labeler = StudentLabeler(options, record.heads)
    # `start_student` stands for the class
    return ScoreJob(spec, labeler, cast("EngineClass", None), f"relabel score {request.student}", storage)


def _args(request: ScoreRequest, say: Callable[[str], None]) -> StudentArgs | BundleArgs:
    if bundle_scorer.is_bundle(request.student):
        if request.dtype is not None:
            raise UsageError(
                f"--dtype {request.dtype}: {request.student} is a bundle, which computes in what it was exported in. "
                "Name one of its precisions with --precision."
            )
        provider, choice = bundle_scorer.choose(request.student, request.device, request.precision)
        if request.precision is None:
            say(f"precision {choice.precision} on {provider}: {choice.reason}")
        runtime = OPENVINO if provider == OPENVINO else None
        return BundleArgs(
            batch_tokens=request.batch_tokens or batch_tokens_on(provider),
            device=provider,
            precision=choice.precision,
            runtime=runtime,
        )
    if request.precision is not None:
        raise UsageError(
            f"--precision {request.precision}: {request.student} is a student, which computes in --dtype. Export it "
            "to a bundle to label in int8."
        )
    dtype = cast("Dtype", request.dtype or "float32")
    return StudentArgs(batch_tokens=request.batch_tokens, device=request.device, dtype=dtype)


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
