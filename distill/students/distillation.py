"""A distillation from spec to student folder: check, read, train, calibrate, evaluate against gold, labels and teacher,
judge the gates, write the model card and the manifest."""

from __future__ import annotations

import hashlib
import importlib.metadata
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from relabel.distill.students.examples import DEV, TEST, TRAIN, Examples, load_examples
from relabel.distill.students.labels import NO_GRADE
from relabel.distill.students.manifest import (
    STUDENT_MANIFEST_VERSION,
    Figures,
    GateCheck,
    JudgedGates,
    LearnedGold,
    LearnedLabels,
    SideFigures,
    SplitFacts,
    StudentFigures,
    StudentManifest,
    StudentRecord,
)
from relabel.distill.students.model import logits_of_rows, make_texts, softmax, student_files, write_student
from relabel.distill.students.networks import Trainer, TrainingInputs, check_base, make_record
from relabel.distill.students.spec import KINDS, DistillSpec
from relabel.distill.training.curves import Outcome, check_services, write_curves
from relabel.distill.training.output import (
    CARD_NAME,
    BaseModelUsed,
    OutputFolder,
    Product,
    Start,
    is_finished,
    refuse_own_base,
    remove_leftovers,
    spec_section,
    training_in,
    training_record,
    write_finished,
)
from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage
from relabel.manifests.metrics.evaluation import (
    MOST_LEXICAL,
    Baselines,
    Evaluation,
    bm25,
    evaluate,
    intervals_of,
    judge_gate,
    judge_gates,
)
from relabel.manifests.metrics.judged import Judged
from relabel.manifests.metrics.measures import DEPTH, TINY, fit_temperature
from relabel.manifests.models import resolve_model
from relabel.manifests.process import installed_versions
from relabel.manifests.records import canonical_json
from relabel.manifests.secrets import counted

# ------------------------------------------------------------------------------
# Figures of a student on some rows: by trusted grades, by the labels, and its distance from its teacher. They are those
# of `relabel evaluate`.


# N rows, K grades


def judged_rows(
    probs_NK: np.ndarray,
    gold_N: np.ndarray,
    *,
    label_N: np.ndarray | None = None,
    queries: Sequence[str] = (),
    texts: Sequence[tuple[str, str]] = (),
) -> Judged:
    """Rows to be judged, one at least.

    Args:
        probs_NK: distributions; of a row without one NaN.
        gold_N: grades 0..K-1.
        label_N: the grades said; by default the most probable ones, the lower of equals.
        queries: of each row, where it is ranked.
        texts: of each row, for the lexical baseline.
    """
    names, query_N = np.unique(queries, return_inverse=True) if queries else ((), None)
    label_N = probs_NK.argmax(1) if label_N is None else label_N
    probs_NK = probs_NK.astype(np.float64)
    has_probs = not np.isnan(probs_NK).all()
    lexical_N = bm25(texts) if 0 < len(texts) <= MOST_LEXICAL else None
    return Judged(
        grades=probs_NK.shape[1],
        gold=gold_N,
        labels=label_N,
        queries=query_N,
        num_queries=len(names),
        docs=np.arange(len(gold_N)),
        probs=probs_NK / probs_NK.sum(1, keepdims=True) if has_probs else None,
        num_correct=None,
        num_samples=None,
        lexical=lexical_N,
    )


def figures_of(judged: Judged, found: Evaluation) -> Figures:
    """Figures by name, None where one is not defined: those of an evaluation, `auc` (the mean over all cuts), `nll`
    (mean negative log-likelihood, nats) and `rows`.
    """
    figures: Figures = {"rows": len(judged.gold), **{name: one.value for name, one in found.figures.items()}}
    if judged.probs is not None and judged.has_probs.all():
        aucs = [value for name, value in figures.items() if name.startswith("auc_") and value is not None]
        likelihood_N = judged.probs[np.arange(len(judged.gold)), judged.gold]
        nll = float(-np.log(np.maximum(likelihood_N, TINY)).mean())
        figures |= {"auc": float(np.mean(aucs)) if aucs else None, "nll": nll}
    return figures


def graded_figures(probs_NK: np.ndarray, gold_N: np.ndarray) -> Figures:
    """Figures of distributions against grades, without intervals; of no row, their number alone."""
    if not len(gold_N):
        return {"rows": 0}
    judged = judged_rows(probs_NK, gold_N)
    return figures_of(judged, evaluate(judged, resamples=0))


