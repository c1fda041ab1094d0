"""What a process's variables mean before anything reads them."""

from __future__ import annotations

import getpass
import os
from collections.abc import MutableMapping


def fill_in_region(environment: MutableMapping[str, str]) -> None:
    """Let `AWS_REGION` count where `AWS_DEFAULT_REGION` is not set, the only one of the two that botocore reads."""
    if region := environment.get("AWS_REGION"):
        environment.setdefault("AWS_DEFAULT_REGION", region)


def fill_in_user(environment: MutableMapping[str, str]) -> None:
    """Name the user where nothing does, as in a container under a uid without a passwd entry: torch asks for the name,
    for a folder of its own, and ends without one.
    """
    try:
        getpass.getuser()
    except (KeyError, OSError):
        environment["LOGNAME"] = f"uid-{os.getuid()}"
