"""What trainings of students and teachers share: the loop, the model's folder, atomic checkpoints, batches, the curve.

Read `loop.py` first.
"""
