"""Compare: two label runs over the same pairs, row by row and query by query. Owns which rows are the same and what is
shown of them; the figures are `manifests/metrics/comparison.py`, `paired_tests.py` and, with gold grades,
`evaluation.py`. Read `comparing_runs.py` first.
"""
