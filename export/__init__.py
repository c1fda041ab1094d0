"""A student becomes a deployable bundle: ONNX export, parity, latency, publishing, channels and pull.

Start with `exporting.py`, then `loader.py`, which every bundle carries as `load.py`; `bench.py` measures latency,
`conform.py` compares a running server with a bundle, `mistakes.py` names what it does wrong, `publishing.py` publishes.
`puller.py` and `loader.py` are single files without dependencies on this package.
"""
