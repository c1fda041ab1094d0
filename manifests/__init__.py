"""What is written down, and what all floors say to each other: records, schemas, specs, digests, plans, receipts,
storage, errors.

The ground floor: it imports no other folder of this repository, never runs a model, never prints and never reads the
environment (but for the failpoints). Read `asks.py` first (the words between labelers and engines), then the rooms:
`runs/` (plan, receipts, proofs: how no row gets lost), `inputs/`, `storage/`, `judging/`, `metrics/`, `models/`,
`secrets/`.
"""
