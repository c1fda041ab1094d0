"""The `relabel` command: a table of subcommands, loaded when they are called, and the one place where errors become exit codes.

Imports click alone, so that `relabel --help` answers in under 200 ms.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import click

COMMANDS: dict[str, tuple[str, str]] = {
    "init": ("jobs.commands.setup:init", "Write a job file to start from."),
    "plan": ("jobs.commands.label:plan", "Cut the input into shards and chunks; say what a run would do."),
    "run": ("jobs.commands.label:run", "Label what is not labelled yet."),
    "status": ("jobs.commands.inspect:status", "Show what is done, open and quarantined."),
    "retry": ("jobs.commands.label:retry", "Ask the quarantined rows again."),
    "verify": ("jobs.commands.inspect:verify", "Prove that no row is lost or doubled and no file changed."),
    "score": ("jobs.commands.score:score", "Label pairs with a trained student."),
    "merge": ("jobs.commands.merge:merge", "Join outputs made in one way into one."),
    "evaluate": ("jobs.commands.evaluate:evaluate", "Judge labels by human grades; compare a student with its teacher."),
    "compare": ("jobs.commands.compare:compare", "Compare two label runs over the same pairs: two prompts, two teachers."),
    "convert": ("jobs.commands.convert:convert", "Turn labels into TREC qrels, run files, JSONL or Parquet, and back."),
    "report": ("jobs.commands.report:report", "Write one HTML page about runs, students and bundles."),
    "distill": ("jobs.commands.distill:distill", "Train a student on finished label runs."),
    "export": ("jobs.commands.export:export", "Export a student to a bundle: ONNX, checked against it on real pairs."),
    "build-engine": ("jobs.commands.export:build_engine", "Build a TensorRT engine of a bundle, for this machine."),
    "bench": ("jobs.commands.bench:bench", "Measure a bundle's latency and throughput on this machine."),
    "pairs": ("jobs.commands.pairs:pairs", "Build pairs: from citations, and their context documents by BM25."),
    "publish": ("jobs.commands.publish:publish", "Publish a bundle to a store, and point a channel at it."),
    "pull": ("jobs.commands.publish:pull", "Fetch what a channel points to, check it, switch to it; or roll back."),
    "channel": ("jobs.commands.publish:channel", "Point a channel at a published version."),
    "rollback": ("jobs.commands.publish:rollback", "Point a channel at the version before."),
    "list": ("jobs.commands.publish:list_bundles", "List the bundles at a place."),
    "show": ("jobs.commands.publish:show", "Show a bundle's versions and channels, or what one version is."),
    "gc": ("jobs.commands.publish:gc", "Remove versions and files that nothing points to."),
    "schema": ("jobs.commands.setup:schema", "Print a JSON Schema: of the job file, or of the label files."),
    "doctor": ("jobs.commands.setup:doctor", "Show what this machine has: extras, devices, folders."),
    "demo": ("jobs.commands.demo:demo", "Go the whole way with a small set: label, distill, export, publish, pull, score."),
}
"""Command → where it lives, and its line in the help."""


class LazyGroup(click.Group):
    """A group that imports a command's module when that command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module; None for a name that is no command."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        found = getattr(importlib.import_module(module), attribute)
        assert isinstance(found, click.Command)
        return found

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from manifests.specs import unknown_name

            raise click.UsageError(unknown_name("command", args[0], list(COMMANDS)))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Example: relabel run job.yaml --shard 3/64",
)
@click.version_option(package_name="relabel", prog_name="relabel")
def relabel() -> None:
    """Turn a reasoning LLM's relevance judgments into labels that a small model can learn from.

    Every command takes --output json. Exit codes: 0 done, 1 our fault, 2 usage, 3 bad input, 4 something missing, 5 gate refused,
    10 nothing to do, 20 partial (run again), 30 too many quarantined, 75 locked, 130 stopped by hand.
    """


def main(args: list[str] | None = None) -> None:
    """Entry point of the console script: run a command, end with its exit code."""
    arguments = sys.argv[1:] if args is None else args
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that can't show a document's letter must not end a run
    try:
        with _log_form(arguments):
            code = _ended(arguments)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    sys.exit(code if isinstance(code, int) else 0)


def _log_form(arguments: list[str]) -> AbstractContextManager[None]:
    """The form of stderr: set before a command is even parsed, so that a wrong flag is told in that form too."""
    found = os.environ.get("RELABEL_LOG_FORMAT")
    for index, argument in enumerate(arguments):
        if argument.startswith("--log-format="):
            found = argument.partition("=")[2]
        elif argument == "--log-format":
            found = next(iter(arguments[index + 1 :]), None)
    if found != "json":
        return nullcontext()
    from jobs.log_format import json_lines

    return json_lines()


def _ended(arguments: list[str]) -> Any:
    """Run a command; its exit code, with what went wrong said.

    Raises:
        BrokenPipeError: the reader of our output has gone (`relabel status | head`): nothing to say and nobody to say it to.
    """
    try:
        return relabel.main(args=arguments, prog_name="relabel", standalone_mode=False)
    except click.ClickException as exc:
        _show(exc)
        code, name, message = exc.exit_code, "UsageError", exc.format_message()
    except (KeyboardInterrupt, click.Abort):
        _say_error("Stopped by hand.", "stopped")
        code, name, message = 130, "Stopped", "Stopped by hand."
    except SystemExit as exc:  # only when a pipe broke does click exit by itself: with 1, which is our code for a fault of ours
        raise BrokenPipeError from exc
    except Exception as exc:  # noqa: BLE001 (the top: see `_failed`)
        code, name, message = _failed(exc), type(exc).__name__, str(exc)
    if _wants_json(arguments):
        click.echo(json.dumps({"error": name, "message": message, "exit_code": code}, ensure_ascii=False))
    return code


def _failed(exc: Exception) -> int:
    """Say what went wrong. The one place where any error at all is caught: it ends the process with the code that fits."""
    from jobs.exits import Exit, exit_for
    from manifests.errors import RelabelError

    if isinstance(exc, RelabelError):
        _say_error(f"relabel: {exc}", "error", error=type(exc).__name__, exit_code=int(exit_for(exc)))
        return int(exit_for(exc))
    from jobs.log_format import say_crash

    say_crash(exc, "relabel: this is a fault of relabel, not of your input. Committed work is safe. Please report the lines above.")
    return int(Exit.OUR_FAULT)


def _show(exc: click.ClickException) -> None:
    from jobs.log_format import is_json

    if is_json():
        _say_error(exc.format_message(), "usage", exit_code=exc.exit_code)
    else:
        exc.show()


def _say_error(message: str, event: str, **fields: Any) -> None:
    from jobs.log_format import is_json, say

    if is_json():
        say(message, level="error", event=event, **fields)
    else:
        click.echo(message, err=True)


def _wants_json(arguments: list[str]) -> bool:
    joined = " ".join(arguments)
    return "--output json" in joined or "--output=json" in joined
