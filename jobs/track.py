"""A judge over time: `relabel evaluate --track FILE` adds a line a day to a CSV and says whether the agreement with
gold has fallen by more than chance explains over all looks.
"""

import csv
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from relabel.jobs.output import Exit
from relabel.jobs.run.progress import write_metrics
from relabel.jobs.sections import JudgedLabels
from relabel.jobs.tables import written
from relabel.manifests.errors import InputError, UsageError
from relabel.manifests.files import Storage, place_of
from relabel.manifests.metrics.drift import ALPHA, Fall, latest_fall
from relabel.manifests.metrics.judged import Judged
from relabel.manifests.records import as_object, digest_of
from relabel.manifests.secrets import counted

AGREEMENT = "accuracy"
COLUMNS = ("date", "model", "fingerprint", "agreement", "low", "high", "pairs")
LABELS = "labels"
"""The last column: a digest of which labels were looked at. Files of before lack it."""
WIDTHS = 2 * 1.959963984540054
"""Standard errors between the bounds of a 95 % interval."""


@dataclass(frozen=True)
class Tracked:
    """Labels by gold, and what they say with those of earlier days.

    Args:
        looks: lines of the file.
        fall: of the agreement since the first line.
        first, last: agreement of the first and of the last line.
        pairs_before: judged at the look before; None at the first.
        repeats: date of an earlier look at the same labels, so that none was added; empty where they are new.
    """

    judged: JudgedLabels
    file: str
    looks: int
    fall: Fall
    first: float
    last: float
    pairs_before: int | None
    repeats: str = ""

    @property
    def exit_code(self) -> int:
        """That of the gates; refused, too, where the fall is beyond chance."""
        return int(Exit.GATE) if self.fall.is_beyond_chance else self.judged.exit_code

    @property
    def text(self) -> str:
        """In a line, another where the labels are not new, and another where the pairs may be others."""
        if not self.repeats:
            return self._verdict
        repeated = f"{self.file}: these labels are the look of {self.repeats} already, so none was added"
        return repeated if self.looks == 1 else f"{repeated}\n{self._verdict}"

    @property
    def _verdict(self) -> str:
        if self.fall.bound is None:
            return f"{self.file}: the first look; the next ones are compared with it"
        verdict = "beyond chance" if self.fall.is_beyond_chance else "within chance"
        since = "this look" if self.fall.since == 1 else f"the last {self.fall.since:,} looks"
        text = f"{self.file}: {self.looks:,} looks; agreement {self.last:.4f} now, {self.first:.4f} in the first look. "
        if self.fall.value <= 0:
            text += "It has not fallen"
        else:
            text += (
                f"The fall that shows best is that of {since}, {self.fall.value:.4f} on average: {verdict}, whose "
                f"bound is {self.fall.bound:.4f} (false alarms at most {ALPHA:g}, all looks together). {self._basis}"
            )
        pairs = self.judged.figures[AGREEMENT].over
        if self.pairs_before is not None and abs(pairs - self.pairs_before) > self.pairs_before / 10:
            now = counted(pairs, "pair")
            text += f"\n{now}, and {self.pairs_before:,} at the look before: are they of the same file?"
        return text

    @property
    def _basis(self) -> str:
        """What the bound is made of: queries where labels name some, else pairs."""
        text = f"The bound rests on {self.judged.num_groups:,} {self.judged.resampled}"
        if self.judged.resampled == "rows":
            return text
        return f"{text}, not on their {counted(self.judged.figures[AGREEMENT].over, 'pair')}"

    def as_json(self) -> dict[str, Any]:
        """The result for programs."""
        track = {
            "file": self.file,
            "looks": self.looks,
            **as_object(self.fall),
            "is_beyond_chance": self.fall.is_beyond_chance,
            "is_repeated": bool(self.repeats),
        }
        return {**self.judged.as_json(), "exit_code": self.exit_code, "track": track}

    def lines(self) -> list[str]:
        """The result for people."""
        return [self.text, *self.judged.lines()]

    def write_metrics(self, path: str) -> str:
        """Replace a Prometheus file; why it can't be written, or nothing."""
        metrics: list[Any] = [
            ("relabel_agreement", "Share of pairs whose label is gold.", self.judged.figures[AGREEMENT].value or 0.0),
            ("relabel_agreement_fall", "How far it has fallen since the first look.", self.fall.value),
            ("relabel_agreement_fall_bound", "What chance explains of that.", self.fall.bound or 0.0),
            ("relabel_agreement_has_fallen", "1 if it fell by more.", float(self.fall.is_beyond_chance)),
        ]
        return write_metrics(Path(path), metrics, {"track": Path(self.file).name})


