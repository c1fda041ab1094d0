"""Numbers of things in messages."""

from __future__ import annotations


def counted(number: int, thing: str) -> str:
    """How many of something there are: `1 row`, `2,000 rows`."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")
