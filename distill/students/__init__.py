"""Students: label runs become a trained student. Imports no labeler.

Read `students.py` first for what a student is, `losses.py` for what it learns, `training.py` for how,
`student_manifest.py` for what is recorded of it.
"""
