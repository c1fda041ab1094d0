"""Training: `students/`, the compact models that serve, and `teachers/`, the reasoning models that label; what both are
made with is in `training/`.

Students meet labels as files that a manifest describes and never import `labelers`; teachers are trained on the
labelers' own prompts and may.
"""
