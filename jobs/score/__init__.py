"""Score: a student labels pairs through the shards, receipts and exit codes of a run. Read `student_jobs.py` first."""
