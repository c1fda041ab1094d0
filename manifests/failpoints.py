"""Named places where a test may have this process killed, as `kill -9` would.

`RELABEL_FAILPOINT=after_labels` kills at the first hit of that name, `after_labels:3` at the third. Armed by the
environment so that a test can aim at a real command in a fresh process; unarmed, a hit is one comparison.
"""

import os
import signal

FAILPOINTS = (
    "before_plan_rows",
    "before_plan",
    "after_plan",
    "before_temp_sync",
    "before_temp_rename",
    "before_labels",
    "after_labels",
    "after_quarantine",
    "after_answers",
    "before_receipt",
    "after_receipt",
    "before_manifest",
    "after_manifest",
)
"""Every place there is; the crash tests loop over this tuple, so a new one is covered at birth."""

BATCH_FAILPOINTS = ("before_batch_file", "before_batch", "after_batch", "after_batch_record")
"""Places of a run that hands asks over as batches; tests/engines_openai/test_batches.py loops over them."""

ROUNDS_FAILPOINTS = ("before_round_file", "after_round_file", "before_trajectories", "after_trajectories")
"""Places of `relabel rounds` between its runs; tests/faults/test_rounds_kill.py loops over them."""

PUBLISH_FAILPOINTS = (
    "before_object",
    "during_upload",
    "after_object",
    "after_objects",
    "after_version",
    "before_channel",
    "after_channel",
)
PULL_FAILPOINTS = ("during_download",)
"""Places of `relabel publish` and `relabel pull`; tests/faults/test_publishing.py loops over them."""

TRAINING_FAILPOINTS = ("after_training_step", "before_checkpoint", "after_checkpoint", "before_model")
"""Places of `relabel distill` and `relabel train`; tests/distill and tests/teachers loop over them."""

_armed = ""
_hits_left = 0


def arm(place: str) -> None:
    """Be killed at a place.

    Args:
        place: `after_labels`, `after_labels:3`, or nothing at all.
    """
    global _armed, _hits_left
    _armed, _, count = place.partition(":")
    _hits_left = int(count or 1)


def hit(name: str) -> None:
    """Die here if this place is armed and its count is up."""
    global _hits_left
    if name == _armed:
        _hits_left -= 1
        if _hits_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


arm(os.environ.get("RELABEL_FAILPOINT", ""))
