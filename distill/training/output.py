"""The folder that a trained model owns: checkpoints while it is trained, then the model, with a manifest written last;
resume and restart, and the training curve as a table, a plot, and on services. Importing it does not load torch."""

from __future__ import annotations

import errno
import importlib.metadata
import io
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, Self, TypeVar

import pyarrow as pa
import yaml

from relabel.manifests import failpoints
from relabel.manifests.errors import (
    ConfigError,
    DiskFullError,
    LockHeldError,
    ManifestError,
    StaleRunError,
    StoreError,
    TrainingError,
)
from relabel.manifests.files import FileLock
from relabel.manifests.labels import table_bytes
from relabel.manifests.models import ResolvedModel
from relabel.manifests.process import check_interrupted, require
from relabel.manifests.records import LEFT_OUT, checked, differing, digest_of, plain, read_record, readable_json
from relabel.manifests.run_manifest import MANIFEST_NAME
from relabel.manifests.specs import Spec
from relabel.manifests.store import LocalStore, sync_folder

logger = logging.getLogger(__name__)

# ------------------------------------------------------------------------------
# The training curve, as Parquet and as a plot.


CURVES_NAME = "curves.parquet"
PLOT_NAME = "curves.svg"
CURVE_SCHEMA = pa.schema([("step", pa.int64()), ("split", pa.string()), ("name", pa.string()), ("value", pa.float64())])
LOSS_PANEL = "training loss, nats"
PANELS = {
    LOSS_PANEL: r"",
    "reward": r"(node_)?reward|usefulness$|f1_(ans|ret)$|penalty$",
    "share of answers": r".*_(rate|share)$|accuracy$",
    "tokens": r".*_tokens$",
    "chunks": r"chunks$",
    "coefficients": r"(alpha|ratio)_",
}
"""Axes of a training's figures, by what is on them, and the names that belong there; the first takes the others."""


@dataclass
class Curve:
    """Points in the order in which they were measured: step, split, name, value."""

    points: list[tuple[int, str, str, float]] = field(default_factory=list)

    def add(self, step: int, split: str, values: dict[str, float]) -> None:
        """Add one step's values."""
        self.points += [(step, split, name, float(value)) for name, value in values.items()]

    def series(self, split: str, name: str) -> list[tuple[int, float]]:
        """One curve."""
        return [(step, value) for step, of, called, value in self.points if (of, called) == (split, name)]

    def until(self, step: int) -> Curve:
        """The curve as it was after a step."""
        return Curve([point for point in self.points if point[0] <= step])

    def names(self, split: str) -> list[str]:
        """Names of a split's curves, in the order of their first points."""
        return list(dict.fromkeys(name for _, of, name, _ in self.points if of == split))


def write_curves(folder: Path, curve: Curve, *, title: str) -> None:
    """Write `CURVES_NAME` and `PLOT_NAME`, each whole or not at all."""
    rows = [dict(zip(CURVE_SCHEMA.names, point, strict=True)) for point in curve.points]
    files = LocalStore(folder)
    files.put(CURVES_NAME, table_bytes(pa.Table.from_pylist(rows, schema=CURVE_SCHEMA)))
    files.put(PLOT_NAME, _plotted(curve, title))


