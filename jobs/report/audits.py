"""The report's section on audits: how the page's judges can be fooled. An audit is found where `relabel audit` puts it,
next to the run, student or bundle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from relabel.jobs.audit import (
    AUDIT_NAME,
    LABELS,
    AuditResult,
    ProbeResult,
    audit_folder,
    furthest_table,
    moves_table,
    read_audit,
)
from relabel.jobs.report.artifacts import Artifact, BundleArtifact, RunArtifact, StudentArtifact
from relabel.jobs.sections import Block, Fold, Paragraph, Section, closing_blocks
from relabel.jobs.tables import is_remote
from relabel.manifests.errors import RelabelError
from relabel.manifests.files import Storage
from relabel.manifests.metrics.evaluation import FEWEST_QUERIES
from relabel.manifests.plan import load_plan, recipe_differences
from relabel.manifests.records import sha256_bytes
from relabel.manifests.run_manifest import MANIFEST_NAME
from relabel.manifests.store import open_run_store, read_if_there

FOOLED = 0.05
"""A probe is named in the verdict where more pairs than one in twenty move the wrong way: the low end of the interval,
and more than move so when they are asked again.
"""


def audits_section(artifacts: Sequence[Artifact], storage: Storage, *, has_texts: bool) -> tuple[Section, list[str]]:
    """Each judge's audit; without blocks where none has one.

    Args:
        has_texts: show the pairs that moved the furthest, with their texts.
    Returns:
        The section, and a sentence for each judge.
    """
    blocks: list[Block] = []
    verdicts: list[str] = []
    for artifact in artifacts:
        if is_remote(artifact.path) or not isinstance(artifact, RunArtifact | StudentArtifact | BundleArtifact):
            continue
        path = audit_folder(Path(artifact.path)) / AUDIT_NAME
        if not path.is_file():
            continue
        try:
            result = read_audit(path)
            other = difference_to(artifact, result, path.parent, storage)
        except (RelabelError, OSError) as exc:
            blocks.append(Paragraph(f"The audit of {artifact.name} is not shown. {exc}", "warn"))
            continue
        if other:
            blocks.append(Paragraph(f"{path} is not of this {artifact.kind}: {other}. Audit it again.", "warn"))
            continue
        verdict = verdict_of(artifact.name, result)
        verdicts.append(verdict.text)
        blocks += [verdict, *audit_blocks(artifact.name, result, has_texts=has_texts)]
    return Section("audit", "Audit", blocks), verdicts


def difference_to(artifact: Artifact, result: AuditResult, folder: Path, storage: Storage) -> str:
    """What makes an audit that of another judge; empty where nothing does."""
    if not isinstance(artifact, RunArtifact):
        manifest = read_if_there(artifact.store, MANIFEST_NAME) or b""
        is_same = result.manifest_sha256 == sha256_bytes(manifest)
        return "" if is_same else "another was at its place then"
    plan = load_plan(open_run_store(str(folder / LABELS), storage))
    if plan is None:
        return "what was asked is gone, so nobody can tell"
    names = recipe_differences(plan.parts, artifact.plan.parts)
    return f"{', '.join(names)} differ" if names else ""


def verdict_of(name: str, result: AuditResult) -> Paragraph:
    """By which probes a judge is fooled, or that none was shown to."""
    gates = "".join(f" A gate refuses it: {verdict}." for verdict in result.refused)
    fooled = "; ".join(f"{probe.probe} {moved_text(probe)}" for probe in result.probes if is_fooled_by(probe))
    over = f"{result.rows:,} pairs of {result.queries:,} queries"
    if result.queries < FEWEST_QUERIES:
        return Paragraph(f"Whether {name} can be fooled is not known: {over} are too few.{gates}", "warn")
    if fooled:
        return Paragraph(
            f"{name} can be fooled. Pairs that a probe moves the wrong way: {fooled}; {over}.{gates}", "bad"
        )
    text = f"No probe is shown to move more than one pair in twenty of {name} the wrong way; {over}.{gates}"
    return Paragraph(text, "bad" if gates else "good")


def is_fooled_by(probe: ProbeResult) -> bool:
    """Whether the judge is shown to be."""
    low = probe.moved.low
    return not probe.is_noise and low is not None and low > max(FOOLED, probe.again or 0.0)


def moved_text(probe: ProbeResult) -> str:
    """`83 % (66 to 92 %)`."""
    moved = probe.moved
    assert moved.value is not None
    assert moved.low is not None
    assert moved.high is not None
    return f"{moved.value:.0%} ({moved.low:.0%} to {moved.high:.0%})"


def audit_blocks(name: str, result: AuditResult, *, has_texts: bool) -> Iterator[Block]:
    """The table of probes, the pairs that moved the furthest, and what each probe changes."""
    yield moves_table(result, f"How the grades of {name} move")
    furthest = furthest_table(result)
    if has_texts and furthest.rows:
        yield Fold(f"The {len(furthest.rows)} pairs that moved the furthest", [furthest])
    notes = [f"{probe.probe}: {probe.about}" for probe in result.probes]
    notes.append(f"moved so: by {result.step:.3g} or more, a tenth of the scale")
    yield from closing_blocks(notes, result.gates)
