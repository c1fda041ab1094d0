"""Latency and throughput of a bundle: closed and open loop. Start with `measure.py`."""
