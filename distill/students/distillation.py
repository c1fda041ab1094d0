"""A distillation from spec to student folder: check, read, train, calibrate, evaluate, write the model card and the
manifest."""

from __future__ import annotations

import hashlib
import importlib.metadata
import pkgutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from relabel.distill.students.evaluation import (
    check_gates,
    check_stopping,
    dev_figures,
    fitted_temperatures,
    judged_gates,
    judged_logits,
    side_figures,
)
from relabel.distill.students.examples import DEV, TEST, Examples, load_examples
from relabel.distill.students.manifest import (
    STUDENT_MANIFEST_VERSION,
    JudgedGates,
    LearnedGold,
    LearnedLabels,
    SideFigures,
    SplitFacts,
    StudentFigures,
    StudentManifest,
    StudentRecord,
)
from relabel.distill.students.model import make_texts, softmax, student_files, write_student
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
from relabel.manifests.files import Storage
from relabel.manifests.models import resolve_model
from relabel.manifests.process import installed_versions
from relabel.manifests.records import canonical_json

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
