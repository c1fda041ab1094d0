"""Heads that a student can have."""

from __future__ import annotations

NODE_HEADS = ("subject", "attribute")
HEADS = ("relevance", *NODE_HEADS)
"""Heads that a student can have, in the order in which they are built."""
