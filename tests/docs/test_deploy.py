"""The files under docs/deploy are what their readers take: checked by schema, by tool, or by running them."""

import configparser
import re
import runpy
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

from relabel.jobs.cli import relabel
from relabel.jobs.output import Exit
from relabel.jobs.run.shards import SHARD_COUNT_VARIABLE

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "docs" / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
RUNS = [path for path in MANIFESTS if not path.name.startswith("train")]
UNITS = sorted((DEPLOY / "systemd").iterdir())
SCRIPT = DEPLOY / "slurm" / "array.sbatch"
TRAINING = {
    "slurm": DEPLOY / "slurm" / "train.sbatch",
    "torchrun": DEPLOY / "torchrun" / "train.sh",
    "kubernetes": DEPLOY / "kubernetes" / "train-job.yaml",
}


def container(manifest: dict[str, Any]) -> dict[str, Any]:
    (found,) = job_of(manifest)["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def job_of(manifest: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = manifest["spec"]
    return spec["jobTemplate"]["spec"] if manifest["kind"] == "CronJob" else spec


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_the_call_of_a_kubernetes_manifest_parses(path: Path) -> None:
    words = container(yaml.safe_load(path.read_text()))["command"]
    assert words[0] == "relabel"
    check_call(words[1:])


def check_call(words: list[str]) -> None:
    """A command and its arguments are as the command line takes them."""
    # a command keeps the help option that its first context gave it
    above = click.Context(relabel, **relabel.context_settings)
    command = relabel.get_command(above, words[0])
    assert command is not None
    command.make_context(words[0], words[1:], parent=above)


@pytest.mark.parametrize("scheduler", TRAINING)
def test_a_training_is_called_so_that_the_same_call_goes_on(scheduler: str) -> None:
    text = TRAINING[scheduler].read_text()
    (call,) = re.findall(r"^[^#\n]*--no-python relabel (.+?)(?: &)?$", text, re.MULTILINE)
    named = re.sub(r'"\$command"', "train", re.sub(r'"\$\{?[Ss][^"]*"', "teacher.yaml", call))
    words = named.split()
    assert {"--resume", "--done-ok"} <= set(words)
    check_call(words)


def test_pods_of_a_training_have_time_for_a_checkpoint_and_a_pod_that_is_moved_does_not_count() -> None:
    job = job_of(yaml.safe_load(TRAINING["kubernetes"].read_text()))
    pod = container({"kind": "Job", "spec": job})
    wait_s = next(int(one["value"]) for one in pod["env"] if one["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    assert wait_s < job["template"]["spec"]["terminationGracePeriodSeconds"]
    assert job["podFailurePolicy"]["rules"][0]["action"] == "Ignore"
    assert f"--nproc-per-node {pod['resources']['limits']['nvidia.com/gpu']} " in " ".join(pod["command"])
    subprocess.run(["bash", "-n", "-c", pod["command"][-1]], check=True)


@pytest.mark.parametrize(
    ("code", "present", "calls"),
    [
        (0, ("aws", "torchrun"), ["aws --version", "torchrun", "aws s3 sync /scratch/teacher s3://models/teacher"]),
        (1, ("aws", "torchrun"), ["aws --version", "torchrun"]),
        (0, ("torchrun",), []),
    ],
    ids=["trained", "failed", "no AWS CLI"],
)
def test_a_pod_copies_what_was_trained_and_nothing_else(
    code: int, present: tuple[str, ...], calls: list[str], tmp_path: Path
) -> None:
    """A pod without the means to copy its model trains none."""
    for name in present:
        ends = code if name == "torchrun" else 0
        (tmp_path / name).write_text(f'#!/bin/bash\necho "{name} $*" >>"$CALLS"\nexit {ends}\n')
        (tmp_path / name).chmod(0o755)
    command = container(yaml.safe_load(TRAINING["kubernetes"].read_text()))["command"]
    around = {"PATH": f"{tmp_path}:/nowhere", "CALLS": str(tmp_path / "calls")}
    bash = shutil.which("bash") or "bash"
    done = subprocess.run([bash, *command[1:]], env=around, check=False, timeout=60, capture_output=True)
    noted = tmp_path / "calls"
    lines = noted.read_text().splitlines() if noted.exists() else []
    assert [line if line.startswith("aws") else line.split()[0] for line in lines] == calls
    assert (done.returncode == 0) == (calls[-1:] == ["aws s3 sync /scratch/teacher s3://models/teacher"])


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_a_kubernetes_manifest_is_valid_by_the_schema_of_its_version(path: Path, version: str) -> None:
    kubernetes_validate.validate(yaml.safe_load(path.read_text()), version, strict=True)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_pods_of_a_kubernetes_job_know_their_number_and_every_exit_code_has_a_rule(path: Path) -> None:
    manifest = yaml.safe_load(path.read_text())
    job, pod = job_of(manifest), container(manifest)
    variables = {one["name"]: one.get("value") for one in pod["env"]}
    assert job["completionMode"] == "Indexed"
    assert variables[SHARD_COUNT_VARIABLE] == str(job["completions"])
    assert pod["command"][-2:] == ["--log-format", "json"]
    assert {"--done-ok", "auto"} <= set(pod["command"])
    assert job["template"]["spec"]["restartPolicy"] == "Never", "podFailurePolicy asks for it"
    rules = [
        rule["onExitCodes"] | {"action": rule["action"]}
        for rule in job["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    ]
    assert all(rule["containerName"] == pod["name"] for rule in rules)
    ruled = sorted(code for rule in rules for code in rule["values"])
    assert ruled == sorted({int(code) for code in Exit} - {Exit.DONE, Exit.NOTHING_TO_DO, Exit.OUR_FAULT, Exit.STOPPED})
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] >= 45, (
        "a drain takes 20 s, an engine's end some more"
    )


def test_a_cron_job_with_a_time_of_day_tries_no_pod_again_after_a_partial_run() -> None:
    manifest = yaml.safe_load((DEPLOY / "kubernetes" / "cronjob.yaml").read_text())
    rules = job_of(manifest)["podFailurePolicy"]["rules"]
    assert "--until" in container(manifest)["command"]
    assert any(rule["action"] == "FailIndex" and Exit.PARTIAL in rule["onExitCodes"]["values"] for rule in rules)
    assert (
        manifest["spec"]["timeZone"]
        in container(manifest)["command"][container(manifest)["command"].index("--until") + 1]
    )


def test_units_have_known_sections_and_take_the_codes_that_are_no_failure() -> None:
    for path in UNITS:
        unit = configparser.ConfigParser(interpolation=None, strict=True)
        unit.optionxform = str  # type: ignore[assignment, method-assign]
        unit.read_string(path.read_text())
        assert set(unit.sections()) <= {"Unit", "Service", "Timer", "Install"}
        if path.suffix == ".service" and path.name != "relabel-failed@.service":
            service = unit["Service"]
            codes = {Exit.NOTHING_TO_DO, Exit.PARTIAL, Exit.LOCKED}
            assert {int(code) for code in service["SuccessExitStatus"].split()} == {int(code) for code in codes}
            assert service["Type"] == "oneshot"
            assert "--done-ok" not in service["ExecStart"]
            assert service.get("KillMode") == ("mixed" if "relabel run" in service["ExecStart"] else None), (
                "engines end with their run"
            )


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_takes_the_units_as_they_are(tmp_path: Path) -> None:
    for path in UNITS:
        text = re.sub("/opt/relabel/bin/relabel|/usr/bin/curl", shutil.which("true") or "", path.read_text())
        (tmp_path / path.name.replace("@.", "@ecom.")).write_text(text)
        (tmp_path / path.name).write_text(text)
    files = sorted(str(path) for path in tmp_path.glob("*@ecom.*"))
    assert len(files) == 5
    done = subprocess.run(
        ["systemd-analyze", "verify", *files], capture_output=True, text=True, check=False, timeout=60
    )
    ours = [line for line in done.stderr.splitlines() if "relabel" in line]
    assert (done.returncode, ours) == (0, [])


def test_the_crontab_has_five_times_a_user_and_no_bare_percent_sign() -> None:
    lines = [
        line for line in (DEPLOY / "cron" / "relabel").read_text().splitlines() if line and not line.startswith("#")
    ]
    entries = [line for line in lines if not re.match(r"\w+=", line)]
    assert len(entries) == 1
    for entry in entries:
        *times, user, command = entry.split(maxsplit=6)
        assert all(re.fullmatch(r"[\d*/,-]+", field) for field in times)
        assert user == "relabel"
        assert not re.search(r"(?<!\\)%", command)
        assert entry in (ROOT / "docs" / "scheduling.md").read_text(), "docs/scheduling.md shows another line"
        shell = subprocess.run(
            ["bash", "-n", "-c", command.replace("\\%", "%")], capture_output=True, text=True, check=False
        )
        assert shell.returncode == 0, shell.stderr


SCRIPTS = [SCRIPT, TRAINING["slurm"], TRAINING["torchrun"], DEPLOY / "ray" / "submit.sh"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_one_that_bash_reads(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert path.stat().st_mode & 0o100


@pytest.fixture
def node(tmp_path: Path) -> dict[str, str]:
    """A node's environment in an array's task, with a relabel and a scontrol that write down how they were called."""
    note = 'echo "$(basename "$0") $*" >>"$CALLS"'
    works = 'for _ in $(seq "${STEPS:-0}"); do sleep 0.1; done'
    worker = f'{note}\ntrap "exit 20" TERM\n{works}\nexit "$CODE"'
    for name, body in {"relabel": worker, "torchrun": worker, "scontrol": note}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    return {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "CALLS": str(tmp_path / "calls"),
        "JOB": "jobs/x.yaml",
        "SLURM_ARRAY_JOB_ID": "55",
        "SLURM_ARRAY_TASK_ID": "3",
    }


@pytest.mark.parametrize(
    ("code", "restarts", "ends_in", "requeues"),
    [(0, 0, 0, 0), (75, 3, 0, 1), (20, 20, 20, 0), (3, 0, 3, 0)],
)
def test_an_array_task_goes_back_to_the_queue_if_work_is_left(
    node: dict[str, str], code: int, restarts: int, ends_in: int, requeues: int
) -> None:
    done = subprocess.run(
        [str(SCRIPT)], env=node | {"CODE": str(code), "SLURM_RESTART_COUNT": str(restarts)}, check=False, timeout=60
    )
    lines = Path(node["CALLS"]).read_text().splitlines()
    assert done.returncode == ends_in
    assert lines[0].startswith("relabel run jobs/x.yaml --shard auto")
    assert lines[1:] == ["scontrol requeue 55_3"] * requeues


def test_an_array_task_that_is_asked_to_end_lets_relabel_drain(node: dict[str, str]) -> None:
    process = subprocess.Popen([str(SCRIPT)], env=node | {"CODE": "1", "STEPS": "300"})
    deadline = time.perf_counter() + 30
    while not Path(node["CALLS"]).exists() and time.perf_counter() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0
    assert Path(node["CALLS"]).read_text().splitlines()[1:] == ["scontrol requeue 55_3"]


def test_a_training_on_slurm_queues_again_after_a_signal_and_not_after_a_failure(node: dict[str, str]) -> None:
    node |= {"SLURM_JOB_ID": "55", "SPEC": "x.yaml"}
    done = subprocess.run([str(TRAINING["slurm"])], env=node | {"CODE": "1"}, check=False, timeout=60)
    assert done.returncode == 1
    process = subprocess.Popen([str(TRAINING["slurm"])], env=node | {"CODE": "1", "STEPS": "300"})
    deadline = time.perf_counter() + 30
    while len(Path(node["CALLS"]).read_text().splitlines()) < 2 and time.perf_counter() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0
    calls = Path(node["CALLS"]).read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["torchrun", "torchrun", "scontrol"]
    assert calls[-1] == "scontrol requeue 55"


def test_the_grader_changes_over_when_the_link_is_switched(tmp_path: Path) -> None:
    loader = "class Student:\n    def __init__(self, folder, **_): self.precision = folder.name\n"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "load.py").write_text(loader)
    link = tmp_path / "current"
    link.symlink_to("one")
    grader = runpy.run_path(str(DEPLOY / "serving" / "grader.py"))["Grader"](tmp_path)
    first = grader.student
    grader.follow()
    assert grader.student is first
    (tmp_path / "next").symlink_to("two")
    (tmp_path / "next").rename(link)
    grader.follow()
    assert grader.student.precision == "two"
