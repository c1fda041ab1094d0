"""A score run: the job whose engine is a student or a bundle.

The job is planned, locked, committed and proven as any other; only what labels differs: a student is given whole
chunks, sorted by length, and generates nothing.
"""

import contextlib
import gc
import json
import time
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from relabel.distill.students.model import StudentModel, TokenRow, load_student, student_files
from relabel.distill.students.portable import CPU_BATCH_TOKENS, batch_tokens_on, length_batches
from relabel.distill.students.spec import NODE_HEADS, STUDENT_NAME, StudentFiles, StudentRecord, read_student
from relabel.export.bundle_facts import ChosenPrecision, choose_precision, read_parity, student_facts
from relabel.export.bundles import MANIFEST_NAME, open_bundle
from relabel.export.loader import (
    AMX,
    HINTS,
    LOADER,
    OPENVINO,
    PROVIDERS,
    BundleError,
    Student,
    check_answers,
    check_files,
    choose_openvino,
    cpu_flags,
    default_precision,
    read_manifest,
)
from relabel.export.parity import provider_here
from relabel.jobs.delivery import fetch_folder
from relabel.jobs.job import Job, cache_dir
from relabel.jobs.run.chunks import ChunkLabeler, ChunkWork, quarantined, quarantined_text
from relabel.jobs.run.loop import IDLE_S
from relabel.jobs.run.progress import Progress, StageSeen
from relabel.jobs.run.session import CommitThreads
from relabel.jobs.run.stop import Stop
from relabel.jobs.settings import Places, resolved
from relabel.labelers.registry import Labeler
from relabel.manifests.asks import DOCUMENT_FIELD, Answer, Ask, Decision, EngineFacts, Message
from relabel.manifests.errors import GateError, ManifestError, MissingExtraError, ModelError, RelabelError, UsageError
from relabel.manifests.files import Storage, is_url
from relabel.manifests.inputs import Dataset
from relabel.manifests.labels import Label, LabelColumn, LabelRow, Pair, QuarantineRow
from relabel.manifests.models import default_cache_dir
from relabel.manifests.phi import DEFAULT_PHI, PhiTable
from relabel.manifests.process import require
from relabel.manifests.records import checked, digest_of, sha256_bytes
from relabel.manifests.specs import EngineArgs, EngineSpec, JobSpec, LabelerOptions, validate_spec
from relabel.manifests.store import read_whole

# B rows, K grades

STUDENT = "student"
"""Of a score run: its engine, its labeler and the kind of its plan."""
STAGE = "score"
PURPOSE = "relabel score of a bundle"
Dtype = Literal["float32", "bfloat16", "float16"]

# ------------------------------------------------------------------------------
# Which student or bundle it is: its record and manifest are read, its weights are not.


def is_bundle(path: str) -> bool:
    """Whether a folder is a bundle's and no student's."""
    return not (Path(path) / STUDENT_NAME).exists() and (Path(path) / LOADER).is_file()


def identify(path: str) -> tuple[StudentRecord, dict[str, str], str]:
    """Read the record and the manifest of a student, or the manifest of a bundle; of that, names and sizes of its files
    are checked.

    Returns:
        The record; by name the sha256 of each file that decides what it answers, as the manifest has it, of a bundle
        graphs, tokenizer and contract; the manifest's own sha256.
    Raises:
        ManifestError: there is neither; the manifest is missing, strange or damaged; or a bundle's file is.
    """
    file = Path(path) / MANIFEST_NAME
    if is_bundle(path):
        bundle = open_bundle(Path(path))
        facts = student_facts(bundle)
        deciding = {facts.inputs.tokenizer}
        for model in facts.models:
            deciding.update(model.files)
        files = {file.path: file.sha256 for file in bundle.all_files if file.path in deciding}
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
        return record, {**files, "inputs": digest_of(contract)}, bundle.manifest.sha256
    if Path(path).exists() and not (Path(path) / STUDENT_NAME).exists():
        raise ManifestError(
            f"{path}: holds no {STUDENT_NAME}, so no student, and is no bundle. Give the output of `relabel distill` "
            f"or of `relabel export`; where a bundle was pulled to, {path}/current."
        )
    record = read_student(path)
    try:
        data = file.read_bytes()
        files = checked(StudentFiles, json.loads(data)).files
    except (OSError, ValueError) as exc:
        raise ManifestError(
            f"{file}: is missing, or does not name the student's files. Run `relabel distill` again until it ends, or "
            "restore the folder from a copy."
        ) from exc
    return record, files, sha256_bytes(data)


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
        data = read_whole(f"{reference.rstrip('/')}/{MANIFEST_NAME}", storage)
    except FileNotFoundError as exc:
        raise ManifestError(
            f"{reference}: holds no {MANIFEST_NAME}, so no finished student. Give a copy of `relabel distill`'s output."
        ) from exc
    slot = (cache_dir() or default_cache_dir()) / "students" / sha256_bytes(data)[:32]

    def check(folder: Path) -> None:
        if (folder / MANIFEST_NAME).read_bytes() != data:
            raise ModelError(f"{reference}: replaced while it was fetched. Run again, once it stays as it is.")

    if not slot.is_dir():
        fetch_folder(reference, slot, check, storage)
    return str(slot)


