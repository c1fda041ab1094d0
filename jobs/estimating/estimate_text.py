"""An estimate as people and programs read it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from relabel.jobs.estimating.estimating import Planned
from relabel.jobs.output import table
from relabel.manifests.runs.ranges import Range


def estimate_json(planned: Planned) -> dict[str, Any]:
    """The whole estimate as plain values; a range is [low, value, high]."""
    found = planned.estimate
    return {
        "rows": found.rows,
        "rows_reused": list(found.rows_reused),
        "rows_asked": list(found.rows_asked),
        "stages": {
            name: {key: list(getattr(stage, key)) for key in stage.__slots__} for name, stage in found.stages.items()
        },
        "prompt_tokens": list(found.prompt_tokens),
        "output_tokens": list(found.output_tokens),
        "prefix_hit": list(found.prefix_hit.rounded(4)),
        "seconds": None if found.seconds is None else list(found.seconds),
        "cost": None if found.cost is None else list(found.cost),
        "is_exact": found.is_exact,
        "basis": asdict(found.basis),
        "reuse": planned.remarks,
    }


def estimate_text(planned: Planned) -> str:
    """What the open rows will come to, a line for each figure, with 95 % intervals."""
    found = planned.estimate
    basis = found.basis
    rows = [
        ("reused", f"{_shown(found.rows_reused)} of {found.rows:,} open rows ({basis.rows_reused})"),
        ("asked", f"{_shown(found.rows_asked)} rows"),
    ]
    rows += [
        (
            f"  {name}",
            f"{_shown(stage.asks)} asks, {_shown(stage.prompt_tokens)} tokens in, {_shown(stage.output_tokens)} out, "
            f"prefix hit {_share(stage.prefix_hit)}",
        )
        for name, stage in found.stages.items()
    ]
    rows.append(("  tokens by", f"{basis.tokens}; output by {basis.output_tokens}; prefix hit by {basis.prefix_hit}"))
    seconds = "not known" if found.seconds is None else f"{_shown(found.seconds, 1)} of one worker"
    rows.append(("seconds", f"{seconds} ({basis.seconds})"))
    if found.cost is not None:
        rows.append(("cost", f"{_shown(found.cost, 2)} at the price given"))
    rows += [("reuse", remark) for remark in planned.remarks]
    return table(rows)


def _shown(found: Range, digits: int = 0) -> str:
    value = f"{found.value:,.{digits}f}"
    return value if found.low == found.high else f"{value} ({found.low:,.{digits}f} to {found.high:,.{digits}f})"


def _share(found: Range) -> str:
    return (
        f"{found.value:.0%}" if found.low == found.high else f"{found.value:.0%} ({found.low:.0%} to {found.high:.0%})"
    )
