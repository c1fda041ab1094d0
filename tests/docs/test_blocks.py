"""The other blocks of the pages: YAML is what its reader takes, Python is Python."""

import ast
from pathlib import Path
from typing import Any

import pytest
import yaml

from relabel.distill.students.spec import DistillSpec
from relabel.distill.teachers.spec import read_teacher_spec
from relabel.jobs.job import load_job
from relabel.manifests.specs import JobSpec, validate_spec
from tests.docs.pages import PAGES, ROOT, Block, blocks
from tests.jobs.conftest import JOB, folder, no_scheduler  # noqa: F401

BLOCKS = [block for page in PAGES for block in blocks(page)]
OWN = {"resolves", "toy"}
"""Labelers and engines that a page makes; its own run is their test."""


def of(language: str) -> list[Any]:
    found = [block for block in BLOCKS if block.language == language]
    assert found
    return [pytest.param(block, id=f"{block.page.relative_to(ROOT)}:{block.line}") for block in found]


@pytest.mark.parametrize("block", of("yaml"))
def test_yaml_of_a_page_is_a_job_a_student_a_teacher_or_a_part_of_a_job(
    block: Block,
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = yaml.safe_load(block.text)
    for name in ("SITE", "STORE_SECRET"):
        monkeypatch.setenv(name, "here")
    if "student" in values:
        validate_spec(DistillSpec, values, where=block.page.name)
    elif "init" in values:
        read_teacher_spec(values, where=block.page.name)
    elif OWN.isdisjoint(values.get(section, {}).get("name") for section in ("labeler", "engine")):
        assert set(values) <= set(JobSpec.model_fields)
        (folder / "job.yaml").write_text(yaml.safe_dump({**JOB, **values}))
        load_job("job.yaml")


@pytest.mark.parametrize("block", of("python"))
def test_python_of_a_page_is_python(block: Block) -> None:
    ast.parse(block.text)
