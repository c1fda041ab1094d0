"""What a newcomer meets first: spec files to start from, completion in the shell, refusals that say what was meant."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from relabel.jobs.cli import main
from relabel.jobs.commands.setup import EXTRAS, NEXT, distributions_of
from relabel.labelers.registry import LABELERS, labeler_class
from relabel.manifests.errors import ModelError
from relabel.manifests.models import resolve_model
from tests.docs.pages import ROOT


@pytest.mark.parametrize("kind", NEXT)
def test_a_fresh_spec_names_its_schema_and_fits_it(relabel: Callable[..., Any], folder: Path, kind: str) -> None:
    done = relabel("init", "--kind", kind, "--output", "json")
    assert done.code == 0
    text = Path(f"{kind}.yaml").read_text()
    first = text.splitlines()[0]
    assert first == f"# yaml-language-server: $schema={kind}.schema.json"
    schema = json.loads(Path(f"{kind}.schema.json").read_text())
    assert schema == json.loads(relabel("schema", kind).out)
    jsonschema.validate(yaml.safe_load(text), schema)
    relabel("init", "--kind", kind).refused(2, f"{kind}.yaml: is there already")
    assert f"{NEXT[kind]} sub/a.yaml" in relabel("init", "sub/a.yaml", "--kind", kind).out
    assert Path(f"sub/{kind}.schema.json").is_file()


@pytest.mark.parametrize("kind", NEXT)
@pytest.mark.parametrize("command", ["run", "distill", "train"])
def test_a_spec_of_another_kind_is_named_with_the_command_that_takes_it(
    relabel: Callable[..., Any], folder: Path, kind: str, command: str
) -> None:
    wanted = {"run": "job", "distill": "student", "train": "teacher"}
    (right,) = (name for name, one in wanted.items() if one == kind)
    relabel("init", "--kind", kind)
    done = relabel(command, f"{kind}.yaml")
    said = f"{kind}.yaml: this is a {kind}'s spec, not a {wanted[command]}'s: relabel {right} {kind}.yaml\n"
    assert done.code == 3
    assert done.err.endswith(said) == (command != right)


def test_a_fresh_job_says_the_scale_of_every_labeler(relabel: Callable[..., Any], folder: Path) -> None:
    relabel("init")
    (comment,) = re.findall("# grades: .*By default (.*); others", Path("job.yaml").read_text())
    first, second = comment.split(" · ")
    said = dict.fromkeys(re.findall("[a-z][a-z0-9-]+", first.partition(" have ")[0]), int(first.split()[-2]))
    said |= dict.fromkeys(re.findall("[a-z][a-z0-9-]+", second), int(second.split()[-1]))
    fields = {name: labeler_class(name).Options.model_fields["grades"] for name in LABELERS}
    assert said == {name: field.default for name, field in fields.items() if field.annotation is int}


@pytest.mark.parametrize(
    ("reference", "meant"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "hf:Qwen/Qwen2.5-7B-Instruct"),
        ("gpt2", "hf:org/name"),
    ],
)
def test_a_model_s_name_that_is_refused_is_said_as_the_hub_s(folder: Path, reference: str, meant: str) -> None:
    with pytest.raises(ModelError) as refused:
        resolve_model(reference)
    assert str(refused.value).endswith(f"A model of the Hugging Face hub is written {meant}.")


def test_a_folder_like_the_one_that_is_not_there_is_suggested_before_the_hub(folder: Path) -> None:
    Path("models/minilm-l6").mkdir(parents=True)
    with pytest.raises(ModelError, match=r"Did you mean models/minilm-l6\?$"):
        resolve_model("models/minilm")


def test_bash_completes_what_there_is(folder: Path) -> None:
    """And where a file is wanted, bash is left to complete files."""
    if shutil.which("bash") is None:
        pytest.skip("bash is not here")
    Path("relabel").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m relabel "$@"\n')
    Path("relabel").chmod(0o755)
    found = {"templates ex": "export", "schema stu": "student", "run job-of": "-o default"}
    script = 'eval "$(_RELABEL_COMPLETE=bash_source relabel)"\ncompopt() { echo "$@"; }\n'
    for line in found:
        script += f"COMP_WORDS=(relabel {line}); COMP_CWORD=2; COMPREPLY=()\n_relabel_completion relabel\n"
        script += 'printf "%s\\n" "${COMPREPLY[@]}"\n'
    here = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(["bash", "-c", script], env=os.environ | here, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert set(done.stdout.split("\n")) - {""} == {*found.values()}


def test_every_extra_that_a_user_may_install_is_looked_for_with_all_that_is_in_it() -> None:
    said = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(EXTRAS) == set(said) - {"docs", "dev"}
    for extra, wanted in said.items():
        names = [re.split(r"[^\w.-]", one)[0] for one in wanted]
        assert set(distributions_of(extra)) >= set(names) - {"relabel-ir"}
    assert {"bitsandbytes", "trl", "vllm"} <= set(distributions_of("train-gpu"))


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look for a GPU, torch is loaded, which takes seconds."""
    monkeypatch.setattr("relabel.jobs.commands.setup._devices", lambda: ["cpu"])


