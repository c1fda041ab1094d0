"""Commands, the run loop, progress and exit codes: the only folder that reads the environment, prints and exits.

Start with `cli.py` (the command table), then `commands/` (options and output of each command), `job.py` (the job file
and its output), `run/` (one worker, from the first ask to the manifest; `workers.py` for several). `output.py` has
the table of exit codes.
"""
