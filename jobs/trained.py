"""How a student's training ended, for people and for programs."""

from dataclasses import dataclass
from typing import Any

from relabel.distill.students.distillation import Report
from relabel.distill.students.spec import StudentManifest
from relabel.jobs.output import Printed, grid
from relabel.manifests.metrics.evaluation import not_beaten
from relabel.manifests.records import plain
from relabel.manifests.secrets import counted


@dataclass(frozen=True)
class StudentResult(Printed, Report):
    """A student, trained now or earlier."""

    def as_json(self) -> dict[str, Any]:
        """The result for programs."""
        manifest = self.manifest
        split = plain(manifest.split)
        split.pop("learned_queries", None)  # long, and nothing to read
        return {
            "name": manifest.name,
            "fingerprint": manifest.fingerprint,
            "heads": plain(manifest.heads),
            "temperature": plain(manifest.temperature),
            "rows": plain(manifest.rows),
            "rows_by_head": plain(manifest.rows_by_head),
            "split": split,
            "training": plain(manifest.training),
            "metrics": plain(manifest.metrics),
            "notes": plain(manifest.notes),
            "gate": plain(self.gate),
            "output": str(self.output),
            "was_done": self.was_done,
        }

    def lines(self) -> list[str]:
        """The result for people."""
        manifest = self.manifest
        training = manifest.training
        sides = [f"{name} {side.rows:,} of {side.queries:,} queries" for name, side in manifest.split.sides().items()]
        how = f"on {training.device}; no step was left when it was resumed"
        if training.rows_per_s is not None:
            how = f"{training.rows_per_s:,} rows/s on {training.device}"
        rows = [
            ("verdict", _verdict(manifest)),
            ("heads", ", ".join(f"{name} {grades}" for name, grades in manifest.heads.items())),
            ("rows", ", ".join(sides)),
            ("trained", f"{counted(training.steps, 'step')}, {how}"),
        ]
        rows += [("note", note) for note in manifest.notes]
        rows += [("gate", check.text) for check in self.gate.checks]
        head = "Nothing to do: this student is in" if self.was_done else "The student is in"
        return [f"{head} {self.output}", grid(rows), "", grid(manifest.metrics.test.figure_rows())]


def _verdict(manifest: StudentManifest) -> str:
    """Whether a student beats the baselines of its test split."""
    test = manifest.metrics.test
    if test.baselines is None:
        return "not known: no test row has a grade to judge by"
    over = f"over {test.student['rows']:,} test rows, by {test.judged_by}"
    below = "; ".join(not_beaten(test.student, test.baselines))
    return f"no better than a baseline {over}: {below}" if below else f"above the baselines {over}"
