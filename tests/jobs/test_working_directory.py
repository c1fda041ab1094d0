"""Nothing that lies in the working directory is imported: every command runs where modules of our names and our
dependencies' lie.
"""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import click
import pyarrow.parquet as pq
import pytest

from relabel.jobs.cli import relabel
from tests.docs.pages import PAGES, blocks
from tests.docs.worlds import cited_answers, finished_run, two_days, write_pairs
from tests.jobs.conftest import folder, no_scheduler  # noqa: F401
from tests.jobs.test_demo import write_tiny_model
from tests.publish.conftest import write_bundle
from tests.teachers.models import write_tiny_decoder

ROOT = Path(__file__).parents[2]
OURS = ("relabel",)
FOLDERS = ("jobs", "labelers", "distill", "export", "manifests")
IS_FULL = os.environ.get("RELABEL_FAULTS") in ("full", "long")
DONE, NOTHING_TO_DO, REFUSED, UNREACHED = {0}, {10}, {3, 4}, {20}

CALLS: dict[str, list[tuple[str, set[int]]]] = {
    "init": [("init first.yaml", DONE)],
    "ask": [("ask crew.yaml --row 1", DONE)],
    "templates export": [("templates export r3a prompts", DONE)],
    "plan": [("plan crew.yaml", DONE)],
    "run": [("run crew.yaml --workers 2", DONE)],
    "rounds": [("rounds search.yaml --workers 1", DONE)],
    "status": [("status crew.yaml", DONE)],
    "retry": [("retry crew.yaml --workers 2", NOTHING_TO_DO)],
    "verify": [("verify crew.yaml", DONE)],
    "merge": [("merge out/monday out/tuesday --to out/week", DONE)],
    "evaluate": [("evaluate out/monday --qrels monday.parquet", DONE)],
    "compare": [("compare out/monday out/other", DONE)],
    "systems": [("systems out/monday out/other --labels out/monday", DONE)],
    "audit": [("audit crew.yaml --rows 4 --to out/audit", DONE)],
    "combine": [("combine out/monday out/other --to combined.parquet", DONE)],
    "review": [
        ("review out/monday --to look.parquet", DONE),
        ("review out/monday --from anna=monday.parquet --to people.parquet", DONE),
    ],
    "convert": [("convert out/monday labels.qrels", DONE), ("convert out/monday labels.jsonl", DONE)],
    "distill": [("distill student.yaml", DONE)],
    "train": [("train teacher.yaml", DONE)],
    "score": [("score out/student --input pairs.parquet --limit 8 --to out/scores", DONE)],
    "export": [("export out/student --to out/bundle --provider cpu --licence MIT", DONE)],
    "bench": [("bench out/bundle --seconds 0.5 --shapes 1xreplay", DONE)],
    "build-engine": [("build-engine out/bundle --to out/engine", REFUSED)],  # TensorRT is not here
    "conform": [("conform http://127.0.0.1:9 out/bundle", UNREACHED)],
    "report": [("report out/monday out/student out/bundle --gold monday.parquet --to report.html", DONE)],
    "pairs cited": [("pairs cited answers.parquet --docs docs.parquet --to cited.parquet", DONE)],
    "pairs context": [("pairs context cited.parquet --to with-context.parquet", DONE)],
    "pairs queries": [
        ("pairs queries cited.parquet --to more.parquet --queries-in query", DONE),
        ("pairs queries cited.parquet --to hard.parquet --queries-in query --candidates out/student", DONE),
    ],
    "pairs chunk": [
        ("pairs chunk cited.parquet --to chunked.parquet", DONE),
        ("pairs chunk cited.parquet --to chunked.parquet --force --format markdown --tokenizer encoder", DONE),
    ],
    "pairs tree": [
        ("pairs tree cited.parquet --to trees.parquet", DONE),
        ("pairs tree cited.parquet --to trees.parquet --force --format markdown", DONE),
    ],
    "pairs unjudged": [
        (
            "pairs unjudged out/monday --labels few.qrels --queries monday.parquet --corpus monday.parquet "
            "--to unjudged.parquet",
            DONE,
        )
    ],
    "pairs similar": [("pairs similar chunked.parquet --to similar.parquet --model encoder", DONE)],
    "publish": [
        ("publish out/bundle models --channel stable --anyway", DONE),
        ("publish second models --channel stable --version two", DONE),
    ],
    "rollback": [("rollback models/ecom stable", DONE)],
    "pull": [("pull models/ecom@stable served", DONE)],
    "channel set": [("channel set models/ecom candidate two", DONE)],
    "list": [("list models", DONE)],
    "show": [("show models/ecom", DONE), ("show served", DONE)],
    "gc": [("gc models", DONE | NOTHING_TO_DO)],
    "schema": [("schema job", DONE), ("schema labels", DONE)],
    "doctor": [("doctor", {0, 4}) if IS_FULL else ("doctor --help", DONE)],  # it loads all that is installed
    "demo": [("demo --engine fake --student encoder --to out/demo" + ("" if IS_FULL else " --labels-only"), DONE)],
}
"""Command → calls, in an order in which each finds what it needs, with the codes that it may end in."""

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


