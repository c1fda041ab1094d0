"""What training has in common, whatever is trained: a model's folder and whose it is, checkpoints that are whole or not
there, the order of batches, the curve. Knows neither students nor teachers.

Read `making.py` first.
"""
