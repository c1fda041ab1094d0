"""Artifacts that a report can cover (label runs, teachers, students and bundles), opened from a folder or URL; and the
sections that show them: lineage, rows and labels of runs, trainings, students, and bundles.
"""

import io
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from relabel.distill.students.model import NOT_THE_MODEL
from relabel.distill.students.spec import LearnedGold, LearnedLabels, StudentManifest
from relabel.distill.teachers.spec import METHODS, TeacherManifest
from relabel.distill.training.output import (
    CHECKPOINTS,
    CURVE_SCHEMA,
    CURVES_NAME,
    LOSS_PANEL,
    PLOT_NAME,
    RECORD_NAME,
    BaseModelUsed,
    panel_of,
    panels_of,
)
from relabel.export.bench import latency_rows, machine_line, measurements_of, warnings_of
from relabel.export.bundle_facts import (
    Parity,
    StudentFacts,
    compared_on,
    parity_rows,
    read_parity,
    read_student_facts,
    undecided_lines,
)
from relabel.export.bundles import read_manifest
from relabel.jobs.evaluate import run_pairs
from relabel.jobs.run.notices import load_stop, load_warnings
from relabel.jobs.sections import (
    Badge,
    Block,
    Cell,
    Code,
    Facts,
    Fold,
    Paragraph,
    Plot,
    Remarks,
    Section,
    Series,
    Shade,
    Table,
)
from relabel.jobs.tables import is_remote
from relabel.labelers.route import RouteStep, read_step
from relabel.labelers.subtrees import Subtree, one_line
from relabel.manifests.cascade import audit_of
from relabel.manifests.errors import InputError, ManifestError, RelabelError, UsageError
from relabel.manifests.files import Storage, is_url, place_of
from relabel.manifests.labels import (
    LABELS,
    QUARANTINE,
    QUERY_AND_DOCUMENT,
    InputColumn,
    LabelRow,
    Pair,
    QuarantineRow,
    Reads,
    label_rows,
)
from relabel.manifests.metrics.comparison import AGAINST_TEACHER
from relabel.manifests.metrics.judged import title_of
from relabel.manifests.models import default_cache_dir, digest_of_files, directory_digest
from relabel.manifests.plan import PLAN_NAME, Plan, load_plan, refuse_rounds
from relabel.manifests.records import digest_of, sha256_bytes
from relabel.manifests.run_folder import RunFolder, Snapshot
from relabel.manifests.run_labels import own_columns, read_labels
from relabel.manifests.run_manifest import MANIFEST_NAME, RunManifest, load_manifest
from relabel.manifests.secrets import shortened
from relabel.manifests.store import Store, open_run_store, read_if_there
from relabel.manifests.trees import COLUMN, Tree, read_tree

DIGITS = 16
"""Of a digest that is shown."""


def base_name(path: str) -> str:
    """The last part of a path or URL."""
    return path.rstrip("/").rpartition("/")[2] or path


@dataclass
class _Opened:
    """What all artifacts have.

    Args:
        kind: what a page calls it.
        digest: what manifests call it that name it as their source.
    """

    kind: str
    name: str
    path: str
    store: Store
    digest: str


@dataclass
class RunArtifact(_Opened):
    """A label run, or a student's scores, which lie in the same way.

    Args:
        manifest: None where it is not finished; `spec` is then empty, else as it was resolved.
        found: what its receipts say.
    """

    storage: Storage
    plan: Plan
    folder: RunFolder
    manifest: RunManifest | None
    spec: dict[str, Any]
    found: Snapshot
    is_finished: bool

    def spec_part(self, *names: str) -> dict[str, Any]:
        """An object inside the spec, by the names on the way to it; empty where there is none, or something else is
        there.
        """
        found: Any = self.spec
        for name in names:
            found = found.get(name) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else {}


@dataclass
class TeacherArtifact(_Opened):
    """A teacher's folder."""

    manifest: TeacherManifest


@dataclass
class StudentArtifact(_Opened):
    """A student's folder; scores and bundles call it by the digest over its files, as its manifest names them."""

    manifest: StudentManifest


@dataclass
class BundleArtifact(_Opened):
    """A bundle, by its manifest; its files are not checked (`relabel pull` and `load.py` do that).

    Args:
        student: which it is of, and what that was made of.
        parity: how near its models are to the student; None where its manifest does not say.
    """

    facts: dict[str, Any]
    student: StudentFacts
    parity: Parity | None


Artifact: TypeAlias = RunArtifact | TeacherArtifact | StudentArtifact | BundleArtifact


# ------------------------------------------------------------------------------
# Opening paths: each artifact is recognized by its files.


def open_artifacts(paths: Sequence[str], storage: Storage) -> list[Artifact]:
    """Open every path; two of one name are distinguished by their paths.

    Raises:
        UsageError: one place twice, however it is spelled.
        InputError: a path holds nothing that a report knows.
        ManifestError: what it holds is damaged.
    """
    spelled: dict[str, str] = {}
    for path in paths:
        first = spelled.setdefault(place_of(path).rstrip("/"), path)
        if first is not path:
            raise UsageError(f"PATH: {first} is given twice, as {path} too.")
    found = [open_artifact(path, storage) for path in paths]
    named = Counter((type(one), one.name) for one in found)
    for one in found:
        if named[type(one), one.name] > 1:
            one.name = f"{one.name} ({one.path})"
    return found


