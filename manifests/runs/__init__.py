"""Runs: plan, receipts, proofs and manifest of an output; labels reused from earlier ones. Why no row gets lost.

Read `plans.py` and `cutting.py` first, then `receipts.py`, `proofs.py`, `run_folder.py` and `run_manifest.py`.
"""