# ------------------------------------------------------------------------------
# A student or a bundle, loaded and proven to be what its manifest says.


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


def start_student(path: str, args: StudentArgs) -> tuple[StudentModel, EngineFacts]:
    """Load the student on its device, and say what it is.

    Raises:
        ManifestError: a file is not the one that its manifest names.
        MissingExtraError: torch or the device is absent.
    """
    record, files, manifest_sha256 = identify(path)
    changed = sorted({name for name, _ in student_files(path).items() ^ files.items()})
    if changed:
        raise ManifestError(
            f"{path}: {', '.join(changed)} changed since the student was trained (no file of it, missing, or its "
            "sha256 is not the manifest's). Restore the folder from a copy, or train again."
        )
    torch = require("torch", extra="cpu", purpose="relabel score")
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        student = load_student(path, device=device, batch_tokens=args.batch_tokens)
    except (RuntimeError, AssertionError) as exc:  # torch's words for a device that it does not know, or has not
        raise MissingExtraError(
            f"--device {device}: torch can't use it ({exc}). `relabel doctor` shows what is here."
        ) from exc
    student.module.to(getattr(torch, args.dtype))
    return student, EngineFacts(
        STUDENT,
        version("torch"),
        record.name,
        digest_of(files),
        device=device,
        dtype=args.dtype,
        details={"kind": record.kind, "manifest_sha256": manifest_sha256, "temperature": record.temperature},
    )


def choose(path: str, device: str, precision: str | None) -> ChosenPrecision:
    """The provider and the precision to label with: the bundle's default where none is named, but see
    `choose_openvino`. The file that it computes from has to have passed its gate.

    Raises:
        UsageError: no such provider, or precision.
        MissingExtraError: it is not to be had here.
        ManifestError: the bundle's parity is damaged.
    """
    if device not in ("auto", "cpu", "cuda", OPENVINO):
        raise UsageError(f"--device {device}: a bundle runs on auto, cpu, cuda or openvino.")
    facts = open_bundle(Path(path)).facts
    parity = read_parity(facts.get("parity"), f"{path}/{MANIFEST_NAME}")
    why = "named"
    refused = list[str]()
    if device == OPENVINO:
        wish = precision
        exported = {model.precision for model in parity.models}
        with _bundle_refusals(UsageError, f"--precision {wish}: "):
            device, precision, refused = choose_openvino(wish, cpu_flags(), exported)
        if wish is None:
            why = f"this CPU has {AMX if precision == 'bf16' else 'VNNI'}"
    if precision is None:
        precision = default_precision(facts)
        why = "the bundle's default"
    choice = choose_precision(parity, provider_here(device, option="--device", purpose=PURPOSE), precision, why)
    return choice._replace(reason="; ".join([choice.reason, *refused]))


