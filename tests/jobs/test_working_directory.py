"""Nothing that lies in the working directory is imported: every command runs where modules of our names and our
dependencies' lie.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import click
import pytest

from relabel.jobs.cli import relabel
from tests.docs.pages import PAGES, blocks
from tests.faults.command_lines import LINES, Line, write_world
from tests.jobs.conftest import folder, no_scheduler  # noqa: F401

ROOT = Path(__file__).parents[2]
OURS = ("relabel",)
FOLDERS = ("jobs", "labelers", "distill", "export", "manifests")
IS_FULL = os.environ.get("RELABEL_FAULTS") in ("full", "long")
CALLS = [line for line in LINES.values() if IS_FULL or line.parent == "light"] + [
    Line("run more.yaml --workers 2"),
    Line("rounds search.yaml --workers 1 --set output=out/again"),
    Line("ask ecom.yaml --row 1"),
    Line("pairs chunk pairs.parquet --to chunked.parquet --format markdown"),
    Line("pairs tree pairs.parquet --to trees.parquet --format markdown"),
    Line("show served"),
]
"""Every command, those that begin processes or load more libraries in other ways too. `doctor` loads all that is
installed, `build-engine` finds no TensorRT.
"""

SCRIPT = """
import json, sys, traceback
from relabel.jobs.cli import main
ends = []
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as end:
        ends.append(end.code)
    print(" ".join(words), ends[-1], file=sys.stderr)
print("\\n" + json.dumps(ends))
"""
"""A script as the installed `relabel` is one: its own folder is first on the path. One process
for many commands.
"""


def distributions() -> Iterator[str]:
    """Ours and all that we may need, with every extra, as far as it is installed here."""
    waiting, seen = ["relabel-ir"], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            needed = requires(name) or []
        except PackageNotFoundError:
            continue
        yield name
        wanted = needed if name == "relabel-ir" else [one for one in needed if "extra ==" not in one]
        waiting += [re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", one, maxsplit=1)[0]).lower() for one in wanted]


def module_names() -> list[str]:
    """Top-level modules of those distributions."""
    known = {re.sub(r"[-_.]+", "-", name).lower() for name in distributions()}
    provided = {
        module
        for module, names in packages_distributions().items()
        if known & {re.sub(r"[-_.]+", "-", name).lower() for name in names}
    }
    return sorted(name for name in {*provided, *OURS} if name.isidentifier() and name not in sys.stdlib_module_names)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In which every command has something to do, written where nothing hostile is."""
    found = tmp_path_factory.mktemp("worlds") / "world"
    write_world(found, is_heavy=IS_FULL)
    (found / "more.yaml").write_text((found / "new.yaml").read_text().replace("out/new", "out/more"))
    return found


@pytest.fixture
def hostile(folder: Path) -> Path:  # noqa: F811
    """The working directory, full of modules that leave a mark when they are imported."""
    marks = folder / "imported"
    names = module_names()
    assert set(OURS) < set(names)
    assert {"numpy", "pyarrow", "click", "yaml", "torch", "ray", "s3fs", "pip", "llguidance"} - set(names) <= {
        "pip",
        "ray",
    }
    for name in {*names, "pip", "vllm", "tensorrt", "tensorrt_rtx", "onnxruntime", "sitecustomize", "usercustomize"}:
        (folder / f"{name}.py").write_text(
            f"open({str(marks)!r}, 'a').write({name!r} + chr(10))\nraise ImportError({name!r})\n"
        )
    return folder


def assert_nothing_was_imported(folder: Path) -> None:  # noqa: F811
    marks = folder / "imported"
    assert not marks.exists(), sorted(set(marks.read_text().split()))


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("RELABEL_", "PYTHON"))}