def test_every_command_has_a_call() -> None:
    assert sorted(CALLS) == sorted(commands()), "a new command needs a call here"
    for name, calls in CALLS.items():
        assert calls
        assert all(f"{line} ".startswith(f"{name} ") for line, _ in calls)


def write_specs(folder: Path) -> None:  # noqa: F811
    """A job of two shards, a student and a teacher of Monday's labels, over tiny random models."""
    write_tiny_model(folder / "encoder")
    job = {
        "name": "crew",
        "input": {"path": "pairs.parquet"},
        "labeler": {"name": "graph-grpo"},
        "engine": {"name": "fake", "seed": 7},
    }
    student = {
        "name": "ecom",
        "labels": ["out/monday"],
        "student": {"kind": "encoder", "model": "encoder", "heads": {"relevance": 3}},
        "train": {"epochs": 1, "batch_size": 16, "max_tokens": 32},
        "split": {"dev": 0.2, "test": 0.4},
        "output": "out/student",
    }
    write_tiny_decoder(folder / "decoder")
    teacher = {
        "name": "ecom",
        "method": "sft",
        "init": "decoder",
        "data": {"runs": ["out/monday"]},
        "train": {"max_steps": 1, "batch_size": 2},
        "output": "out/teacher",
    }
    search = {
        "name": "search",
        "input": {"path": "answers.parquet"},
        "labeler": {"name": "review"},
        "engine": {"name": "fake"},
        "rounds": {"corpus": "docs.parquet", "max_rounds": 2},
        "output": "out/search",
        "run": {"max_failed_fraction": 1.0},
    }
    (folder / "search.yaml").write_text(json.dumps(search))
    first = pq.read_table(folder / "monday.parquet").slice(0, 1).to_pylist()[0]
    (folder / "few.qrels").write_text(f"{first['query_id']} 0 {first['doc_id']} 1\n")
    (folder / "crew.yaml").write_text(json.dumps(job | {"output": "out/crew", "shards": 2}))
    (folder / "student.yaml").write_text(json.dumps(student))
    (folder / "teacher.yaml").write_text(json.dumps(teacher))


@pytest.mark.full
def test_no_command_and_no_process_of_theirs_imports_from_the_working_directory(hostile: Path) -> None:
    """All of them, each doing its work: labels, a student of them, its scores, its bundle, measured, published and
    pulled.
    """
    two_days(hostile)
    finished_run(hostile, "other", "monday.parquet", seed=8)
    write_pairs(hostile)
    cited_answers(hostile)
    write_bundle(hostile / "second")
    write_specs(hostile)
    assert_nothing_was_imported(hostile)
    calls = [call for some in CALLS.values() for call in some]
    helps = [[*name.split(), "--help"] for name in CALLS]
    codes = as_script(hostile, [*helps, *(line.split() for line, _ in calls)])
    assert codes[: len(helps)] == [0] * len(helps)
    wrong = {line: code for (line, wanted), code in zip(calls, codes[len(helps) :], strict=True) if code not in wanted}
    assert wrong == {}
    assert (hostile / "served" / "current" / "model.onnx").read_bytes() == (
        hostile / "out" / "bundle" / "model.onnx"
    ).read_bytes()


def test_the_installed_command_and_python_with_m_import_nothing_from_the_working_directory(hostile: Path) -> None:
    """With -m, which is how a launcher may call it, Python looks there for the package itself, before any line of ours
    is run.
    """
    for call in ([Path(sys.executable).with_name("relabel")], [sys.executable, "-m", "relabel"]):
        done = subprocess.run(
            [*call, "schema", "job"], cwd=hostile, env=environment(), capture_output=True, text=True, check=False
        )
        assert_nothing_was_imported(hostile)
        assert done.returncode == 0, done.stderr
        (hostile / "relabel.py").unlink(missing_ok=True)


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
    assert {"delivery.py", "demo.py", "puller.py", "workers.py"} <= set(found)


def test_no_page_starts_relabel_so_that_the_working_directory_is_on_the_path() -> None:
    for page in PAGES:
        assert not re.search(r"(?:python3?|torchrun|launch) .*-m relabel\b", page.read_text(encoding="utf-8")), page
        lines = [line for block in blocks(page) for line in block.lines]
        calls = [line for line in lines if re.match(r"(torchrun|accelerate launch)\b", line)]
        assert [line for line in calls if not re.search(r"--no[-_]python relabel ", line)] == [], page
