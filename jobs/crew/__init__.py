"""Crew: several workers on one run, processes that this one supervises, a GPU each, or actors that Ray places. Owns how they are started,
watched and ended, and which rows brought an engine down; what a worker does, `sessions.py` and `loop.py` beside this folder know. Read
`choice.py` first, then `supervise.py`.
"""
