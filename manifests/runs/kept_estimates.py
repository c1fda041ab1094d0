"""The estimate that was written before the first commit, read back and held against what came."""

from __future__ import annotations

from relabel.manifests.errors import ManifestError
from relabel.manifests.records import checked, fault_of, unsealed, version_of
from relabel.manifests.runs.estimates import Actual, Estimate, PlannedFigure, against
from relabel.manifests.runs.snapshots import Tally
from relabel.manifests.storage.run_store_ports import RunStore

ESTIMATE_NAME = "estimate.json"
ESTIMATE_VERSION = 2
READ_VERSIONS = (1, ESTIMATE_VERSION)
"""Before 2, seconds were always said."""


def load_estimate(store: RunStore) -> Estimate | None:
    """What was said when the run was planned; None if nothing was.

    Raises:
        ManifestError: it is damaged, or another version of relabel wrote it.
    """
    try:
        held = unsealed(store.read(ESTIMATE_NAME))
        return checked(Estimate, held) if version_of(held) in READ_VERSIONS else None
    except FileNotFoundError:
        return None
    except ValueError as exc:
        raise ManifestError(
            f"{store.root}/{ESTIMATE_NAME}: not an estimate ({fault_of(exc)}). Move it away; nothing depends on it."
        ) from exc


def plan_against_actual(store: RunStore, tally: Tally) -> list[PlannedFigure] | None:
    """Plan against actual, each figure; None if nothing was estimated."""
    estimate = load_estimate(store)
    if estimate is None:
        return None
    return against(estimate, Actual(tally.rows, tally.reused, tally.stages, tally.worker_seconds))
