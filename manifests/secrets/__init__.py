"""Secrets: what they look like, where they may be, and how what leaves this process is masked. Read `redaction.py`
first.
"""
