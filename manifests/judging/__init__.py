"""Judging: gold grades, TREC files and label sets, joined by row or pair. The figures are `metrics/`. Read
`label_sets.py` first.
"""
