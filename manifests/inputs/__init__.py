"""Inputs: which files a pattern names, what their columns are, and what goes wrong while they are read. Read
`dataset.py` first.
"""
