"""Labels become a compact student: losses, heads, collators, calibration and scoring.

Owns everything between finished label runs and a trained student folder. It never runs a teacher, never imports `labelers`
(labels arrive as files that a manifest describes) and never knows of ONNX. Its code arrives with the student work; until then
this paragraph is all there is.
"""
