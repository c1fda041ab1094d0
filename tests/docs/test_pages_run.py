"""The commands of the pages, run: each page in a folder of its own, from its first line to its last, on tiny data.

A `bash` line has to end in 0, or in the code that its comment names (`# exit 10: nothing to do`). A `console` line
also has to print what the page shows under it: line by line, with any number for a number, any digest for a
digest, and anything for a line `…`. On pages of `EXACT` the numbers count, too. Blocks with a title
(`title="job.yaml"`) are files, written before the line that follows them. What can't be run here is in `NOT_RUN` with
its reason, and has to parse (`test_calls`).
"""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from relabel.jobs.cli import COMMANDS
from tests.distill.conftest import encoder_dir  # noqa: F401
from tests.docs.pages import DOCS, PAGES, ROOT, Command, blocks, commands
from tests.docs.worlds import SERVERS, VARIABLES, WORLDS, Rows, call, endpoint, reranker, toy_server
from tests.evaluate.conftest import random_rows  # noqa: F401
from tests.jobs.conftest import folder, no_scheduler  # noqa: F401

NOT_RUN = {
    r"--backend ray": "starts or needs a Ray cluster; tests/ray has one",
    r"/etc/": "changes the machine",
    r"^(sbatch|RAY_ADDRESS=)": "needs a cluster; test_deploy runs the scripts themselves",
    r"^kubectl": "needs a cluster; test_deploy holds the manifests against Kubernetes' schemas",
    r"^(systemctl|journalctl)": "needs systemd as the first process; test_deploy has systemd read the units",
    r"^docker": "needs Triton's container",
    r"^make ": "makes environments of its own; below, each target is one that there is",
    r"^pip install '": "needs a package index; below, each extra is one that there is",
}
"""Lines that are not run, by what is in them, and why not."""

ELSEWHERE = {"s3://bucket/models": "bucket/models", "/srv/": "srv/"}
"""Where a page's places lie in a test: a store may be a folder, and nobody may write to /srv here."""

INSTALLS = "pip install -e ."
SITE = "installed"
"""A page may install the package that it has made: into a folder of the page's own, which Python looks into."""

EXACT = {"label-my-pairs.md"}
"""Pages that make their own data, and so print what a reader sees, to the digit."""

