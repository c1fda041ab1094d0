"""Asking: a few rows put to the model outside of any run, and all that was asked and answered, to be looked at. Owns
which rows, and how they are shown; how an ask comes about and what becomes of an answer, `running/loop.py` knows.
"""
