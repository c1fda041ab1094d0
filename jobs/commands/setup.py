"""The commands `init`, `schema` and `templates`: spec files, JSON Schemas and prompt templates to start from."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import click

from relabel.jobs.commands.options import FORCE_HELP, local_folder, output_option
from relabel.jobs.exits import Exit
from relabel.jobs.files import check_free, written
from relabel.jobs.output import emit, grid
from relabel.manifests.errors import UsageError
from relabel.manifests.files import Storage

# ------------------------------------------------------------------------------
# `init` and `schema`: what one needs to write a first job.


NEXT = {
    "job": "Set input.path in it, then: relabel plan",
    "student": "Set labels and gold in it, then: relabel distill",
    "teacher": "Set init and data in it, then: relabel train --dry-run",
}
"""By kind of spec, what to do with one that is fresh."""


@click.command(epilog="Example: relabel init job.yaml")
@click.argument("path", required=False)
@click.option(
    "--kind", type=click.Choice(list(NEXT)), default="job", show_default=True, help="What the file is a spec of."
)
@click.option("--force", is_flag=True, help=FORCE_HELP)
@output_option
def init(path: str | None, kind: str, force: bool, output: str) -> int:
    """Write a spec file to start from, with a comment for each key: PATH, by default KIND.yaml.

    Its JSON Schema is put next to it as KIND.schema.json, and the file's first line names that: editors with a YAML
    language server then offer keys and explain them.
    """
    path = path or f"{kind}.yaml"
    schema_file, storage = Path(path).with_name(f"{kind}.schema.json"), Storage()
    check_free(path, [], storage, force=force)
    text = resources.files("relabel.jobs").joinpath(f"templates/{kind}.yaml").read_text(encoding="utf-8")
    texts = {
        str(schema_file): _schema_text(kind),
        path: f"# yaml-language-server: $schema={schema_file.name}\n{text}",
    }
    for name, held in texts.items():
        with written(name, storage) as file:
            file.write_text(held, encoding="utf-8")
    return emit({"path": path, "schema": str(schema_file)}, f"Wrote {path}. {NEXT[kind]} {path}", output)


def _schema_text(kind: str, *, indent: int | None = 2) -> str:
    from relabel.jobs.settings import schemas

    return json.dumps(schemas()[kind](), indent=indent, ensure_ascii=False)


@click.command(epilog="Example: relabel schema job > job.schema.json")
@click.argument("what", type=click.Choice([*NEXT, "labels", "quarantine"]))
@click.option(
    "--labeler",
    metavar="NAME",
    help="With `labels`: also the columns that this labeler's label files have of their own.",
)
@output_option
def schema(what: str, labeler: str | None, output: str) -> int:
    """Print the JSON Schema of a job, student or teacher file, or the columns of label and quarantine files."""
    if labeler is not None and what != "labels":
        raise UsageError(
            f"--labeler {labeler}: {what} files have no columns of a labeler's. Use it with `relabel schema labels`."
        )
    if what in NEXT:
        click.echo(_schema_text(what, indent=None if output == "json" else 2))
        return Exit.DONE
    from relabel.manifests import schemas

    found, version = (
        (schemas.LABELS, schemas.SCHEMA_VERSION) if what == "labels" else (schemas.QUARANTINE, schemas.ROWS_VERSION)
    )
    columns = [{"name": column.name, "type": str(column.type)} for column in found]
    if labeler is not None:
        from relabel.labelers.registry import labeler_class

        own = labeler_class(labeler).columns
        columns += [
            {"name": column.name, "type": str(schemas.KINDS[column.kind]), "about": column.about} for column in own
        ]
    lines = grid([(column["name"], f"{column['type']}  {column.get('about', '')}".rstrip()) for column in columns])
    return emit({"schema": what, "version": version, "columns": columns}, f"{what}, version {version}\n{lines}", output)


# ------------------------------------------------------------------------------
# `templates`: the built-in prompts as files to edit.


@click.group(epilog="Example: relabel templates export r3a my-prompts")
def templates() -> None:
    """Prompt templates: what a labeler asks, as files."""


@templates.command(
    "export",
    short_help="Write a labeler's built-in templates.",
    epilog="Example: relabel templates export r3a my-prompts",
)
@click.argument("labeler", metavar="LABELER")
@click.argument("folder", metavar="DIR")
@click.option("--force", is_flag=True, help="Replace files that are there.")
@output_option
def export_templates(labeler: str, folder: str, force: bool, output: str) -> int:
    """Write a labeler's built-in prompt templates to a folder, to edit them there.

    A job uses them once `labeler.templates` names the folder; the labels of files that were not edited are those of the
    built-in ones. `relabel ask JOB.YAML --edit-prompt DIR` asks again whenever one of them changes.
    """
    from relabel.labelers.base import template_files

    target = local_folder(folder, "DIR")
    files = template_files(labeler)
    storage = Storage()
    for name in files:
        check_free(str(target / name), [], storage, force=force)
    for name, source in files.items():
        with written(str(target / name), storage) as path:
            path.write_bytes(source.read_bytes())
    said = (
        f"Wrote {len(files)} templates of {labeler} to {folder}: {', '.join(files)}\n"
        "A job next to it takes them by these lines (a relative path counts from the job file's folder):\n\n"
        f"labeler:\n  name: {labeler}\n  templates: {folder}"
    )
    return emit({"labeler": labeler, "folder": folder, "files": list(files)}, said, output)