RUNNING = [page for page in PAGES if commands(page)]
_NUMBER = re.compile(r"\b[0-9a-f]{12,}\b|[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
_SIZE = re.compile(r"# (?:bytes|[kMGT]B)\b")


@pytest.fixture
def prepared(
    folder: Path,  # noqa: F811
    random_rows: Rows,  # noqa: F811
    encoder_dir: Callable[..., Path],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[str], None]:
    """`prepared("score.md")`: what that page takes for granted lies in the working folder."""

    def prepare(page: str) -> None:
        monkeypatch.setenv("RELABEL_STUDENT__MODEL", str(encoder_dir()))  # instead of weights from a package index
        monkeypatch.setenv("RELABEL_TRAIN__MAX_TOKENS", "32")  # and what that model holds
        monkeypatch.setenv("RELABEL_TRAIN__EPOCHS", "1")
        monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("PYTHONPATH", str(folder / SITE))
        for name, value in VARIABLES.get(page, {}).items():
            monkeypatch.setenv(name, value)
        WORLDS.get(page, lambda *_: None)(folder, random_rows)

    return prepare


def why_not(line: str) -> str | None:
    return next((reason for pattern, reason in NOT_RUN.items() if re.search(pattern, line)), None)


def shape(line: str) -> str:
    """A line of output without what may differ from run to run: numbers, digests, and how columns are set."""
    return _SIZE.sub("# B", " ".join(_NUMBER.sub("#", line).split()))


def shapes(lines: list[str], *, is_exact: bool) -> list[str]:
    held = [line for line in lines if line.strip()]
    return [" ".join(line.split()) for line in held] if is_exact else [shape(line) for line in held]


def shows(shown: list[str], printed: list[str]) -> bool:
    """Whether the lines of a page are those that were printed, where a line `…` matches any lines."""
    if not shown:
        return not printed
    if shown[0] == "…":
        return any(shows(shown[1:], printed[start:]) for start in range(len(printed) + 1))
    return bool(printed) and shown[0] == printed[0] and shows(shown[1:], printed[1:])


def run(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a line, in this process where it is a plain call of relabel and the page
    installed nothing.
    """
    if line == INSTALLS:
        line = (
            "python -m pip install --quiet --no-index --no-deps --no-build-isolation --disable-pip-version-check "
            f"--target {SITE} ."
        )
    capsys.readouterr()
    if line.startswith("relabel ") and not re.search(r"[|<>;&$]", line) and not Path(SITE).is_dir():
        code = call(*shlex.split(line)[1:])
        out, err = capsys.readouterr()
        assert "Traceback" not in err, err
        return code, out, err
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, timeout=120)
    code = done.returncode if done.returncode >= 0 else 128 - done.returncode  # killed by a signal: as a shell has it
    return code, done.stdout, done.stderr


def write_files(page: Path, before: int, written: set[str]) -> None:
    """Write the files that a page shows before a line of its own, each once."""
    for block in blocks(page):
        if block.title and block.line < before and block.title not in written:
            written.add(block.title)
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(block.text, encoding="utf-8")


@pytest.mark.parametrize("page", RUNNING, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_do_what_the_page_says(
    page: Path, prepared: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    prepared(page.name)
    places, written = dict(ELSEWHERE), set[str]()
    with ExitStack() as running:
        if page.name in SERVERS:
            running.enter_context(SERVERS[page.name]())
        for command in commands(page):
            write_files(page, command.number, written)
            if why_not(command.line):
                continue
            if "localhost:8000" in command.line:
                (model,) = Path().glob("out/bundle/triton/*-fp32/1/model.onnx")
                places["localhost:8000"] = running.enter_context(endpoint(model))
            if command.line.startswith("python toy_server.py"):
                running.enter_context(toy_server())
                continue
            if command.line.startswith("python rerank.py"):
                places["localhost:8080"] = running.enter_context(reranker("out/bundle"))
                continue
            check(command, places, capsys)


def check(command: Command, places: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    line = command.line
    for place, here in places.items():
        line = line.replace(place, here)
    code, out, err = run(line, capsys)
    assert code == command.exit, f"{command.where}: {command.line}\n{out}\n{err}"
    if command.output is not None:
        is_exact = command.page.name in EXACT
        shown = shapes(list(command.output), is_exact=is_exact)
        printed = shapes(out.splitlines(), is_exact=is_exact)
        assert shows(shown, printed), f"{command.where} shows\n" + "\n".join(shown) + "\n\nand this is printed:\n" + out


def test_every_reason_for_not_running_a_line_is_needed() -> None:
    lines = [command.line for page in PAGES for command in commands(page)]
    assert [pattern for pattern in NOT_RUN if not any(re.search(pattern, line) for line in lines)] == []
    assert set(WORLDS) | set(SERVERS) | set(VARIABLES) <= {page.name for page in RUNNING}


def test_every_command_is_on_the_page_of_commands() -> None:
    text = (DOCS / "commands.md").read_text(encoding="utf-8")
    assert set(COMMANDS) <= set(re.findall(r"`([a-z-]+)`", text))


def test_every_extra_that_the_pages_install_and_every_target_that_they_make_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    makefile = (ROOT / "Makefile").read_text()
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    extras = {name for group in re.findall(r"relabel-ir\[([\w,]+)\]", text) for name in group.split(",")}
    assert extras
    assert extras <= set(project["optional-dependencies"])
    targets = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE))
    assert {"demo", "test"} <= targets
    assert [name for name in sorted(targets) if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []
