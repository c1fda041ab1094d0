"""The command `audit`: how a judge can be fooled."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from relabel.jobs.commands.label import score_job_of
from relabel.jobs.commands.options import (
    columns_option,
    date_option,
    given_parameters,
    local_folder,
    log_option,
    names_column_options,
    output_option,
    refuse_given,
    report_refused,
    scored_model_options,
    set_option,
)
from relabel.jobs.output import emit, note
from relabel.manifests.errors import UsageError

if TYPE_CHECKING:
    from relabel.jobs.job import Job

JOB_SUFFIXES = (".yaml", ".yml", ".json")
OF_MODELS = ("columns", "device", "precision", "api", "served_model", "api_key_env")


@click.command(epilog="Example: relabel audit job.yaml --rows 100 --require 'stuffing<=0.05'")
@click.argument("target", metavar="JOB.YAML|STUDENT|BUNDLE|RERANKER")
@click.option(
    "--pairs",
    multiple=True,
    metavar="PAIRS",
    help="Parquet file, folder, glob or URL of pairs to change. Repeatable.  [default: the job's input]",
)
@columns_option("Columns of --pairs other than those the student was trained on.")
@click.option(
    "--colder",
    metavar="FILE",
    help="A subset of ColDeR (JSON lines) in place of --pairs and of all probes.",
)
@click.option("--to", metavar="DIR", help="Folder of the audit.  [default: measurements/NAME/audit next to the judge]")
@click.option("--rows", type=click.IntRange(1), metavar="N", help="Pairs to change.  [default: the job's, or 300]")
@click.option(
    "--probe",
    "probes",
    multiple=True,
    metavar="NAME",
    help="Try this probe, and the judge's noise. Repeatable.  [default: all]",
)
@click.option(
    "--require",
    "require",
    multiple=True,
    metavar="GATE",
    help="Exit 5 unless this holds, for instance 'stuffing<=0.05': at most one pair in 20 moves the wrong way. "
    "Repeatable.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=7,
    show_default=True,
    help="Of the choice of pairs, and of resamples.",
)
@set_option
@date_option
@click.option("--device", default="auto", show_default=True, metavar="NAME", help="Of a model: as in relabel score.")
@scored_model_options
@log_option
@output_option
def audit(
    target: str,
    pairs: tuple[str, ...],
    columns: dict[str, Any],
    colder: str | None,
    to: str | None,
    rows: int | None,
    probes: tuple[str, ...],
    require: tuple[str, ...],
    seed: int,
    overrides: tuple[str, ...],
    day: str | None,
    output: str,
    **of_model: Any,
) -> int:
    """Say how a judge can be fooled: change pairs so that their relevance stays, and see whether the grades move.

    The judge is a job's labeler and engine, a student, a bundle, or a reranker's folder or address. Each probe changes
    the same pairs in one way: query words stuffed into the document, an instruction to the judge, a forged answer,
    length, lorem ipsum, and others. Shown are the mean move of the expected grade and the share of pairs that moved the
    wrong way by a tenth of the scale, with 95 % intervals over queries, next to the judge's own noise. docs/audit.md
    has all probes.

    The same command again continues a killed audit, and asks nothing where all is answered. Exit 5: a gate of --require
    or of the job's `audit.require` failed; `relabel publish` then wants --anyway.
    """
    from relabel.jobs.audit import AUDIT_NAME, AuditOptions, AuditResult
    from relabel.jobs.audit import audit as audit_judge
    from relabel.jobs.colder import read_colder
    from relabel.jobs.job import load_job
    from relabel.manifests.files import Storage
    from relabel.manifests.metrics.evaluation import parse_flag, parse_gate
    from relabel.manifests.specs import Columns

    given = given_parameters()
    gates = [parse_flag(text) for text in require]
    is_job = target.endswith(JOB_SUFFIXES) or Path(target).is_file()
    job = None
    if is_job:
        refuse_given(given, OF_MODELS, f"{target} is a job, which says that itself.")
        job = load_job(target, overrides=overrides, day=day)
    else:
        refuse_given(given, ("overrides", "day"), f"{target} is no job file.")
    folder = _folder_of(target if job is None else job.spec.output, to, colder)
    own = None
    if colder is not None:
        if probes:
            raise UsageError("--probe: --colder brings a probe of its own.")
        refuse_given(given, ("pairs", "columns"), "--colder brings pairs of its own.")
        path = folder / "colder.parquet"
        own = read_colder(colder, path, Storage())
        pairs = (str(path),)
        columns = {"query_id": "query_id", "query": "query", "doc_id": "doc_id", "document": ["document"]}
    if job is None:
        job = _job_of_model(target, pairs, columns, of_model)
    elif pairs:
        job = job.changed("input", path=pairs, table=None, snapshot=None, since=None)
    if own is not None:
        job = job.changed("input", columns=Columns(), limit=None)
    elif is_job:
        gates += [parse_gate(name, f"<={bound}") for name, bound in job.spec.audit.require.items()]
    options = AuditOptions(
        to=str(folder),
        rows=rows or job.spec.audit.rows,
        gates=gates,
        probes=probes,
        own=own,
        seed=seed,
    )
    with names_column_options(are_options=not is_job):
        result = audit_judge(job, options, report_progress=note)
    if isinstance(result, AuditResult):
        report_refused(result.gates)
        note(f"the audit is {folder / AUDIT_NAME}")
    return emit(result, output, result.exit_code)


def _folder_of(judge: str, to: str | None, colder: str | None) -> Path:
    """Where the audit goes: as named, else next to the judge."""
    from relabel.jobs.audit import audit_folder

    if to is not None:
        return local_folder(to, "--to")
    name = "audit" if colder is None else f"colder-{Path(colder).stem}"
    return audit_folder(local_folder(judge, "the judge, without --to,"), name)


def _job_of_model(target: str, pairs: tuple[str, ...], columns: dict[str, Any], of_model: dict[str, Any]) -> Job:
    """The job that a student, a bundle or a reranker would score these pairs by."""
    from relabel.jobs.score import ScoreOptions
    from relabel.manifests.files import Storage
    from relabel.manifests.plan import PLAN_NAME

    if Path(target, PLAN_NAME).is_file():
        raise UsageError(
            f"{target}: the output of a run. Name the job file, whose judge is asked: relabel audit JOB.YAML"
        )
    if not pairs:
        raise UsageError(f"{target} names no pairs: give some with --pairs.")
    unused = str(Path.cwd() / "unused")
    return score_job_of(target, ScoreOptions(input=pairs, to=unused, columns=columns, **of_model), Storage())
