"""Data that all folders share: records, schemas, specs, digests, plans, receipts, storage, metrics and errors.

Imports no other folder of this package, runs no model, prints nothing, and reads no environment variable except the
failpoints'. Start with `asks.py` (the interface of labelers and engines), then `plan.py` and `store.py`,
which explain why no row is lost.
"""
