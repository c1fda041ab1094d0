"""The fingerprint: what ties an output to one job, and whose plan a plan is."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from relabel.manifests.digests import canonical_json, digest_of
from relabel.manifests.errors import StaleRunError
from relabel.manifests.inputs.changed_files import changed_files
from relabel.manifests.inputs.dataset import Dataset
from relabel.manifests.runs.plans import Plan
from relabel.manifests.runs.recipes import parts_as_of
from relabel.manifests.schemas import SCHEMA_VERSION

SHOWN_LINES = 12
"""Of each template's difference."""


def fingerprint_parts(
    dataset: Dataset,
    *,
    limit: int | None,
    overlong: str,
    labeler: dict[str, Any],
    label_columns: Mapping[str, str],
    templates: dict[str, str],
    stages: dict[str, str],
    engine: dict[str, Any],
    model_digest: str,
    cut: dict[str, int | None],
) -> dict[str, Any]:
    """What ties an output to one job, as plain values whose differences a person can read.

    Input paths are not part of it: a data set may move, its identity is what its footers say.

    Args:
        label_columns: those that the labeler declares, name → kind, in their order in the label files.
        stages: a digest of each stage's ask as it is rendered for a made-up pair (`label_keys.stage_digests`): it names
            the stage that a changed template belongs to, and changes also where the code that renders it does.
    """
    parts: dict[str, Any] = {
        "inputs": digest_of([list(file.identity) for file in dataset.files]),
        "limit": limit,
        "overlong": overlong,
        "columns": dataset.columns.model_dump(mode="json"),
        "labeler": labeler,
        "label_columns": list(label_columns.items()),
        "templates": templates,
        "stages": stages,
        "engine": engine,
        "model": model_digest,
        "schema": SCHEMA_VERSION,
        "cut": cut,
    }
    if dataset.table is not None:
        parts["table"] = dataset.table.identity
    if dataset.reads.columns:
        parts["input_columns"] = [one.name for one in dataset.reads.columns]
    if dataset.reads.siblings:  # a chunk that cut a query would hold some of its siblings
        parts["whole_queries"] = True
    held: dict[str, Any] = json.loads(canonical_json(parts))  # as a plan that was written and read back holds them
    return held


def is_plan_of(plan: Plan, parts: dict[str, Any]) -> bool:
    """Whether a plan is that of the job whose parts these are."""
    return plan.parts == parts_as_of(parts, plan.parts)


def template_name(digest: str) -> str:
    """Where the template with this sha256 is kept, in the output: so that its text can be shown when it changed."""
    return f"plan/template-{digest[:16]}.j2"


def check_plan(
    plan: Plan,
    dataset: Dataset,
    parts: dict[str, Any],
    *,
    output: str,
    template: Callable[[str], bytes | None] = lambda _: None,
) -> None:
    """Refuse to go on with a plan made for other inputs or another job.

    Args:
        template: the bytes of the template with this sha256; None where they are not known.
    Raises:
        StaleRunError: names every file that changed, or every setting that differs.
    """
    if is_plan_of(plan, parts):
        return
    changed = changed_files(plan.files, dataset.files) if plan.parts.get("inputs") != parts.get("inputs") else []
    changes = list(_changes(plan.parts, parts_as_of(parts, plan.parts), template))
    if changed:
        listed = "\n  ".join(changed[:20]) + (f"\n  … and {len(changed) - 20} more" if len(changed) > 20 else "")
        raise StaleRunError(
            f"{output}: the inputs are not those that were planned, and an output never grows or changes its input. "
            f"Changed:\n  {listed}\n  "
            "Restore the files, or label the new ones into another output."
            + ("\n  ".join([" Settings differ too:", *changes]) if changes else "")
        )
    listed = "\n  ".join(changes[:20]) + (f"\n  … and {len(changes) - 20} more" if len(changes) > 20 else "")
    raise StaleRunError(
        f"{output}: belongs to another job. Different:\n  {listed}\n  Use another `output`, or restore the spec."
    )


def _changes(was: dict[str, Any], now: dict[str, Any], template: Callable[[str], bytes | None]) -> Iterator[str]:
    """What differs, a phrase each; of a template its lines. What follows from a difference that is shown is left out:
    stages that ask otherwise, and the templates of another labeler.
    """
    is_asked_otherwise = any(was.get(key) != now.get(key) for key in ("labeler", "templates"))
    is_other_labeler = was.get("labeler", {}).get("name") != now.get("labeler", {}).get("name")
    left_out = {"inputs", "stages" if is_asked_otherwise else "", "templates" if is_other_labeler else ""}
    for key in sorted({*was, *now} - left_out):
        for path, before, after in differing(was.get(key), now.get(key), key):
            is_template = path.startswith("templates.")
            yield _template_phrase(path, before, after, template) if is_template else _phrase(path, before, after)


def _template_phrase(path: str, before: str | None, after: str | None, template: Callable[[str], bytes | None]) -> str:
    old, new = (b"" if digest is None else template(digest) for digest in (before, after))
    if old is None or new is None:
        return f"{path}: another text than when the output was planned"
    one, other = (data.decode(errors="replace").splitlines() for data in (old, new))
    named = list(difflib.unified_diff(one, other, n=1, lineterm=""))  # two lines of file names first
    lines = named[2:] or ["the same lines, with other line ends"]
    lines[SHOWN_LINES:] = [f"… and {len(lines) - SHOWN_LINES} more"] if len(lines) > SHOWN_LINES else []
    return "\n    ".join([f"{path}:", *lines])


def _phrase(path: str, before: Any, after: Any) -> str:
    return f"{path}: was {json.dumps(before)}, is {json.dumps(after)}"


def differences(was: Any, now: Any) -> Iterator[str]:
    """What differs between two plain values, a phrase each, by the path of keys to it."""
    for path, before, after in differing(was, now):
        yield _phrase(path, before, after)


def differing(was: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """What differs between two plain values: the path of keys to it, and both."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in sorted({*was, *now}):
            yield from differing(was.get(key), now.get(key), f"{path}.{key}" if path else key)
    elif was != now:
        yield path, was, now
