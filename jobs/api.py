"""relabel from Python: what the commands do, as functions that return records and raise `RelabelError`.

`import relabel` names them. A spec is the path or URL of a file, or a dictionary of what the file would hold; then
relative paths count from the working directory. `RELABEL_*` variables count as they do for the commands.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from relabel.jobs.output import Exit, Printed
from relabel.manifests.errors import InputError, RelabelError, UsageError
from relabel.manifests.labels import Pair

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from relabel.jobs.ask import Asked
    from relabel.jobs.compared_systems import ComparedSystems
    from relabel.jobs.sections import ComparedSets, JudgedLabels
    from relabel.jobs.trained import StudentResult

Spec = str | Mapping[str, Any]
Given = ParamSpec("Given")
Returned = TypeVar("Returned")


@dataclass(frozen=True)
class RunResult(Printed):
    """How a run ended.

    Args:
        exit: what the command would exit with: `DONE`, `NOTHING_TO_DO`, `PARTIAL` (call again), `OVER_LIMIT`.
        rows: of the whole input; `labelled`, `quarantined` and `open` add up to it.
        quarantined: rows without a label, by reason.
        seconds: of this call.
        report: all that the command's `--output json` prints.
        table: what it prints for people.
    """

    output: str
    exit: Exit
    rows: int
    labelled: int
    quarantined: Mapping[str, int]
    open: int
    seconds: float
    report: Mapping[str, Any]
    table: Sequence[str] = field(default=(), repr=False)

    def lines(self) -> list[str]:
        """The result for people."""
        return list(self.table)

    def labels(self, *, texts: bool = False) -> pa.Table:
        """The labels, see `read_labels`; of a run that is not finished those that are there, with a warning."""
        return read_labels(self.output, texts=texts, allow_partial=True)


_COMMAND_LINE = re.compile(
    r"(?P<command>\brelabel [a-z][^;\n`]*)"
    r"|(?P<set>--set (?P<pair>[^\s=]+=\S*[^\s.,;:)`]))"
    r"|--(?P<flag>[a-z][a-z-]*)( (?P<map>-?\w+=\w+(,(-?\d+=\d+|…))*)| (?P<word>mean|first|all)\b| '(?P<quoted>[^']+)')?"
)
"""A command, which stays as it is, or an option that is named outside of one, with the value that it is to have."""
_ARGUMENTS = {
    "set": "overrides",
    "for": "duration",
    "map": "grade_map",
    "map-labels": "label_map",
    "gold": "qrels",
    "baseline": "baselines",
    "plan": "is_plan",
}
"""Where an argument has another name than the option."""


def _names_arguments(call: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """Errors, and the notes and warnings of a result, name the arguments of this function where the command's name
    options.
    """
    parameters = inspect.signature(call).parameters

    def as_argument(found: re.Match[str]) -> str:
        if found["command"]:
            return found[0]
        if found["pair"]:
            return f'overrides=["{found["pair"]}"]'
        name = found["flag"].replace("-", "_")
        if name not in parameters:
            name = _ARGUMENTS.get(found["flag"], name)
        if name not in parameters and ("options" not in parameters or name not in _option_names(call.__name__)):
            return found[0]
        if found["map"]:
            return f"{name}={{{found['map'].replace('=', ': ').replace(',', ', ')}}}"
        if found["word"]:
            return f'{name}="{found["word"]}"'
        if found["quoted"]:
            return f'{name}=["{found["quoted"]}"]'
        return f"`{name}`"

    @functools.wraps(call)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
        try:
            result = call(*args, **kwargs)
        except RelabelError as exc:
            exc.args = tuple(_COMMAND_LINE.sub(as_argument, arg) if isinstance(arg, str) else arg for arg in exc.args)
            raise
        for remarks in (getattr(result, "notes", None), getattr(result, "warnings", None)):
            if remarks is not None:
                remarks[:] = [_COMMAND_LINE.sub(as_argument, remark) for remark in remarks]
        return result

    return called


def _option_names(function: str) -> set[str]:
    """What may be among the further `options` of `evaluate` or `systems`."""
    from relabel.jobs.evaluate import JudgingOptions
    from relabel.jobs.systems import SystemsOptions

    kind = SystemsOptions if function == "systems" else JudgingOptions
    return {field.name for field in fields(kind)}


def _checked_options(function: str, options: dict[str, Any]) -> dict[str, Any]:
    """Further options, with maps read that are texts.

    Raises:
        UsageError: an option is unknown.
    """
    from relabel.manifests.gold import parse_map
    from relabel.manifests.specs import nearest

    known = _option_names(function)
    for name in options.keys() - known:
        meant = _ARGUMENTS.get(name.replace("_", "-")) or nearest(name, sorted(known))
        raise UsageError(f"{function}: no argument `{name}`." + (f" Did you mean `{meant}`?" if meant else ""))
    flags = {"grade_map": "--map", "label_map": "--map-labels"}
    return {
        name: parse_map(value, flags[name]) if name in flags and isinstance(value, str) else value
        for name, value in options.items()
    }


@_names_arguments
def run(
    spec: Spec,
    *,
    overrides: Sequence[str] = (),
    shard: str | None = None,
    date: str | None = None,
    until: str | None = None,
    duration: str | None = None,
    workers: int | None = None,
    gpus: str | None = None,
    is_retry: bool = False,
) -> RunResult:
    """Label what is not labelled yet, as `relabel run` does; the same call again continues.

    Progress is shown on stderr: a bar on a terminal, one line in a notebook, lines elsewhere. The first Ctrl-C, or a
    notebook's interrupt, commits what is under way and returns; the second raises KeyboardInterrupt.

    Args:
        overrides: `KEY=VALUE` strings that win over the spec, as `--set`.
        shard: `INDEX/COUNT`, or `auto`.
        date: what `${date}` means, as 2026-11-19.
        until, duration: end by this time, or within this length, as `--until` and `--for`.
        workers, gpus: so many engine processes, or one for each of these GPUs, as `--workers` and `--gpus`.
        is_retry: ask the quarantined rows again instead, as `relabel retry`.
    Raises:
        RelabelError: what is wrong with the spec, the input, the engine or the store.
    """
    from relabel.jobs.job import JobSource
    from relabel.jobs.labeling import RunOptions, run_job

    options = RunOptions(
        shard=shard,
        until=until,
        duration=duration,
        workers=workers,
        gpus=gpus,
        is_retry=is_retry,
    )
    report = run_job(JobSource(spec, overrides, date), options)
    return RunResult(
        output=report.output,
        exit=report.exit,
        rows=report.rows,
        labelled=report.tally.labelled,
        quarantined=report.tally.quarantined,
        open=report.rows - report.tally.rows,
        seconds=report.seconds,
        report=report.as_json(),
        table=report.lines(),
    )


@_names_arguments
def ask(
    spec: Spec,
    rows: int | Mapping[str, Any] | Sequence[int | Mapping[str, Any]] = 0,
    *,
    overrides: Sequence[str] = (),
) -> Asked:
    """Put rows to the model as a run would, and return all that was asked and answered. Nothing is written.

    Args:
        rows: one or several numbers of input rows, from 0; or pairs that need not be in the input, as dictionaries with
            `query` and `document` (and, where the labeler reads them, `query_id`, `doc_id`, `context` and its own
            columns).
    Returns:
        One record for each row, or for each query where the labeler sees whole queries: its `exchanges` (prompt, raw
        answer, distributions) and `rows` (the label, or why there is none). Where one row was asked, `.label` of the
        whole is its label, and `.grade` its grade.
    Raises:
        RelabelError: what is wrong with the spec, a row or the engine.
    """
    from relabel.jobs.ask import Asked, Asker, RowChoice
    from relabel.jobs.job import load_job

    job = load_job(spec, overrides=overrides)
    chosen = [rows] if isinstance(rows, int | Mapping) else rows
    with contextlib.closing(Asker()) as asker:
        choices = (
            RowChoice((row,)) if isinstance(row, int) else [_pair(row, number)] for number, row in enumerate(chosen)
        )
        return Asked(asked for choice in choices for asked in asker.ask(job, choice))


def _pair(row: Mapping[str, Any], number: int) -> Pair:
    """A pair of a caller's own.

    Raises:
        InputError: it lacks its query or document.
    """
    for name in ("query", "document"):
        if not isinstance(row.get(name), str):
            raise InputError(f"row {number}: wants a text `{name}`. Got the keys {', '.join(map(str, row))}.")
    return Pair(
        row_id=number,
        query_id=str(row.get("query_id", number)),
        query=row["query"],
        doc_id=str(row.get("doc_id", number)),
        document=row["document"],
        context=tuple(row.get("context", ())),
        columns={
            name: value
            for name, value in row.items()
            if name not in ("query_id", "query", "doc_id", "document", "context")
        },
    )


@_names_arguments
def read_labels(output: str, *, texts: bool = False, allow_partial: bool = False) -> pa.Table:
    """The labels of a run, in the order of the input's rows; quarantined rows have none.

    `polars.from_arrow(table)`, `table.to_pandas()` and `datasets.Dataset(table)` take it further.

    Args:
        output: of the run: a folder or URL.
        texts: add the columns `query` and `document`, and `gold` where the job names one, from the run's input.
        allow_partial: take what is there of a run that is not finished or over its quarantine limit, with a warning
            that says so.
    Returns:
        The columns of `relabel schema labels`, one row a label.
    Raises:
        InputError: the folder holds no run, or its input can't be read.
        ManifestError: the run is not finished, a file is damaged, or the input changed since.
    """
    import pyarrow as pa

    from relabel.manifests.files import Storage
    from relabel.manifests.label_sets import join_texts
    from relabel.manifests.run_labels import file_schema, open_run_labels, read_labels

    storage = Storage()
    run = open_run_labels(output, storage, allow_partial=allow_partial)
    for note in run.notes:
        warnings.warn(note, stacklevel=3)
    if texts:
        schema, tables = join_texts(run, storage)
    else:
        schema = file_schema(run.plan.parts)
        tables = (read_labels(run.folder, file) for file in run.found.labels)
    return pa.concat_tables([schema.empty_table(), *tables]).sort_by("row_id")


@_names_arguments
def evaluate(
    *labels: str,
    qrels: str | None = None,
    require: Sequence[str] = (),
    side: Literal["test", "dev", "train", "all"] | None = None,
    resamples: int = 1000,
    seed: int = 7,
    **options: Any,
) -> JudgedLabels | ComparedSets:
    """Judge labels by gold grades, or compare students with their teacher, as `relabel evaluate` does.

    Args:
        labels: outputs of runs or of scores, or label files; of several the first is the teacher.
        qrels: gold: TREC qrels, Parquet, CSV or JSONL, or the run's own input. One set alone needs it.
        require: gates such as `macro_f1>=0.6`; `exit_code` is 5 where one does not hold.
        side: rows of this side of a student's split alone; by default the test side where a student is among them.
        resamples, seed: of the intervals.
        options: further fields of `JudgingOptions`: `grade`, `by`, `doc`, `grade_map`, `allow_partial` … A map is
            `{3: 2}`, or a text as the command takes it, `"3=2"`.
    Returns:
        `figures` by name with value and interval, counts, baselines, confusion and notes; of several sets
        `comparisons`, one a student. Its fields are the keys of the command's JSON.
    Raises:
        RelabelError: what is wrong with the labels or the gold.
    """
    from relabel.jobs.evaluate import JudgingOptions, compare_sets, judge
    from relabel.manifests.files import Storage
    from relabel.manifests.metrics.evaluation import parse_flag

    if len(labels) == 1 and qrels is None:
        raise UsageError("evaluate: one set is judged by gold: give `qrels`, or a second set to compare it with.")
    judging = JudgingOptions(
        qrels=qrels,
        side=side,
        gates=[parse_flag(text) for text in require],
        resamples=resamples,
        seed=seed,
        **_checked_options("evaluate", options),
    )
    if len(labels) == 1:
        return judge(labels, judging, Storage())[1]
    return compare_sets(labels, judging, Storage())


@_names_arguments
def systems(*rankings: str, labels: str, gold: str | None = None, **options: Any) -> ComparedSystems:
    """Say which of several searches is better, as `relabel systems` does.

    Args:
        rankings: two or more of `PATH` or `NAME=PATH`: TREC run files, tables, answers of OpenSearch, or scores.
        labels: the judge's: output of a run, or a file.
        gold: grades of a few humans; without, the judge's opinion is shown.
        options: further fields of `SystemsOptions`: `k`, `relevant`, `made_by`, `is_plan`, `width`, `grade_map` … A map
            is `{3: 2}`, or a text as the command takes it, `"3=2"`.
    Returns:
        `pairs`, each with its sentence and `figures` by name; `systems`; warnings, notes, and the plan where it was
        asked for. Its fields are the keys of the command's JSON.
    Raises:
        RelabelError: what is wrong with rankings, labels or gold.
    """
    from relabel.jobs.systems import SystemsOptions, compare_systems
    from relabel.manifests.files import Storage

    chosen = SystemsOptions(labels=labels, gold=gold, **_checked_options("systems", options))
    return compare_systems(rankings, chosen, Storage())


@_names_arguments
def distill(spec: Spec, *, overrides: Sequence[str] = (), resume: bool = False, restart: bool = False) -> StudentResult:
    """Train a student on finished label runs, as `relabel distill` does.

    Args:
        overrides: `KEY=VALUE` strings that win over the spec, as `--set`.
        resume: continue from the last checkpoint; restart: delete what the output holds, and start over.
    Returns:
        Its manifest (figures, split, heads), where it lies, and the gates' verdicts. A student that was there already
        is reported as it is (`was_done`).
    Raises:
        RelabelError: what is wrong with the spec, the labels, the model or the training.
    """
    from relabel.jobs.commands.train import start_of, train_student

    return train_student(spec, overrides, start=start_of(resume=resume, restart=restart))


class TrainedStudent:
    """A trained student: the folder that `relabel distill` wrote.

    Args:
        path: the folder.
        device: what torch calls it.
    Raises:
        ManifestError, ModelError: the folder holds no student, or one that can't be loaded.
    """

    def __init__(self, path: str, *, device: str = "cpu") -> None:
        from relabel.distill.students.model import load_student

        self.model = load_student(path, device=device)

    def probabilities(self, pairs: Sequence[tuple[str, str]]) -> dict[str, np.ndarray]:
        """Calibrated grade distributions of (query, document) pairs: by head, float32 [B, K], in the order given."""
        return self.model.probabilities(pairs)

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """One number a pair to rank by, from 0 to 1: the expected grade over the highest one, as `Bundle.score`."""
        probs_BK = self.probabilities(pairs)["relevance"].astype("float64")
        grades_K = range(probs_BK.shape[1])
        return [float(value) for value in probs_BK @ list(grades_K) / grades_K[-1]]
