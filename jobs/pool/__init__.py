"""Worker pool: several workers on one run, processes that this one supervises, a GPU each, or actors that Ray places.

Owns how they are started, watched and ended, and which rows brought an engine down; what a worker does,
`running/sessions.py` and `running/loop.py` know. Read `backends.py` first, then `supervise.py`.
"""
