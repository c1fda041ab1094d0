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
    about_probes,
    audit_folder,
    furthest_table,
    moves_table,
    read_audit,
    verdict_of,
)
from relabel.jobs.report.artifacts import Artifact, BundleArtifact, RunArtifact, StudentArtifact
from relabel.jobs.sections import Block, Fold, Paragraph, Section, closing_blocks
from relabel.jobs.tables import is_remote
from relabel.manifests.errors import RelabelError
from relabel.manifests.files import Storage
from relabel.manifests.plan import load_plan, recipe_differences
from relabel.manifests.records import sha256_bytes
from relabel.manifests.run_manifest import MANIFEST_NAME
from relabel.manifests.store import open_run_store, read_if_there


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


def audit_blocks(name: str, result: AuditResult, *, has_texts: bool) -> Iterator[Block]:
    """The table of probes and what each of them changes, the pairs that moved the furthest, and the gates."""
    yield moves_table(result, f"How the grades of {name} move")
    yield about_probes(result)
    furthest = furthest_table(result)
    if has_texts and furthest.rows:
        yield Fold(f"The {len(furthest.rows)} pairs that moved the furthest", [furthest])
    yield from closing_blocks([], result.gates)