def open_artifact(path: str, storage: Storage) -> Artifact:
    """What lies at a path.

    Raises:
        InputError: nothing that a report knows.
        ManifestError: it is damaged.
    """
    if not is_remote(path) and Path(place_of(path)).is_file():
        raise InputError(
            f"{path}: is a file. A report takes folders: outputs of `relabel run`, `score`, `train`, `distill` or "
            "`export`."
        )
    store = open_run_store(path, storage)
    plan = load_plan(store)
    if plan is not None:
        kind = "scores" if plan.facts.kind == "student" else "label run"
        folder = RunFolder(store, plan)
        run = load_manifest(store)
        found = folder.snapshot()
        spec = {} if run is None else run.spec
        is_finished = run is not None and run.receipts_sha256 == found.digest
        return RunArtifact(
            kind,
            plan.name,
            path,
            store,
            plan.fingerprint,
            storage,
            plan,
            folder,
            run,
            spec,
            found,
            is_finished,
        )
    manifest = read_if_there(store, MANIFEST_NAME) or b""
    where = f"{path}/{MANIFEST_NAME}"
    if not manifest and not is_url(path) and Path(path, CHECKPOINTS, RECORD_NAME).is_file():
        raise InputError(
            f"{path}: a training that is not finished. Its curves up to the last checkpoint are in "
            f"{path}/{CHECKPOINTS}/{PLOT_NAME}."
        )
    try:
        of = manifest and json.loads(manifest).get("kind")
    except (ValueError, AttributeError) as exc:
        raise ManifestError(f"{where}: not a JSON object ({type(exc).__name__}). Restore it from a copy.") from exc
    match of:
        case "student":
            student = StudentManifest.read(manifest, where)
            return StudentArtifact(
                "student",
                student.name,
                path,
                store,
                digest_of(student.files or {}),
                student,
            )
        case "teacher":
            teacher = TeacherManifest.read(manifest, where)
            digest = _teacher_digest(path, store, teacher)
            return TeacherArtifact(
                "teacher",
                teacher.name,
                path,
                store,
                digest,
                teacher,
            )
        case "bundle":
            facts = read_manifest(manifest, where)
            parity = read_parity(facts["parity"], where) if facts.get("parity") else None
            digest = sha256_bytes(manifest)
            of_student = read_student_facts(facts, where)
            return BundleArtifact(
                "bundle",
                str(facts["name"]),
                path,
                store,
                digest,
                facts,
                of_student,
                parity,
            )
    refuse_rounds(store)
    raise InputError(
        f"{path}: holds no {PLAN_NAME} (a label run), and no {MANIFEST_NAME} of a student, a teacher or a "
        "bundle. Give an output of `relabel run`, `score`, `train`, `distill` or `export`."
    )


def _teacher_digest(path: str, store: Store, manifest: TeacherManifest) -> str:
    """What a run calls the model: over all files of the folder, as they are now. At a URL the weights are believed to
    be those that the manifest names, and are not read.
    """
    if not is_remote(path):
        return directory_digest(Path(place_of(path)), cache_dir=default_cache_dir())
    held = {name: data for name in NOT_THE_MODEL if (data := read_if_there(store, name)) is not None}
    return digest_of_files({**(manifest.files or {}), **{name: sha256_bytes(data) for name, data in held.items()}})


# ------------------------------------------------------------------------------
# Lineage from data to bundle: what each manifest says it was made of, and whether the artifact given here is that.


class Thing(NamedTuple):
    """A thing that something was made of, or was made."""

    kind: str
    title: str

    def __str__(self) -> str:
        return f"{self.kind} {self.title}"


class Link(NamedTuple):
    """One thing was made of another; `is_same`: the source that is given is what the manifest names, None where it is
    not given.
    """

    source: Thing
    target: Thing
    is_same: bool | None


Source: TypeAlias = tuple[str, str, str, str, bool | None]
"""Keys of a thing and of what it was made of, which hold digests; kind and title of the latter; see `Link`. Without a
verdict the source is the same if its key is among those of what is given."""


def trace(artifacts: Iterable[Artifact]) -> list[Link]:
    """What was made of what, by what is given and what its manifests name."""
    words = {"label run": "run", "scores": "run", "teacher": "model"}
    given = {f"{words.get(one.kind, one.kind)} {one.digest}": one for one in artifacts}
    things = {key: Thing(one.kind, one.name) for key, one in given.items()}
    links: dict[tuple[str, str, bool | None], Link] = {}
    for key, one in given.items():
        for target, source, kind, title, is_same in _sources(key, one, given):
            things.setdefault(source, Thing(kind, title))
            verdict = True if is_same is None and source in given else is_same
            links[source, target, verdict] = Link(things[source], things[target], verdict)
    return list(links.values())


