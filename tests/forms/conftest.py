"""The folder and commands of tests/jobs, and tables of tests/convert."""

from tests.convert.conftest import convert, write_rows  # noqa: F401
from tests.evaluate.conftest import run  # noqa: F401
from tests.jobs.conftest import committed, folder, no_scheduler, pairs, relabel, write_job, write_pairs  # noqa: F401
