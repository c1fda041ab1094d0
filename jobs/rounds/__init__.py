"""A search in several rounds over a corpus: retrieve, review, ask again, until it is over; each round is a run.

Source: R2RAG, section 3.3 . Its result are trajectories, one for each question. Nothing is remembered
between rounds but the rounds themselves: the state of a search is read from what its reviews say. Read `loop.py` first,
then `searches.py`.
"""
