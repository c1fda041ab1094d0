"""The folder and commands of tests/jobs, and a review that must end well."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.convert.conftest import rows_of
from tests.jobs.conftest import committed, folder, no_scheduler, pairs, relabel, write_job, write_pairs  # noqa: F401

__all__ = ["rows_of"]


@pytest.fixture
def review(relabel: Callable[..., Any]) -> Callable[..., Any]:  # noqa: F811
    """`review("--to", "look.parquet")`: the JSON of a review of out/ecom; it must end well."""

    def call(*arguments: str) -> Any:
        done = relabel("review", "out/ecom", *arguments, "--output", "json")
        assert done.code == 0, done
        return done.json

    return call
