"""What holds for every command: light help, one JSON object, stdout for results alone, one table of exit codes."""

import errno
import importlib.metadata
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.jobs.job import load_job
from relabel.jobs.output import Exit, exit_for
from relabel.jobs.root_help import COMMANDS
from relabel.manifests import errors
from relabel.manifests.process import Terminated

HEAVY = {
    "torch",
    "vllm",
    "transformers",
    "onnxruntime",
    "ray",
    "botocore",
    "pydantic",
    "pyarrow",
    "polars",
    "numpy",
    "rich",
    "yaml",
    "fsspec",
    "jinja2",
    "hypothesis",
}
CODES = {
    "RelabelError": 3,
    "TransientError": 20,
    "EngineCrashError": 20,
    "PeerLostError": 20,
    "DiskFullError": 20,
    "StoreUnreachableError": 20,
    "ChannelMovedError": 20,
    "NothingNewError": 10,
    "LockHeldError": 75,
    "TerminalError": 3,
    "UsageError": 2,
    "ConfigError": 3,
    "InputError": 3,
    "ManifestError": 3,
    "StaleRunError": 3,
    "StoreError": 3,
    "ModelError": 4,
    "MissingExtraError": 4,
    "EngineLostError": 4,
    "ServerGoneError": 20,
    "UnreadableError": 20,
    "GateError": 5,
    "SaidElsewhereError": 3,
    "TrainingError": 3,
    "VerdictError": 3,
}


