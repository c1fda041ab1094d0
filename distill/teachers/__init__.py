"""Teachers: reasoning models trained here on the labelers' own prompts. Imports `labelers`; nothing in `students/`
imports it.
"""
