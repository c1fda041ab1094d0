"""What is measured: each metric once, with its intervals, tests and gates. Read `evaluation.py` first."""
