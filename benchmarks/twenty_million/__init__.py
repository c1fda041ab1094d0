"""Twenty million asks while workers, starters, nodes and the storage die: one committed result each, paid once.

`__main__.py` is the show from beginning to end, `server.py` the model's stand-in, which counts what is paid, `chaos.py`
what is killed, and `evidence.py` an independent reader of what is left.
"""
