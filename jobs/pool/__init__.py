"""Several workers on one run: processes on this machine, one GPU each, or actors on a Ray cluster.

Start with `backends.py`, then `supervisor.py`. What a single worker does is in `relabel.jobs.run`.
"""