@pytest.mark.usefixtures("on_cpu")
def test_doctor_says_first_whether_the_job_can_start(
    relabel: Callable[..., Any], write_pairs: Callable[..., Any], write_job: Callable[..., str]
) -> None:
    job = write_job()
    found = relabel("doctor", job)
    first, second, *_ = found.out.splitlines()
    assert first == "job.yaml: can't start here, see input"
    assert second.startswith("  job: ")
    write_pairs()
    assert relabel("doctor", job).out.splitlines()[0] == "job.yaml: can start here"


@pytest.mark.usefixtures("on_cpu")
def test_doctor_refuses_an_output_of_another_job_as_run_does(
    relabel: Callable[..., Any], write_pairs: Callable[..., Any], write_job: Callable[..., str]
) -> None:
    write_pairs()
    job = write_job()
    assert relabel("run", job).code == 0
    assert relabel("doctor", job).code == 0
    other = ("--set", "labeler.name=umbrela")
    refused = relabel("run", job, *other)
    found = relabel("doctor", job, *other, "--output", "json")
    assert refused.code == found.code == 3
    assert "belongs to another job. Different:" in found.json["job"]["output"]
    assert "belongs to another job. Different:" in refused.err
    assert "can't start here, see output" in relabel("doctor", job, *other).out.splitlines()[0]


@pytest.mark.usefixtures("on_cpu")
def test_doctor_finds_a_folder_unfit_whose_permissions_alone_look_well(
    relabel: Callable[..., Any], write_pairs: Callable[..., Any], write_job: Callable[..., str]
) -> None:
    write_pairs()
    found = relabel("doctor", write_job({"output": "/proc/labels"}))
    assert "can't start here, see output" in found.out.splitlines()[0]
    assert "/proc: not a folder that can be written to" in found.out


def test_doctor_says_memory_and_providers(relabel: Callable[..., Any]) -> None:
    found = relabel("doctor", "--output", "json").json
    assert found["free_memory_gib"] > 0
    assert "CPUExecutionProvider" in found["onnxruntime"]


# Only `jobs/` reads the environment, and it settles what a variable means before anything else is done.


READ_BELOW = {
    "manifests/failpoints.py",
    "labelers/engines/vllm.py",
    "export/exporting.py",
    "export/puller.py",
    "export/loader.py",
}
"""What a fault test arms before anything is imported; what is written for vLLM and NNCF, which have no other way to be
set; and programs of their own: the one that `relabel pull --script` hands out, and a bundle's `load.py`.
"""


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"AWS_REGION": "eu-west-1"}, "eu-west-1"),
        ({"AWS_REGION": "eu-west-1", "AWS_DEFAULT_REGION": "us-east-2"}, "us-east-2"),
        ({"AWS_REGION": ""}, None),
        ({}, None),
    ],
)
def test_a_region_counts_by_either_of_its_names(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], found: str | None
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.setenv(name, "put back")  # so that what `main` sets is taken away again
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main(["--version"])
    botocore = pytest.importorskip("botocore.session")
    assert botocore.Session().get_config_variable("region") == found


def test_no_room_below_jobs_reads_the_environment() -> None:
    reading = set()
    for room in ("manifests", "labelers", "distill", "export"):
        for file in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv"):
                    reading.add(str(file.relative_to(ROOT)))
    assert reading == READ_BELOW