def teacher_figures(probs_NK: np.ndarray, teacher_NK: np.ndarray, teacher_N: np.ndarray) -> dict[str, float | None]:
    """How far the student lies from its teacher.

    Args:
        teacher_NK: the teacher's distributions, NaN where it gave none.
        teacher_N: the teacher's grades.
    Returns:
        `agreement` (share of equal grades), `f1_macro` by the teacher's grades, `kl` (mean KL(teacher ‖ student) over
        rows with a distribution, nats), `rows`.
    """
    if not len(teacher_N):
        return {"rows": 0, "agreement": None, "f1_macro": None, "kl": None}
    has_N = ~np.isnan(teacher_NK).any(1)
    kl = None
    if has_N.any():
        p_NK = teacher_NK[has_N].astype(np.float64)
        p_NK /= p_NK.sum(1, keepdims=True)
        q_NK = np.maximum(probs_NK[has_N].astype(np.float64), TINY)
        kl = float((p_NK * (np.log(np.maximum(p_NK, TINY)) - np.log(q_NK))).sum(1).mean())
    counts = graded_figures(probs_NK, teacher_N)
    return {"rows": len(teacher_N), "agreement": counts["accuracy"], "f1_macro": counts["f1_macro"], "kl": kl}


# ------------------------------------------------------------------------------
# How good a student and its teacher are on rows that it did not learn from: by gold, or where there is none by what
# the teacher said.


NDCG = f"ndcg@{DEPTH}"


def judge(examples: Examples) -> tuple[np.ndarray, str]:
    """The grades that a student is judged by, -1 where there is none, and what they are."""
    if (examples.gold != NO_GRADE).any():
        return examples.gold, "gold"
    return examples.teacher, "labels"


def dev_figures(work: TrainingInputs, module: Any) -> dict[str, float]:
    """Figures on dev while training."""
    rows = work.examples.rows_of(DEV)
    logits = logits_of_rows(module, work.texts, [work.tokens[row] for row in rows], work.record.heads)
    found = {"loss": dev_loss(work.spec, work.examples, logits, rows)}
    judge_N, _ = judge(work.examples)
    graded = judge_N[rows] != NO_GRADE
    figures = graded_figures(softmax(logits["relevance"][graded]), judge_N[rows][graded])
    names = ("accuracy", "f1_macro", "kappa", "kappa_quadratic", "auc")
    return found | {name: float(value) for name in names if (value := figures.get(name)) is not None}


def dev_loss(spec: DistillSpec, examples: Examples, logits: dict[str, np.ndarray], rows: np.ndarray) -> float:
    """The training loss of these rows."""
    import torch

    from relabel.distill.students.losses import Objective

    objective = Objective(spec.loss, examples.heads, examples.phi)
    batch = {
        "targets": {name: torch.from_numpy(values[rows]) for name, values in examples.targets.items()},
        "weights": {name: torch.from_numpy(values[rows]) for name, values in examples.weights.items()},
        "row_weight": torch.from_numpy(examples.row_weight[rows]),
    }
    sums = objective.sums({name: torch.from_numpy(values) for name, values in logits.items()}, batch)
    return float(objective.loss(sums, {name: weight.sum() for name, weight in objective.row_weights(batch).items()}))


def side_figures(work: TrainingInputs, probs: dict[str, np.ndarray], trained_NK: np.ndarray, side: int) -> SideFigures:
    """All figures of one side: student and teacher by the judge, student by teacher, nodes by the labels.

    Args:
        probs: calibrated.
        trained_NK: the relevance head's before calibration, which may have moved it away from its teacher and towards
            trusted grades.
    """
    examples = work.examples
    rows = examples.rows_of(side)
    judge_N, by = judge(examples)
    judged = rows[judge_N[rows] != NO_GRADE]
    taught = rows[examples.teacher[rows] != NO_GRADE]
    both = judged[examples.teacher[judged] != NO_GRADE]
    has_teacher = by == "gold" and len(both) > 0
    by_node = {}
    for name in set(examples.heads) - {"relevance"}:
        own = rows[examples.weights[name][rows] > 0]
        by_node[name] = graded_figures(probs[name][own], examples.targets[name][own].argmax(1))
    relevance_NK = probs["relevance"]
    student, intervals, baselines = _judged(examples, relevance_NK, judge_N, judged)
    taught_sets = (trained_NK[taught], examples.teacher_probs[taught], examples.teacher[taught])
    return SideFigures(
        rows=len(rows),
        judged_by=by,
        student=student,
        teacher=_teacher_against(examples, both) if has_teacher else None,
        student_where_teacher=(
            _judged(examples, relevance_NK, judge_N, both)[0] if has_teacher and len(both) != len(judged) else None
        ),
        to_teacher=teacher_figures(*taught_sets) if len(taught) else None,
        baselines=baselines,
        intervals=intervals,
        **by_node,
    )


