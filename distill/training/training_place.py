"""Where a training keeps its checkpoints, and what it says of the rows that it can't go on with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from relabel.distill.training.checkpoint_folders import list_checkpoints
from relabel.manifests.errors import TrainingError

ROWS_NAMED = 20


@dataclass
class TrainingPlace:
    """Where a training keeps its checkpoints, and whom it talks to.

    Args:
        folder: of the checkpoints.
        keep: how many of them stay, the best one beside them.
        say: called with progress, a line each.
        names: where each row comes from, `(source, row_id)`.
        report_to: services that the curve is sent to.
        title: of the curve's plot, which then lies beside the checkpoints, with the curve, as far as the last one goes.
    """

    folder: Path
    keep: int
    say: Callable[[str], None]
    names: Sequence[tuple[str, int]]
    report_to: Sequence[str] = ()
    title: str | None = None

    def not_finite(self, what: str, rows: Sequence[int], *, step: int) -> TrainingError:
        """The error for a number that is none.

        Args:
            rows: that it came of.
            step: that it is of.
        """
        rows = list(dict.fromkeys(rows))
        named = ", ".join(f"{source}:{row_id}" for source, row_id in (self.names[row] for row in rows[:ROWS_NAMED]))
        more = f" and {len(rows) - ROWS_NAMED} more" if len(rows) > ROWS_NAMED else ""
        kept = list_checkpoints(self.folder)
        last = f"The last checkpoint is {kept[-1]}" if kept else "No checkpoint was written yet"
        return TrainingError(
            f"step {step}: {what}. Rows of the batch, as source:row_id: {named}{more}. "
            f"{last}. Look at these rows; if they are fine, train again with --restart and a lower train.learning_rate "
            "or train.precision: fp32 (another spec doesn't go on from these checkpoints)."
        )
