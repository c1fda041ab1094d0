"""An export from student to sealed bundle: models, parity, papers, seal.

All is built in a folder beside the target and moved there in one step, after every gate has passed. What a gate refused
stays beside it under another name, unsealed, so that nobody deploys it and somebody can look at it.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from relabel.distill.students.student_manifest import StudentFiles
from relabel.distill.students.student_record import read_student
from relabel.distill.students.students import StudentModel, load_student, make_texts, student_digest, student_files
from relabel.export import loader
from relabel.export.bundle_cards import CARD_NAME, render_bundle_card
from relabel.export.bundle_formats import ONNX, load_format
from relabel.export.bundle_places import locked, made_beside, put_back, switch
from relabel.export.bundles import Bundle, open_bundle, seal_bundle
from relabel.export.contracts import input_contract, write_loader, write_tokenizer
from relabel.export.parity_check import AskedPairs, Say, asked_pairs, check_gates, compare
from relabel.export.parity_records import Parity, read_parity
from relabel.export.precisions import list_models, write_models
from relabel.export.reference_pairs import PairsFile
from relabel.export.sessions import provider_here
from relabel.export.specs import ExportSpec
from relabel.export.student_facts import ModelFile, StudentFacts, StudentInputs, read_student_facts
from relabel.export.token_lengths import describe_lengths
from relabel.export.triton import write_repository
from relabel.manifests.digests import digest_of
from relabel.manifests.errors import ManifestError, StaleRunError
from relabel.manifests.extras import installed_versions
from relabel.manifests.records import checked, fault_of, plain
from relabel.manifests.storage.context import Storage

LIBRARIES = ("torch", "transformers", "tokenizers", "onnx", "onnxruntime", "onnxscript", "optimum-onnx", "numpy")
FROM_STUDENT = ("fingerprint", "model", "training", "metrics", "gate", "notes")
"""What a bundle's lineage copies from its student's manifest."""


@dataclass(frozen=True)
class Exported:
    """How an export ended.

    Args:
        bundle: sealed.
        was_done: it was there already.
    """

    bundle: Bundle
    was_done: bool


def export_bundle(
    path: Path,
    target: Path,
    spec: ExportSpec,
    storage: Storage,
    *,
    pairs: PairsFile | None = None,
    provider: str = "auto",
    is_replacing: bool = False,
    say: Say = lambda _: None,
) -> Exported:
    """Export a student.

    Args:
        path: the student's folder.
        target: folder of the bundle to make.
        pairs: what to compare on; the student's test split by default.
        provider: what to compare on: `cpu`, `cuda`, or `auto`.
        is_replacing: take the place of another bundle in `target`.
        say: called with progress, a line each.
    Raises:
        GateError: a model differs from the student beyond a gate; nothing lies at `target`.
        StaleRunError: `target` holds something else.
        ConfigError, InputError, ManifestError, ModelError, MissingExtraError: something is off, see the modules that
        say so.
    """
    record = read_student(path)
    options = {"provider": provider, "spec": spec.model_dump(mode="json"), "pairs": asdict(pairs) if pairs else None}
    recipe = digest_of(
        {"student": student_digest(path), "relabel": importlib.metadata.version("relabel-ir"), **options}
    )
    put_back(target)
    done = _there(target, recipe, is_replacing=is_replacing)
    if done is not None:
        return Exported(done, was_done=True)
    provider = provider_here(provider)
    further = {name: load_format(name) for name in spec.formats if name != ONNX}
    for form in further.values():
        form.check()
    manifest = student_manifest(path)
    compared, training = asked_pairs(record, manifest, pairs, spec, storage)
    student = load_student(path)
    # a served graph takes padded rows, however the student was trained
    student.texts = make_texts(replace(record, packs=False), student.tokenizer)
    with made_beside(target) as folder:
        write_tokenizer(student, folder)
        write_loader(folder)
        made = write_models(student, folder, spec, training, say)
        contract, models = input_contract(student), list_models(folder, spec)
        encoder = loader.Encoder(folder, plain(contract))
        rows = encoder.encode(compared.pairs)
        inputs = StudentInputs(**vars(contract), lengths=describe_lengths([len(ids) for ids, _ in rows]))
        facts = _facts(student, manifest, spec, inputs, models) | {"made_by": _made_by(made), "recipe": recipe}
        asked = AskedPairs(compared, encoder, rows)
        parity = compare(student, folder, models, asked, spec, provider, say)
        described, judged = read_student_facts(facts, str(target)), read_parity(parity, str(target))
        _write_papers(folder, described, judged, spec)
        check_gates(folder, parity, judged, target)
        bundle = _finish(folder, facts | {"parity": parity}, target)
    for name, form in further.items():
        for precision in [one for one in spec.precisions if one in form.precisions]:
            say(f"{precision}: making {name}")
            bundle = form.add(target, precision)
    return Exported(bundle, was_done=False)


def student_manifest(path: Path) -> dict[str, Any]:
    """A student's manifest, its files held against it; empty where there is none.

    Raises:
        ManifestError: it is damaged, or a file changed since the student was trained.
    """
    file = path / "manifest.json"
    if not file.is_file():
        return {}
    try:
        held: dict[str, Any] = json.loads(file.read_bytes())
        files = checked(StudentFiles, held).files
    except (OSError, ValueError) as exc:
        raise ManifestError(
            f"{file}: not readable as a student's manifest ({fault_of(exc)}). Restore it, or train again."
        ) from exc
    found = student_files(path)
    if changed := sorted(name for name in files if found.get(name) != files[name]):
        raise ManifestError(
            f"{path}: {', '.join(changed)} changed since the student was trained. Restore the folder from a copy."
        )
    return held


def _there(target: Path, recipe: str, *, is_replacing: bool) -> Bundle | None:
    """The bundle at the target, if it is this very one.

    Raises:
        StaleRunError: something else is there.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return None
    try:
        held = open_bundle(target)
    except ManifestError as exc:
        raise StaleRunError(
            f"{target}: holds something that is not a whole bundle ({exc}) Name another --to, or move it away."
        ) from exc
    if held.facts.get("recipe") == recipe:
        return held
    if is_replacing:
        return None
    raise StaleRunError(
        f"{target}: holds another bundle, {held.name} {held.version}. Name another --to, or replace it with --replace."
    )


