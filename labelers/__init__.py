"""Prompts, reading rules and engines: a pair goes in, a label or a typed refusal comes out.

Owns what is asked of a teacher and how its words are read. It never touches storage, chunks or receipts, never prints,
and no labeler imports torch. Read `registry.py` first, then `direct.py` (the smallest labeler), `verdicts.py` (the
reading rules) and `answers.py` (what is read of a text that no grammar held).
"""
