"""Estimating: what a run would ask, take and cost, in ranges. Read `estimating.py` first."""
