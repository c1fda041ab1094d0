"""One worker's run over its shards, from the first ask to the manifest, and several workers on one run (`workers.py`).
Start with `label.py`, then `loop.py`.
"""
