"""The first ten minutes of somebody new, recorded as text: init, ask, edit a prompt, ask, plan, run, evaluate,
report.

    python benchmarks/first_ten_minutes.py MODEL --to benchmarks/first_ten_minutes_cpu_DATE.md

MODEL is a folder with a small chat model (SmolLM2-135M-Instruct). Every command runs on a terminal of its own in a
fresh folder; what it shows is put down as it is, without colours.
"""

import argparse
import os
import re
import shlex
import sys
import tempfile
import time
from pathlib import Path

import pexpect
import pyarrow as pa
import pyarrow.parquet as pq

from relabel.jobs.commands.demo import load_pairs

ROWS, LONGEST_S = 16, 900
INSTALLS = "pip install 'relabel-ir[cpu,eval]'"
JOB = (
    "sed -i 's/name: fake .*/name: transformers/; s/^  # name: transformers/  model: smollm2-135m/; "
    f"s/limit: 200/limit: {ROWS}/; s/max_think_tokens: 256/max_think_tokens: 24\\n  max_text_tokens: 24/' job.yaml"
)
QUOTES = "sed -i 's/^labeler:/&\\n  evidence: constrained/' job.yaml"
EDIT = "sed -i 's/^That was the document.*/Be strict: a product of another kind is 0. &/' my-prompts/verdict.j2"
WATCHED = "is watched: a change there asks again"


class Recording:
    """Commands in one folder, and what they showed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started_s = time.monotonic()
        self.lines: list[str] = []

    def run(self, line: str) -> None:
        """A command, to its end."""
        shell = self._begin(line)
        shell.expect(pexpect.EOF)
        self._end(shell, shell.before)

    def edit_and_ask_again(self, line: str, edit: str) -> None:
        """A command that watches templates; they are edited from a second terminal, then Ctrl-C."""
        shell = self._begin(line)
        shell.expect_exact(WATCHED)
        text = shell.before + shell.after
        os.system(f"cd {shlex.quote(str(self._folder))} && {edit}")
        shell.expect_exact(WATCHED)
        text += shell.before.replace("note: changed", f"[in a second terminal: {edit}]\nnote: changed") + shell.after
        shell.sendintr()
        shell.expect(pexpect.EOF)
        self._end(shell, text + shell.before)

    def note(self, line: str) -> None:
        """A line that is not run here."""
        self.lines += [f"$ {line}", ""]

    def _begin(self, line: str) -> pexpect.spawn:
        minutes, seconds = divmod(int(time.monotonic() - self._started_s), 60)
        self.lines.append(f"[{minutes:02d}:{seconds:02d}] $ {line}")
        return pexpect.spawn(
            "sh",
            ["-c", line],
            cwd=self._folder,
            env={
                **os.environ,
                "PATH": f"{self._folder}/bin:{os.environ['PATH']}",
                "RELABEL_CACHE": f"{self._folder}/.cache",  # somebody new has no rates of earlier runs
                "TERM": "dumb",
                "COLUMNS": "100",
            },
            encoding="utf-8",
            timeout=LONGEST_S,
            dimensions=(40, 100),
        )

    def _end(self, shell: pexpect.spawn, text: str) -> None:
        shell.close()
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r\n", "\n")
        self.lines += [part.rpartition("\r")[2].rstrip() for part in shown.strip("\n").split("\n")]
        if shell.exitstatus:
            self.lines.append(f"(exit code {shell.exitstatus})")
        self.lines.append("")


def record(model: Path, folder: Path) -> list[str]:
    """All lines of the recording."""
    (folder / "bin").mkdir()
    command = folder / "bin" / "relabel"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m relabel "$@"\n')
    command.chmod(0o755)
    (folder / "smollm2-135m").symlink_to(model.resolve())
    pq.write_table(pa.Table.from_pylist(load_pairs()[:ROWS]), folder / "pairs.parquet")
    recording = Recording(folder)
    recording.note(INSTALLS)
    recording.run("relabel init job.yaml")
    recording.run(JOB)
    recording.run("relabel ask job.yaml --row 3")
    recording.run(QUOTES)
    recording.run("relabel templates export r3a my-prompts")
    recording.edit_and_ask_again("relabel ask job.yaml --row 3 --stage verdict --edit-prompt my-prompts", EDIT)
    recording.run("relabel plan job.yaml")
    recording.run("relabel plan job.yaml --probe")
    recording.run("relabel run job.yaml")
    recording.run("relabel evaluate out/my-labels --qrels pairs.parquet --resamples 200")
    recording.run("relabel report out/my-labels --gold pairs.parquet --to report.html")
    recording.run("ls")
    return recording.lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = record(given.model, Path(folder))
    head = (
        "# The first ten minutes with SmolLM2-135M\n\nA recording as text: what somebody new types and sees, "
        f"{ROWS} pairs and a real model on a CPU. Minutes and seconds are before each command; the model is far too "
        "small to judge: without a grammar it quotes what is not there, and `evaluate` says what its grades are worth. "
        "Made by `python benchmarks/first_ten_minutes.py MODEL --to FILE`.\n"
    )
    given.to.write_text(f"{head}\n```text\n" + "\n".join(lines).rstrip() + "\n```\n", encoding="utf-8")


if __name__ == "__main__":
    main()