def _facts(
    student: StudentModel,
    manifest: Mapping[str, Any],
    spec: ExportSpec,
    inputs: StudentInputs,
    models: Sequence[ModelFile],
) -> dict[str, Any]:
    """The bundle's manifest but for parity and what made it."""
    record = student.record
    origin = {key: manifest[key] for key in FROM_STUDENT if key in manifest}
    return {
        "name": record.name,
        "grades": record.grades,
        "heads": record.heads,
        "temperature": record.temperature,
        "phi": record.phi if len(record.heads) > 1 else None,
        "inputs": plain(inputs),
        "outputs": {
            "probabilities": list(record.heads),
            "logits": [f"{name}_logits" for name in record.heads if spec.logits],
        },
        "models": plain(models),
        "lineage": {
            "student": {"digest": student_digest(student.path), "name": record.name, **origin},
            **{key: manifest.get(key) for key in ("labels", "gold", "split")},
        },
        "licence": {"bundle": spec.licence, "model": manifest.get("model", {}).get("reference")},
        "spec": spec.model_dump(mode="json"),
    }


def _made_by(made: dict[str, Any]) -> dict[str, Any]:
    return {
        "relabel": importlib.metadata.version("relabel-ir"),
        "models": made,
        "versions": installed_versions(LIBRARIES),
    }


def _write_papers(folder: Path, student: StudentFacts, parity: Parity, spec: ExportSpec) -> None:
    """Model card, and Triton's view if it was asked for."""
    (folder / CARD_NAME).write_text(render_bundle_card(student, parity), encoding="utf-8")
    if spec.triton:
        logits = {f"{name}_logits": grades for name, grades in student.heads.items() if spec.logits}
        write_repository(folder, student.name, student.models, student.inputs.names, student.heads | logits)


def _finish(folder: Path, facts: dict[str, Any], target: Path) -> Bundle:
    """Seal, and move into place."""
    seal_bundle(folder, facts)
    with locked(target, waits=True):
        switch(folder, target)
    return open_bundle(target, check_bytes=False)
