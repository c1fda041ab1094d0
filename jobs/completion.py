"""Completion of commands and options by the shell's TAB; where there is nothing of ours to offer, the shell offers
files.
"""

from __future__ import annotations

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    ShellComplete,
    ZshComplete,
    add_completion_class,
    shell_complete,
)


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


def complete(command: click.Command, variable: str, instruction: str) -> int:
    """Answer a shell; the exit code.

    Args:
        variable: the one that a shell asks by.
        instruction: what it holds: the shell, and what is wanted. `bash_source` prints what a shell reads at its start.
    """
    for cls in (_Bash, _Zsh):
        add_completion_class(cls)
    return shell_complete(command, {}, "relabel", variable, instruction)
