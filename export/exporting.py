"""An export from student to sealed bundle: models in each precision, parity check, Triton configuration, card and
seal."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from relabel.distill.students.manifest import StudentFiles, StudentRecord, read_student
from relabel.distill.students.model import StudentModel, load_student, make_texts, student_digest, student_files
from relabel.distill.students.spec import KINDS
from relabel.export import loader
from relabel.export.bundle_facts import (
    CARD_NAME,
    ModelFile,
    ModelParity,
    Parity,
    StudentFacts,
    StudentInputs,
    describe_lengths,
    read_parity,
    read_student_facts,
    render_bundle_card,
)
from relabel.export.bundles import Bundle, link_or_copy, locked, made_beside, open_bundle, put_back, seal_bundle, switch
from relabel.export.exporters import (
    ONNX,
    GraphOptions,
    check_tokens,
    input_contract,
    load_exporter,
    load_format,
    write_loader,
    write_tokenizer,
)
from relabel.export.loader import Encoder
from relabel.export.parity import (
    PairSet,
    PairsFile,
    answers,
    draw_pairs,
    draw_queries,
    file_pairs,
    lineage_pairs,
    measure,
)
from relabel.export.quantization import CALIBRATION_BATCH, drop_notes, write_fp16, write_int8, write_int8_static
from relabel.export.reference_answers import ModelSession, choose_rows, own_answers, provider_here, write_reference
from relabel.export.specs import ExportSpec
from relabel.manifests.errors import GateError, InputError, ManifestError, StaleRunError
from relabel.manifests.files import Storage
from relabel.manifests.process import installed_versions
from relabel.manifests.records import checked, digest_of, fault_of, plain, readable_json

# ------------------------------------------------------------------------------
# A Triton model repository inside a bundle: `triton/<name>-<precision>/config.pbtxt` and `…/1/model.onnx`.
#
# The model files are the bundle's own under a second name (a copy where the disk has no links): Triton wants them where
# its layout says, and a published bundle's equal bytes are uploaded and downloaded once. Triton serves token ids, so
# the client encodes with the bundle's `load.py` (`Encoder`), and pads the rows of a batch alike.


FOLDER = "triton"
MAX_BATCH = 128
PREFERRED_BATCHES = (8, 32)
MAX_DELAY_US = 2000
"""How long Triton may hold a request back for company: 2 ms, a fraction of what one batch costs on a CPU or an older
GPU.
"""


def write_repository(
    bundle: Path, name: str, models: Sequence[ModelFile], inputs: Sequence[str], outputs: Mapping[str, int]
) -> None:
    """Write the view beside the models.

    Args:
        bundle: folder of the bundle.
        models: as in its manifest.
        inputs: names of the graph's inputs.
        outputs: number of grades by output.
    """
    for model in models:
        if model.format != "onnx":
            continue
        label = f"{model_name(name)}-{model.precision}"
        folder = bundle / FOLDER / label
        (folder / "1").mkdir(parents=True)
        for file in model.files:
            link_or_copy(bundle / file, folder / "1" / _inner_name(file, model.path))
        (folder / "config.pbtxt").write_text(render_config(label, inputs, outputs), encoding="utf-8")


def render_config(label: str, inputs: Sequence[str], outputs: Mapping[str, int]) -> str:
    """Triton's ModelConfig in protobuf's text form."""
    lines = [f'name: "{label}"', 'backend: "onnxruntime"', f"max_batch_size: {MAX_BATCH}"]
    lines += [f'input [{{ name: "{name}" data_type: TYPE_INT64 dims: [ -1 ] }}]' for name in inputs]
    lines += [
        f'output [{{ name: "{name}" data_type: TYPE_FP32 dims: [ {grades} ] }}]' for name, grades in outputs.items()
    ]
    sizes = ", ".join(map(str, PREFERRED_BATCHES))
    lines += [
        f"dynamic_batching {{ preferred_batch_size: [ {sizes} ] max_queue_delay_microseconds: {MAX_DELAY_US} }}",
        "instance_group [{ count: 1 kind: KIND_AUTO }]",
        "",
    ]
    return "\n".join(lines)


def model_name(name: str) -> str:
    """A bundle's name as Triton and file systems take it."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-") or "student"


def _inner_name(file: str, path: str) -> str:
    """`model.onnx` for the graph; data beside it keeps the name that the graph knows it by."""
    return "model.onnx" if file == path else Path(file).name


# ------------------------------------------------------------------------------
# The model files of a bundle: the graph as it is exported, and what is made of it in fewer bits.


FILES = {
    "fp32": "model.onnx",
    "fp16": "model.fp16.onnx",
    "int8": "model.int8.onnx",
    "int8-static": "model.int8-static.onnx",
}

Say = Callable[[str], None]


