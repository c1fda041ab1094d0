"""Label sets judged by gold grades, and students compared with their teacher. Read `judging.py` first."""
