"""Every spec and every call of docs/ leads to the same output from any working directory."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from relabel.distill.students.spec import DistillSpec
from relabel.distill.teachers.spec import read_teacher_spec, teacher_keys
from relabel.jobs.job import load_job
from relabel.jobs.settings import JOB, SpecKind, absolute, read_settings, resolved
from relabel.jobs.spec_yaml import parse_yaml
from relabel.labelers.engines.registry import engine_names
from relabel.labelers.registry import labeler_names
from relabel.manifests.specs import Spec, validate_spec
from tests.docs.pages import DOCS, PAGES, ROOT, blocks, calls
from tests.docs.worlds import call, write_pairs

DEPLOY = sorted(path for path in (DOCS / "deploy").rglob("*") if path.is_file())
STUDENT = SpecKind("student", tuple(DistillSpec.model_fields), "", "")
TEACHER = SpecKind("teacher", teacher_keys(), "", "")
VARIABLES = {"SITE": "eu", "REGION": "north"}


def kind_of(text: str) -> SpecKind | None:
    """Which spec a text is, if it is a whole one."""
    try:
        values = parse_yaml(text)
    except yaml.YAMLError:
        return None
    keys = set(values) if isinstance(values, dict) else set()
    return (
        JOB
        if {"input", "labeler", "engine", "output"} <= keys
        else STUDENT
        if {"student", "labels", "output"} <= keys
        else TEACHER
        if {"method", "init", "output"} <= keys
        else None
    )


def specs() -> list[Any]:
    """Every whole spec of the repository, in a file or on a page."""
    found = []
    tracked = subprocess.run(
        ["git", "ls-files", "*.yaml", "*.yml"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in tracked:
        text = (ROOT / name).read_text(encoding="utf-8")
        if kind_of(text):
            found.append(pytest.param(name, text, id=name))
    for page in PAGES:
        for block in blocks(page):
            if block.language == "yaml" and kind_of(block.text):
                name = str(page.relative_to(ROOT))
                found.append(pytest.param(f"jobs/{block.title or 'job.yaml'}", block.text, id=f"{name}:{block.line}"))
    return found


def read(path: str, kind: SpecKind, overrides: Sequence[str] = ()) -> Spec:
    if kind is JOB:
        return absolute(load_job(path, environment=VARIABLES, overrides=overrides).spec)
    settings = read_settings(path, environment=VARIABLES, kind=kind)
    if kind is TEACHER:
        return absolute(resolved(read_teacher_spec(settings.values, where=path), settings.places))
    return absolute(resolved(validate_spec(DistillSpec, settings.values, where=path), settings.places))


@pytest.mark.parametrize(("name", "text"), specs())
def test_a_spec_leads_to_the_same_places_from_any_folder(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "srv"
    file = home / name
    file.parent.mkdir(parents=True)
    file.write_text(text, encoding="utf-8")
    (tmp_path / "elsewhere").mkdir()
    kind = kind_of(text)
    assert kind is not None
    found = []
    overrides = []
    if kind is JOB:  # a page may write a labeler or an engine of its own
        values = parse_yaml(text)
        overrides += ["labeler={name: direct}"] if values["labeler"]["name"] not in labeler_names() else []
        overrides += ["engine={name: fake}"] if values["engine"]["name"] not in engine_names() else []
    for cwd in (file.parent, home, tmp_path / "elsewhere", Path("/")):
        monkeypatch.chdir(cwd)
        found += [read(os.path.relpath(file, cwd), kind, overrides), read(str(file), kind, overrides)]
    assert all(spec == found[0] for spec in found)
    output = str(found[0].model_dump()["output"])
    assert "://" in output or Path(output).is_relative_to(home), f"{name}: {output} leads out of the checkout"


def test_the_specs_of_the_docs_share_the_folder_out_of_the_checkout() -> None:
    places = {read(str(path), STUDENT).model_dump()["output"] for path in (DOCS / "students").glob("*.yaml")}
    assert {str(Path(place).parent) for place in places} == {str(ROOT / "out")}
    bert = read(str(DOCS / "students/ecom-bert.yaml"), STUDENT).model_dump()
    assert (bert["labels"][0]["path"], bert["gold"]["path"]) == (str(ROOT / "out/ecom"), str(ROOT / "pairs.parquet"))
    assert read(str(DOCS / "students/r3a-2-soft.yaml"), STUDENT).model_dump()["student"]["model"] == str(
        ROOT / "out/r3a-sft"
    )


def with_specs() -> list[Any]:
    """Every call that names a job file: where it is, and its words."""
    found = []
    for path in [*PAGES, *DEPLOY]:
        for where, words in calls(path):
            named = [word for word in words[1:] if word.endswith((".yaml", ".yml"))]
            if words[0] in ("plan", "run", "retry", "status", "verify") and named:
                found.append(pytest.param(named[0], id=where))
    return found


@pytest.mark.parametrize("named", with_specs())
def test_a_call_of_the_docs_finds_its_output_from_a_foreign_folder(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "root" / named.lstrip("/")
    file.parent.mkdir(parents=True)
    file.write_text(
        "{name: x, input: {path: ../in.parquet}, labeler: {name: direct}, engine: {name: fake}, output: ../out/x}"
    )
    monkeypatch.chdir(tmp_path / "root")
    at_home = read(os.path.relpath(file), JOB)
    monkeypatch.chdir("/")
    assert read(str(file), JOB) == at_home
    assert at_home.model_dump()["output"] == str(file.parent.parent / "out/x")


def test_what_a_scheduler_calls_needs_no_working_directory() -> None:
    for path in DEPLOY:
        text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
        assert not re.search(r"\bcd |WorkingDirectory=", text), path
        named = re.findall(r"[^\s,'\"\[\]]+\.ya?ml\b", text)
        for word in named:
            assert word.startswith("/") or path.suffix == ".sbatch", f"{path}: {word}"


@pytest.mark.parametrize("name", ["cron/relabel", "systemd/relabel@.service"])
def test_a_scheduled_run_from_the_root_writes_next_to_its_job_file_and_the_next_one_labels_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (DOCS / "deploy" / name).read_text()
    (line,) = re.findall(r"(?:ExecStart=|\* relabel )(/opt/relabel/bin/relabel run .*)", text)
    (tmp_path / "jobs").mkdir()
    write_pairs(tmp_path, last=8)
    job = (
        "{name: ecom, input: {path: ../pairs.parquet}, labeler: {name: direct}, engine: {name: fake}, output: "
        "'../out/${date}', shards: 1}"
    )
    (tmp_path / "jobs/ecom.yaml").write_text(job)
    line = re.sub(r"/srv/relabel|/var/lib/node_exporter/textfile", str(tmp_path), line.partition(" >>")[0]).replace(
        "\\%", "%"
    )
    line = (
        line.replace("%i", "ecom")
        .replace("--until 06:00", "--for 1h")
        .replace("/opt/relabel/bin/relabel", "printf '%s\\n'")
    )
    words = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout.splitlines()
    monkeypatch.chdir("/")
    codes = [call(*words), call(*words)]
    assert codes == [0, 0 if "--done-ok" in words else 10]
    (day,) = (tmp_path / "out").iterdir()
    assert len(list(day.glob("receipts/*/*.json"))) == 1
