"""Running: one worker's way through its shards, from the first ask to the manifest. Owns the loop between labelers and
engine, what stops it, and what is said while it goes; what a receipt proves, `manifests/runs/receipts.py` knows. Read
`sessions.py` first, then `loop.py`.
"""
