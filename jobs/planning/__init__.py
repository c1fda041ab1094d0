"""Planning: from a job file to an opened output with its plan, what it will cost, and which shards a worker takes. Owns
how a job is read and checked; what a plan is, `manifests/runs/plans.py` knows. Read `job_files.py` first, then
`opening.py`.
"""
