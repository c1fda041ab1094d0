"""A folder to write into, and the CLI called in this process (both from the jobs' tests)."""

from tests.jobs.conftest import committed, folder, no_scheduler, relabel  # noqa: F401
