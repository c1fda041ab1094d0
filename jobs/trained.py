"""How the training of a student or a teacher ended, for people and for programs."""

from dataclasses import dataclass
from typing import Any

from relabel.distill.students.distillation import Report
from relabel.distill.students.spec import LearnedGold, StudentManifest
from relabel.distill.teachers.teaching import TeacherReport
from relabel.distill.training.output import TrainingFacts
from relabel.jobs.output import Printed, grid
from relabel.manifests.metrics.evaluation import not_beaten, not_shown_to_beat
from relabel.manifests.records import as_object, plain
from relabel.manifests.secrets import counted, one_line


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
        sides = [f"{name} {side.rows:,} of {side.queries:,} queries" for name, side in manifest.split.sides().items()]
        rows = [
            ("verdict", _verdict(manifest)),
            ("heads", ", ".join(f"{name} {grades}" for name, grades in manifest.heads.items())),
            ("rows", ", ".join(sides)),
            ("trained", _trained(manifest.training)),
        ]
        rows += [("note", note) for note in manifest.notes]
        rows += [("gate", check.text) for check in self.gate.checks]
        head = "Nothing to do: this student is in" if self.was_done else "The student is in"
        return [f"{head} {self.output}", grid(rows), "", grid(manifest.metrics.test.figure_rows())]


def _trained(training: TrainingFacts) -> str:
    """How many steps, and how fast."""
    how = f"on {training.device}; no step was left when it was resumed"
    if training.rows_per_s is not None:
        how = f"{training.rows_per_s:,} rows/s on {training.device}"
    return f"{counted(training.steps, 'step')}, {how}"


def _verdict(manifest: StudentManifest) -> str:
    """Whether a student beats the baselines of its test split, by more than chance."""
    test = manifest.metrics.test
    if test.baselines is None:
        return "not known: no test row has a grade to judge by"
    over = f"over {test.student['rows']:,} test rows, by {test.judged_by}"
    below = "; ".join(not_beaten(test.student, test.baselines))
    if below:
        return f"no better than a baseline {over}: {below}"
    unclear = "; ".join(not_shown_to_beat(test.student, test.intervals, test.baselines))
    return f"not shown to be better than a baseline {over}: {unclear}" if unclear else f"above the baselines {over}"


@dataclass(frozen=True)
class TeacherResult(Printed, TeacherReport):
    """A teacher, trained now or earlier."""

    def as_json(self) -> dict[str, Any]:
        """The result for programs."""
        manifest = self.manifest
        values = {
            "name": manifest.name,
            "method": manifest.method,
            "fingerprint": manifest.fingerprint,
            "labeler": manifest.labeler,
            "data": manifest.data,
            "training": manifest.training,
            "notes": manifest.notes,
            "output": str(self.output),
            "was_done": self.was_done,
        }
        return as_object(values)

    def lines(self) -> list[str]:
        """The result for people."""
        manifest = self.manifest
        data = manifest.data
        rows = [("method", manifest.method), ("labeler", _labeler(manifest.labeler))]
        rows += [("run", f"{run.path}: {counted(run.labels, 'label')}") for run in data.runs]
        if data.gold is not None:
            rows.append(("gold", _gold(data.gold)))
        rows.append(("rows", f"{data.rows:,}, {counted(data.examples, 'example')}"))
        rows += [("left out", f"{count:,} {reason}") for reason, count in data.dropped.items() if count]
        rows.append(("trained", _trained(manifest.training)))
        rows += [("note", note) for note in manifest.notes]
        head = "Nothing to do: this teacher is in" if self.was_done else "The teacher is in"
        return [one_line(f"{head} {self.output}"), grid(rows)]


def _labeler(options: dict[str, Any]) -> str:
    """Its name and scale."""
    grades = options.get("grades")
    return f"{options['name']}, {counted(grades, 'grade')}" if grades else str(options["name"])


def _gold(gold: LearnedGold) -> str:
    """Its file and column, what its grades count as, and how many rows have one."""
    column = gold.grade or gold.sets or gold.answers
    named = f"{gold.path}, `{column}`" if column else gold.path
    if gold.map:
        named += f" ({', '.join(f'{old} as {new}' for old, new in gold.map.items())})"
    return f"{named}: {counted(gold.graded_rows, 'row')}"
