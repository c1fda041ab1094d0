"""An export from student to sealed bundle: models, parity, papers, seal.

All is built in a folder beside the target and moved there in one step, after every gate has passed. What a gate refused
stays beside it under another name, unsealed, so that nobody deploys it and somebody can look at it.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from distill.students.student_manifest import StudentFiles
from distill.students.students import (
    StudentModel,
    StudentRecord,
    load_student,
    make_texts,
    read_student,
    student_digest,
    student_files,
)
from export import loader
from export.bundle_cards import CARD_NAME, render_bundle_card
from export.bundle_formats import ONNX, load_format
from export.bundle_places import locked, made_beside, put_back, switch
from export.bundles import Bundle, open_bundle, seal_bundle
from export.contracts import check_tokens, input_contract, write_loader, write_tokenizer
from export.parity import answers, measure
from export.parity_records import ModelParity, Parity, read_parity
from export.precisions import list_models, write_models
from export.reference_pairs import PairSet, PairsFile, draw_queries, file_pairs, lineage_pairs
from export.sessions import ModelSession, provider_here
from export.specs import ExportSpec
from export.student_facts import ModelFile, StudentFacts, StudentInputs, read_student_facts
from export.token_lengths import describe_lengths
from export.triton import write_repository
from manifests.digests import digest_of, readable_json
from manifests.errors import GateError, ManifestError, StaleRunError
from manifests.extras import installed_versions
from manifests.records import checked, fault_of, plain
from manifests.storage.context import Storage

PARITY_NAME = "parity.json"
LIBRARIES = ("torch", "transformers", "tokenizers", "onnx", "onnxruntime", "onnxscript", "optimum-onnx", "numpy")
FROM_STUDENT = ("fingerprint", "model", "training", "metrics", "gate", "notes")
"""What a bundle's lineage copies from its student's manifest."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Exported:
    """How an export ended.

    Args:
        bundle: sealed.
        was_done: it was there already.
    """

    bundle: Bundle
    was_done: bool


class AskedPairs(NamedTuple):
    """Pairs with their tokens, as the bundle's own loader makes them."""

    pairs: PairSet
    encoder: loader.Encoder
    rows: list[tuple[list[int], list[int]]]


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
    recipe = digest_of({"student": student_digest(path), "relabel": importlib.metadata.version("relabel"), **options})
    put_back(target)
    done = _there(target, recipe, is_replacing=is_replacing)
    if done is not None:
        return Exported(done, was_done=True)
    provider = provider_here(provider)
    further = {name: load_format(name) for name in spec.formats if name != ONNX}
    for form in further.values():
        form.check()
    manifest = student_manifest(path)
    compared, training = _pairs(record, manifest, pairs, spec, storage)
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
        _check_gates(folder, parity, judged, target)
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


def compare(
    student: StudentModel,
    folder: Path,
    models: Sequence[ModelFile],
    asked: AskedPairs,
    spec: ExportSpec,
    provider: str,
    say: Say,
) -> dict[str, Any]:
    """Every model of the folder against the student; `parity` in the bundle's manifest.

    Raises:
        ModelError: the loader's tokens are not the student's.
        MissingExtraError: this machine can't run one of the models.
    """
    import onnxruntime

    pairs, encoder, rows = asked
    say(f"parity: {len(pairs.pairs):,} pairs, the student in torch")
    check_tokens(student, rows, pairs)
    reference = student.probabilities(pairs.pairs)
    found = []
    for model in models:
        say(f"parity: {model.precision} on {provider}")
        session = ModelSession(folder / model.path, provider, list(student.record.heads))
        by_size = {size: answers(session, encoder, rows, size) for size in spec.parity.batch_sizes}
        found.append(measure(model.precision, reference, by_size, pairs, spec.parity))
    about = {"spec": spec.parity.model_dump(mode="json"), "pairs": pairs.about, "provider": provider}
    return {**about, "onnxruntime": onnxruntime.__version__, "models": plain(found)}


def refusal_text(refused: list[ModelParity], aside: Path) -> str:
    """What a gate refused, and the rows that differ most."""
    lines = ["parity failed, so no bundle was made:"]
    for one in refused:
        for check in one.checks:
            if not check.has_passed:
                lines.append(f"  {one.precision}: {check.check} is {check.value:.3g}, the bound {check.bound:g}")
        for row in one.worst:
            flip = ", flipped" if row.is_flip else ""
            moved = f"{_probs(row.student)} became {_probs(row.model)}"
            lines.append(f"    row {row.row} of {row.source}, batch of {row.batch_size}{flip}: {moved}")
    lines.append(
        f"All figures are in {aside / PARITY_NAME}. Leave that precision out of --precisions, or set its bound (--set "
        "parity.…)."
    )
    return "\n".join(lines)


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


def _pairs(
    record: StudentRecord, manifest: Mapping[str, Any], source: PairsFile | None, spec: ExportSpec, storage: Storage
) -> tuple[PairSet, PairSet | None]:
    """Pairs to compare on, and those to calibrate on where something is calibrated."""
    test = training = None
    if source is None or "int8-static" in spec.precisions:
        test, training = lineage_pairs(manifest, storage, grades=record.grades)
    whole = test if source is None else file_pairs(source, record.columns, storage, grades=record.grades)
    assert whole is not None
    return draw_queries(whole, spec.parity.min_pairs, seed=spec.parity.seed), training


def _facts(
    student: StudentModel,
    manifest: Mapping[str, Any],
    spec: ExportSpec,
    inputs: StudentInputs,
    models: Sequence[ModelFile],
) -> dict[str, Any]:
    """The bundle's manifest but for parity and what made it; `latency` is filled by whoever measures it."""
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
        "latency": None,
        "licence": {"bundle": spec.licence, "model": manifest.get("model", {}).get("reference")},
        "spec": spec.model_dump(mode="json"),
    }


def _made_by(made: dict[str, Any]) -> dict[str, Any]:
    return {"relabel": importlib.metadata.version("relabel"), "models": made, "versions": installed_versions(LIBRARIES)}


def _write_papers(folder: Path, student: StudentFacts, parity: Parity, spec: ExportSpec) -> None:
    """Model card, and Triton's view if it was asked for."""
    (folder / CARD_NAME).write_text(render_bundle_card(student, parity), encoding="utf-8")
    if spec.triton:
        logits = {f"{name}_logits": grades for name, grades in student.heads.items() if spec.logits}
        write_repository(folder, student.name, student.models, student.inputs.names, student.heads | logits)


def _check_gates(folder: Path, held: dict[str, Any], parity: Parity, target: Path) -> None:
    """Lay a folder aside that a gate refuses.

    Args:
        held: the parity as it is written beside the models.
    Raises:
        GateError: a gate refuses; lists the worst rows.
    """
    refused = [one for one in parity.models if not one.has_passed]
    if refused:
        aside = target.with_name(target.name + ".refused")
        if aside.exists():
            shutil.rmtree(aside)
        (folder / PARITY_NAME).write_bytes(readable_json(held))
        folder.rename(aside)
        raise GateError(refusal_text(refused, aside))


def _finish(folder: Path, facts: dict[str, Any], target: Path) -> Bundle:
    """Seal, and move into place."""
    seal_bundle(folder, facts)
    with locked(target, waits=True):
        switch(folder, target)
    return open_bundle(target, check_bytes=False)


def _probs(values: list[float | None]) -> str:
    return "[" + " ".join("none" if value is None else f"{value:.3f}" for value in values) + "]"
