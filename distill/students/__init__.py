"""Students: label runs become a trained student. Imports no labeler.

Read `networks.py` first for what a student is, `losses.py` for what it learns and how, `model.py` for how
it is loaded.
"""
