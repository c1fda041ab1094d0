"""One worker's run over its shards, from the first ask to the manifest, and several workers on one run (`workers.py`).
Start with `session.py`, then `loop.py`.
"""
