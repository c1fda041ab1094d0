"""Copies docs/ to a folder and adds reference/: the help of every command, the keys of every spec, the metrics.

`make docs` calls it: python .ci/reference.py DOCS FOLDER. Nothing it writes is kept in the repository.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner

from relabel.jobs.cli import COMMANDS, relabel
from relabel.labelers.registry import labeler_names
from relabel.manifests.metrics.judged import METRICS

SPECS = {
    "job": "labels pairs",
    "student": "trains a student",
    "teacher": "trains a teacher",
}


def printed(*words: str) -> str:
    """What a command of relabel prints."""
    done = CliRunner().invoke(relabel, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def helps(name: str, above: click.Context) -> Iterator[str]:
    """The help of a command and of its subcommands."""
    assert isinstance(above.command, click.Group)
    command = above.command.get_command(above, name)
    assert command is not None
    context = click.Context(command, info_name=name, parent=above, **command.context_settings)
    yield f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```"
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            yield from helps(below, context)


def kind(value: dict[str, Any]) -> str:
    """What a key of a spec takes, in words."""
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in value or "enum" in value:
        return ", ".join(f"`{one}`" for one in value.get("enum", [value.get("const")]))
    if "anyOf" in value or "oneOf" in value:
        return " or ".join(kind(one) for one in value.get("anyOf", value.get("oneOf")))
    if value.get("type") == "array":
        return f"list of {kind(value.get('items', {}))}"
    return {"null": "null", "string": "text", "object": "mapping"}.get(value.get("type", ""), value.get("type", "any"))


def keys(node: dict[str, Any], above: str = "") -> Iterator[str]:
    """A line for each key of a section, those of sections inside it too."""
    for name, value in node.get("properties", {}).items():
        default = value.get("default")
        ending = f"; default `{json.dumps(default, ensure_ascii=False)}`" if default not in (None, {}, []) else ""
        ending = "" if isinstance(default, dict) else "; required" if name in node.get("required", ()) else ending
        text = re.sub(r"\s+", " ", value.get("description", ""))
        yield f"- **`{above}{name}`** ({kind(value)}{ending}){': ' * bool(text)}{text}"
        yield from keys(value, f"{above}{name}.")


def spec_page(name: str) -> str:
    """A section for the file and for each part of it."""
    schema = json.loads(printed("schema", name))
    tops = schema.get("oneOf", [schema])
    parts = [(top.get("title", name), top) for top in tops] + list(schema.get("$defs", {}).items())
    sections = [f"## {title}\n\n{part.get('description', '')}\n\n" + "\n".join(keys(part)) for title, part in parts]
    return f"# Keys of a {name}\n\nAs `relabel schema {name}` prints them.\n\n" + "\n\n".join(sections)


def metrics_page() -> str:
    rows = ["| metric | in JSON and gates | what it is |", "|---|---|---|"]
    for metric in METRICS:
        names = ", ".join(f"`{name.replace('{}', '…')}`" for name in (metric.name, *metric.aliases))
        title = metric.title.replace("{}", "…") + (" ↓" if metric.direction == "lower" else "")
        rows.append(f"| {title} | {names} | {metric.what} |")
    symbols = "Of N rows and K grades: gold g, label l, distribution p(k). 0/0 is undefined. ↓: lower is better."
    return f"# Metrics\n\n{symbols}\n\n" + "\n".join(rows)


def columns_page() -> str:
    """Columns of the label files of each labeler."""
    words = [("labels", "--labeler", name) for name in labeler_names()] + [("quarantine",)]
    return "# Columns of label files\n\n" + "\n\n".join(
        f"## {one[-1]}\n\n```text\n{printed('schema', *one)}```" for one in words
    )


def main(docs: str, folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(docs, folder)
    above = click.Context(relabel, info_name="relabel", **relabel.context_settings)
    pages = {name: spec_page(name) for name in SPECS}
    pages["options"] = "# Options of every command\n\n" + "\n\n".join(
        section for name in COMMANDS for section in helps(name, above)
    )
    pages |= {"metrics": metrics_page(), "columns": columns_page()}
    (Path(folder) / "reference").mkdir()
    for name, text in pages.items():
        (Path(folder) / "reference" / f"{name}.md").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
