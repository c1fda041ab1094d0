"""Commands, the run loop, progress and exit codes: the one folder that reads the environment, prints and exits.

Owns the order in which things happen, and nothing about what a label means. Read `cli.py` first, then `loop.py` (one shard after the other
through one engine) and `exits.py`.
"""
