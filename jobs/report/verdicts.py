"""What a reader of a report has to know first: which system is better, and whether runs and students are better than
baselines that learned nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from relabel.jobs.evaluate import manifest_of_scorer
from relabel.jobs.report.artifacts import Artifact, BundleArtifact, RunArtifact, StudentArtifact
from relabel.jobs.sections import Paragraph, Section
from relabel.manifests.metrics.evaluation import Baselines, baselines_not_beaten, not_shown_to_beat
from relabel.manifests.metrics.judged import title_of
from relabel.manifests.records import checked, plain


def verdict_section(artifacts: Sequence[Artifact], found: Sequence[str]) -> Section:
    """Which runs' answers are made up, what the page's other sections found, and a sentence for each student: of one
    that is given, of a bundle's, and of the one whose scores are given.
    """
    verdicts = [
        Paragraph(
            f"The answers of {one.name} are made up (engine fake): no figure that rests on them means anything.", "bad"
        )
        for one in artifacts
        if isinstance(one, RunArtifact) and any(engine.get("family") == "fake" for engine in one.snapshot.all_engines)
    ]
    verdicts += [Paragraph(sentence) for sentence in found]
    verdicts += [
        verdict_of(name, manifest)
        for name, manifest in _manifests(artifacts)
        if isinstance(manifest.get("metrics"), Mapping)
    ]
    return Section("verdict", "Verdict", list(dict.fromkeys(verdicts)))  # a student and its bundle: one sentence


def _manifests(artifacts: Sequence[Artifact]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The name and the manifest of each student that is known, as plain values."""
    for artifact in artifacts:
        if isinstance(artifact, StudentArtifact):
            yield artifact.name, plain(artifact.manifest)
    for artifact in artifacts:
        if isinstance(artifact, BundleArtifact):
            yield artifact.name, artifact.facts["lineage"].get("student") or {}
    for artifact in artifacts:
        if isinstance(artifact, RunArtifact) and artifact.kind == "scores":
            path, manifest = manifest_of_scorer(artifact.path, artifact.storage)
            if not isinstance(manifest, str):
                student = (manifest.get("lineage") or {}).get("student") or manifest
                yield str(student.get("name") or Path(path).name), student


def verdict_of(name: str, manifest: Mapping[str, Any]) -> Paragraph:
    """Whether a student is better than its baselines on its own test split, as its manifest holds the figures."""
    test = manifest["metrics"].get("test") or {}
    figures = test.get("student") or {}
    if not test.get("baselines"):
        return Paragraph(
            f"Whether the student {name} is better than a baseline is not known: its manifest holds no baselines.",
            "warn",
        )
    baselines = checked(Baselines, test["baselines"])
    below = [
        f"{baselines.words(unbeaten.kind)} ({title_of(unbeaten.figure)} {unbeaten.value:.3f} against "
        f"{unbeaten.bound:.3f})"
        for unbeaten in baselines_not_beaten(figures, baselines)
    ]
    over = f"On its test split, {figures.get('rows', 0):,} rows judged by {test.get('judged_by')}"
    refused = [check["text"] for check in (manifest.get("gate") or {}).get("checks", ()) if not check["has_passed"]]
    gates = "".join(f" A gate refuses it: {text}." for text in refused)
    if below:
        return Paragraph(f"The student {name} is no better than {' and '.join(below)}. {over}.{gates}", "bad")
    unclear = not_shown_to_beat(figures, test.get("intervals"), baselines)
    if unclear:
        text = f"The student {name} is not shown to be better than a baseline: {'; '.join(unclear)}. {over}.{gates}"
        return Paragraph(text, "bad" if refused else "warn")
    text = f"The student {name} is above the baselines. {over}.{gates}"
    return Paragraph(text, "bad" if refused else "good")