@dataclass(frozen=True)
class BundleModel:
    """A bundle that scores as `StudentModel` does; batches follow from the rows that are given alone.

    Args:
        record: what the bundle says of its student.
        student: the bundle's own loader.
        batch_tokens: tokens of a batch, padding included.
    """

    record: StudentRecord
    student: Student
    batch_tokens: int

    def encode(self, pairs: Sequence[tuple[str, str]]) -> list[TokenRow]:
        """Token rows; a logistic student has counts where others have segments."""
        return [TokenRow(*row) for row in self.student.encoder.encode_marked(pairs)]

    def score(
        self, rows: Sequence[TokenRow], on_batch: Callable[[int], bool] = lambda _: True
    ) -> dict[str, np.ndarray] | None:
        """Calibrated distributions by head, float32 [B, K], in the order of the rows; None if `on_batch` gave up.

        Raises:
            ModelError: onnxruntime can't run the model on a batch.
        """
        student = self.student
        probs = {name: np.empty((len(rows), grades), dtype=np.float32) for name, grades in student.heads.items()}
        for places in length_batches([len(row.ids) for row in rows], self.batch_tokens):
            batch_rows = [rows[place] for place in places]
            batch = student.encoder.collate([(row.ids, row.types or []) for row in batch_rows])
            try:
                values = student.session.run(list(probs), batch)
            except Exception as exc:  # onnxruntime's errors share no class but this
                raise ModelError(
                    f"{student.folder}: onnxruntime can't run {student.precision} on {len(places)} pairs "
                    f"({str(exc)[:300]}). Take smaller batches (--batch-tokens), or another --precision."
                ) from exc
            for name, values_BK in zip(probs, values, strict=True):
                probs[name][places] = values_BK
            if not on_batch(len(places)):
                return None
        return probs


def start_bundle(path: str, args: BundleArgs) -> tuple[BundleModel, EngineFacts]:
    """Prove a bundle's bytes, open its model, and say what it is.

    OpenVINO's answers to the reference pairs are checked before the first label: its gate is this machine's.

    Raises:
        ManifestError: a file is not the one that the manifest names, or openvino is asked for and no pairs are sealed.
        MissingExtraError: the runtime or the provider is absent.
        GateError: openvino answers the reference pairs otherwise than at export.
    """
    record, files, manifest_sha256 = identify(path)
    bundle = open_bundle(Path(path))
    provider = provider_here(args.device, option="--device", purpose=PURPOSE)
    with _bundle_refusals(ManifestError, f"{path}: is not the bundle that its manifest names, and labels nothing. "):
        check_files(bundle.folder.resolve(), read_manifest(bundle.folder.resolve()))
    with _bundle_refusals(MissingExtraError, f"--device {args.device}: "):
        student = Student(bundle.folder, provider=provider, precision=args.precision, check_digests=False)
    details: dict[str, Any] = {
        "runtime": PROVIDERS.get(provider, provider),
        "bundle": bundle.version,
        "student": student_facts(bundle).lineage.student.digest,
        "manifest_sha256": manifest_sha256,
    }
    release = str(require("onnxruntime", extra="cpu", purpose=PURPOSE).__version__)
    if provider == OPENVINO:
        release = version(OPENVINO)
        details |= {"precision_hint": HINTS[student.precision], "has_amx": AMX in cpu_flags()}
        with _bundle_refusals(ManifestError, f"--device {OPENVINO}: "):
            parity = check_answers(student)
        if not parity.has_passed:
            raise GateError(f"{parity}")
    return BundleModel(record, student, args.batch_tokens), EngineFacts(
        STUDENT,
        release,
        record.name,
        digest_of(files),
        device=provider,
        dtype=args.precision,
        details=details,
    )


@contextlib.contextmanager
def _bundle_refusals(kind: type[RelabelError], note: str) -> Iterator[None]:
    """Turn what a bundle's loader refuses into an error of this kind; the note begins its message."""
    try:
        yield
    except BundleError as exc:
        raise kind(f"{note}{exc}") from exc


# ------------------------------------------------------------------------------
# The job of `relabel score`.


class StudentLabeler(Labeler):
    """A score run as a labeler: one decision a pair, on query and document alone. Its asks tell prompts apart; the
    engine reads pairs by the chunk instead.
    """

    Options: ClassVar[type[LabelerOptions]] = LabelerOptions

    def __init__(self, options: LabelerOptions, record: StudentRecord) -> None:
        super().__init__(options)
        nodes = [name for name in NODE_HEADS if name in record.heads]
        for name in nodes:
            self.columns += (
                LabelColumn(name, "int8", f"The most probable {name} score, 0 to 4."),
                LabelColumn(f"{name}_probs", "list<float32>", "Its distribution over the five scores."),
            )
        if len(nodes) == len(NODE_HEADS):
            self.columns += (
                LabelColumn("phi_grade", "int8", "The grade by the rule map: φ(subject, attribute)."),
                LabelColumn("phi_agrees", "bool", "Whether that is the grade."),
            )
        self._decisions = (Decision("relevance", "", tuple(map(str, range(options.grades)))),)

    def label(self, pair: Pair) -> Generator[Ask, Answer, Label]:
        """One ask, whose answer holds no text but the distribution."""
        answer = yield self._ask(pair)
        distribution = answer.distributions["relevance"]
        return Label(distribution.argmax, distribution, flags=list(answer.flags))

    def probe(self) -> list[Ask]:
        pair = Pair(
            row_id=0,
            query_id="q",
            query="how to prune roses",
            doc_id="d",
            document="Cut back to an outward bud in late winter.",
        )
        return [self._ask(pair)]

    def _ask(self, pair: Pair) -> Ask:
        message = Message("user", ("", pair.query, "", pair.document, ""), ("query", DOCUMENT_FIELD))
        return Ask(
            stage=STAGE,
            messages=(message,),
            format=None,
            max_tokens=0,
            decisions=self._decisions,
        )


