"""How fast a bundle is: closed and open loop, comparisons side by side, and what is to be said about the figures.

Owns measuring and what a measurement leaves in a bundle; it changes nothing else there. Read `benching.py` first, then
`closed_cells.py` and `open_rates.py`. `quantiles.py`, `rate_sweeps.py`, `findings.py` and `plans.py` decide and touch
no clock.
"""
