"""What a newcomer meets first: spec files to start from, completion in the shell, refusals that say what was meant."""

from __future__ import annotations

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

from relabel.jobs.commands.doctor import EXTRAS, distributions_of
from relabel.jobs.commands.setup import NEXT
from relabel.jobs.downloads import fetch_model
from relabel.manifests.errors import ModelError
from relabel.manifests.files import Storage
from relabel.manifests.models import resolve_model
from tests.jobs.test_demo import write_tiny_model


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


def test_fresh_student_and_teacher_files_are_read_by_their_commands(relabel: Callable[..., Any], folder: Path) -> None:
    from relabel.distill.students.spec import DistillSpec
    from relabel.distill.teachers.spec import read_teacher_spec
    from relabel.manifests.specs import validate_spec

    for kind in ("student", "teacher"):
        relabel("init", "--kind", kind)
    held = {kind: yaml.safe_load(Path(f"{kind}.yaml").read_text()) for kind in ("student", "teacher")}
    assert validate_spec(DistillSpec, held["student"], where="student.yaml").name == "my-student"
    assert read_teacher_spec(held["teacher"], where="teacher.yaml").name == "my-teacher"


@pytest.mark.parametrize(
    ("reference", "meant"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "hf:Qwen/Qwen2.5-7B-Instruct"),
        ("jobs/of/Qwen/Qwen2.5-7B", "hf:Qwen/Qwen2.5-7B"),
        ("gpt2", "hf:org/gpt2"),
        ("huggingface:Qwen/Qwen3-4B", "hf:Qwen/Qwen3-4B"),
        ("a b", "hf:org/name"),
    ],
)
def test_a_model_s_name_that_is_refused_is_said_as_the_hub_s(folder: Path, reference: str, meant: str) -> None:
    with pytest.raises(ModelError) as refused:
        resolve_model(reference)
    assert str(refused.value).endswith(f"A model of the Hugging Face hub is written {meant}.")


@pytest.mark.parametrize("host", ["huggingface.co", "hf.co"])
def test_a_page_of_the_hub_is_said_as_its_model(folder: Path, host: str) -> None:
    with pytest.raises(ModelError) as refused:
        fetch_model(f"https://{host}/Qwen/Qwen2.5-7B-Instruct/tree/main", Storage(), cache_dir=folder)
    assert str(refused.value).endswith(" is written hf:Qwen/Qwen2.5-7B-Instruct.")


def test_a_value_that_the_shell_took_for_a_file_is_explained(relabel: Callable[..., Any], folder: Path) -> None:
    relabel("init", "--kind", "student")
    relabel("distill", "student.yaml", "--set", "require.kappa").refused(2, "Quote values", "'require.kappa=>=0.4'")


@pytest.fixture
def shell(folder: Path) -> Callable[..., list[str]]:
    """`shell("bash", script)`: the lines that a script prints, with `relabel` on the path."""
    Path("bin").mkdir()
    Path("bin/relabel").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m relabel "$@"\n')
    Path("bin/relabel").chmod(0o755)
    here = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "PYTHONPATH": str(Path(__file__).parents[2])}

    def run(program: str, script: str) -> list[str]:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not here")
        done = subprocess.run(
            [program, "-c", script], env=os.environ | here, capture_output=True, text=True, check=True
        )
        assert done.stderr == ""
        return done.stdout.splitlines()

    return run


LINES = [
    ("relabel temp", ["templates"]),
    ("relabel templates ex", ["export"]),
    ("relabel ask --edit", ["--edit-prompt"]),
    ("relabel schema stu", ["student"]),
    ("relabel no-such-command", []),
]


@pytest.mark.parametrize(("line", "found"), LINES)
def test_bash_completes_what_there_is(shell: Callable[..., list[str]], line: str, found: list[str]) -> None:
    words = shlex.split(line)
    script = (
        'eval "$(_RELABEL_COMPLETE=bash_source relabel)"\ncompopt() { :; }\n'
        f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}\n_relabel_completion relabel\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    assert [word for word in shell("bash", script) if word] == found


def test_bash_completes_files_where_a_file_is_wanted(shell: Callable[..., list[str]]) -> None:
    Path("job-of-mine.yaml").write_text("")
    script = (
        'eval "$(_RELABEL_COMPLETE=bash_source relabel)"\ncompopt() { echo "$@"; }\n'
        "COMP_WORDS=(relabel run job-of); COMP_CWORD=2\n_relabel_completion relabel"
    )
    assert shell("bash", script) == ["-o default"]
    assert shell("bash", 'eval "$(_RELABEL_COMPLETE=bash_source relabel)"; complete -p relabel')[0].endswith(
        "_relabel_completion relabel"
    )


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
    monkeypatch.setattr("relabel.jobs.commands.doctor._devices", lambda: ["cpu"])


@pytest.mark.usefixtures("on_cpu")
def test_doctor_says_memory_providers_and_whether_student_and_teacher_could_start(
    relabel: Callable[..., Any], write_pairs: Callable[..., Path], write_job: Callable[..., str]
) -> None:
    write_pairs()
    job = write_job()
    found = relabel("doctor", job, "--output", "json").json
    assert found["free_memory_gib"] > 0
    assert "CPUExecutionProvider" in found["onnxruntime"]
    student = {
        "name": "s",
        "labels": ["out/ecom"],
        "student": {"kind": "encoder", "model": "org/base"},
        "output": "out/s",
    }
    teacher = {"name": "t", "method": "sft", "init": "org/base", "data": {"runs": ["out/ecom"]}, "output": "out/t"}
    for kind, spec, step in (("student", student, "labels"), ("teacher", teacher, "runs")):
        Path(f"{kind}.yaml").write_text(yaml.safe_dump(spec))
        done = relabel("doctor", f"{kind}.yaml", "--output", "json")
        assert done.code == 3
        assert list(done.json[kind]) == ["spec", step]
        assert "out/ecom: no finished run lies there" in done.json[kind][step]
    assert relabel("run", job).code == 0
    for kind in ("student", "teacher"):
        done = relabel("doctor", f"{kind}.yaml")
        assert done.code == 4
        assert "out/ecom has 24 labels" in done.out
        assert "written hf:org/base" in done.out
        write_tiny_model(Path("org/base"))
        done = relabel("doctor", f"{kind}.yaml")
        assert done.code == 0
        assert f"{kind}: output" in done.out
        shutil.rmtree("org")


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("kind", ["student", "teacher"])
def test_doctor_misses_the_gold_that_a_spec_names(relabel: Callable[..., Any], folder: Path, kind: str) -> None:
    """That of `relabel init --kind teacher`, for one: it was called fine, and the training refused it."""
    gold = {"path": "gold.parquet", "grade": "grade"}
    specs: dict[str, Any] = {
        "student": {
            "labels": [],
            "gold": gold,
            "loss": {"gold_weight": 1.0},
            "student": {"kind": "encoder", "model": "base"},
        },
        "teacher": {"method": "sft", "init": "base", "labeler": {"name": "direct"}, "data": {"gold": gold}},
    }
    Path("spec.yaml").write_text(yaml.safe_dump({"name": "s", **specs[kind], "output": "out/s"}))
    write_tiny_model(Path("base"))
    done = relabel("doctor", "spec.yaml", "--output", "json")
    assert done.code == 3
    key = {"student": "gold.path", "teacher": "data.gold.path"}[kind]
    assert f"`{key}` gold.parquet: no such file or folder" in done.json[kind]["gold"]
    Path("gold.parquet").touch()
    assert relabel("doctor", "spec.yaml", "--output", "json").json[kind]["gold"].endswith("gold.parquet is there")
