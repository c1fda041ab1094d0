"""`python -m jobs` is `relabel`, for environments whose scripts are not on the path."""

from jobs.cli import main

main()