def _judged(
    examples: Examples, probs_NK: np.ndarray, grade_N: np.ndarray, rows: np.ndarray
) -> tuple[Figures, dict[str, tuple[float, float]] | None, Baselines | None]:
    """The student's figures on some rows, their intervals, and the baselines."""
    if not len(rows):
        return {"rows": 0}, None, None
    queries, texts = [examples.queries[row] for row in rows], [examples.texts[row] for row in rows]
    judged = judged_rows(probs_NK[rows], grade_N[rows], queries=queries, texts=texts)
    found = evaluate(judged)
    figures = figures_of(judged, found)
    return figures, intervals_of(found.figures, figures), found.baselines


def _teacher_against(examples: Examples, rows: np.ndarray) -> Figures:
    """The teacher's own figures by gold: of the grades that it wrote, with those of its distributions where it gave
    them.
    """
    queries = [examples.queries[row] for row in rows]
    judged = judged_rows(
        examples.teacher_probs[rows], examples.gold[rows], label_N=examples.teacher[rows], queries=queries
    )
    return figures_of(judged, evaluate(judged, resamples=0))


# ------------------------------------------------------------------------------
# A spec's gates and early stopping: whether they can be judged, checked before training, and the results of the gates.


def check_gates(spec: DistillSpec, examples: Examples) -> None:
    """Every gate names a figure that there is, and there will be rows to judge by.

    Raises:
        ConfigError: no such figure.
        InputError: the test split has nothing to judge by.
    """
    if not spec.gates:
        return
    grades = examples.grades
    names = graded_figures(np.eye(grades), np.arange(grades)) | {NDCG: 1.0}
    judge_gates(spec.gates, names, names)
    judge_N, by = judge(examples)
    rows = examples.rows_of(TEST)
    judged = rows[judge_N[rows] != NO_GRADE]
    if not len(judged):
        raise InputError(
            f"`require` is judged on the test split, and none of its rows has a grade ({by}). Raise split.test."
        )
    if any(gate.is_of_teacher for gate in spec.gates) and not (examples.teacher[judged] != NO_GRADE).any():
        raise InputError(
            "`require` has a gate against the teacher, and no row of the test split has both a label and a trusted "
            "grade. Raise split.test, or bring gold for labelled pairs."
        )


def check_stopping(spec: DistillSpec, examples: Examples) -> None:
    """Early stopping uses a figure that every evaluation on dev will have.

    Raises:
        InputError: dev has no rows, or too few grades among them.
    """
    stopping = spec.train.early_stopping
    rows = examples.rows_of(DEV)
    if stopping is None:
        return
    if not len(rows):
        raise InputError(
            "`train.early_stopping` needs the dev split, and no query fell there. Raise split.dev, or bring more "
            "queries."
        )
    judge_N, by = judge(examples)
    num_grades = len(set(judge_N[rows].tolist()) - {NO_GRADE})
    wanted = {"loss": 0, "accuracy": 1, "macro_f1": 1}.get(stopping.metric, 2)
    if num_grades < wanted:
        raise InputError(
            f"train.early_stopping uses {stopping.metric}, which wants {counted(wanted, 'grade')} on dev; its "
            f"{len(rows)} rows have {num_grades} ({by}). Raise split.dev, bring more {by}, or choose the metric `loss`."
        )


