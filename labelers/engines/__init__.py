"""What runs a teacher: one file an engine, all of `manifests.asks.Engine` (`submit`, `poll`, `capacity`).

Engines know tokens, batches and devices; they never know a grade's meaning. Heavy packages load inside the constructor
that needs them. Read `fake.py` first, then `tokens.py`.
"""
