"""A student becomes an artifact that a deployment team can trust: export, parity, latency, bundle, channels.

Owns everything between a trained student and a published bundle. It may ask `distill` for the student's module and nothing above itself,
and it runs on transformers 4.57 and 5 alike, since optimum's exporter lives in an environment of its own. Its code arrives with the
artifact work; until then this paragraph is all there is.
"""