def as_script(folder: Path, calls: list[list[str]]) -> list[int]:  # noqa: F811
    """Exit codes of calls made one after the other in a process that was started as the console script is."""
    (folder.parent / f"{folder.name}-bin").mkdir()
    script = folder.parent / f"{folder.name}-bin" / "command.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(calls)],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert_nothing_was_imported(folder)
    assert done.returncode == 0, done.stderr[-4000:]
    print(done.stderr[-8000:])  # shown by pytest where a code was not the one wanted
    codes: list[int] = json.loads(done.stdout.splitlines()[-1])
    return codes


def commands(group: click.Group = relabel, before: tuple[str, ...] = ()) -> Iterator[str]:
    """Every command of the table that can be called, those inside a group too."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*before, name))
        else:
            yield " ".join((*before, name))


def test_no_command_and_no_process_of_theirs_imports_from_the_working_directory(hostile: Path, world: Path) -> None:
    """All of them, each doing its work; those that train and export in `make faults`."""
    shutil.copytree(world, hostile, symlinks=True, dirs_exist_ok=True)
    assert_nothing_was_imported(hostile)
    helps = [[*name.split(), "--help"] for name in commands()]
    codes = as_script(hostile, [*helps, *(line.text.split() for line in CALLS)])
    assert codes[: len(helps)] == [0] * len(helps)
    wrong = {line.text: code for line, code in zip(CALLS, codes[len(helps) :], strict=True) if code != line.code}
    assert not wrong, wrong


@pytest.mark.full
def test_a_launcher_that_starts_relabel_as_the_docs_say_imports_nothing_from_the_working_directory(
    hostile: Path, world: Path
) -> None:
    shutil.copytree(world, hostile, symlinks=True, dirs_exist_ok=True)
    scripts = Path(sys.executable).parent
    call = [
        scripts / "torchrun",
        "--no-python",
        "--nproc-per-node",
        "1",
        scripts / "relabel",
        "distill",
        "learn.yaml",
    ]
    done = subprocess.run(call, cwd=hostile, env=environment(), capture_output=True, text=True, check=False)
    assert_nothing_was_imported(hostile)
    assert done.returncode == 0, done.stderr[-4000:]


def test_the_installed_command_has_its_own_folder_first_on_the_path_and_not_the_working_directory(
    hostile: Path,
) -> None:
    script = Path(sys.executable).with_name("relabel")
    done = subprocess.run(
        [script, "schema", "job"], cwd=hostile, env=environment(), capture_output=True, text=True, check=False
    )
    assert_nothing_was_imported(hostile)
    assert done.returncode == 0, done.stderr


def test_python_with_m_relabel_imports_no_dependency_from_the_working_directory(hostile: Path) -> None:
    """Which is how a launcher may call it. The package itself Python looks for there first, before any line of ours is
    run.
    """
    (hostile / "relabel.py").unlink()
    call = [sys.executable, "-m", "relabel", "schema", "job"]
    done = subprocess.run(call, cwd=hostile, env=environment(), capture_output=True, text=True, check=False)
    assert_nothing_was_imported(hostile)
    assert done.returncode == 0, done.stderr


def test_every_python_that_we_start_leaves_the_working_directory_out() -> None:
    """`-P` or `-I` follows each `sys.executable` of the five packages, so that a library's user is as safe as the
    command's.
    """
    found = []
    for path in (path for name in FOLDERS for path in sorted((ROOT / name).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.List) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
                found.append(path.name)
                assert ast.unparse(node.elts[1]) in ("'-P'", "'-I'"), f"{path}:{node.lineno}"
    assert {"steps.py", "downloads.py", "puller.py"} <= set(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_no_page_starts_relabel_so_that_the_working_directory_is_on_the_path(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"(?:python3?|torchrun|launch) .*-m relabel\b.*", text) == []
    lines = [
        line for block in blocks(page) for line in block.lines if re.match(r"(torchrun|accelerate launch)\b", line)
    ]
    assert [line for line in lines if not re.search(r"--no[-_]python relabel ", line)] == []