class ScoreJob(Job):
    """A job whose engine is a student. Its plan says so, so that readers of its labels know."""

    __slots__ = ()

    def parts(self, dataset: Dataset) -> dict[str, Any]:
        """What the fingerprint is made of: the input, the student, and in what it computes."""
        parts = super().parts(dataset)
        args = {key: value for key, value in parts["engine"]["args"].items() if value is not None}
        return {
            **parts,
            "labeler": {"name": STUDENT, "grades": self.spec.labeler.grades},
            "engine": {"name": STUDENT, "args": args},
            "kind": STUDENT,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """What `relabel score` is asked for: its options, whose help explains them. None is the student's own.

    Args:
        columns: by role.
        api, served_model, api_key_env: of a server alone; see `rerankers.RerankerArgs`.
        dtype: of a student alone; float32 by default.
        precision: of a bundle alone; the bundle's default where none is named.
    """

    input: Sequence[str]
    to: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None
    limit: int | None = None
    shards: int | None = None
    chunk_rows: int = 512
    batch_tokens: int | None = None
    device: str = "auto"
    dtype: Dtype | None = None
    precision: str | None = None
    api: str = "auto"
    served_model: str = ""
    api_key_env: str | None = None


def score_job(
    student: str,
    options: ScoreOptions,
    storage: Storage,
    *,
    on_choice: Callable[[str], None] = lambda _: None,
) -> ScoreJob:
    """The job of `relabel score`.

    Args:
        student: folder of a student or a bundle.
        on_choice: called with what was chosen for the user, in a line.
    Raises:
        ManifestError: no student or bundle there.
        ConfigError: a value is off.
        UsageError: an option that goes with the other of student and bundle; see `choose`.
        MissingExtraError: a bundle's provider is not to be had here.
    """
    record = identify(student)[0]
    if is_bundle(student):
        args: StudentArgs | BundleArgs = _bundle_args(student, options, on_choice)
    else:
        args = _student_args(student, options)
    columns = {role: column for role, column in record.columns.items() if role not in ("gold", "context")}
    labeler = LabelerOptions(name=STUDENT, grades=record.grades)
    values = {
        "name": options.name or record.name,
        "input": {"path": options.input, "columns": {**columns, **options.columns}, "limit": options.limit},
        "labeler": labeler,
        "engine": EngineSpec(name=STUDENT, model=student, max_prompt_tokens=max(64, record.max_tokens), args=args),
        "output": options.to,
        "shards": options.shards,
        "run": {"chunk_rows": options.chunk_rows},
    }
    here = str(Path.cwd())
    spec = resolved(validate_spec(JobSpec, values, where="relabel score"), Places("relabel score", here, here))
    return ScoreJob(
        spec,
        StudentLabeler(labeler, record),
        StudentRunner,
        f"relabel score {student}",
        storage,
    )


def _bundle_args(bundle: str, options: ScoreOptions, on_choice: Callable[[str], None]) -> BundleArgs:
    if options.dtype is not None:
        raise UsageError(
            f"--dtype {options.dtype}: {bundle} is a bundle, which computes in what it was exported in. Name one of "
            "its precisions with --precision."
        )
    choice = choose(bundle, options.device, options.precision)
    if options.precision is None:
        on_choice(f"precision {choice.precision} on {choice.provider}: {choice.reason}")
    return BundleArgs(
        batch_tokens=options.batch_tokens or batch_tokens_on(choice.provider),
        device=choice.provider,
        precision=choice.precision,
        runtime=OPENVINO if choice.provider == OPENVINO else None,
    )


def _student_args(student: str, options: ScoreOptions) -> StudentArgs:
    if options.precision is not None:
        raise UsageError(
            f"--precision {options.precision}: {student} is a student, which computes in --dtype. Export it to a "
            "bundle to label in int8."
        )
    return StudentArgs(batch_tokens=options.batch_tokens, device=options.device, dtype=options.dtype or "float32")


# ------------------------------------------------------------------------------
# The engine: a thread reads and tokenizes ahead, the main thread keeps the student busy, committers write.
#
# A chunk's rows are sorted by length together, its batches follow from it alone, and its order is restored when it is
# committed. So a run that was killed ends with the bytes of one that was not.


CHUNKS_AHEAD = 2
"""Chunks that wait, tokenized, for the student: enough that a GPU never waits for the tokenizer, few enough to keep
memory flat.
"""


Scorer: TypeAlias = StudentModel | BundleModel
"""What a score run asks."""


class ChunkModel(Protocol):
    """What scores the pairs of chunks, as `StudentModel` and `BundleModel` do."""

    def encode(self, pairs: Sequence[tuple[str, str]]) -> Any:
        """What is scored, a row a pair; in a thread of its own."""
        ...

    def score(self, rows: Any, on_batch: Callable[[int], bool]) -> Any:
        """What `settle` makes labels of; None if `on_batch`, called with the rows of each batch, gave up."""
        ...


class ScoringRunner(ChunkLabeler):
    """What runs a model in place of an engine: it is given whole chunks, and asked nothing else.

    Attributes:
        model: what scores the pairs of chunks.
    """

    model: ChunkModel
    _facts: EngineFacts

    @staticmethod
    def resolve_auto(spec: EngineSpec) -> dict[str, str]:  # noqa: ARG004
        """None: options are chosen with the job."""
        return {}

    def prepare(self, asks: Sequence[Ask]) -> list[str]:
        """Nothing: it is asked nothing."""
        return []

    def facts(self) -> EngineFacts:
        """Provenance of the model."""
        return self._facts

    def costs(self) -> None:
        """Nothing that is known."""

    def close(self) -> None:
        """Nothing: the model goes with its process."""

    def label_chunks(
        self,
        chunks: Iterator[ChunkWork | None],
        commit: Callable[[ChunkWork], bool],
        *,
        progress: Progress,
        stop: Stop,
        on_progress: Callable[[], None] = lambda: None,
    ) -> bool:
        """See `score_chunks`."""
        return score_chunks(
            self.model,
            chunks,
            commit,
            progress=progress,
            stop=stop,
            on_progress=on_progress,
            settle=self.settle,
        )

    @abstractmethod
    def settle(self, work: ChunkWork, encoded: Any, scores: Any) -> None:
        """Fill in the rows of a chunk from what the model encoded and scored."""


class StudentRunner(ScoringRunner):
    """What runs a student or a bundle in place of an engine: it is given whole chunks.

    Raises:
        ManifestError: the files of student or bundle are not those of its manifest.
        ModelError, MissingExtraError: it can't be loaded, or not on this device.
    """

    def __init__(self, spec: EngineSpec, *, overlong: Literal["truncate", "quarantine"]) -> None:
        self.model: Scorer
        if isinstance(spec.args, BundleArgs):
            self.model, self._facts = start_bundle(str(spec.model), spec.args)
        else:
            self.model, self._facts = start_student(str(spec.model), StudentArgs.of(spec))

    @staticmethod
    def model_digest(spec: EngineSpec) -> str:
        """The digest of the student, or of the bundle."""
        return digest_of(identify(str(spec.model))[1])

    def settle(self, work: ChunkWork, encoded: Any, scores: Any) -> None:
        """Fill in grades and distributions, and count the tokens."""
        scored = score_rows(
            work.pairs,
            work.keys,
            scores,
            encoded,
            self.model.record.phi,
        )
        work.rows = [quarantined_text(pair) or row for pair, row in zip(work.pairs, scored, strict=True)]
        work.left = 0
        num_tokens = sum(len(row.ids) for row in encoded)
        work.stages[STAGE] = StageSeen(len(scored), prompt_tokens=num_tokens)


def score_chunks(
    model: ChunkModel,
    chunks: Iterator[ChunkWork | None],
    commit: Callable[[ChunkWork], bool],
    *,
    progress: Progress,
    stop: Stop,
    on_progress: Callable[[], None] = lambda: None,
    settle: Callable[[ChunkWork, Any, Any], None],
) -> bool:
    """Score chunks as `ChunkLabeler.label_chunks` says, whose arguments these are. The chunks are read in a thread.

    Args:
        settle: fills in the rows of a chunk from what the model encoded and scored.
    """
    seconds_a_chunk = 0.0

    def read() -> ReadChunk | None:
        """The next chunk, tokenized; None after the last one. In a thread of its own."""
        if stop.reason is not None:
            return None
        for work in chunks:
            pairs = [] if work is None else work.pairs
            return ReadChunk(work, model.encode([(pair.query, pair.document) for pair in pairs]))
        return None

    def may_go_on(num_rows: int) -> bool:
        """Count the rows of a batch; False if their chunk can't be finished in time."""
        progress.pairs += num_rows
        on_progress()
        return not stop.is_now and time.perf_counter() <= stop.deadline_s

    gc.freeze()  # what torch and the student brought along is not collected again: 0.25 s a full collection
    try:
        with (
            CommitThreads(commit, progress) as commits,
            ThreadPoolExecutor(1, thread_name_prefix="tokenize") as reader,
        ):
            ahead = deque(reader.submit(read) for _ in range(CHUNKS_AHEAD))
            while True:
                stop.mind(seconds_a_chunk)
                if stop.reason is not None:
                    return False
                commits.settle()
                if not wait([ahead[0]], timeout=0.2).done:
                    on_progress()
                    continue
                chunk = ahead.popleft().result()
                if chunk is None:
                    return True
                ahead.append(reader.submit(read))
                work = chunk.work
                if work is None:
                    time.sleep(IDLE_S)
                    continue
                work.started_s = time.perf_counter()
                work.started_clock = time.time()
                scores = model.score(chunk.tokens, may_go_on)
                if scores is None:
                    return False
                settle(work, chunk.tokens, scores)
                seconds_a_chunk = max(time.perf_counter() - work.started_s, 0.9 * seconds_a_chunk)
                progress.statuses.update(Counter(row.status for row in work.rows if row is not None))
                progress.requests += len(work.rows)
                progress.prompt_tokens += work.stages[STAGE].prompt_tokens
                commits.add(work)
    finally:
        gc.unfreeze()


class ReadChunk(NamedTuple):
    """A chunk with its tokens; no chunk where there is nothing just now."""

    work: ChunkWork | None
    tokens: Any


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
    grades_K = np.arange(relevance_BK.shape[1], dtype=np.float64)
    is_finite = np.all([np.isfinite(values_BK).all(axis=1) for values_BK in probs.values()], axis=0).tolist()
    grades = relevance_BK.argmax(axis=1).tolist()
    means = (relevance_BK * grades_K).sum(axis=1).tolist()
    distributions = relevance_BK.tolist()
    columns = _node_columns(probs, phi, grades)
    rows = list[LabelRow | QuarantineRow]()
    for number, pair in enumerate(pairs):
        row_tokens = tokens[number]
        num_tokens = len(row_tokens.ids)
        if not is_finite[number]:
            failed = quarantined(pair, "engine", "the student's probabilities are NaN")
            rows.append(failed._replace(prompt_tokens=num_tokens))
            continue
        label = LabelRow(
            row_id=pair.row_id,
            query_id=pair.query_id,
            doc_id=pair.doc_id,
            status="ok",
            grade=grades[number],
            probs=distributions[number],
            outside_mass=None,
            expected_grade=means[number],
            evidence=[],
            intent=None,
            reasoning=None,
            flags=["document_truncated"] if row_tokens.is_cut else [],
            samples=None,
            prompt_tokens=num_tokens,
            output_tokens=0,
            reused=False,
            key=keys[number],
            columns=columns[number],
        )
        rows.append(label)
    return rows


def _node_columns(probs: Mapping[str, np.ndarray], phi: PhiTable, grades: list[int]) -> list[dict[str, Any]]:
    """Subject and attribute of students that have these heads, and what φ makes of the most probable scores."""
    columns: dict[str, list[Any]] = {}
    for name in NODE_HEADS:
        if name in probs:
            columns[name] = probs[name].argmax(axis=1).tolist()
            columns[f"{name}_probs"] = probs[name].tolist()
    if all(name in probs for name in NODE_HEADS):
        subject_name, attribute_name = NODE_HEADS
        nodes = zip(columns[subject_name], columns[attribute_name], strict=True)
        by_rule = [phi[subject][attribute] for subject, attribute in nodes]
        columns["phi_grade"] = by_rule
        columns["phi_agrees"] = [rule == grade for rule, grade in zip(by_rule, grades, strict=True)]
    if not columns:
        return [{} for _ in grades]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