def judged_gates(spec: DistillSpec, test: SideFigures) -> JudgedGates:
    """The spec's gates on the figures of the test split: against the teacher over the rows that both have, else over
    all.
    """
    where_teacher = test.student if test.student_where_teacher is None else test.student_where_teacher
    verdicts = [
        judge_gate(gate, where_teacher if gate.is_of_teacher else test.student, test.teacher) for gate in spec.gates
    ]
    checks = [GateCheck(**vars(verdict), text=str(verdict)) for verdict in verdicts]
    return JudgedGates(all(verdict.has_passed for verdict in verdicts), checks)


# ------------------------------------------------------------------------------
# One temperature a head, so that a student's probabilities are as sure as they are right.


TEMPERATURES = (0.25, 4.0)
"""Bounds of a fitted temperature: a few dev rows that are all right would ask for one near 0, and so for certainty."""


def judged_logits(work: TrainingInputs, module: Any) -> dict[str, np.ndarray]:
    """Logits by head, float32 [N, K], of the rows that judge; rows that trained keep zeros, which are not used."""
    rows = np.flatnonzero(work.examples.side != TRAIN)
    found = logits_of_rows(module, work.texts, [work.tokens[row] for row in rows], work.record.heads)
    whole = {name: np.zeros((len(work.tokens), values.shape[1]), dtype=np.float32) for name, values in found.items()}
    for name, values in found.items():
        whole[name][rows] = values
    return whole


def fitted_temperatures(work: TrainingInputs, logits: dict[str, np.ndarray], notes: list[str]) -> dict[str, float]:
    """One temperature a head, fitted on dev against gold, or where there is none, and for nodes, against what the head
    learned from: distributions where the labels have them, for the most probable grade alone would ask for certainty
    that the teacher never had. 1 where dev has neither.

    Args:
        notes: remarks are added.
    """
    found = dict.fromkeys(work.record.heads, 1.0)
    rows = work.examples.rows_of(DEV)
    if not work.spec.calibrate:
        return found
    if not len(rows):
        notes.append("no dev rows, so the student is not calibrated: its temperatures are 1")
        return found
    for name in found:
        target_NK = work.examples.targets[name]
        kept = rows[work.examples.weights[name][rows] > 0]
        if name == "relevance" and (work.examples.gold != NO_GRADE).any():
            kept = rows[work.examples.gold[rows] != NO_GRADE]
            target_NK = np.eye(target_NK.shape[1])[work.examples.gold]
        if not len(kept):
            notes.append(f"head {name} is not calibrated, its temperature is 1: no dev row has a grade to judge it by")
        else:
            wished = fit_temperature(softmax(logits[name][kept].astype(np.float64)), target_NK[kept])
            found[name] = min(max(wished, TEMPERATURES[0]), TEMPERATURES[1])
            if found[name] != wished:
                notes.append(f"head {name}: dev asks for temperature {wished:.3g}; {found[name]:g} is the limit")
    return found


LIBRARIES = ("torch", "transformers", "accelerate", "peft", "safetensors", "tokenizers", "numpy", "pyarrow")
SPEED_ONLY = ("device", "compile", "keep_checkpoints", "gradient_checkpointing", "strategy", "report_to")
STUDENT = Product(
    "student",
    "distill",
    "student.model",
    ("labels", "gold"),
    frozenset(
        ("name", "output", "labels", "gold", "require", "student.model", *(f"train.{key}" for key in SPEED_ONLY))
    ),
)


def _data_digest(examples: Examples) -> str:
    total = hashlib.sha256()
    for query, document in examples.texts:
        for text in (query, document):
            data = text.encode("utf-8", "surrogatepass")
            total.update(len(data).to_bytes(8, "big") + data)
    arrays = [
        *examples.targets.values(),
        *examples.weights.values(),
        examples.row_weight,
        examples.gold,
        examples.teacher,
        examples.side,
    ]
    for array in arrays:
        total.update(np.ascontiguousarray(array).tobytes())
    total.update(canonical_json({"heads": examples.heads, "phi": examples.phi}))
    return total.hexdigest()


# ------------------------------------------------------------------------------
# The model card: what a student is, what it learned from and how well, for a person who finds the folder.


