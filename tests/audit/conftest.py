"""The folder and commands of tests/jobs, and a job whose judge is one of `tests/audit/judges.py`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relabel.labelers.registry import ENGINES
from tests.jobs.conftest import folder, no_scheduler, pairs, relabel, write_job, write_pairs  # noqa: F401


@pytest.fixture
def judged_by(
    monkeypatch: pytest.MonkeyPatch,
    write_pairs: Callable[..., Path],  # noqa: F811
    write_job: Callable[..., str],  # noqa: F811
) -> Callable[..., str]:
    """`judged_by("CountsWords", {"audit": …})`: a job file whose engine is that judge, over the folder's pairs."""

    def make(judge: str, changes: dict[str, Any] | None = None) -> str:
        monkeypatch.setitem(ENGINES, judge, f"tests.audit.judges:{judge}")
        write_pairs()
        return write_job({"labeler": {"name": "direct"}, "engine": {"name": judge}, "shards": None} | (changes or {}))

    return make
