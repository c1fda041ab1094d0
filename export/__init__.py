"""A student becomes an artifact that a deployment team can trust: export, parity, latency, bundle, channels.

Owns everything between a trained student and a published bundle. It may ask `distill` for the student's module and
nothing above itself, and it runs on transformers 4.57 and 5 alike, since optimum's exporter lives in an environment of
its own. Read `exporting.py` first, then `loader.py`, which every bundle carries as `load.py`; `bench/` for its latency,
`publishing.py` for its way to those who deploy it, and `puller.py`, which stands alone as `loader.py` does.
"""
