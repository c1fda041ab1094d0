"""Latency and throughput of a bundle: closed and open loop, and comparisons with other runtimes.

Start with `benching.py`, then `cells.py`.
"""
