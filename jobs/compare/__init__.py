"""Two label runs over the same pairs, compared row by row and query by query. Read `comparison.py` first."""