def render_card(manifest: StudentManifest, spec: DistillSpec) -> str:
    """Markdown from a student's manifest, and the spec that is in it."""
    heads = ", ".join(f"{name} ({grades} grades)" for name, grades in manifest.heads.items())
    lines = [
        f"# {manifest.name}",
        "",
        (
            f"{KINDS[spec.student.kind].title} that {KINDS[spec.student.kind].does}, by `relabel "
            f"distill` {manifest.relabel}."
        ),
        "",
        f"- Starts from: `{manifest.model.reference}` (digest `{manifest.model.digest[:16]}`)",
        f"- Heads: {heads}",
        f"- Reads at most {spec.train.max_tokens} tokens of a pair; what is longer is cut.",
        (
            f"- Trained: {manifest.training.steps} steps, {manifest.training.epochs} epochs, on "
            f"{manifest.training.device}."
        ),
        f"- Temperatures (logits are divided by them): {_pairs(manifest.temperature)}",
        *(f"- Note: {note}" for note in manifest.notes),
        "",
        "## Learned from",
        "",
        *(_source(source) for source in manifest.labels),
        *([_gold(manifest.gold, spec.loss.gold_weight)] if manifest.gold else []),
        "",
        *_split(manifest.split),
        "",
        "## Figures on the test split",
        "",
        *_figures(manifest.metrics.test),
        "",
        *_gate(manifest.gate),
        "![training curve](curves.svg)",
        "",
        "## Use",
        "",
        "    relabel score THIS_FOLDER --input pairs.parquet --to scores",
        "",
        (
            "It answers for texts like those it saw: other languages, longer documents or another notion of "
            "relevance want labels of their"
        ),
        (
            "own. It inherits its teacher's mistakes; judge it with trusted grades (`relabel evaluate`) before it "
            "decides anything."
        ),
        "",
        *spec_section(manifest.spec),
    ]
    return "\n".join(lines)


def _source(source: LearnedLabels) -> str:
    made = (
        f"labeler {source.labeler}, fingerprint `{source.fingerprint[:12]}`" if source.fingerprint else "a label file"
    )
    quarantined = (source.rows and source.rows.quarantined) or 0
    return (
        f"- `{source.path}`: {source.labels:,} labels ({made}; {quarantined:,} rows in quarantine; weight "
        f"{source.weight:g})"
    )


def _gold(gold: LearnedGold, share: float) -> str:
    role = f"learned from with weight {share:g}, and judged by" if share else "judged by, not learned from"
    return f"- `{gold.path}`, column `{gold.grade}`: trusted grades of {gold.graded_rows:,} rows, {role}"


def _split(split: SplitFacts) -> list[str]:
    rows = [f"| {name} | {side.rows:,} | {side.queries:,} |" for name, side in split.sides().items()]
    return [f"Split by {split.by} (seed {split.seed}):", "", "| split | rows | queries |", "|---|---|---|", *rows]


def _figures(test: SideFigures) -> list[str]:
    if not test.student.get("rows"):
        return ["No test row has a grade to judge by."]
    head, *rows = [f"| {' | '.join(row)} |" for row in test.figure_rows()]
    return [head, "|---" * (head.count("|") - 1) + "|", *rows]


def _gate(gate: JudgedGates) -> list[str]:
    if not gate.checks:
        return []
    return [
        f"Gate: {'passed' if gate.has_passed else 'FAILED'}",
        "",
        *(f"- {check.text}" for check in gate.checks),
        "",
    ]


def _pairs(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in values.items())


# ------------------------------------------------------------------------------
# A distillation from spec to student folder: check, read, train, calibrate, judge, write.
#
# What costs nothing is checked first (spec, model config, labels, split, gate names), so that no hour of training ends
# in a typo. `manifest.json` is written last: a folder without one holds no finished student.


Say = Callable[[str], None]


@dataclass(frozen=True)
class Report:
    """How `distill` ended.

    Args:
        output: its folder.
        was_done: the student was there already.
        gate: the spec's gates, which may be newer than the student, applied to the manifest's figures.
    """

    manifest: StudentManifest
    output: Path
    was_done: bool
    gate: JudgedGates

    @property
    def has_passed(self) -> bool:
        """Whether no gate refused it."""
        return self.gate.has_passed


@dataclass
class _Trained:
    """What training left: the module, its record, and its figures."""

    module: Any
    record: StudentRecord
    metrics: StudentFigures
    outcome: Outcome