def track(rows: Judged, judged: JudgedLabels, file: str, *, day: str | None = None) -> Tracked:
    """Add a line to a file, in place of its last one where that is of the same day and fingerprint, which of a label
    file is its place's. Labels that an earlier line is of already add none: a look at them says nothing new.

    Args:
        rows: what was judged.
        file: on this machine; made where there is none.
        day: of the labels, as 2026-11-29; today by default.
    Raises:
        UsageError: the labels have no agreement with an interval, or the day is before that of the last line.
        InputError: the file holds something else.
    """
    line = line_of(judged, day or datetime.now(UTC).date().isoformat())
    line[LABELS] = labels_digest(rows, judged)
    lines = read_lines(Path(file), list(line))
    earlier = lines
    if lines and all(lines[-1][name] == line[name] for name in ("date", "fingerprint")):
        earlier = lines[:-1]
    elif lines and line["date"] < lines[-1]["date"]:
        raise UsageError(
            f"--track {file}: its last line is of {lines[-1]['date']}, and this look of {line['date']}. Looks are "
            "compared in their order: give a history to a new file by --track-date, the oldest first."
        )
    repeats = next((one["date"] for one in earlier if one[LABELS] == line[LABELS]), "")
    pairs_before = None
    if not repeats:
        lines = [*earlier, line]
        pairs_before = int(_numbers(earlier[-1:], "pairs", file)[0]) if earlier else None
    agreement_T = _numbers(lines, "agreement", file)
    error_T = (_numbers(lines, "high", file) - _numbers(lines, "low", file)) / WIDTHS
    fall = latest_fall(agreement_T, np.maximum(error_T, 1e-9))
    if not repeats:
        write_lines(file, lines)
    return Tracked(
        judged,
        file,
        looks=len(lines),
        fall=fall,
        first=float(agreement_T[0]),
        last=float(agreement_T[-1]),
        pairs_before=pairs_before,
        repeats=repeats,
    )


def labels_digest(rows: Judged, judged: JudgedLabels) -> str:
    """Which labels a look is of: the judged rows with their grades, and where they lie, so that another run with the
    same grades is another look.
    """
    digest = hashlib.sha256(digest_of([place_of(labels["path"]) for labels in judged.labels]).encode())
    for column_N in (rows.queries, rows.docs, rows.labels):
        if column_N is not None:
            digest.update(np.ascontiguousarray(column_N).tobytes())
    return digest.hexdigest()[:16]


def line_of(judged: JudgedLabels, day: str) -> dict[str, str]:
    """What is kept of a look."""
    figure = judged.figures.get(AGREEMENT)
    if figure is None or figure.value is None or figure.low is None or figure.high is None:
        raise UsageError(
            "--track wants grades of two queries or more, and --resamples above 0: an agreement's interval."
        )
    labels = np.array(judged.confusion).sum(axis=0)
    first = judged.labels[0]
    values = (
        day,
        str(first.get("model_name", "")),
        str(first.get("fingerprint") or digest_of(place_of(first["path"]))[:16]),
        f"{figure.value:.6f}",
        f"{figure.low:.6f}",
        f"{figure.high:.6f}",
        str(figure.over),
    )
    shares = {f"share_{grade}": f"{share:.6f}" for grade, share in enumerate(labels / labels.sum())}
    return {**dict(zip(COLUMNS, values, strict=True)), **shares}


def read_lines(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """The lines of earlier looks.

    Args:
        columns: those of a new line, the last of which files of before lack.
    Raises:
        InputError: the file has other columns.
    """
    if not path.exists():
        return []
    try:
        with path.open(encoding="utf-8", newline="") as opened:
            reader = csv.DictReader(opened)
            lines = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as exc:
        raise InputError(f"--track {path}: can't be read as CSV: {exc}.") from exc
    if list(reader.fieldnames or ()) not in (list(columns), list(columns[:-1])):
        raise InputError(
            f"--track {path}: has the columns {', '.join(reader.fieldnames or ()) or 'none'}, and these looks have "
            f"{', '.join(columns)}. Name another file."
        )
    return [{LABELS: "", **line} for line in lines]


def write_lines(file: str, lines: Sequence[dict[str, str]]) -> None:
    """Replace the file."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[-1]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    with written(file, Storage()) as path:
        path.write_text(text.getvalue(), encoding="utf-8")


def _numbers(lines: Sequence[dict[str, str]], name: str, file: str) -> np.ndarray:
    try:
        return np.array([float(line[name]) for line in lines])
    except (TypeError, ValueError) as exc:
        raise InputError(f"--track {file}: a line's `{name}` is no number: {exc}.") from exc
