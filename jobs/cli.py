"""The `relabel` command: subcommands, shell completion, secrets of the environment, and errors as exit codes."""

import getpass
import importlib
import itertools
import json
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    ShellComplete,
    ZshComplete,
    add_completion_class,
    shell_complete,
)

from relabel.jobs.logs import (
    VARIABLE,
    is_json,
    json_lines,
    redacted_streams,
    unfailing_streams,
    write,
)
from relabel.jobs.output import BY_HAND, Exit, exit_for
from relabel.jobs.root_help import COMMANDS, MAX_WIDTH, root_help
from relabel.manifests.errors import ConfigError, RelabelError, SaidElsewhereError
from relabel.manifests.files import refusal
from relabel.manifests.process import Terminated, own_process, uncollected
from relabel.manifests.secrets import (
    MIN_CHARS,
    STORAGE_KEY,
    forget_secrets,
    keep_secret,
    names_secret,
    one_line,
    redacted,
    secret_in,
    secret_in_url,
)

# ------------------------------------------------------------------------------
# The `relabel` command: subcommands are loaded when they are called; the one place where errors become exit codes.


COMPLETION = "_RELABEL_COMPLETE"
"""A shell sets it to complete what is typed."""


class LazyGroup(click.Group):
    """A group that imports a command's module when that command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the table, without importing one."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module; None for a name that is not a command."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].place.partition(":")
        with uncollected():
            found: click.Command = getattr(importlib.import_module(module), attribute)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does; an unknown name gets the nearest known one with its refusal."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from relabel.manifests.specs import unknown_name

            raise click.UsageError(unknown_name("command", args[0], list(COMMANDS)))
        return super().resolve_command(ctx, args)

    def get_help(self, ctx: click.Context) -> str:
        """The help of all commands from the table, without importing one."""
        return root_help()


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": MAX_WIDTH},
)
@click.version_option(package_name="relabel-ir", prog_name="relabel")
def relabel() -> None:
    """The command; its help is in `root_help.py`."""


def main(args: list[str] | None = None) -> None:
    """Entry point of the console script: run a command, end with its exit code."""
    if args is None:
        # the whole process is ours, and so are those it starts: none imports what lies in the working directory
        os.environ["PYTHONSAFEPATH"] = "1"
        # pydantic would read the entry points of all that is installed; who instruments it sets the variable empty
        os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
        own_process()
        instruction = os.environ.get(COMPLETION)
        if instruction is not None:
            add_completion_class(_Bash)
            add_completion_class(_Zsh)
            sys.exit(
                shell_complete(
                    relabel,
                    {},
                    "relabel",
                    COMPLETION,
                    instruction,
                )
            )
    arguments = [_with_home(argument) for argument in (sys.argv[1:] if args is None else args)]
    forget_secrets()  # of a command before, in a process that runs several
    keep_environment(os.environ)
    region = os.environ.get("AWS_REGION")
    if region:  # botocore reads the other of the two names alone
        os.environ.setdefault("AWS_DEFAULT_REGION", region)
    try:
        getpass.getuser()
    except (KeyError, OSError):
        # torch asks for the user's name, for a folder of its own, and ends without one, as in a container under a uid
        # without a passwd entry
        os.environ["LOGNAME"] = f"uid-{os.getuid()}"
    keep_arguments(arguments)
    with unfailing_streams() as sink, redacted_streams(), _log_form(arguments):
        result = _ended(arguments)
        code = result if isinstance(result, int) else 0
        sys.stdout.flush()
        if sink is not None and sink.lost is not None:  # the disk is full, or something like it
            _report_error(
                f"relabel: stdout can't be written ({sink.lost}): this output is lost; the work that was done is kept.",
                "error",
            )
            if code == 0 and _only_prints(arguments):
                code = Exit.PARTIAL
    sys.exit(int(code))


def _only_prints(arguments: list[str]) -> bool:
    """Whether nothing is left of a command but what it prints, such as a help text."""
    if not arguments or arguments[0].startswith("-"):
        return True
    return arguments[0] in COMMANDS and COMMANDS[arguments[0]].only_prints


def _with_home(argument: str) -> str:
    """A path with its home folder filled in, which a shell does not do in quotes or after `--option=`."""
    option, path = re.fullmatch(r"(--[a-z-]+=)?(.*)", argument, re.DOTALL).groups("")  # type: ignore[union-attr]
    # a user that there is not leaves the name as it is, which no file will have
    return option + os.path.expanduser(path) if re.match(r"~[\w.-]*/", path) else argument  # noqa: PTH111


def _log_form(arguments: list[str]) -> AbstractContextManager[None]:
    """The form of stderr: set before a command is even parsed, so that a wrong flag is reported in that form too."""
    found = os.environ.get(VARIABLE)
    for before, argument in itertools.pairwise(("", *arguments)):
        if argument.startswith("--log-format=") or before == "--log-format":
            found = argument.removeprefix("--log-format=")
    return json_lines() if found == "json" else nullcontext()


def _ended(arguments: list[str]) -> Any:
    """Run a command; its exit code, with what went wrong said."""
    try:
        refuse_secret_arguments(arguments)
        return relabel.main(args=arguments, prog_name="relabel", standalone_mode=False)
    except click.ClickException as exc:
        code = exc.exit_code
        name = "UsageError"
        message = exc.format_message()
        if is_json():
            _report_error(message, "usage", exit_code=code)
        else:
            exc.show()
    except (KeyboardInterrupt, click.Abort) as exc:
        is_asked = isinstance(exc.__cause__ or exc, Terminated)  # click puts its own error around it
        code = Exit.STOPPED
        name = "Stopped"
        message = "Asked to stop by SIGTERM." if is_asked else BY_HAND
        _report_error(message, "stopped")
    except SystemExit as exc:  # click's way with a pipe that broke; stdout and stderr never do, so it is one of ours
        broken = exc.__context__ if isinstance(exc.__context__, OSError) else OSError(f"ended with {exc.code}")
        code = _failed(broken)
        name = type(broken).__name__
        message = str(broken)
    except SaidElsewhereError as exc:
        return int(exit_for(exc))
    except Exception as exc:  # noqa: BLE001 (the top: see `_failed`)
        error = exc if isinstance(exc, RelabelError) else refusal(exc) or exc
        code = _failed(error)
        name = type(error).__name__
        message = str(error)
    joined = " ".join(arguments)
    if "--output json" in joined or "--output=json" in joined:
        click.echo(json.dumps({"error": name, "message": redacted(message), "exit_code": code}, ensure_ascii=False))
    return code


def _failed(exc: Exception) -> int:
    """Say what went wrong. The one place where any error at all is caught: it ends the process
    with the code that fits.
    """
    if isinstance(exc, RelabelError):
        _report_error(f"relabel: {exc}", "error", error=type(exc).__name__, exit_code=int(exit_for(exc)))
        return int(exit_for(exc))
    lines = "".join(traceback.format_exception(exc))
    if not is_json():
        click.echo(lines, err=True, nl=False)
    theirs = _line_of_a_plugin(exc)
    message = (
        "relabel: this is a fault of relabel, not of your input. Committed work is safe. Please report the lines above."
    )
    if theirs:
        message = (
            f"relabel: this is a fault of {theirs}, a labeler or engine that is no part of relabel. Committed work is "
            "safe: once it is mended, the same command goes on."
        )
    _report_error(message, "crash", error=type(exc).__name__, traceback=lines)
    return int(Exit.OUR_FAULT)


def _line_of_a_plugin(exc: Exception) -> str:
    """`FILE:LINE` of a labeler or engine of somebody else that raised an error; empty where it was relabel."""
    from importlib.metadata import entry_points  # reads every package's facts, for a crash alone

    packages = set()
    for group in ("relabel.labelers", "relabel.engines"):
        packages |= {entry.module.partition(".")[0] for entry in entry_points(group=group)}
    for frame, line in reversed(list(traceback.walk_tb(exc.__traceback__))):
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package == "relabel":
            return ""
        if package in packages:
            return f"{frame.f_code.co_filename}:{line}"
    return ""


def _report_error(message: str, event: str, **fields: Any) -> None:
    if is_json():
        write(message, level="error", event=event, **fields)
    else:
        # what a message lists is a line each; no id, path or text begins one of its own
        click.echo("\n  ".join(map(one_line, message.split("\n  "))), err=True)


# ------------------------------------------------------------------------------
# Completion of commands and options by the shell's TAB; where there is nothing of ours to offer, the shell offers
# files.


class _OrFiles(ShellComplete):
    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        """What fits; for the value of an argument or option that has no names of its own, files."""
        found = super().get_completions(args, incomplete)
        is_option = incomplete.startswith("-") and "=" not in incomplete
        return found if found or is_option else [CompletionItem(incomplete, type="file")]


class _Bash(_OrFiles, BashComplete):
    """For bash."""


class _Zsh(_OrFiles, ZshComplete):
    """For zsh."""


# ------------------------------------------------------------------------------
# Environment variables and arguments: defaults for regions and users, and the secrets in them.


_KEY_OPTIONS = ("RELABEL_SIGN_KEY", "RELABEL_TRUST_KEY", "--sign-key", "--key")
"""What may hold the path of a key as well as the key."""
_NAMES_A_PLACE = re.compile(
    r"(?:FILE|PATH|DIR|FOLDER|HOME|SOCK|NAME|HOST|PORT|PREFIX|TYPE|ENV|UR[IL]|ENDPOINT)S?$", re.IGNORECASE
)
_HOLDS_ITSELF = re.compile(r"PASS|PWD|SECRET|TOKEN|JWT|PAT", re.IGNORECASE)
"""The value of such a name is the secret, even where a file is called so."""
_FILE_SUFFIX = re.compile(
    r"[\w./~ @+-]*\.(?:pem|key|pub|crt|cer|p12|pfx|jks|asc|gpg|json|ya?ml|txt|toml|ini|cfg|conf|sock)"
)
_KEY_OR_OPTION = re.compile(r"(?:--)?[a-z][a-z0-9_-]*(?:\.[a-z][a-z0-9_-]*)*")
"""What is shown of what was typed; any other name may hold a secret itself."""
_SHORT_PATH = re.compile(r"[\w./~-]{1,39}")


def keep_environment(environment: Mapping[str, str]) -> None:
    """Keep the values of variables that name a secret, unless they name a file of one, or a service; and what is secret
    in a URL.
    """
    for name, value in environment.items():
        _keep_named(name, value, f"the variable {name}")
        _keep_url(value, f"the variable {name}")


def keep_arguments(arguments: Sequence[str]) -> None:
    """Keep what was typed after the name of a secret, and what is secret in a URL."""
    for before, argument in zip(("", *arguments), arguments, strict=False):
        for typed in (argument, argument.partition("=")[2]):  # `KEY=VALUE`, and `--set=KEY=VALUE`
            name, _, value = typed.partition("=")
            _keep_named(name.rpartition(".")[2], value, _typed_at(name))
        if before.startswith("--") and "=" not in before:
            _keep_named(before, argument, _typed_at(before))
        _keep_url(argument, "a URL on the command line")


def _typed_at(name: str) -> str:
    return f"{name if _KEY_OR_OPTION.fullmatch(name) else 'a secret'} on the command line"


def _keep_named(name: str, value: str, what: str) -> None:
    """Keep a value under the name of a secret."""
    if len(value) < MIN_CHARS or not names_secret(name, value) or _NAMES_A_PLACE.search(name):
        return
    if _HOLDS_ITSELF.search(name) or not (is_path(value) or (name in _KEY_OPTIONS and _SHORT_PATH.fullmatch(value))):
        keep_secret(value, what)


def _keep_url(text: str, what: str) -> None:
    """Keep user, password and query of a URL, which may have blanks and quotes in them where one was typed."""
    if "://" in text and secret_in_url(text):
        for userinfo, query in re.findall(r"://(?:(.*)@)?[^?]*(?:\?(.*))?", text, re.DOTALL):
            for part in (userinfo, userinfo.partition(":")[2], *(pair.partition("=")[2] for pair in query.split("&"))):
                keep_secret(part, what)


def refuse_secret_arguments(arguments: Sequence[str]) -> None:
    """Refuse an argument with a secret in it before any command sees it: it would be written into plans, pages and
    logs.

    What belongs there passes: a key that was given as such, and storage options.

    Raises:
        ConfigError: names the argument by its place, or the option.
    """
    for position, (before, argument) in enumerate(zip(("", *arguments), arguments, strict=False), start=1):
        option, equals, value = argument.partition("=")
        if not (argument.startswith("--") and equals):
            option = before
            value = argument
        if option in _KEY_OPTIONS or value.startswith(STORAGE_KEY):
            continue
        kind = secret_in(value)
        if kind is not None:
            where = option if option.startswith("--") else f"argument {position}"
            raise ConfigError(
                f"{where}: holds {kind}, which would be written into plans and logs. Use the usual variables and "
                "profiles of the store, or storage_options."
            )


def is_path(text: str) -> bool:
    """Whether a text is taken for the path of a file: there is one, or it ends as a key file's name does."""
    try:
        return _FILE_SUFFIX.fullmatch(text) is not None or (("/" in text or "." in text) and Path(text).exists())
    except (OSError, ValueError):  # too long a name, or a NUL in it
        return False
