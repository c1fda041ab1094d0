"""Named places where a test may have this process killed, as `kill -9` would.

`RELABEL_FAILPOINT=after_labels` kills at the first hit of that name, `after_labels:3` at the third. Armed by the environment so that a
test can aim at a real command in a fresh process; unarmed, a hit is one comparison.
"""

from __future__ import annotations

import os
import signal

from manifests.errors import ConfigError

FAILPOINTS = (
    "before_plan_rows",
    "before_plan",
    "after_plan",
    "before_temp_sync",
    "before_temp_rename",
    "before_labels",
    "after_labels",
    "after_quarantine",
    "before_receipt",
    "after_receipt",
    "before_manifest",
    "after_manifest",
)
"""Every place there is; the crash tests loop over this tuple, so a new one is covered at birth."""

_name, _, _count = os.environ.get("RELABEL_FAILPOINT", "").partition(":")
_armed = _name
_hits_left = int(_count or 1)
if _armed and _armed not in FAILPOINTS:
    raise ConfigError(f"variable RELABEL_FAILPOINT={_armed!r}: known are {', '.join(FAILPOINTS)}")


def hit(name: str) -> None:
    """Die here if this place is armed and its count is up."""
    global _hits_left
    if name != _armed:
        return
    _hits_left -= 1
    if _hits_left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
