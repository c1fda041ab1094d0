"""What a newcomer meets first: spec files to start from, completion in the shell, refusals that say what was meant."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from jobs.commands.setup import NEXT
from manifests.errors import ModelError
from manifests.models.references import resolve_model


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
    from distill.students.specs import DistillSpec
    from distill.teachers.spec_files import read_teacher_spec
    from manifests.specs import validate_spec

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


def test_a_value_that_the_shell_took_for_a_file_is_explained(relabel: Callable[..., Any], folder: Path) -> None:
    relabel("init", "--kind", "student")
    relabel("distill", "student.yaml", "--set", "require.kappa").refused(2, "in quotes", "'require.kappa=>=0.4'")


@pytest.fixture
def shell(folder: Path) -> Callable[..., list[str]]:
    """`shell("bash", script)`: the lines that a script prints, with `relabel` on the path."""
    Path("bin").mkdir()
    Path("bin/relabel").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m jobs "$@"\n')
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


@pytest.mark.parametrize(("line", "found"), LINES)
def test_zsh_is_told_what_there_is(shell: Callable[..., list[str]], line: str, found: list[str]) -> None:
    """Three lines for each: its kind, the word, and what it is."""
    words = shlex.split(line)
    lines = shell("sh", f"_RELABEL_COMPLETE=zsh_complete COMP_WORDS='{line}' COMP_CWORD={len(words) - 1} relabel")
    kinds = [tuple(lines[at : at + 2]) for at in range(0, len(lines), 3)]
    assert [word for kind, word in kinds if kind == "plain"] == found
    assert [kind for kind, _ in kinds] == (["plain"] * len(found) or ["file"])


def test_zsh_takes_the_script(shell: Callable[..., list[str]]) -> None:
    script = (
        'autoload -U compinit && compinit -u\neval "$(_RELABEL_COMPLETE=zsh_source relabel)"\nprint ${_comps[relabel]}'
    )
    assert shell("zsh", script) == ["_relabel_completion"]
