"""The model card of a teacher, for a person who finds the folder."""

from __future__ import annotations

from relabel.distill.teachers.methods import METHODS
from relabel.distill.teachers.teacher_manifest import TeacherManifest
from relabel.distill.training.card_parts import spec_section


def render_card(manifest: TeacherManifest) -> str:
    """Markdown from a teacher's manifest."""
    data, training = manifest.data, manifest.training
    sources = [
        f"- `{run.path}`: {run.labels:,} answers of {run.labeler}, fingerprint `{(run.fingerprint or '')[:12]}`"
        for run in data.runs
    ]
    if data.gold is not None:
        named = {"trusted grades": data.gold.grade, "chunks": data.gold.sets, "answers": data.gold.answers}
        held = ", ".join(f"{what} in column `{column}`" for what, column in named.items() if column is not None)
        sources.append(f"- `{data.gold.path}`: {held}")
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in data.dropped.items()) or "none"
    lines = [
        f"# {manifest.name}",
        "",
        (
            f"A causal language model that answers the labeler `{manifest.labeler['name']}`, by `relabel train` "
            f"{manifest.relabel}: {METHODS[manifest.method].title}."
        ),
        "",
        f"- Starts from: `{manifest.model.reference}` (digest `{manifest.model.digest[:16]}`)",
        f"- Trained: {training.steps} steps, {training.epochs} epochs, on {training.device}.",
        *_kept(manifest),
        f"- Learned from {data.rows:,} rows, {data.answer_tokens:,} tokens of answers; rows left out: {dropped}.",
        *sources,
        *(f"- Note: {note}" for note in manifest.notes),
        "",
        "![training curve](curves.svg)",
        "",
        "## Use",
        "",
        "Set `engine.model` of a job to this folder, and `labeler` to the one above with the same options.",
        "Its labels are the work of a model: judge them with trusted grades (`relabel evaluate`) before they decide",
        "anything.",
        "",
        *spec_section(manifest.spec),
    ]
    return "\n".join(lines)


def _kept(manifest: TeacherManifest) -> list[str]:
    best, held_out = manifest.training.best_step, manifest.data.held_out
    if best is None or held_out is None:
        return []
    return [
        f"- Kept: step {best}, the best mean reward on {held_out.rows:,} rows of {held_out.queries:,} queries that "
        "nobody trained on."
    ]
