"""How many grades there are: by labels, by gold, or as was said."""

from __future__ import annotations

import pyarrow.compute as pc

from relabel.jobs.evaluate.judged_options import JudgingOptions
from relabel.manifests.errors import InputError, UsageError
from relabel.manifests.judging.label_columns import map_labels
from relabel.manifests.judging.label_sets import LabelSet
from relabel.manifests.judging.qrels import (
    grades_seen,
)

MOST_GRADES = 10
"""As many as a labeler may have."""


def scale_of(sets: list[LabelSet], seen: set[int], options: JudgingOptions) -> tuple[int, list[str]]:
    """K: of the runs, of distributions, as given, or one more than the highest grade."""
    found: dict[str, int] = {}
    highest = 0
    for one in sets:
        if one.grades is not None:
            found[one.where] = one.grades if options.label_map is None else max(options.label_map.values()) + 1
            continue
        for part in one.parts():
            labels = map_labels(part, options.label_map, where=one.where)
            if labels.probs is not None:
                found[one.where] = pc.list_value_length(labels.probs.drop_null()[:1])[0].as_py()
            highest = max(highest, *grades_seen(labels.grades), 0)
    if len(set(found.values())) > 1:
        raise InputError(
            f"labels are on different scales ({_listed(found)}). Judge them apart, or bring them together with "
            "--map-labels."
        )
    if found:
        grades = next(iter(found.values()))
        if options.grades not in (None, grades):
            raise UsageError(f"--grades {options.grades}: {_listed(found)}.")
        return grades, []
    if options.grades is not None:
        return options.grades, []
    highest_gold = max(seen, default=0)
    grades = max(2, highest + 1, highest_gold + 1)
    if grades > MOST_GRADES:
        raise InputError(
            f"labels go up to {highest} and gold grades up to {highest_gold}: more than {MOST_GRADES} grades are no "
            "scale. Are --label and --grade the right columns? Else bring both to one scale with --map and "
            "--map-labels."
        )
    remark = f"the scale is taken to be 0 to {grades - 1}, after the highest grade there is; --grades sets it"
    if highest != highest_gold:
        remark += (
            f". Labels go up to {highest}, gold grades to {highest_gold}: if these are two scales, see --map and "
            "--map-labels"
        )
    return grades, [remark]


def _listed(scales: dict[str, int]) -> str:
    return ", ".join(f"{where} has {grades} grades" for where, grades in scales.items())
