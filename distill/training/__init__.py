"""What trainings of students and teachers share: the model's folder, atomic checkpoints, batches, the curve.

Read `output.py` first.
"""
