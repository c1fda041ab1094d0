"""What a process's variables mean before anything reads them."""

from __future__ import annotations

from collections.abc import MutableMapping


def fill_in_region(environment: MutableMapping[str, str]) -> None:
    """Let `AWS_REGION` count where `AWS_DEFAULT_REGION` is not set, the only one of the two that botocore reads."""
    if region := environment.get("AWS_REGION"):
        environment.setdefault("AWS_DEFAULT_REGION", region)
