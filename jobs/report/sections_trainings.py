"""What the page says of trainings that are not finished."""

from __future__ import annotations

from collections.abc import Sequence

from relabel.jobs.report.blocks import Badge, Block, Cell, Facts, Paragraph
from relabel.jobs.report.trainings import TrainingArtifact


def training_facts(one: TrainingArtifact, *, digits: int) -> Facts:
    """How far it is, and what is trained.

    Args:
        digits: of a digest that is shown.
    """
    rows: list[tuple[str, Cell]] = [("state", Badge("not finished", "warn")), ("shown as of", one.when)]
    if record := one.record:
        method, labeler = record.spec.get("method"), record.spec.get("labeler")
        rows += [("trains", f"a {record.kind}"), ("starts from", record.model.reference)]
        rows += [("method", str(method))] if method else []
        rows += [("labeler", str(labeler.get("name")))] if isinstance(labeler, dict) else []
        rows += [("relabel", record.relabel), ("fingerprint", record.fingerprint[:digits])]
    return Facts([*rows, ("path", one.path)], f"Training {one.name}")


def training_notes(trainings: Sequence[TrainingArtifact]) -> list[Block]:
    """That they are not finished, and what that means for the page."""
    return [
        Paragraph(
            f"{one.name}: This training is not finished: it is under way, or was stopped. Curves and rollouts are "
            f"those of its last whole checkpoint ({one.when}); what came after it is not shown. --resume goes on with "
            "one that was stopped.",
            "warn",
        )
        for one in trainings
    ]
