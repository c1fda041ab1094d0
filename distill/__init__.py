"""Labels become a compact student: losses, heads, collators, calibration, and the student's folder.

Owns everything between finished label runs and a trained student folder. It never runs a teacher, never imports `labelers`
(labels arrive as files that a manifest describes) and never knows of ONNX. transformers' Trainer carries the loop; what is ours is what it
is fed and what it minimises. Read `students.py` first for what a student is, `losses.py` for what it learns, `training.py` for how.
"""