def _sources(key: str, one: Artifact, given: Mapping[str, Artifact]) -> Iterator[Source]:
    if isinstance(one, RunArtifact):
        files = one.plan.files
        name = base_name(files[0].path) if len(files) == 1 else f"{len(files):,} files"
        yield key, f"data {digest_of([list(file.identity) for file in files])}", "data", name, None
        for engine in one.found.engines:
            yield from (_scorer(key, engine, given) if one.kind == "scores" else _teacher(key, engine, given))
        for source in one.found.reused_from:
            yield key, f"run {source.fingerprint}", "label run", base_name(source.output), None
    elif isinstance(one, TeacherArtifact):
        yield from _learned(
            key,
            one.manifest.data.runs,
            one.manifest.data.gold,
            one.manifest.model,
            given,
        )
    elif isinstance(one, StudentArtifact):
        yield from _learned(
            key,
            one.manifest.labels,
            one.manifest.gold,
            one.manifest.model,
            given,
        )
    else:
        student = one.student.lineage.student
        lineage = one.student.lineage
        student_key = f"student {student.digest}"
        yield key, student_key, "student", student.name, None
        if student_key not in given:
            yield from _learned(
                student_key,
                lineage.labels or (),
                lineage.gold,
                student.model,
                given,
            )


def _teacher(key: str, engine: dict[str, Any], given: Mapping[str, Artifact]) -> Iterator[Source]:
    """The model that a run asked: a given teacher where all its files are those that were asked."""
    source = f"model {engine.get('model_digest', '')}"
    reference = str(engine.get("model", ""))
    place = reference and place_of(str(Path(reference).expanduser()) if reference.startswith("~") else reference)
    at = [other for other, one in given.items() if isinstance(one, TeacherArtifact) and place_of(one.path) == place]
    if at and source not in given:
        yield key, at[0], "teacher", given[at[0]].name, False
    else:
        yield key, source, "teacher", base_name(reference), None


def _scorer(key: str, engine: dict[str, Any], given: Mapping[str, Artifact]) -> Iterator[Source]:
    """What scored: a student, or a bundle with the student that it was made of."""
    name = str(engine.get("model", ""))
    digest = str(engine.get("model_digest"))
    match engine.get("details"):
        case {"bundle": _, "manifest_sha256": str(manifest_sha256), "student": str(digest)}:
            bundle = f"bundle {manifest_sha256}"
            yield key, bundle, "bundle", name, None
            if bundle in given:  # its own manifest says what it was made of
                return
            key = bundle
    yield key, f"student {digest}", "student", name, None


def _learned(
    key: str,
    labels: Iterable[LearnedLabels],
    gold: LearnedGold | None,
    model: BaseModelUsed | None,
    given: Mapping[str, Artifact],
) -> Iterator[Source]:
    """What a student or a teacher was made of."""
    for source in labels:
        if source.kind != "run":
            yield key, f"file {source.path}", "label file", base_name(source.path), None
            continue
        run = given.get(f"run {source.fingerprint}")
        is_same = None
        if isinstance(run, RunArtifact):
            is_same = sha256_bytes(read_if_there(run.store, MANIFEST_NAME) or b"") == source.manifest_sha256
        yield key, f"run {source.fingerprint}", "label run", source.name or base_name(source.path), is_same
    if model is not None:
        yield key, f"model {model.digest}", "base model", base_name(model.reference), None
    if gold is not None:
        kind = "wanted chunks" if gold.sets is not None else "trusted grades"
        yield key, f"gold {gold.path}", kind, base_name(gold.path), None


def lineage_section(artifacts: Sequence[Artifact]) -> Section:
    """What was made of what, each link with how it is known; changed sources first."""
    known = {
        True: Badge("the same, by digest", "good"),
        False: Badge("changed since", "bad"),
        None: Badge("named by a manifest"),
    }
    links = trace(artifacts)
    rows = [(str(one.source), str(one.target), known[one.is_same]) for one in links]
    table = Table("From data to here", ("from", "to", "known"), rows)
    texts = (Paragraph(sentence, "warn") for sentence in changes(links, artifacts))
    return Section("lineage", "Lineage", [*texts, table] if rows else [])


def changes(links: Iterable[Link], artifacts: Iterable[Artifact]) -> list[str]:
    """What is not any more what something was made of, a sentence each."""
    found = list[str]()
    given = {f"{one.kind} {one.name}" for one in artifacts}
    for source, target, is_same in links:
        if is_same is False:
            what = "files have" if source.kind == "teacher" else "manifest has"
            found.append(f"{source} is not what {target} was made of: its {what} changed since.")
        if is_same is None and str(source) in given:
            found.append(
                f"{target} was made of another {source} than the one that is given here: their digests differ."
            )
    return found


# ------------------------------------------------------------------------------
# One pass over a run's labels, for the sections about it; memory does not grow with the run. Letters: N rows of a file,
# M of a sample, K grades.

BINS = 20
SEED = 7


