"""Evaluate: label sets judged by gold and set beside each other. Owns which rows belong together and how
figures are shown; the figures are `manifests/metrics/evaluation.py` and what it calls. Read `judging.py` first.
"""
