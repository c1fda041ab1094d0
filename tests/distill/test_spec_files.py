"""A student's spec file takes variables and flags as a job file does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs.cli import main


@pytest.fixture
def call(
    tmp_path: Path, spec: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """`call("--set", "train.seed=3", RELABEL_NAME="x", changes={…})`: `relabel distill` on the small spec, in this process."""

    def run(*arguments: str, changes: dict[str, Any] | None = None, **environment: str) -> tuple[int, str, str]:
        file = tmp_path / "student.yaml"
        file.write_text(yaml.safe_dump(spec(train={"max_steps": 1}, **changes or {})))
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as end:
                main(["distill", str(file), *arguments, "--output", "json"])
        return int(end.value.code or 0), *capsys.readouterr()

    return run


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_file(call: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    output = {"output": str(tmp_path / "${date:%Y}" / "${env.REGION}-$${x}")}
    variables = {"RELABEL_DATE": "2025-02-03", "REGION": "north", "RELABEL_TRAIN__SEED": "11", "RELABEL_NAME": "other"}
    code, _, err = call("--set", "train.seed=12", changes=output, **variables)
    assert code == 0, err
    manifest = json.loads((tmp_path / "2025" / "north-${x}" / "manifest.json").read_text())
    assert (manifest["name"], manifest["spec"]["train"]["seed"]) == ("other", 12)


def test_variables_of_jobs_do_not_concern_a_student_and_a_slip_does(call: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = call(RELABEL_SPILT__DEV="0.3", RELABEL_ENGINE__SEED="3")
    assert code == 3
    assert "variable RELABEL_SPILT__DEV: no key of a student is called `spilt`; did you mean RELABEL_SPLIT?" in err


@pytest.mark.parametrize(
    ("flag", "environment", "code", "told"),
    [
        ("train.seed", {}, 2, "want KEY=VALUE, for instance --set train.epochs=3"),
        ("train.sed=3", {"RELABEL_TRAIN__EPOCHS": "2"}, 3, "with variable RELABEL_TRAIN__EPOCHS, --set train.sed=3"),
        ("train.seed.deep=3", {}, 3, "not a mapping"),
        ("output=out/${dat}", {}, 3, "Did you mean ${date}?"),
    ],
)
def test_what_is_laid_over_a_spec_and_off_is_told(
    call: Callable[..., tuple[int, str, str]], flag: str, environment: dict[str, str], code: int, told: str
) -> None:
    found = call("--set", flag, **environment)
    assert (found[0], told in found[2]) == (code, True), found[2]
