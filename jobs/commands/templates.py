"""`templates`: the built-in prompts as files to edit."""

from __future__ import annotations

import os
from pathlib import Path

import click

from relabel.jobs.commands.options import local_folder, output_option
from relabel.jobs.files.durable_files import check_free, written
from relabel.jobs.output import emit
from relabel.manifests.errors import UsageError
from relabel.manifests.storage.context import Storage
from relabel.manifests.storage.filesystems import is_url


@click.group(epilog="Example: relabel templates export r3a my-prompts --job job.yaml")
def templates() -> None:
    """Prompt templates: what a labeler asks, as files."""


@templates.command(
    "export",
    short_help="Write a labeler's built-in templates.",
    epilog="Example: relabel templates export r3a my-prompts --job job.yaml",
)
@click.argument("labeler", metavar="LABELER")
@click.argument("folder", metavar="DIR")
@click.option("--job", "job_file", metavar="JOB.YAML", help="Name DIR in this job file too; its comments stay.")
@click.option("--force", is_flag=True, help="Replace files that are there.")
@output_option
def export_templates(labeler: str, folder: str, job_file: str | None, force: bool, output: str) -> int:
    """Write a labeler's built-in prompt templates to a folder, to edit them there.

    A job uses them once `labeler.templates` names the folder; the labels of files that were not edited are those of the
    built-in ones. `relabel ask JOB.YAML --edit-prompt DIR` asks again whenever one of them changes.
    """
    from relabel.labelers.template_files import template_files

    target = local_folder(folder, "DIR")
    files = template_files(labeler)
    edited = _edited(job_file, labeler, target) if job_file is not None else None
    storage = Storage()
    for name in files:
        check_free(str(target / name), [], storage, force=force)
    for name, source in files.items():
        with written(str(target / name), storage) as path:
            path.write_bytes(source.read_bytes())
    if job_file is not None and edited is not None:
        with written(job_file, storage) as path:
            path.write_text(edited, encoding="utf-8")
    said = f"Wrote {len(files)} templates of {labeler} to {folder}: {', '.join(files)}\n" + (
        _in_a_job(labeler, folder) if edited is None else f"{job_file} names the folder in labeler.templates."
    )
    result = {"labeler": labeler, "folder": folder, "files": list(files), "job": job_file}
    return emit(result, said, output)


def _in_a_job(labeler: str, folder: str) -> str:
    return (
        "A job beside it takes them by these lines (a relative path counts from the job file's folder; --job JOB.YAML "
        f"writes them):\n\nlabeler:\n  name: {labeler}\n  templates: {folder}"
    )


def _edited(job_file: str, labeler: str, folder: Path) -> str:
    """The job file's text with `labeler.templates` set.

    Raises:
        UsageError: it is another labeler's job, lies at a URL, or is written in a way that is not ours to change.
        ConfigError: the file can't be read, or is no job.
    """
    from relabel.jobs.planning.settings import JOB
    from relabel.jobs.planning.spec_edits import with_key
    from relabel.jobs.planning.spec_yaml import read_spec_file

    if is_url(job_file):
        raise UsageError(f"--job {job_file}: only a file on this machine is changed. Put labeler.templates in by hand.")
    section = read_spec_file(job_file, beginning=JOB.beginning, keys=JOB.fields).get("labeler")
    asked = section.get("name") if isinstance(section, dict) else None
    if asked != labeler:
        raise UsageError(f"--job {job_file}: its labeler is {asked}, not {labeler}. Export the templates of that one.")
    path = os.path.relpath(folder.absolute(), Path(job_file).absolute().parent)
    edited = with_key(Path(job_file).read_text(encoding="utf-8"), "labeler", "templates", path)
    if edited is None:
        raise UsageError(
            f"--job {job_file}: can't be changed by rule. Add `templates: {path}` below `labeler` by hand, and leave "
            "out --job."
        )
    return edited
