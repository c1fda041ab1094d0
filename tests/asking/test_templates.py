"""`relabel templates export`: what it writes is what is asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relabel.jobs.job import load_job
from relabel.labelers.registry import LABELERS

JOB = """\
# A job of mine.
name: mine   # by me
input: {path: pairs.parquet}

labeler:     # who asks
  name: NAME   # the one
  # and how often
  attempts: 2

engine: {name: fake}
output: out
"""


def digests(job: str) -> dict[str, str]:
    found: dict[str, str] = load_job(job).labeler.template_digests
    return found


@pytest.mark.parametrize("name", sorted(LABELERS))
def test_a_job_over_what_was_exported_asks_what_it_asked_until_a_file_is_edited(
    relabel: Callable[..., Any], folder: Path, name: str
) -> None:
    Path("jobs").mkdir()
    job = Path("jobs/mine.yaml")
    job.write_text(JOB.replace("NAME", name))
    before = digests(str(job))
    done = relabel("templates", "export", name, "prompts", "--output", "json")
    assert done.code == 0, done
    assert done.json["files"] == sorted(path.name for path in Path("prompts").iterdir())
    assert set(done.json["files"]) >= set(before)
    job.write_text(JOB.replace("NAME   # the one", f"{name}   # the one\n  templates: ../prompts"))
    assert load_job(str(job)).spec.labeler.templates == "prompts"
    assert digests(str(job)) == before
    file = Path("prompts", sorted(before)[0])
    file.write_text(file.read_text() + "\nBe strict.\n")
    assert {name for name, digest in digests(str(job)).items() if digest != before[name]} == {file.name}


def test_files_that_are_there_are_replaced_only_by_force_and_a_refusal_writes_nothing(
    relabel: Callable[..., Any], folder: Path
) -> None:
    assert relabel("templates", "export", "r3a", "prompts").code == 0
    Path("prompts/verdict.j2").write_text("mine")
    Path("prompts/intent.j2").unlink()
    relabel("templates", "export", "r3a", "prompts").refused(2, "prompts/", "is there already", "--force")
    assert not Path("prompts/intent.j2").exists()
    assert Path("prompts/verdict.j2").read_text() == "mine"
    assert relabel("templates", "export", "r3a", "prompts", "--force").code == 0
    assert Path("prompts/verdict.j2").read_text() != "mine"