def subclasses(kind: type[errors.RelabelError]) -> Iterator[type[errors.RelabelError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from subclasses(child)


ERRORS = sorted(set(subclasses(errors.RelabelError)), key=lambda kind: kind.__name__)


def fresh(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with an environment that holds no variable of ours."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RELABEL_")}
    environment.update(options.pop("variables", {}))
    encoding = environment.get("PYTHONIOENCODING", "utf-8")
    call = [sys.executable, "-c", "from relabel.jobs.cli import main; main()", *arguments]
    return subprocess.run(
        call, env=environment, encoding=encoding, check=False, timeout=60, **{"capture_output": True, **options}
    )


def test_help_loads_nothing_heavy() -> None:
    """One process: the help of relabel itself, then that of commands, whatever they run."""
    code = (
        "import sys\nfrom relabel.__main__ import main\n"
        "for words in ([], ['run'], ['plan'], ['retry'], ['rounds'], ['score'], ['distill'], ['train']):\n"
        "    sys.argv[1:] = [*words, '--help']\n    try:\n        main()\n"
        "    except SystemExit as end:\n        assert not end.code, end\n"
        "    print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.count("Usage: relabel") == 8
    first, *others = (set(line.split()) for line in done.stderr.splitlines())
    assert not first & {"click", *HEAVY}
    assert not set().union(*others) & HEAVY


@pytest.mark.parametrize("is_asked_for", [False, True])
def test_a_library_s_warning_of_a_version_to_come_is_shown_to_who_asks_for_it(is_asked_for: bool) -> None:
    code = (
        "import sys, warnings\nfrom relabel.jobs.cli import main\nsys.argv[1:] = ['schema', 'labels']\n"
        "try:\n    main()\nexcept SystemExit:\n    warnings.warn('will be gone', FutureWarning)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    if is_asked_for:
        environment["PYTHONWARNINGS"] = "default"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert "row_id" in done.stdout
    assert ("will be gone" in done.stderr) is is_asked_for


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_is_the_one_reviewed_and_ends_in_an_example(
    relabel: Callable[..., Any],
    golden: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
    command: str | None,
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    done = relabel(*([command] if command else []), "--help")
    assert (done.code, done.err) == (0, "")
    assert done.out.rstrip().rpartition("\n")[2].strip().startswith(f"Example: relabel {command or 'run'} ")
    golden(f"help/{command or 'relabel'}.txt", done.out)
    example = done.out.rstrip().rpartition("Example: relabel ")[2].partition(">")[0].split()
    assert relabel(*example, "--help").code == 0, "it does not parse"


def test_unknown_command_and_flag_name_the_nearest(relabel: Callable[..., Any]) -> None:
    relabel("rnu").refused(
        2, 'No command "rnu": known are', "retry, review, rollback, rounds, run", "Did you mean run?"
    )
    relabel("run", "job.yaml", "--shrad", "1/2").refused(2, "--shrad", "--shard")
    relabel("plan").refused(2, "Missing argument 'JOB.YAML'", "relabel plan --help")


def _nothing(_: Callable[..., Any]) -> None:
    return


def _labelled(relabel: Callable[..., Any]) -> None:
    assert relabel("run", "job.yaml").code == 0


def _labelled_twice(relabel: Callable[..., Any]) -> None:
    _labelled(relabel)
    assert relabel("run", "job.yaml", "--set", "output=out/other", "--set", "engine.seed=8").code == 0


def _planned(relabel: Callable[..., Any]) -> None:
    assert relabel("plan", "job.yaml").code == 0


def _taught(_: Callable[..., Any]) -> None:
    """A tiny student in the folder."""
    from tests.score.conftest import write_tiny_student

    write_tiny_student(Path("student"))


def _scored(relabel: Callable[..., Any]) -> None:
    """A run and a student's scores of the same pairs."""
    _taught(relabel)
    _labelled(relabel)
    assert relabel("score", "student", "--input", "pairs.parquet", "--to", "out/scores").code == 0


SEARCH = """
name: search
input: {path: pairs.parquet}
labeler: {name: review}
engine: {name: fake}
rounds: {corpus: pairs.parquet, max_rounds: 2}
output: out/search
run: {max_failed_fraction: 1.0}
"""
STUDENT = """
name: tiny
labels: [out/ecom]
student: {kind: encoder, model: student}
train: {max_steps: 1, batch_size: 4, max_tokens: 24}
split: {dev: 0.0, test: 0.3}
output: out/student
"""
TEACHER = """
name: tiny
method: sft
init: decoder
labeler: {name: direct, grades: 3}
data: {gold: {path: pairs.parquet, grade: grade}}
train: {max_steps: 1, batch_size: 2}
output: out/teacher
"""


def _questioned(_: Callable[..., Any]) -> None:
    """A search in rounds over the pairs' own documents."""
    Path("search.yaml").write_text(SEARCH)


def _searched(relabel: Callable[..., Any]) -> None:
    _questioned(relabel)
    assert relabel("rounds", "search.yaml").code == 0


def _distillable(relabel: Callable[..., Any]) -> None:
    """Labels, and a spec of a student that starts from the tiny one."""
    _taught(relabel)
    _labelled(relabel)
    Path("student.yaml").write_text(STUDENT)


def _distilled(relabel: Callable[..., Any]) -> None:
    _distillable(relabel)
    assert relabel("distill", "student.yaml").code == 0


def _teachable(_: Callable[..., Any]) -> None:
    """Trusted grades, and a spec of a teacher that starts from a tiny decoder."""
    from tests.teachers.models import write_tiny_decoder

    write_tiny_decoder(Path("decoder"))
    rows = pq.read_table("pairs.parquet").to_pylist()
    pq.write_table(pa.Table.from_pylist([{**row, "grade": at % 3} for at, row in enumerate(rows)]), "pairs.parquet")
    Path("teacher.yaml").write_text(TEACHER)


def _teacher_made(relabel: Callable[..., Any]) -> None:
    _teachable(relabel)
    assert relabel("train", "teacher.yaml").code == 0


def _published(relabel: Callable[..., Any]) -> None:
    """A bundle in the folder, and two versions of it at `stable`."""
    from relabel.export.bundles import seal_bundle

    for version in ("1.0", "2.0"):
        Path("bundle").mkdir(exist_ok=True)
        Path("bundle/model.onnx").write_text(version)
        seal_bundle(Path("bundle"), {"name": "ecom", "lineage": {}})
        assert relabel("publish", "bundle", "store", "--version", version, "--channel", "stable").code == 0


def _bundled(relabel: Callable[..., Any]) -> None:
    """A tiny student and its bundle."""
    _taught(relabel)
    assert relabel(*EXPORT.split()).code == 0


EXPORT = "export student --to bundle --pairs pairs.parquet --provider cpu --precisions fp32"
KEPT: dict[Callable[..., Any], tempfile.TemporaryDirectory[str]] = {}
"""The folder of the first call after each preparation, as it was before the call: further ones get a copy of it."""

CALLS = [
    ("init new.yaml", _nothing, 0),
    ("init job.yaml", _nothing, 2),
    ("ask job.yaml", _nothing, 0),
    ("ask job.yaml --dry-run", _nothing, 0),
    ("ask job.yaml --edit-prompt absent", _nothing, 2),
    ("ask job.yaml --row 100000", _nothing, 3),
    ("ask job.yaml --row 1 --random 2", _nothing, 2),
    ("templates export graph-grpo prompts", _nothing, 0),
    ("templates export graph prompts", _nothing, 3),
    ("plan job.yaml", _nothing, 0),
    ("plan job.yaml --probe", _nothing, 0),
    ("plan absent.yaml", _nothing, 3),
    ("plan job.yaml --set input.path=absent", _nothing, 3),
    ("run job.yaml", _nothing, 0),
    ("run job.yaml", _labelled, 10),
    ("run job.yaml --done-ok", _labelled, 0),
    ("run job.yaml --dry-run", _nothing, 0),
    ("run job.yaml --shard 0/2", _nothing, 0),
    ("run job.yaml --shard 2/2", _nothing, 2),
    ("run job.yaml --set engine.seed", _nothing, 2),
    ("run job.yaml --for 1h --metrics run.prom --log-format json", _nothing, 0),
    ("run job.yaml --for soon", _nothing, 2),
    ("run job.yaml --until 2020-01-01T06:00", _nothing, 2),
    ("run job.yaml --date 2026-11-19", _nothing, 2),
    ("status job.yaml --date 2026-11-19", _labelled, 2),
    ("run job.yaml --set engine.seed=8", _labelled, 3),
    ("run job.yaml --set engine.args.p_garbage=1 --set labeler.attempts=1", _nothing, 30),
    ("run job.yaml --set engine.args.p_crash=1", _nothing, 20),
    ("run job.yaml --workers 1", _nothing, 0),
    ("run job.yaml --gpus 0 --workers 1", _nothing, 2),
    ("run job.yaml --address auto", _nothing, 2),
    ("run job.yaml --set engine.model=x", _nothing, 4),
    ("rounds search.yaml", _questioned, 0),
    ("rounds search.yaml", _searched, 10),
    ("rounds search.yaml --done-ok", _searched, 0),
    ("rounds search.yaml --set rounds.k=3", _searched, 3),
    ("rounds search.yaml --workers 1 --gpus 0", _questioned, 2),
    ("rounds job.yaml", _nothing, 3),
    ("status out/search/round-2", _searched, 0),
    ("status job.yaml", _labelled, 0),
    ("status job.yaml --live", _labelled, 0),
    ("status out/ecom", _planned, 0),
    ("status absent", _nothing, 3),
    ("retry job.yaml", _labelled, 10),
    ("retry job.yaml --done-ok", _labelled, 0),
    ("retry job.yaml --dry-run", _labelled, 0),
    ("retry job.yaml", _nothing, 3),
    ("verify job.yaml", _labelled, 0),
    ("verify out/ecom", _planned, 3),
    ("pairs context pairs.parquet --to context.parquet", _nothing, 0),
    ("pairs context absent.parquet --to context.parquet", _nothing, 3),
    ("pairs context pairs.parquet --to pairs.parquet", _nothing, 2),
    ("pairs chunk pairs.parquet --to chunked.parquet", _nothing, 0),
    ("pairs chunk absent.parquet --to chunked.parquet", _nothing, 3),
    ("pairs tree pairs.parquet --to trees.parquet", _nothing, 0),
    ("pairs tree absent.parquet --to trees.parquet", _nothing, 3),
    ("pairs queries pairs.parquet --to more.parquet --queries-in query", _nothing, 0),
    ("pairs queries pairs.parquet --to more.parquet --column doc_id", _nothing, 3),
    ("pairs similar absent.parquet --to similar.parquet --model absent", _nothing, 3),
    ("pairs cited pairs.parquet --docs pairs.parquet --to out.parquet", _nothing, 3),
    ("pairs", _nothing, 2),
    ("merge out/ecom --to merged", _labelled, 0),
    ("merge out/ecom --to merged", _planned, 3),
    ("merge out/ecom", _labelled, 2),
    ("combine out/ecom pairs.parquet --to combined.parquet", _labelled, 0),
    ("combine out/ecom pairs.parquet --to combined.parquet", _planned, 3),
    ("combine out/ecom --to combined.parquet", _labelled, 2),
    ("distill student.yaml", _distillable, 0),
    ("distill student.yaml --resume", _distilled, 10),
    ("distill student.yaml --done-ok", _distilled, 0),
    ("distill student.yaml --set train.max_steps=2", _distilled, 3),
    ("distill student.yaml --resume --restart", _nothing, 2),
    ("distill student.yaml --set train", _distillable, 2),
    ("distill absent.yaml", _nothing, 3),
    ("train teacher.yaml --resume", _teacher_made, 10),
    ("train teacher.yaml --done-ok", _teacher_made, 0),
    ("train teacher.yaml --set train.max_steps=2", _teacher_made, 3),
    ("train teacher.yaml --set method=dpo", _teachable, 3),
    ("train teacher.yaml --resume --restart", _nothing, 2),
    ("train absent.yaml", _nothing, 3),
    ("score student --input pairs.parquet --to out/scores", _taught, 0),
    ("score student --input pairs.parquet --to out/scores --shards 2 --shard 1/2", _taught, 0),
    ("score student --input pairs.parquet --to out/scores --dry-run", _taught, 0),
    ("score student --input pairs.parquet --to out/scores", _scored, 10),
    ("score student --input pairs.parquet --to out/scores --columns document", _taught, 2),
    ("score student --input pairs.parquet --to out/scores --precision int8", _taught, 2),
    ("score student --input absent --to out/scores", _taught, 3),
    ("score student --input pairs.parquet --to out/scores", _nothing, 3),
    ("score student --input pairs.parquet", _nothing, 2),
    ("evaluate out/ecom out/scores", _scored, 0),
    ("evaluate out/ecom --qrels pairs.parquet --require accuracy>=2", _labelled, 5),
    ("evaluate out/ecom --qrels pairs.parquet", _labelled, 0),
    ("evaluate out/ecom --qrels pairs.parquet", _planned, 3),
    ("evaluate out/ecom", _labelled, 2),
    ("report out/ecom out/scores --qrels pairs.parquet --max-rows 10 --to page.html", _scored, 0),
    ("report out/ecom --grade grade", _labelled, 2),
    ("report", _nothing, 2),
    ("report absent", _nothing, 3),
    ("compare out/ecom out/other --qrels pairs.parquet --html page.html", _labelled_twice, 0),
    ("compare out/ecom out/ecom", _labelled, 2),
    ("compare out/ecom absent", _labelled, 3),
    ("compare out/ecom", _labelled, 2),
    ("systems out/ecom out/other --labels out/ecom", _labelled_twice, 0),
    ("systems out/ecom --labels out/ecom", _labelled, 2),
    ("systems out/ecom absent.run --labels out/ecom", _labelled, 3),
    ("audit job.yaml --rows 8 --to out/audit", _nothing, 0),
    ("audit job.yaml --rows 8 --require stuffing<=0 --require lorem<=0", _nothing, 5),
    ("audit absent.yaml", _nothing, 3),
    ("audit job.yaml --colder absent.jsonl", _nothing, 3),
    ("audit job.yaml --colder absent.jsonl --pairs pairs.parquet", _nothing, 2),
    ("audit job.yaml --precision int8", _nothing, 2),
    ("review out/ecom --to look.labelstudio.json", _labelled, 0),
    ("review out/ecom --from pairs.parquet --to gold.parquet", _labelled, 3),
    ("review out/ecom --from anna=pairs.parquet --to gold.parquet", _labelled, 0),
    ("review out/ecom --to look.txt", _labelled, 2),
    ("review out/ecom --to look.parquet --examples prompts", _labelled, 2),
    ("review out/ecom --from anna=pairs.parquet --to gold.parquet --examples prompts", _labelled, 3),
    ("review out/ecom --to look.parquet", _planned, 3),
    ("convert out/ecom ecom.qrels", _labelled, 0),
    ("convert pairs.parquet pairs.jsonl", _nothing, 0),
    ("convert absent.qrels ecom.run", _nothing, 3),
    ("convert pairs.parquet ecom.txt", _nothing, 2),
    ("convert out/ecom ecom.qrels", _planned, 3),
    (EXPORT, _taught, 0),
    (EXPORT, _bundled, 10),
    ("export student --to bundle", _taught, 3),
    ("export student --to bundle --gold grade", _taught, 2),
    ("export student --to hf --format hf", _taught, 3),
    (f"{EXPORT} --formats tensorrt", _taught, 4),
    ("bench bundle --providers cpu --precisions fp32 --seconds 0.2 --shapes 1xreplay", _bundled, 0),
    (
        "bench bundle --providers cpu --seconds 0.2 --shapes 1xreplay --require cpu.fp32.1xreplay.mean_ms<=0 --to "
        "results",
        _bundled,
        5,
    ),
    ("bench bundle --providers cuda", _bundled, 4),
    ("bench bundle", _published, 3),
    ("bench absent", _nothing, 3),
    ("bench bundle --seconds 0", _bundled, 2),
    ("build-engine bundle --to engine", _published, 3),
    ("build-engine absent --to engine", _nothing, 3),
    ("conform http://127.0.0.1:9 absent", _nothing, 3),
    ("conform http://127.0.0.1:9", _nothing, 2),
    ("conform 127.0.0.1:9 absent", _nothing, 2),
    ("publish bundle elsewhere", _published, 0),
    ("publish bundle store --version 2.0", _published, 10),
    ("publish bundle store --version 1.0", _published, 3),
    ("publish absent store", _nothing, 3),
    ("publish bundle store --channel a/b", _published, 2),
    ("pull store/ecom dest", _published, 0),
    ("pull store/ecom@3.0 dest", _published, 3),
    ("pull --rollback dest --check-parity", _nothing, 2),
    ("pull store/ecom", _nothing, 2),
    ("pull --rollback dest", _nothing, 3),
    ("pull --script pull.py", _nothing, 0),
    ("pull --script pull.py dest", _nothing, 2),
    ("channel set store/ecom stable 1.0", _published, 0),
    ("channel set store/ecom stable 2.0", _published, 10),
    ("channel set store/ecom stable 3.0", _published, 3),
    ("channel", _nothing, 2),
    ("rollback store/ecom stable", _published, 0),
    ("rollback store/ecom beta", _published, 3),
    ("list store", _published, 0),
    ("list gs://bucket", _nothing, 2),
    ("show store/ecom", _published, 0),
    ("show store/ecom@1.0", _published, 0),
    ("show store/absent", _published, 3),
    ("gc store", _published, 0),
    ("gc store --delete", _published, 10),
    ("gc store --grace soon", _published, 2),
    ("schema job", _nothing, 0),
    ("schema labels", _nothing, 0),
    ("schema quarantine", _nothing, 0),
    ("schema nothing", _nothing, 2),
    ("doctor", _nothing, 0),
    ("doctor job.yaml", _nothing, 0),
    ("doctor absent.yaml", _nothing, 3),
    ("doctor job.yaml --set input.path=absent", _nothing, 3),
    ("doctor --set engine.seed=3", _nothing, 2),
    ("demo --engine fake --to pairs.parquet", _nothing, 3),
    ("demo --engine fake --to .", _nothing, 2),
    ("demo --engine nothing", _nothing, 2),
    ("demo --teach --labels-only", _nothing, 2),
    ("", _nothing, 2),
    ("nothing", _nothing, 2),
    ("run", _nothing, 2),
    ("run job.yaml --nothing", _nothing, 2),
]


@pytest.mark.parametrize(("line", "before", "code"), CALLS)
def test_output_json_prints_one_object_whatever_happens(
    relabel: Callable[..., Any],
    write_pairs: Callable[..., Path],
    write_job: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    before: Callable[[Callable[..., Any]], None],
    code: int,
) -> None:
    monkeypatch.setattr(
        "relabel.jobs.commands.setup._devices", lambda: ["cpu"]
    )  # to look for a GPU, torch is loaded: seconds
    if before in KEPT:
        shutil.copytree(KEPT[before].name, ".", dirs_exist_ok=True)
    else:
        write_pairs()
        write_job()
        before(relabel)
        KEPT[before] = tempfile.TemporaryDirectory()
        shutil.copytree(".", KEPT[before].name, dirs_exist_ok=True)
    done = relabel(*line.split(), "--output", "json")
    assert done.code == code, done
    assert "Traceback" not in done.err
    if "error" in done.json:
        assert set(done.json) == {"error", "message", "exit_code"}
        assert done.json["exit_code"] == code
        assert len(done.json["message"]) > 10
        assert code not in (0, 10, 30)
    else:
        assert code in (0, 5, 10, 30) or line.startswith("doctor")
        assert done.json.get("exit_code", code) == code or "--done-ok" in line


def test_every_command_is_in_the_json_test_in_success_and_in_error() -> None:
    good = {line.split()[0] for line, _, code in CALLS if line and code == 0}
    bad = {line.split()[0] for line, _, code in CALLS if line and code in (2, 3)}
    assert good >= set(COMMANDS) - {
        "build-engine",
        "conform",
        "demo",
    }  # test_demo.py has it
    assert bad >= set(COMMANDS)


@pytest.mark.parametrize(
    ("error", "name", "code", "said"),
    [
        (RuntimeError("a screw is loose"), "RuntimeError", 1, "this is a fault of relabel, not of your input"),
        (KeyboardInterrupt(), "Stopped", 130, "Stopped by hand."),
        (Terminated(), "Stopped", 130, "Asked to stop by SIGTERM."),
        (errors.LockHeldError("shard 3 is taken"), "LockHeldError", 75, "relabel: shard 3 is taken"),
    ],
)
def test_any_error_at_all_ends_as_a_code_and_one_object(
    relabel: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: BaseException, name: str, code: int, said: str
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("relabel.jobs.job.load_job", fails)
    done = relabel("plan", "job.yaml", "--output=json")
    assert done.code == code
    assert done.json == {"error": name, "message": str(error) or said, "exit_code": code}
    assert said in done.err
    assert relabel("plan", "job.yaml").out == ""


def test_a_fault_of_another_package_is_no_fault_of_relabel(
    relabel: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "their_package.py").write_text("def label(*_, **__):\n    return {}['score']\n")
    monkeypatch.syspath_prepend(tmp_path)
    theirs = importlib.metadata.EntryPoint("theirs", "their_package:label", "relabel.labelers")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [theirs])
    monkeypatch.setattr("relabel.jobs.job.load_job", theirs.load())
    done = relabel("plan", "job.yaml")
    assert done.code == 1
    assert f"this is a fault of {tmp_path}/their_package.py:2, a labeler or engine that is no part of" in done.err


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EMFILE])
def test_what_the_system_refuses_anywhere_is_no_fault_of_ours(
    relabel: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number), "/somewhere/pairs.parquet")

    monkeypatch.setattr("relabel.jobs.job.load_job", fails)
    done = relabel("plan", "job.yaml", "--output=json")
    assert done.code == done.json["exit_code"] == (20 if number == errno.ENOSPC else 3)
    assert done.json["error"] in ("StoreError", "DiskFullError")
    assert done.json["message"] in done.err
    assert "Traceback" not in done.err
    assert ("ulimit -n" if number == errno.EMFILE else "/somewhere/pairs.parquet: ") in done.err


def test_result_goes_to_stdout_and_all_else_to_stderr(
    relabel: Callable[..., Any], write_pairs: Callable[..., Path], write_job: Callable[..., str]
) -> None:
    write_pairs()
    done = relabel("run", write_job())
    assert "ecom: done, every row accounted for" in done.out
    assert "labelled     24" in done.out
    assert "graph-grpo asks fake on fake" in done.err
    assert "graph-grpo asks" not in done.out
    assert "labelled" not in done.err


def test_init_writes_a_job_that_loads_and_keeps_what_is_there(relabel: Callable[..., Any], folder: Path) -> None:
    done = relabel("init", "new/job.yaml")
    assert done.code == 0
    assert "relabel plan new/job.yaml" in done.out
    assert load_job("new/job.yaml", environment={}).spec.engine.name == "fake"
    (folder / "new/job.yaml").write_text("mine")
    relabel("init", "new/job.yaml").refused(2, "new/job.yaml: is there already", "--force")
    assert (folder / "new/job.yaml").read_text() == "mine"
    assert relabel("init", "new/job.yaml", "--force").code == 0
    assert load_job("new/job.yaml", environment={}).spec.name == "my-labels"


def test_demo_leaves_files_alone_that_no_demo_wrote(relabel: Callable[..., Any], folder: Path) -> None:
    """`relabel init`, then `relabel demo --to .`: both write a job.yaml, and the template's data is called
    pairs.parquet.
    """
    (folder / "job.yaml").write_text("mine")
    relabel("demo", "--engine", "fake", "--to", ".").refused(
        2, "job.yaml: is there already, and no demo wrote it", "--to FOLDER"
    )
    assert (folder / "job.yaml").read_text() == "mine"
    assert [path.name for path in folder.iterdir()] == ["job.yaml"]


@pytest.mark.parametrize("arguments", [("status", "job.yaml"), ("status", "absent", "--output", "json")])
def test_reader_that_goes_away_is_met_with_silence(
    write_pairs: Callable[..., Path],
    write_job: Callable[..., str],
    relabel: Callable[..., Any],
    arguments: tuple[str, ...],
) -> None:
    """`relabel status | head -1`, with a head that has gone before the first byte."""
    write_pairs()
    write_job()
    _planned(relabel)
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = fresh(*arguments, capture_output=False, stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)
    assert done.returncode == (3 if "absent" in arguments else 0)
    assert "Traceback" not in done.stderr
    assert "Broken" not in done.stderr
    assert "absent" in arguments or done.stderr == ""


def test_terminal_that_lacks_a_letter_gets_an_escape_and_not_a_crash(
    write_pairs: Callable[..., Path], write_job: Callable[..., str]
) -> None:
    write_pairs()
    write_job({"output": "out/schön-日"})
    done = fresh("plan", "job.yaml", variables={"PYTHONIOENCODING": "latin-1"})
    assert done.returncode == 0, done.stderr
    assert "out/schön-\\u65e5/plan.json" in done.stdout


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_error_has_its_exit_code_its_place_in_the_drawn_tree_and_its_text_across_processes(
    kind: type[errors.RelabelError],
) -> None:
    error = errors.VerdictError("format", "no tags") if kind is errors.VerdictError else kind("shard 3: ünlucky")
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back), vars(back)) == (kind, str(error), vars(error))
    assert str(back) in ("shard 3: ünlucky", "format: no tags")
    assert exit_for(error) == CODES[kind.__name__]
    assert f" {kind.__name__} " in f"{errors.__doc__} ".replace("\n", " ")
    assert kind.__name__.endswith("Error")


def test_exit_codes_are_the_ones_promised_to_schedulers() -> None:
    assert {code.name: int(code) for code in Exit} == {
        "DONE": 0,
        "OUR_FAULT": 1,
        "USAGE": 2,
        "BAD_INPUT": 3,
        "MISSING": 4,
        "GATE": 5,
        "NOTHING_TO_DO": 10,
        "PARTIAL": 20,
        "OVER_LIMIT": 30,
        "LOCKED": 75,
        "STOPPED": 130,
    }
