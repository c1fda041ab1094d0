"""A student's spec file takes variables and flags as a job file does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from relabel.jobs.cli import main


@pytest.fixture
def call(
    tmp_path: Path,
    spec: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., tuple[int, str, str]]:
    """`call("--set", "train.seed=3", RELABEL_NAME="x", changes={…})`: `relabel distill` on the small spec, in this
    process.
    """

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


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_file(
    call: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
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
    ("flag", "environment", "code", "message"),
    [
        ("train.sed=3", {"RELABEL_TRAIN__EPOCHS": "2"}, 3, "with variable RELABEL_TRAIN__EPOCHS, --set train.sed=3"),
        ("output=out/${dat}", {}, 3, "Did you mean ${date}?"),
    ],
)
def test_what_is_laid_over_a_spec_and_off_is_reported(
    call: Callable[..., tuple[int, str, str]], flag: str, environment: dict[str, str], code: int, message: str
) -> None:
    found = call("--set", flag, **environment)
    assert (found[0], message in found[2]) == (code, True), found[2]


GOOD = "name: x\nlabels: [out]\nstudent: {kind: encoder, model: m}\noutput: o\n"


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("name: x\n  bad: [1,\n", ["student.yaml, line 2, column 6: not YAML"]),
        (GOOD + "name: y\n", ["line 5, column 1", "the key `name` is given twice"]),
        ("- a\n", ["want a mapping with the keys name, labels, gold, student, loss, ", "; got list"]),
        ("", ["student.yaml: is empty. `relabel schema student` prints its keys"]),
        (GOOD + "trian: {epochs: 1}\n", ["unknown key `trian`: did you mean `train`?"]),
        (
            GOOD.replace("model: m", "modle: m"),
            ["`student.model` is missing", "unknown key `student.modle`: did you mean `model`?"],
        ),
        (
            GOOD.replace("{kind: encoder, model: m}", "encoder"),
            ["`student` = 'encoder': want a mapping with the keys kind, model"],
        ),
        (GOOD.replace("output: o", "output: 3"), ["`output` = 3", "in YAML, put it in quotes"]),
        (
            "name: job\ninput: {path: x}\nlabeler: {name: r3a}\nengine: {name: fake}\noutput: o\n",
            ["`labels` is missing", "unknown key `engine`"],
        ),
    ],
)
def test_a_file_that_is_no_spec_of_a_student_is_refused_with_its_place_and_what_belongs_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, messages: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("student.yaml").write_text(text)
    with pytest.raises(SystemExit) as end:
        main(["distill", "student.yaml"])
    found = capsys.readouterr()
    assert (end.value.code, found.out) == (3, "")
    for part in messages:
        assert part in found.err
    assert "relabel init" not in found.err
    assert "labeler" not in found.err or "labeler" in text
