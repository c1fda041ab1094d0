"""A command line that a message offers is one to be pasted: it means the job that was asked, and no other."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]
FAILING = {
    "labeler": {"name": "direct", "attempts": 1},
    "engine": {"name": "fake", "seed": 7, "args": {"p_garbage": 0.3}},
    "run": {"chunk_rows": 4, "max_failed_fraction": 1.0},
}


def offered(text: str, command: str) -> list[str]:
    """The words of the one `relabel COMMAND …` that a text ends a line with."""
    (line,) = re.findall(rf"relabel ({command} .+)$", text, flags=re.MULTILINE)
    return shlex.split(line)


@pytest.mark.parametrize("name", ["two words.yaml", "-dash.yaml"])
@pytest.mark.parametrize("changes", [[], ["--set", "output=out/other place"], ["--date", "2026-11-19"]])
def test_a_retry_that_is_offered_asks_the_output_that_the_run_left(
    relabel: Call, write_pairs: Call, write_job: Call, folder: Path, name: str, changes: list[str]
) -> None:
    write_pairs()
    write_job({**FAILING, "output": "out/ecom-${date}"}, path=name)
    ended = relabel("run", *changes, "--", name)
    assert ended.code == 0, ended
    (output,) = (path for path in (folder / "out").iterdir())
    command, *words = offered(ended.err, "retry")
    again = relabel(command, "--output", "json", *words)
    assert again.code in (0, 20), again
    assert Path(again.json["output"]).name == output.name
    assert again.json["this_run"]["requests"] > 0
    assert list((folder / "out").iterdir()) == [output]


def test_a_retry_that_can_do_no_more_names_the_command_that_can(
    relabel: Call, write_pairs: Call, write_job: Call
) -> None:
    write_pairs()
    job = write_job({"labeler": {"name": "direct"}})
    assert relabel("run", job, "--shard", "0/4").code == 0
    left = relabel("retry", job)
    assert left.code == 20
    assert "run the same command again" not in left.out
    assert relabel(*offered(left.err, "run")).code == 0