def distill(
    spec: DistillSpec,
    storage: Storage,
    *,
    start: Start = "new",
    cache_dir: Path | None = None,
    say: Say = lambda _: None,
    is_writer: bool = True,
) -> Report:
    """Train the student of a spec.

    Args:
        storage: how labels, gold and output are reached. The model is looked up in the cache alone
            (`jobs/delivery.py` brings it there).
        say: called with progress and remarks, a line each.
        is_writer: False in all but the first of several processes that train together: they write nothing.
    Raises:
        ConfigError, InputError, ManifestError, ModelError: something is off, see the modules that say so.
        StaleRunError: the output holds a student or checkpoints of another spec.
        LockHeldError: another process trains there.
        TrainingError: the loss is not finite, or memory runs out twice.
    """
    output = OutputFolder(STUDENT, spec.output)
    check_services(spec.train.report_to)
    resolved = resolve_model(spec.student.model, cache_dir=cache_dir)
    if is_writer:  # the first of several processes may have begun to write before the others get here
        output.check_free()
        refuse_own_base(output, resolved, key="student.model")
    examples = load_examples(spec, storage)
    training = training_record(STUDENT, spec, resolved, _data_digest(examples), version=STUDENT_MANIFEST_VERSION)
    if is_finished(output, training, start):
        if is_writer:
            remove_leftovers(output, training)
        manifest = output.manifest(StudentManifest)
        return Report(manifest, output.folder, True, judged_gates(spec, manifest.metrics.test))
    base = check_base(spec, resolved)
    check_gates(spec, examples)
    check_stopping(spec, examples)
    record = make_record(spec, base, examples.heads, examples.phi, examples.columns)
    texts = make_texts(record, base.tokenizer)
    notes = list(examples.notes)
    for note in notes:
        say(note)
    tokens = texts.encode(examples.texts)
    work = TrainingInputs(spec, base, record, examples, tokens, texts, output.checkpoints, say, notes)
    if not is_writer:
        manifest = _manifest(work, _train(work), training.fingerprint)
    else:
        with training_in(output, training, start):
            trained = _train(work)
            manifest = write_finished(output, lambda folder: _write(work, trained, folder, training.fingerprint))
    return Report(manifest, output.folder, False, judged_gates(spec, manifest.metrics.test))


def _train(work: TrainingInputs) -> _Trained:
    """Train, calibrate, judge."""
    trainer: Trainer = pkgutil.resolve_name(KINDS[work.spec.student.kind].trainer)
    module, outcome = trainer(work, lambda found: dev_figures(work, found))
    work.notes += outcome.notes
    merge = getattr(module, "merge", None)
    if merge is not None:
        merge()
    module.eval()
    logits = judged_logits(work, module)
    temperature = fitted_temperatures(work, logits, work.notes)
    probs = {name: softmax(values / temperature[name]) for name, values in logits.items()}
    trained = softmax(logits["relevance"])
    metrics = StudentFigures(*(side_figures(work, probs, trained, side) for side in (DEV, TEST)))
    return _Trained(module, replace(work.record, temperature=temperature), metrics, outcome)


def _write(work: TrainingInputs, trained: _Trained, folder: Path, fingerprint: str) -> StudentManifest:
    """Write all files but the manifest."""
    write_student(folder, trained.record, trained.module, work.base.tokenizer)
    write_curves(folder, trained.outcome.curve, title=work.spec.name)
    manifest = replace(_manifest(work, trained, fingerprint), files=student_files(folder))
    (folder / CARD_NAME).write_text(render_card(manifest, work.spec), encoding="utf-8")
    return manifest


def _manifest(work: TrainingInputs, trained: _Trained, fingerprint: str) -> StudentManifest:
    """The manifest of a student, without its files' digests."""
    spec, record, base = work.spec, trained.record, work.base
    return StudentManifest(
        version=STUDENT_MANIFEST_VERSION,
        relabel=importlib.metadata.version("relabel-ir"),
        name=spec.name,
        fingerprint=fingerprint,
        model=BaseModelUsed(base.resolved.reference, base.resolved.digest, base.config.model_type),
        heads=record.heads,
        temperature=record.temperature,
        phi=record.phi if len(record.heads) > 1 else None,
        **vars(work.examples.about),
        training=trained.outcome.facts,
        metrics=trained.metrics,
        gate=judged_gates(spec, trained.metrics.test),
        notes=work.notes,
        versions=installed_versions(LIBRARIES),
        spec=spec.model_dump(mode="json"),
        student=asdict(record),
    )