@dataclass
class Histogram:
    """Counts in equal bins from 0 to `top`, and the sum for a mean."""

    top: float
    counts: np.ndarray = field(default_factory=lambda: np.zeros(BINS, dtype=np.int64))
    total: float = 0.0

    def add(self, values_N: np.ndarray) -> None:
        """Count values; those beyond the top fall into the last bin."""
        place_N = np.clip((values_N / self.top * BINS).astype(np.int64), 0, BINS - 1)
        self.counts += np.bincount(place_N, minlength=BINS)
        self.total += float(values_N.sum())

    @property
    def rows(self) -> int:
        """How many values were counted."""
        return int(self.counts.sum())


@dataclass
class RunTally:
    """A run, and counts over all its labels."""

    run: RunArtifact
    by_grade: np.ndarray
    entropy: Histogram
    outside: Histogram
    by_status: Counter[str]
    flags: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, Counter[str]] = field(default_factory=dict)
    """By status, the reasons of quarantined rows; the rarest are dropped where there are many."""
    chosen: list[LabelRow | QuarantineRow] = field(default_factory=list)
    """Rows for the label browser: labels, then the quarantine."""


def tally_labels(run: RunArtifact, *, most: int) -> RunTally:
    """Read every committed file once, and those with rows for the browser whole.

    Args:
        most: rows to choose for the browser, at random but the same ones each time; 0 for none.
    Raises:
        ManifestError: a file is missing or not the one committed.
    """
    grades = run.plan.facts.labeler.grades
    top_nats = math.log(max(grades, 1))  # without grades there is no distribution to be counted
    rows = run.found.tally
    by_status = +Counter({"ok": rows.labelled + rows.reused, **rows.quarantined})
    found = RunTally(
        run,
        np.zeros(grades, dtype=np.int64),
        Histogram(top_nats),
        Histogram(1.0),
        by_status,
    )
    rng = np.random.default_rng(SEED)
    drawn = {
        status: np.sort(rng.choice(by_status[status], count, replace=False))
        for status, count in (shares(by_status, most).items() if most else ())
    }
    place = Counter[str]()
    for file in run.found.labels:
        table = run.folder.table(file, LABELS, ["grade", "probs", "outside_mass", "flags"])
        _add_labels(found, table)
        rows_M = _taken(drawn, place, "ok", np.arange(table.num_rows))
        if len(rows_M):
            found.chosen += label_rows(read_labels(run.folder, file, check_bytes=False).take(pa.array(rows_M)))
    for file in run.found.quarantine:
        table = run.folder.table(file, QUARANTINE, ["status", "reason"])
        _add_reasons(found, table)
        status_N = np.array(table["status"].to_pylist(), dtype=object)
        taken = [_taken(drawn, place, name, np.flatnonzero(status_N == name)) for name in dict.fromkeys(status_N)]
        if any(map(len, taken)):
            whole = run.folder.table(file, QUARANTINE, check_bytes=False).take(pa.array(np.concatenate(taken)))
            found.chosen += [QuarantineRow(**row) for row in whole.to_pylist()]
    return found


def _taken(drawn: Mapping[str, np.ndarray], place: Counter[str], status: str, rows_N: np.ndarray) -> np.ndarray:
    """Those of a file's rows of one status that were drawn; they are counted on."""
    places = drawn.get(status, rows_N[:0]) - place[status]
    place[status] += len(rows_N)
    return np.asarray(rows_N[places[(places >= 0) & (places < len(rows_N))]])


def _add_labels(found: RunTally, table: pa.Table) -> None:
    grade_N = table["grade"].drop_null().to_numpy()
    found.by_grade += np.bincount(grade_N.astype(np.int64), minlength=len(found.by_grade))[: len(found.by_grade)]
    found.flags.update(pc.list_flatten(table["flags"]).to_pylist())
    outside_N = table["outside_mass"].drop_null().to_numpy()
    found.outside.add(outside_N[np.isfinite(outside_N)].astype(np.float64))
    probs = table["probs"].drop_null().combine_chunks()
    flat_M = probs.flatten().to_numpy(zero_copy_only=False).astype(np.float64)
    if len(probs) and len(flat_M) == len(probs) * len(found.by_grade):
        p_NK = flat_M.reshape(-1, len(found.by_grade))
        with np.errstate(divide="ignore", invalid="ignore"):
            found.entropy.add(-np.where(p_NK > 0, p_NK * np.log(p_NK), 0.0).sum(1))


def _add_reasons(found: RunTally, table: pa.Table) -> None:
    counts = table.group_by(["status", "reason"]).aggregate([([], "count_all")])
    for row in counts.to_pylist():
        reasons = found.reasons.setdefault(row["status"], Counter())
        reasons[row["reason"]] += row["count_all"]
        if len(reasons) > 10_000:
            found.reasons[row["status"]] = Counter(dict(reasons.most_common(1_000)))