def _plotted(curve: Curve, title: str) -> bytes:
    """Figures of training above, on axes by what they are; on dev below. The same curve gives the same bytes."""
    matplotlib = require("matplotlib", extra="cpu", purpose="The plot of a training")
    figure_class = require("matplotlib.figure", extra="cpu", purpose="The plot of a training").Figure
    of_train = {LOSS_PANEL: [], **panels_of(curve.names("train"))}
    shown = [(panel, "train", names) for panel, names in of_train.items()]
    shown.append(("dev", "dev", [name for name in curve.names("dev") if panel_of(name) != "tokens"]))
    with matplotlib.rc_context({"svg.hashsalt": "relabel", "svg.fonttype": "none"}):
        height = 3 * len(shown)  # margins are fixed: a layout that measures its texts draws everything twice
        figure = figure_class(figsize=(8, height))
        figure.subplots_adjust(
            left=0.11,
            right=0.98,
            bottom=0.5 / height,
            top=1 - 0.3 / height,
            hspace=0.08,
        )
        all_axes = figure.subplots(len(shown), 1, sharex=True)
        for axes, (label, split, names) in zip(all_axes, shown, strict=True):
            for name in names:
                points = zip(*curve.series(split, name), strict=True)
                marker = "o" if split == "dev" else None
                axes.plot(
                    *points,
                    label=name,
                    linewidth=1,
                    marker=marker,
                    markersize=3,
                )
            axes.set(ylabel=label)
            axes.grid(alpha=0.3)
            if names:
                axes.legend(fontsize="small", ncols=1 + len(names) // 8)
        all_axes[0].set(title=title)
        all_axes[-1].set(xlabel="optimizer step")
        sink = io.BytesIO()
        figure.savefig(sink, format="svg", metadata={"Date": None})
    return sink.getvalue()


def panels_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Names by panel, for those panels that have any, in the order of `PANELS`."""
    shown = [name for name in names if name not in ("learning_rate", "grad_norm")]
    by_panel: dict[str, list[str]] = {panel: [] for panel in PANELS}
    for name in shown:
        by_panel[panel_of(name)].append(name)
    return {panel: names_of for panel, names_of in by_panel.items() if names_of}


def panel_of(name: str) -> str:
    return next((panel for panel, pattern in PANELS.items() if pattern and re.match(pattern, name)), LOSS_PANEL)


# ------------------------------------------------------------------------------
# The curve on services, through accelerate's trackers.
#
#     checkpoints/reports/state.json      the run's name, ids that services gave it, points sent
#     .tensorboard/<run>/                 TensorBoard's events; hidden, so they are no part of the model


PROJECT = "relabel"
"""Project, or experiment, of all runs."""
REPORTS = "reports"
STATE = "state.json"
EVENTS = ".tensorboard"
NOT_IN_NAMES = re.compile(r"[^\w./-]")
"""Characters that some service takes in no figure's name."""


def check_services(names: Sequence[str]) -> None:
    """
    Raises:
        MissingExtraError: a service's package is not installed.
    """
    for name in names:
        require(name, extra=name, purpose=f"train.report_to: {name}")


class CurveReporter:
    """Sends a curve as it grows. Names of services, and how much each one has, are kept in a file, so that a resumed
    training continues the same run; a service that fails is left out and never ends a training.

    Args:
        names: of the services.
        checkpoints: folder of the training's checkpoints, in the model's.
        report: called with each service that fails.
    """

    def __init__(self, names: Sequence[str], checkpoints: Path, report: Callable[[str], None]) -> None:
        self._trackers: dict[str, Any] = dict.fromkeys(names)
        self._folder = checkpoints / REPORTS
        self._model = checkpoints.resolve().parent
        self._report = report
        self._state: dict[str, Any] = {"run": f"{self._model.name}-{uuid.uuid4().hex[:8]}", "ids": {}, "sent": {}}
        file = self._folder / STATE
        if file.is_file():
            self._state = json.loads(file.read_text(encoding="utf-8"))

    def send(self, curve: Curve) -> None:
        """Send what a service does not have yet."""
        sent = self._state["sent"]
        for name in list(self._trackers):
            with self._dropped_if_it_fails(name):
                self._trackers[name] = self._trackers[name] or self._started(name)
                for step, group in groupby(curve.points[sent.get(name, 0) :], key=lambda point: point[0]):
                    points = list(group)
                    values = {f"{of}/{NOT_IN_NAMES.sub('.', figure)}": value for _, of, figure, value in points}
                    self._trackers[name].log(values, step=step)
                    sent[name] = sent.get(name, 0) + len(points)
                    self._keep()

    def finish(self) -> None:
        """Close all runs."""
        for name, tracker in list(self._trackers.items()):
            with self._dropped_if_it_fails(name):
                if tracker is not None:
                    tracker.finish()

    @contextmanager
    def _dropped_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as exc:
            del self._trackers[name]
            logger.warning("report_to: %s", name, exc_info=exc)
            self._report(
                f"report_to: {name} failed ({type(exc).__name__}: {first_line(exc)}): training continues without it. "
                "--resume, or the next training, tries again."
            )

    def _started(self, name: str) -> Any:
        """accelerate's tracker for the run, new or begun before."""
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        run = self._state["run"]
        ids = self._state["ids"]
        options: dict[str, dict[str, Any]] = {
            "tensorboard": {"run_name": run, "logging_dir": self._model / EVENTS},
            "mlflow": {"experiment_name": PROJECT, "run_id": ids.get("mlflow"), "run_name": run},
            "wandb": {"run_name": PROJECT, "name": run, "id": run, "resume": "allow"},
            "trackio": {"run_name": PROJECT, "name": run, "resume": "allow", "embed": False},
        }
        tracker = LOGGER_TYPE_TO_CLASS[name](**options[name])
        tracker.start()
        if name == "mlflow":
            ids["mlflow"] = tracker.tracker.info.run_id
        self._keep()
        return tracker

    def _keep(self) -> None:
        LocalStore(self._folder).put(STATE, json.dumps(self._state).encode(), is_synced=False)


def first_line(exc: BaseException) -> str:
    """The first line of an error, shortened for a message."""
    return (str(exc).splitlines() or [type(exc).__name__])[0][:150]


# ------------------------------------------------------------------------------
# What a training leaves, as records.


CARD_NAME = "README.md"

Start = Literal["new", "resume", "restart"]
"""`new` refuses to touch what an earlier training left; `resume` continues it, and begins where there is nothing;
`restart` deletes it first.
"""


class Product(NamedTuple):
    """What a command trains.

    Args:
        kind: `student`; as manifests and messages have it.
        command: the one that trains it, `distill`.
        model_key: of its spec, that names the model to start from.
        data_keys: that name what is learned from.
        undecided: keys, as dotted paths, that are no part of its fingerprint: they change speed alone, or name data and
            models, whose digests are part of it.
    """

    kind: str
    command: str
    model_key: str
    data_keys: tuple[str, ...]
    undecided: frozenset[str]


@dataclass(frozen=True)
class BaseModelUsed:
    """The model that a training starts from."""

    reference: str
    digest: str
    type: str | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingFacts:
    """How a training went, as in a manifest.

    Args:
        best_step: the step that was kept, where evaluations on dev chose one.
        stopped_by: what ended it before its last step, `early_stopping` or `watch`.
        rows_per_s: rows trained in a second of this process's own steps, evaluations and checkpoints left out.
        batch_size, accumulation: in the end: one is halved and the other doubled where memory ran out.
    """

    steps: int
    epochs: int | float
    best_step: int | None = None
    stopped_by: str | None = None
    device: str
    rows_per_s: int | float | None
    batch_size: int | None = None
    tokens_per_batch: int | None = None
    accumulation: int = 1
    was_batch_halved: bool = False


@dataclass
class Outcome:
    """How a training ended, and remarks for the user."""

    facts: TrainingFacts
    curve: Curve
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class ManifestMark:
    """The part of a manifest that names whose it is; the rest of it may be of another version.

    Args:
        kind: `teacher` or `student`.
        spec: the resolved spec.
    """

    kind: str
    fingerprint: str
    spec: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainingRecord(ManifestMark):
    """What is trained in a folder: `training.json`.

    Args:
        data: digest of all training data.
        processes: that train together.
    """

    version: int
    relabel: str
    model: BaseModelUsed
    data: str
    processes: int = 1

    @property
    def batches_of_step(self) -> int:
        """Batches of an optimizer step, of all processes. By as many, any number of processes trains the same model,
        and goes on from the checkpoints of any other.
        """
        return int(self.spec["train"]["accumulation"]) * self.processes


@dataclass(frozen=True, kw_only=True)
class TrainedManifest(ManifestMark):
    """What the manifest of any trained model holds; fields that JSON may do without are None there.

    Args:
        versions: of the libraries.
        files: sha256 by name of the files that decide what the model answers.
    """

    version: int
    relabel: str
    name: str
    model: BaseModelUsed
    training: TrainingFacts
    notes: list[str]
    versions: dict[str, str]
    files: dict[str, str] | None = field(default=None, metadata=LEFT_OUT)

    @classmethod
    def read(cls, data: bytes, where: str) -> Self:
        """The whole of a manifest.

        Raises:
            ManifestError: it is damaged, or of another version.
        """
        what = f"not as this relabel writes a {cls.kind}'s manifest"
        return read_record(
            cls,
            data,
            where,
            what,
            "Restore it from a copy, or train again.",
        )


ManifestT = TypeVar("ManifestT", bound=TrainedManifest)


def training_record(
    product: Product, spec: Spec, model: ResolvedModel, data: str, *, version: int, processes: int
) -> TrainingRecord:
    """The record of a training; its fingerprint is the digest of the spec's choices, the data and the model.

    Args:
        data: digest of all training data.
        version: of the model's manifest.
        processes: that train together.
    """
    record = TrainingRecord(
        version=1,
        kind=product.kind,
        relabel=importlib.metadata.version("relabel-ir"),
        fingerprint="",
        model=BaseModelUsed(model.reference, model.digest),
        data=data,
        spec=spec.model_dump(mode="json"),
        processes=processes,
    )
    chosen = decisive(record.spec, product.undecided)
    chosen["train"]["accumulation"] = record.batches_of_step
    choices = {"spec": chosen, "data": data, "model": model.digest, "version": version}
    return replace(record, fingerprint=digest_of(choices))


def decisive(spec: Mapping[str, Any], undecided: Collection[str], prefix: str = "") -> dict[str, Any]:
    """A spec's plain values without the keys that do not change the model, given as dotted paths."""
    choices: dict[str, Any] = {}
    for key, value in spec.items():
        path = f"{prefix}{key}"
        if path not in undecided:
            choices[key] = decisive(value, undecided, f"{path}.") if isinstance(value, dict) else value
    return choices


def changes(product: Product, was: ManifestMark, now: TrainingRecord) -> list[str]:
    """What another training differs in: keys, with both values where these are numbers (texts may be secrets); its
    model and data where a record has them.
    """
    changed: list[str] = []
    undecided = product.undecided
    if isinstance(was, TrainingRecord):
        undecided = undecided | {"train.accumulation"}
        if was.batches_of_step != now.batches_of_step:
            counts = f"was {was.batches_of_step}, is {now.batches_of_step}"
            changed.append(f"train.accumulation, of all processes together: {counts}")
    for path, old, new in differing(decisive(was.spec, undecided), decisive(now.spec, undecided)):
        are_numbers = isinstance(old, int | float) and isinstance(new, int | float)
        changed.append(f"{path}: was {old}, is {new}" if are_numbers else path)
    if isinstance(was, TrainingRecord) and was.model.digest != now.model.digest:
        changed.append(f"the model that `{product.model_key}` names")
    if isinstance(was, TrainingRecord) and was.data != now.data:
        keys = ", ".join(f"`{key}`" for key in product.data_keys if now.spec.get(key))
        changed.append(f"the data ({keys})")
    return changed


def spec_section(spec: dict[str, Any]) -> list[str]:
    """The spec that a model was trained by, as the last lines of its card."""
    written = yaml.safe_dump(spec, sort_keys=False, allow_unicode=True, width=120).rstrip()
    return ["## Spec", "", "```yaml", written, "```", ""]


# ------------------------------------------------------------------------------
# Checkpoints as folders: their names, and which are there.


WEIGHTS = "weights.safetensors"


def checkpoint_name(step: int) -> str:
    """Name of a step's checkpoint; sorts by step."""
    return f"checkpoint-{step:06d}"


def step_of(checkpoint: Path) -> int:
    """The optimizer step that a checkpoint was written after."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    named = [path for path in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(filter(Path.is_dir, named), key=step_of)


def how_it_goes_on(checkpoints: Path) -> str:
    """What is kept of a training that ends early, and how to continue, for a message."""
    whole = list_checkpoints(checkpoints)
    if whole:
        return f"{whole[-1].name} is kept: --resume goes on from it."
    return "No checkpoint was written yet, and nothing is lost but the steps since the start: --resume starts again."


@dataclass
class TrainingPlace:
    """Where a training keeps its checkpoints, and where its progress goes.

    Args:
        folder: of the checkpoints.
        keep: how many of them stay, in addition to the best one.
        report: called with progress, a line each.
        names: where each row comes from, `(source, row_id)`.
        title: of the curve's plot, which is then written with each checkpoint, as is the curve.
    """

    folder: Path
    keep: int
    report: Callable[[str], None]
    names: Sequence[tuple[str, int]]
    title: str | None = None

    def not_finite(self, what: str, rows: Sequence[int], *, step: int) -> TrainingError:
        """The error for a value that is not finite; it names the first twenty rows.

        Args:
            rows: that it came of.
            step: that it is of.
        """
        names = [self.names[row] for row in list(dict.fromkeys(rows))[:20]]
        first = [f"{source}:{row_id}" for source, row_id in names]
        whole = list_checkpoints(self.folder)
        last = f"The last checkpoint is {whole[-1]}" if whole else "No checkpoint was written yet"
        return TrainingError(
            f"step {step}: {what}. Rows of the batch, as source:row_id: {', '.join(first)}. {last}. "
            "Read these rows; if they are fine, train again with --restart and a lower train.learning_rate "
            "or train.precision: fp32 (another spec doesn't go on from these checkpoints)."
        )


# ------------------------------------------------------------------------------
# Writing a model or a checkpoint: errors of the disk as ours, the mode of the files, and when they are on the disk.


@contextmanager
def writing(folder: Path, checkpoints: Path) -> Iterator[None]:
    """Turn errors of the disk into ours: safetensors has an error of its own, tokenizers raises a
    bare Exception, both with the system's number in its text.

    Args:
        checkpoints: folder of the training's, for the message.
    Raises:
        DiskFullError: no space is left.
        StoreError: any other error of the operating system.
    """
    try:
        yield
    except StoreError:  # ours already, and an OSError too
        raise
    except Exception as exc:
        is_theirs = type(exc) is Exception or type(exc).__name__ == "SafetensorError"
        stated = re.search(r"\(os error (\d+)\)", str(exc)) if is_theirs else None
        number = int(stated[1]) if stated else None
        if isinstance(exc, OSError):
            number = exc.errno
        if number is None:
            raise
        advice = how_it_goes_on(checkpoints)
        if number in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(f"{folder}: no space left to write it. Free some space. {advice}") from exc
        raise StoreError(f"{folder}: can't be written ({exc}). Fix this. {advice}") from exc


def sync_files(folder: Path, *names: str) -> None:
    """Put files of a folder on the disk, all or those named, and their names: what is committed after it names nothing
    that a loss of power takes.
    """
    for file in [folder / name for name in names] or sorted(filter(Path.is_file, folder.iterdir())):
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    sync_folder(folder)


# ------------------------------------------------------------------------------
# The folder of one model: the finished model, and `checkpoints/` while it is trained.


CHECKPOINTS = "checkpoints"
RECORD_NAME = "training.json"
"""In the checkpoints' folder: the `TrainingRecord` of the training that they belong to."""


@dataclass(frozen=True)
class OutputFolder:
    """The folder that a trained model owns.

    Args:
        product: what is trained there.
    """

    product: Product
    folder: Path

    @property
    def checkpoints(self) -> Path:
        """What an unfinished training leaves."""
        return self.folder / CHECKPOINTS

    def check(self, base: ResolvedModel) -> None:
        """Make sure that the folder is empty or holds what an earlier call left: training there replaces files.

        Args:
            base: the model to start from, which is not to be written over.
        Raises:
            ConfigError: it is a file, or a broken link, or lies in the base.
            StaleRunError: it holds files of something else, or the other command trains there.
        """
        command = self.product.command
        key = self.product.model_key
        for lock in self.checkpoints.glob("*.lock"):
            if lock.stem != command:
                raise StaleRunError(
                    f"{self.folder}: `relabel {lock.stem}` trains or trained there, and would lose its checkpoints. "
                    f"Name another `output`; or, if that training is not wanted any more, remove {self.checkpoints}."
                )
        nearest = next(path for path in (self.folder, *self.folder.absolute().parents) if os.path.lexists(path))
        if not nearest.is_dir():
            raise ConfigError(f"`output` = {self.folder}: {nearest} is a file, or a broken link. Name a folder.")
        is_ours = (self.folder / MANIFEST_NAME).exists() or (self.checkpoints / RECORD_NAME).exists()
        files = sorted(path.name for path in self.folder.glob("[!.]*"))
        begun = {path.name for path in self.checkpoints.glob("[!.]*")}
        # killed before it began, or while it wrote the record
        is_empty = not files or (files == [CHECKPOINTS] and begun <= {f"{command}.lock"})
        if not is_ours and not is_empty:
            raise StaleRunError(
                f"{self.folder}: holds {', '.join(files[:5])}, which no {self.product.kind} of ours left there. Name "
                "another `output`, or empty it."
            )
        folder = self.folder.resolve()
        if base.path.resolve() in (folder, *folder.parents):
            raise ConfigError(
                f"`output` ({self.folder}) lies in `{key}`, the model to start from, or is the same folder. Name "
                "another `output`."
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other process trains here meanwhile.

        Raises:
            LockHeldError: one does.
        """
        lock = FileLock(self.checkpoints / f"{self.product.command}.lock", f"the {self.product.kind} in {self.folder}")
        lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def begun(self) -> TrainingRecord | None:
        """What is trained here; None where nothing is, or the record can't be read."""
        try:
            return checked(TrainingRecord, json.loads((self.checkpoints / RECORD_NAME).read_bytes()))
        except (OSError, ValueError):
            return None

    def is_finished(self, record: TrainingRecord, start: Start) -> bool:
        """Whether this training's model is here, and stays.

        Raises:
            StaleRunError: the folder holds another model.
            ManifestError: what is here is not such a model's.
        """
        file = self.folder / MANIFEST_NAME
        kind = self.product.kind
        if start == "restart" or not file.exists():
            return False
        what = f"is not a {kind}'s manifest"
        advice = "The folder may belong to something else: name another output."
        mark = read_record(
            ManifestMark,
            file.read_bytes(),
            str(file),
            what,
            advice,
        )
        if mark.kind != kind:
            raise ManifestError(f"{file}: {what} (it is of a {mark.kind}). {advice}")
        if mark.fingerprint != record.fingerprint:
            known = "; ".join(changes(self.product, mark, record)) or f"fingerprint {mark.fingerprint[:12]}"
            raise StaleRunError(
                f"{self.folder}: holds a {kind} of another spec, model or data ({known}). Name another `output`, or "
                "replace it with --restart."
            )
        return True

    def check_checkpoints(self, record: TrainingRecord, start: Start) -> None:
        """Check that the checkpoints may be resumed; a --restart deletes them.

        Raises:
            StaleRunError: they are of another training, or of this one and neither --resume nor --restart was given.
        """
        left = sorted(path.name for path in self.checkpoints.glob("checkpoint-*"))
        if not left or start == "restart":
            return
        begun = self.begun()
        if begun is None or begun.fingerprint != record.fingerprint:
            changed = "; ".join(changes(self.product, begun, record)) if begun else ""
            known = f" ({changed})" if changed else ""
            raise StaleRunError(
                f"{self.checkpoints}: {left[-1]} is of another spec, model or data{known}. Restore what changed and "
                "give --resume, name another `output`, or start over with --restart, which deletes it."
            )
        if start == "new":
            raise StaleRunError(
                f"{self.checkpoints}: an unfinished training left {left[-1]}. Continue with --resume, or start over "
                "with --restart."
            )


def finished_model(
    output: OutputFolder, record: TrainingRecord, start: Start, cls: type[ManifestT], *, is_writer: bool
) -> ManifestT | None:
    """The manifest of this training's model where it is there and stays; checkpoints that its training was killed
    before it could remove are removed.

    Raises:
        StaleRunError: the folder holds another model.
        ManifestError: its manifest is damaged, or of another version.
    """
    if not output.is_finished(record, start):
        return None
    begun = output.begun()
    if is_writer and (begun is None or begun.fingerprint in (record.fingerprint, "")) and output.checkpoints.is_dir():
        with suppress(LockHeldError), output.locked():
            shutil.rmtree(output.checkpoints)
    file = output.folder / MANIFEST_NAME
    return cls.read(file.read_bytes(), str(file))


class Made(NamedTuple, Generic[ManifestT]):
    """A model that was trained, to be written.

    Args:
        manifest: without its files' digests.
        write: writes the model's files into a folder; sha256 by name of those that decide what it answers.
        card: its model card, from its whole manifest.
    """

    manifest: ManifestT
    curve: Curve
    write: Callable[[Path], dict[str, str]]
    card: Callable[[ManifestT], str]


def train_into(
    output: OutputFolder,
    record: TrainingRecord,
    start: Start,
    train: Callable[[], Made[ManifestT]],
    *,
    is_writer: bool,
    mirrored: Callable[[Start], AbstractContextManager[None]] | None = None,
) -> ManifestT:
    """Train a model and write its folder, the manifest last; checkpoints are removed at the end.

    Args:
        mirrored: `Mirror.held`, where checkpoints are copied elsewhere.
        is_writer: False in all but the first of several processes that train together: they write nothing.
    Raises:
        LockHeldError: another process trains there.
        StaleRunError: another call finished this model meanwhile, or checkpoints of another one are there.
        DiskFullError, StoreError: the disk refuses.
    """
    if not is_writer:
        return train().manifest
    checkpoints = output.checkpoints
    files = LocalStore(output.checkpoints)
    with output.locked(), mirrored(start) if mirrored is not None else nullcontext():
        if output.is_finished(record, start):  # while this call read its data
            raise StaleRunError(
                f"{output.folder}: another call finished this {output.product.kind} meanwhile. The same command again "
                "finds it."
            )
        if start == "restart":
            # a kill after this leaves nothing to resume from
            files.put(RECORD_NAME, readable_json(plain(replace(record, fingerprint=""))))
            for path in filter(Path.is_dir, checkpoints.iterdir()):
                shutil.rmtree(path)
            (output.folder / MANIFEST_NAME).unlink(missing_ok=True)
        output.check_checkpoints(record, start)
        if not list_checkpoints(checkpoints):
            for name in (CURVES_NAME, PLOT_NAME):
                (checkpoints / name).unlink(missing_ok=True)
        files.put(RECORD_NAME, readable_json(plain(record)))
        made = train()
        failpoints.hit("before_model")
        with writing(output.folder, checkpoints):
            manifest = replace(made.manifest, files=made.write(output.folder))
            write_curves(output.folder, made.curve, title=manifest.name)
            (output.folder / CARD_NAME).write_text(made.card(manifest), encoding="utf-8")
            sync_files(output.folder)
        check_interrupted()
        LocalStore(output.folder).put(MANIFEST_NAME, readable_json(plain(manifest)))
        shutil.rmtree(checkpoints)
    return manifest
