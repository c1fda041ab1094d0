"""Commands, the run loop, progress and exit codes: the one folder that reads the environment, prints and exits.

Owns the order in which things happen, and nothing about what a label means. Read `cli.py` first, then the rooms in the
order of a run: `commands/` (what is typed), `planning/` (from a job file to an opened output), `running/` (one worker's
way through its shards), `pool/` (several workers); beside them `estimating/`, `merge/`, `score/`, `pairs/`,
`evaluate/`, `compare/`, `convert/`, `report/`, `delivery/` and `demo/`, a command each. `files/` holds what they share
about files, `exits.py` is the table of exit codes.
"""