def write_models(
    student: StudentModel, folder: Path, spec: ExportSpec, training: PairSet | None, say: Say
) -> dict[str, Any]:
    """Write every ONNX file of a bundle.

    Args:
        folder: holds the tokenizer already.
        training: pairs to calibrate on, where a static int8 is asked for.
    Returns:
        What made each: exporter and versions, fusions that were found, operators quantized.
    Raises:
        ModelError: a step can't be done with this model.
        InputError: there is nothing to calibrate on.
    """
    plain = folder / FILES["fp32"]
    say(f"fp32: exporting with {spec.exporter}")
    made: dict[str, Any] = {"fp32": load_exporter(spec.exporter)(student, plain, GraphOptions(spec.logits, spec.opset))}
    for precision in spec.onnx_precisions[1:]:
        target = folder / FILES[precision]
        say(f"{precision}: writing {target.name}")
        if precision == "fp16":
            config = student.module.inner.config
            made[precision] = write_fp16(
                plain, target, num_heads=config.num_attention_heads, hidden_size=config.hidden_size
            )
        elif precision == "int8":
            made[precision] = write_int8(plain, target, narrowing=KINDS[student.record.kind].int8_narrows)
        else:
            assert training is not None
            made[precision] = write_int8_static(plain, target, _calibration(student, folder, spec, training))
    for precision in spec.onnx_precisions:  # last: fp16 is made by the notes of fp32
        drop_notes(folder / FILES[precision])
    return made


def list_models(folder: Path, spec: ExportSpec) -> list[ModelFile]:
    """The ONNX files as the manifest lists them."""
    found = []
    for precision in spec.onnx_precisions:
        path = FILES[precision]
        files = sorted(file.name for file in folder.iterdir() if file.name in (path, path + ".data"))
        found.append(ModelFile(path=path, format="onnx", precision=precision, files=files))
    return found


def _calibration(
    student: StudentModel, folder: Path, spec: ExportSpec, training: PairSet
) -> list[dict[str, np.ndarray]]:
    """Batches of training pairs of like length."""
    pairs = draw_pairs(training, spec.calibration_pairs, seed=spec.parity.seed)
    if not pairs:
        raise InputError(
            "int8-static: the student's training split is empty, there is nothing to calibrate on. Take int8."
        )
    encoder = Encoder(folder, plain(input_contract(student)))
    rows = sorted(encoder.encode(pairs), key=lambda row: len(row[0]))
    return [
        encoder.collate(rows[start : start + CALIBRATION_BATCH]) for start in range(0, len(rows), CALIBRATION_BATCH)
    ]


# ------------------------------------------------------------------------------
# An exported student held against the one it was made of, over pairs.


PARITY_NAME = "parity.json"


class AskedPairs(NamedTuple):
    """Pairs with their tokens, as the bundle's own loader makes them."""

    pairs: PairSet
    encoder: loader.Encoder
    rows: list[tuple[list[int], list[int]]]


def compare(
    student: StudentModel,
    folder: Path,
    models: Sequence[ModelFile],
    asked: AskedPairs,
    spec: ExportSpec,
    provider: str,
    say: Say,
) -> dict[str, Any]:
    """Every model of the folder against the student; `parity` in the bundle's manifest. What each answers of the
    reference pairs is written into the folder.

    Raises:
        ModelError: the loader's tokens are not the student's.
        MissingExtraError: this machine can't run one of the models.
    """
    import onnxruntime

    pairs, encoder, rows = asked
    say(f"parity: {len(pairs.pairs):,} pairs, the student in torch")
    check_tokens(student, rows, pairs)
    reference = student.probabilities(pairs.pairs)
    places = choose_rows(pairs, spec.reference_pairs)
    found, answered = [], {}
    for model in models:
        say(f"parity: {model.precision} on {provider}")
        session = ModelSession(folder / model.path, provider, list(student.record.heads))
        by_size = {size: answers(session, encoder, rows, size) for size in spec.parity.batch_sizes}
        found.append(measure(model.precision, reference, by_size, pairs, spec.parity))
        answered[model.precision] = own_answers(session, encoder, rows, places)
    write_reference(folder, pairs, places, answered, found, spec.parity)
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


def asked_pairs(
    record: StudentRecord, manifest: Mapping[str, Any], source: PairsFile | None, spec: ExportSpec, storage: Storage
) -> tuple[PairSet, PairSet | None]:
    """Pairs to compare on, and those to calibrate on where something is calibrated."""
    test = training = None
    if source is None or "int8-static" in spec.precisions:
        test, training = lineage_pairs(manifest, storage, grades=record.grades)
    whole = test if source is None else file_pairs(source, record.columns, storage, grades=record.grades)
    assert whole is not None
    return draw_queries(whole, spec.parity.min_pairs, seed=spec.parity.seed), training


def check_gates(folder: Path, held: dict[str, Any], parity: Parity, target: Path) -> None:
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


def _probs(values: list[float | None]) -> str:
    return "[" + " ".join("none" if value is None else f"{value:.3f}" for value in values) + "]"


# ------------------------------------------------------------------------------
# An export from student to sealed bundle: models, parity, papers, seal.
#
# All is built in a folder beside the target and moved there in one step, after every gate has passed. What a gate
# refused stays beside it under another name, unsealed, so that nobody deploys it and somebody can look at it.


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
