"""Storage: a run's store, bundle stores, leases and retries, on a disk and on S3. Nothing here knows what a label is.

Read `ports.py` first.
"""
