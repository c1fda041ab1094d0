"""The model card: what a student is, what it learned from and how well, for a person who finds the folder."""

from __future__ import annotations

from relabel.distill.students.data_facts import LearnedGold, LearnedLabels, SplitFacts
from relabel.distill.students.kinds import KINDS
from relabel.distill.students.specs import DistillSpec
from relabel.distill.students.student_manifest import JudgedGates, SideFigures, StudentManifest
from relabel.distill.training.card_parts import spec_section

_SHOWN = ("rows", "accuracy", "f1_macro", "kappa", "kappa_quadratic", "auc", "ece", "nll")


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
    student, teacher = test.student, test.teacher
    if not student.get("rows"):
        return ["No test row has a grade to judge by."]
    head = f"| judged by {test.judged_by} | student |" + (" teacher |" if teacher else "")
    rows = [
        f"| {name} | {_number(student.get(name))} |" + (f" {_number(teacher.get(name))} |" if teacher else "")
        for name in _SHOWN
        if name in student
    ]
    return [head, "|---|---|" + ("---|" if teacher else ""), *rows]


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


def _number(value: int | float | None) -> str:
    return "undefined" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