def shares(counts: Mapping[str, int], most: int) -> dict[str, int]:
    """How many rows of each status to show: all where they fit, else by their share, but some of each.

    Args:
        counts: rows by status, each above 0.
        most: in all; more where there are more statuses than that.
    """
    if sum(counts.values()) <= most:
        return dict(counts)
    floor = max(1, most // (4 * len(counts)))
    found = {status: min(count, floor) for status, count in counts.items()}
    left = max(0, most - sum(found.values()))
    open_rows = sum(counts.values()) - sum(found.values())
    return {status: have + left * (counts[status] - have) // open_rows for status, have in found.items()}


def input_texts(run: RunArtifact, row_ids: list[int], *, reads: Reads = QUERY_AND_DOCUMENT) -> dict[int, Pair]:
    """Pairs by row id, read again from the run's input; `reads` is what is wanted of them.

    Raises:
        InputError, ManifestError: it is not there any more, or not what was labelled.
    """
    return {
        pair.row_id: pair
        for pair in run_pairs(
            run.path,
            run.plan,
            run.storage,
            np.array(sorted(row_ids), dtype=np.int64),
            reads=reads,
        )
    }


# ------------------------------------------------------------------------------
# Facts.


def run_warnings(run: RunArtifact) -> list[str]:
    """What a reader of a run's labels should know, and why it ended early if it did; a sentence each."""
    stopped = None if run.is_finished else load_stop(run.folder.store)
    warnings = load_warnings(run.folder.store)
    if stopped is not None:
        warnings.append(f"stopped at {stopped.text}")
    return warnings


def run_facts(run: RunArtifact) -> Facts:
    """State, labeler, engines, rows, tokens and cost."""
    tally = run.found.tally
    plan = run.plan
    manifest = run.manifest
    state = Badge("finished, every row accounted for", "good")
    if not run.is_finished:
        state = Badge("not finished", "warn")
    elif manifest is not None and manifest.over_limit:
        state = Badge("over its quarantine limit", "bad")
    stages = [
        (
            stage,
            f"{counts.get('asks', 0):,} requests, {counts.get('prompt_tokens', 0):,} tokens in "
            f"({counts.get('cached_tokens', 0) / max(1, counts.get('prompt_tokens', 0)):.0%} cached), "
            f"{counts.get('output_tokens', 0):,} out",
        )
        for stage, counts in tally.stages.items()
    ]
    cascade = manifest.cascade if manifest is not None else audit_of(run.folder, run.found.labels)
    price = run.spec.get("cost_per_gpu_hour")
    gpus = run.spec_part("engine", "args").get("tensor_parallel_size") or 1
    cost = (
        tally.worker_seconds / 3600 * price * gpus if isinstance(price, int | float) and isinstance(gpus, int) else None
    )
    differences = manifest.mixed.differences if manifest is not None else []
    rows: list[tuple[str, Cell]] = [
        ("state", state),
        ("labeler", f"{plan.facts.labeler.name}, grades 0 to {run.plan.facts.labeler.grades - 1}"),
        *(
            (
                "student" if run.kind == "scores" else "teacher",
                f"{base_name(str(one.get('model')))} on {one.get('family')} {one.get('version', '')}, "
                f"{', '.join(filter(None, [one.get('device'), one.get('dtype')]))}",
            )
            for one in run.found.engines
        ),
        ("rows", f"{tally.rows:,} of {plan.rows:,} done, {plan.queries:,} queries"),
        ("shards, chunks", f"{len(plan.shards):,}, {plan.num_chunks:,}"),
        *stages,
        ("worker time", f"{tally.worker_seconds:,.1f} s, engine starts left out"),
        *([("cascade", Badge(cascade.text, "bad" if cascade.is_alarm else "good"))] if cascade else []),
        *([("cost", cost)] if cost is not None else []),
        *([("relabel", manifest.relabel)] if manifest is not None else []),
        *([("engines differ", "; ".join(differences))] if differences else []),
        ("fingerprint", plan.fingerprint[:DIGITS]),
        ("path", run.path),
    ]
    return Facts(f"{'Scores' if run.kind == 'scores' else 'Label run'} {run.name}", rows)


# ------------------------------------------------------------------------------
# Whether every row is there.


def conservation_section(runs: Sequence[RunTally], *, has_reasons: bool) -> Section:
    """Rows in = labelled + reused + quarantined; the quarantine by status and reason.

    Args:
        has_reasons: show them; they may quote what a model answered, and so what a document holds.
    """
    rows: list[list[Cell]] = []
    for run in (one.run for one in runs):
        tally = run.found.tally
        verdict = Badge(f"{run.plan.rows - run.found.tally.rows:,} rows open", "warn")
        if tally.rows != tally.labelled + tally.reused + tally.num_quarantined:
            verdict = Badge("does not add up", "bad")
        elif run.is_finished:
            verdict = Badge("proven by row ids", "good")
        rows.append([run.name, run.plan.rows, tally.labelled, tally.reused, tally.num_quarantined, verdict])
    blocks: list[Block] = [
        Paragraph("Row ids in and out are compared when a run ends; relabel verify proves it again."),
        Table("Rows in and out", ("run", "rows in", "labelled", "reused", "quarantined", "verdict"), rows),
        *(block for one in runs for block in _quarantine(one, has_reasons=has_reasons)),
    ]
    return Section("conservation", "Conservation", blocks if runs else [])


def _quarantine(one: RunTally, *, has_reasons: bool) -> Iterator[Block]:
    run = one.run
    total = run.found.tally.num_quarantined
    if not total:
        return
    counts = sorted(run.found.tally.quarantined.items(), key=lambda item: (-item[1], item[0]))
    limit = f", limit {run.manifest.max_failed_fraction:.1%}" if run.manifest is not None else ""
    title = f"Quarantine of {run.name}: {total / max(1, run.found.tally.rows):.2%} of the rows{limit}"
    yield Table(title, ("status", "rows"), [[status, Shade(f"{count:,}", count / total)] for status, count in counts])
    for status, count in counts if has_reasons else ():
        reasons = one.reasons.get(status, Counter())
        shown = [(shortened(reason, 300), number) for reason, number in reasons.most_common(12)]
        yield Fold(
            f"{status}: {count:,} rows of {run.name}",
            [Table(f"Why, the {len(shown)} most frequent of {len(reasons):,}", ("reason", "rows"), shown)],
        )


# ------------------------------------------------------------------------------
# The labels themselves.


def labels_section(runs: Sequence[RunTally]) -> Section:
    """Grades, entropy and mass outside the grades, over all labels; flags."""
    series = [
        Series(one.run.name, list(map(str, range(len(one.by_grade)))), one.by_grade.tolist())
        for one in runs
        if one.by_grade.sum()
    ]
    flags: list[list[Cell]] = [[one.run.name, flag, count] for one in runs for flag, count in one.flags.most_common()]
    none = "These labels hold no distributions, so no entropy and no outside mass can be shown."
    blocks: list[Block] = [
        *(
            [
                Plot(
                    "Grades",
                    "bars",
                    series,
                    "grade",
                    "rows",
                )
            ]
            if series
            else []
        ),
        *_histograms("Entropy of the distributions", "entropy, nats", runs, lambda one: one.entropy),
        *_histograms("Mass outside the grades", "outside mass", runs, lambda one: one.outside),
        *([Paragraph(none)] if runs and not any(one.entropy.rows for one in runs) else []),
        *([Table("Flags on labels", ("run", "flag", "rows"), flags)] if flags else []),
    ]
    return Section("distributions", "Labels", blocks)


def _histograms(
    title: str, label: str, runs: Sequence[RunTally], of_run: Callable[[RunTally], Histogram]
) -> Iterator[Plot]:
    """One plot; runs with another number of grades have another top, and a plot of their own."""
    held = [(one, of_run(one)) for one in runs if of_run(one).rows]
    for top in dict.fromkeys(found.top for _, found in held):
        chosen = [(one, found) for one, found in held if found.top == top]
        grades = "" if len(chosen) == len(held) else f", {round(math.exp(top))} grades"
        edges = np.linspace(0, top, BINS + 1).tolist()
        series = [Series(one.run.name, edges, found.counts.tolist()) for one, found in chosen]
        note = "; ".join(
            f"{one.run.name}: mean {found.total / found.rows:.4f} over {found.rows:,} rows" for one, found in chosen
        )
        yield Plot(
            title=f"{title}{grades}",
            form="histogram",
            series=series,
            label=label,
            value="rows",
            note=note,
        )


# ------------------------------------------------------------------------------
# Labels of `route`: trees of a few documents as indented text, step by step.

DOCUMENTS = 3
"""Shown of each run: the first of the label browser."""
STEPS = 12
"""Of a document."""
LINES = 200
"""Of a tree."""
TEXT_CHARS = 240
_COLUMNS = {"answer_ids": "list<int32>", "expand_ids": "list<int32>", "steps": "list<string>"}


def routes_section(runs: Sequence[RunTally]) -> Section:
    """What a router saw and did, of a few documents of each run of `route`; nothing on a page that shows no rows."""
    blocks: list[Block] = []
    for one in runs:
        labels = [row for row in one.chosen if isinstance(row, LabelRow)]
        if _COLUMNS.items() <= own_columns(one.run.plan.parts).items() and labels:
            blocks += _documents(one.run, labels[:DOCUMENTS])
    text = Paragraph(
        "Each step shows all headings, and the text that is lit: a retrieved passage, or an unfolded heading's."
    )
    return Section("routes", "Routes", [text, *blocks] if blocks else [])


def _documents(run: RunArtifact, labels: Sequence[LabelRow]) -> Iterator[Block]:
    try:
        pairs = input_texts(
            run,
            [row.row_id for row in labels],
            reads=Reads(columns=(InputColumn(COLUMN, "list<node>", "The document's tree.", True),)),
        )
    except (RelabelError, OSError) as exc:
        yield Paragraph(f"{run.name}: its documents' trees can't be read again: {exc}", "warn")
        return
    for row in labels:
        answers, expands, steps = (row.columns[name] or [] for name in _COLUMNS)
        counts = f"{len(answers)} answering, {len(expands)} to be unfolded, {len(steps)} steps"
        names = f"{run.name}, {shortened(row.query_id, 80)}, {shortened(row.doc_id, 80)}"
        yield Fold(f"{names}: {counts}", list(walk(steps, pairs[row.row_id])))


def walk(written: Sequence[str], pair: Pair) -> Iterator[Block]:
    """The steps of one label, as its column holds them, one tree each."""
    yield Paragraph(f"Query: {shortened(pair.query, TEXT_CHARS)}")
    try:
        tree = read_tree(pair.columns[COLUMN], pair.document)
        steps = [read_step(text) for text in written]
    except (InputError, ValueError) as exc:
        yield Paragraph(f"Its steps can't be shown on its tree: {shortened(str(exc), TEXT_CHARS)}", "warn")
        return
    for number, step in enumerate(steps[:STEPS], start=1):
        is_there = step.expanded is not None and 0 <= step.expanded < len(tree.nodes)
        shown = f"unfolded {step.expanded}" if is_there else "a passage"
        found = [
            *(f"answers {id}" for id in step.answers),
            *(f"unfold {id}" for id in step.expands),
            *(["refused"] if step.refused else []),
            *([f"{step.expelled} lines that were not legal"] if step.expelled else []),
        ]
        title = f"Step {number}, {shown}: {', '.join(found) or 'no action'}"
        yield Code(title, "\n".join([title, *tree_lines(tree, step)]))
    if len(steps) > STEPS:
        yield Paragraph(f"… and {len(steps) - STEPS} more steps.")


def tree_lines(tree: Tree, step: RouteStep) -> Iterator[str]:
    """What was shown, a line a node, indented by its level."""
    subtree = Subtree(tree, frozenset(id for id in step.lit if 0 <= id < len(tree.nodes)))
    for node in subtree.visible[:LINES]:
        folded = len(subtree.own_content(node.id)) if node.id in subtree.collapsed else 0
        marks = {
            "unfolded": node.id == step.expanded,
            "answers": node.id in step.answers,
            "to be unfolded": node.id in step.expands,
            f"{folded} folded": folded,
        }
        text = shortened(one_line(node.text), TEXT_CHARS)
        shown = "".join(f" [{mark}]" for mark, is_set in marks.items() if is_set)
        yield f"{'  ' * node.level}{'·' if node.is_content else '#'}{node.id} {text}{shown}"
    if len(subtree.visible) > LINES:
        yield f"… {len(subtree.visible) - LINES} more"


# ------------------------------------------------------------------------------
# Facts of each model.


def teacher_facts(one: TeacherArtifact) -> Facts:
    """Method, data and training of a teacher."""
    manifest = one.manifest
    data = manifest.data
    training = manifest.training
    method = METHODS.get(manifest.method)
    kept = "" if training.best_step is None else f", by which step {training.best_step:,} was kept"
    held = data.held_out if data.held_out is not None and data.held_out.rows else None
    rows: list[tuple[str, Cell]] = [
        ("method", manifest.method if method is None else f"{manifest.method}: {method.title}"),
        ("labeler", str(manifest.labeler.get("name"))),
        ("starts from", manifest.model.reference),
        ("learned from", f"{data.rows:,} rows, {data.answer_tokens:,} tokens of answers"),
        *(("left out", f"{count:,} {reason}") for reason, count in data.dropped.items()),
        ("trained", f"{training.steps:,} steps on {training.device}"),
        *([("held out", f"{held.rows:,} rows of {held.queries:,} queries{kept}")] if held else []),
        ("relabel", manifest.relabel),
        ("fingerprint", manifest.fingerprint[:DIGITS]),
        ("digest", one.digest[:DIGITS]),
        ("path", one.path),
    ]
    return Facts(f"Teacher {one.name}", rows)


def student_facts(one: StudentArtifact) -> Facts:
    """Heads, size and gate of a student."""
    manifest = one.manifest
    record = one.manifest.student
    passed = Badge("passed", "good") if manifest.gate.has_passed else Badge("refused", "bad")
    rows: list[tuple[str, Cell]] = [
        ("kind", record.get("kind")),
        ("reads at most", f"{record.get('max_tokens')} tokens"),
        *_heads(manifest.heads, manifest.temperature),
        ("starts from", manifest.model.reference),
        ("fingerprint", manifest.fingerprint[:DIGITS]),
        ("gate", passed if manifest.gate.checks else "no gate set"),
        ("path", one.path),
    ]
    return Facts(f"Student {one.name}", rows)


def bundle_facts(one: BundleArtifact) -> Facts:
    """Models and heads of a bundle."""
    rows: list[tuple[str, Cell]] = [
        ("models", ", ".join(f"{model.path} ({model.precision})" for model in one.student.models)),
        *_heads(one.student.heads, one.student.temperature or {}),
        ("licence", one.student.licence["bundle"] or "not stated"),
        ("version", one.digest[:DIGITS]),
        ("path", one.path),
    ]
    return Facts(f"Bundle {one.name}", rows)


def _heads(heads: Mapping[str, int], temperature: Mapping[str, float]) -> list[tuple[str, Cell]]:
    named = ", ".join(f"{name} ({grades} grades)" for name, grades in heads.items())
    divided = ", ".join(f"{name} {value:.3g}" for name, value in temperature.items())
    return [("heads", named), *([("temperatures", divided)] if divided else [])]


# ------------------------------------------------------------------------------
# Training curves.

MOST_LINES = 8
POINTS = 400
"""Most points of a curve that is drawn."""


def training_blocks(one: StudentArtifact | TeacherArtifact) -> Iterator[Block]:
    """Losses and rewards by step, figures on dev, and facts of the training."""
    yield from _curves(one)
    facts: list[tuple[str, Cell]] = [
        (name.replace("_", " "), value if isinstance(value, int | float) else str(value))
        for name, value in vars(one.manifest.training).items()
        if value is not None
    ]
    yield Facts(f"Training of {one.name}", facts)


def _curves(one: StudentArtifact | TeacherArtifact) -> Iterator[Plot]:
    """A plot for each kind of figure, and one of figures on dev."""
    try:
        columns = pq.read_table(io.BytesIO(one.store.read(CURVES_NAME)), columns=CURVE_SCHEMA.names).to_pydict()
    except FileNotFoundError:
        return
    except (pa.ArrowException, OSError) as exc:
        raise ManifestError(
            f"{one.path}/{CURVES_NAME}: not readable as curves. Restore the folder from a copy."
        ) from exc
    curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for step, split, name, value in zip(*(columns[name] for name in CURVE_SCHEMA.names), strict=True):
        curves.setdefault((split, name), []).append((step, value))
    on_dev = [name for split, name in curves if split == "dev" and panel_of(name) != "tokens"]
    panels = panels_of(name for split, name in curves if split == "train")
    for split, panel, names in [*(("train", *item) for item in panels.items()), ("dev", "", on_dev)]:
        title = "On dev" if split == "dev" else "Training loss" if panel == LOSS_PANEL else f"Training, {panel}"
        for start in range(0, len(names), MOST_LINES):
            held = {name: curves[split, name] for name in names[start : start + MOST_LINES]}
            thin = {name: points[:: max(1, len(points) // POINTS)] for name, points in held.items()}
            series = [Series(name, *zip(*points, strict=True)) for name, points in thin.items()]
            number = f" ({start // MOST_LINES + 1})" if len(names) > MOST_LINES else ""
            yield Plot(
                f"{title}{number}, {one.name}",
                "lines",
                series,
                "optimizer step",
                "loss, nats" if panel == LOSS_PANEL else panel,
            )


# ------------------------------------------------------------------------------
# Students by their own manifests.


def student_blocks(student: str, manifest: StudentManifest) -> Iterator[Block]:
    """A student's test split, gates and remarks, as its manifest holds them."""
    test = manifest.metrics.test
    split = manifest.split
    if test.student.get("rows"):
        head, *rows = test.figure_rows()
        yield Table(f"{student} on its test split", head, rows)
    if test.to_teacher:
        named = [(title_of(name, AGAINST_TEACHER), value) for name, value in test.to_teacher.items()]
        yield Facts(f"{student} against its teacher", named)
    yield Table(
        f"Split of {student}, by {split.by}",
        ("split", "rows", "queries"),
        [(name, side.rows, side.queries) for name, side in split.sides().items()],
    )
    good = Badge("passed", "good")
    bad = Badge("refused", "bad")
    checks = [(check.text, good if check.has_passed else bad) for check in manifest.gate.checks]
    if checks:
        yield Table(f"Gates of {student}", ("gate", "verdict"), checks)
    yield Remarks(manifest.notes)


# ------------------------------------------------------------------------------
# Bundles: parity with the student, and latency as `relabel bench` measured it.


def parity_blocks(bundle: BundleArtifact) -> Iterator[Block]:
    """Every model compared with the student that it was exported from, on real pairs."""
    parity = bundle.parity
    if parity is None:
        text = f"The manifest of {bundle.name} holds no parity: how near its models are to the student is not known."
        yield Paragraph(text, "warn")
        return
    head, *rows = parity_rows(parity)
    weak = " Fewer than the gate wants: a weak result." if parity.models[0].is_weak else ""
    yield Paragraph(f"{compared_on(parity)} The worst batch size of each.{weak}")
    tones = {"passed": "good", "REFUSED": "bad"}
    shown: list[list[Cell]] = [[*row[:-1], Badge(row[-1], tones.get(row[-1], "warn"))] for row in rows]
    yield Table(f"Parity of {bundle.name}", head, shown)
    yield from (Paragraph(sentence, "warn") for sentence in undecided_lines(parity))


def latency_blocks(bundle: BundleArtifact) -> Iterator[Block]:
    """Closed loop: ask, wait, ask again. Open loop: requests come at random times, at a rate."""
    for facts in () if is_url(bundle.path) else measurements_of(Path(bundle.path), bundle.digest):
        head, *rows = latency_rows(facts)
        table = Table(f"Latency of {bundle.name}, measured {facts.measured_at}", head, rows)
        yield Paragraph(machine_line(facts))
        yield table if len(rows) < 24 else Fold(f"{len(rows):,} measurements", [table])
        yield from (Paragraph(warning, "warn") for warning in warnings_of(facts))
