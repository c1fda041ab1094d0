"""One worker's run over its shards, from the first ask to the manifest. Start with `session.py`, then `loop.py`."""
