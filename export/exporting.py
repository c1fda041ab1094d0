"""Export of a student to a sealed bundle: models in each precision, parity, model card, Triton's view, seal.

All is built in a folder next to the target and moved there in one step, after every gate has passed. What a gate
refused stays at `TARGET.refused`, unsealed: nobody deploys it, and it can be examined.
"""

import importlib.metadata
import inspect
import json
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from relabel.distill.students import portable
from relabel.distill.students.model import (
    DecoderTexts,
    StudentModel,
    load_student,
    make_texts,
    student_digest,
)
from relabel.distill.students.spec import KINDS, StudentFiles, StudentRecord, read_student
from relabel.export import loader
from relabel.export.bundle_facts import (
    CARD_NAME,
    ModelFile,
    ModelParity,
    describe_lengths,
    read_parity,
    read_student_facts,
    render_bundle_card,
)
from relabel.export.bundles import Bundle, Recipe, made_before, new_folder_for, open_bundle, seal_bundle
from relabel.export.loader import DEFAULT_PRECISION, LEAST_ONNXRUNTIME, LOADER, STATIC, Encoder
from relabel.export.parity import (
    PairSet,
    PairsFile,
    answers,
    choose_rows,
    draw_pairs,
    draw_queries,
    file_pairs,
    lineage_pairs,
    measure,
    model_runner,
    provider_here,
    write_reference,
)
from relabel.export.specs import ExportSpec
from relabel.export.tensorrt_engines import ENGINE_PRECISIONS, build_into, check_machine, quiet
from relabel.manifests.errors import ConfigError, GateError, ManifestError, ModelError
from relabel.manifests.files import Storage
from relabel.manifests.process import installed_versions, require
from relabel.manifests.records import digest_of, first_changed, plain, read_record, readable_json

FILES = {"fp32": "model.onnx", "fp16": "model.fp16.onnx", "int8": "model.int8.onnx", STATIC: "model.int8-static.onnx"}
PARITY_NAME = "parity.json"
TOKENIZER = "tokenizer.json"
IMPORTED = "from relabel.distill.students.portable import batch_tokens_on, length_batches, query_counts"
"""What the loader imports of this package: the text of that module replaces it in `load.py`."""
TRITON_DELAY_US = 2000
"""How long Triton may hold a request back for a batch: 2 ms, a fraction of what a batch costs on a CPU or an older
GPU.
"""
FROM_STUDENT = ("fingerprint", "model", "training", "metrics", "gate", "notes")
"""What a bundle's lineage copies from its student's manifest."""
VERSIONS = ("torch", "transformers", "tokenizers", "onnx", "onnxruntime", "onnxscript", "numpy")
"""Packages whose versions a bundle's manifest states."""
Report = Callable[[str], None]
"""Takes a line of progress."""


def export_bundle(
    path: Path,
    target: Path,
    spec: ExportSpec,
    storage: Storage,
    *,
    pairs: PairsFile | None = None,
    provider: str = "auto",
    is_replacing: bool = False,
    report: Report = lambda _: None,
) -> tuple[Bundle, bool]:
    """Export a student.

    Args:
        path: the student's folder.
        target: folder of the bundle to make.
        pairs: what to compare on; the student's test split by default.
        provider: what to compare on: `cpu`, `cuda`, or `auto`.
        is_replacing: take the place of another bundle in `target`.
        report: called with progress, a line each.
    Returns:
        The sealed bundle, and whether it was there already.
    Raises:
        GateError: a model differs from the student beyond a gate; nothing is made at `target`.
        StaleRunError: `target` holds something else.
        ConfigError, InputError, ManifestError, ModelError, MissingExtraError: see the modules that raise them.
    """
    record = read_student(path)
    digest = student_digest(path)
    options = spec.model_dump(mode="json")
    recipe = digest_of(
        {
            "student": digest,
            "relabel": importlib.metadata.version("relabel-ir"),
            "provider": provider,
            "spec": options,
            "pairs": pairs.recipe() if pairs else None,
        }
    )
    existing = made_before(
        target,
        _opened,
        Recipe(recipe, options),
        is_replacing=is_replacing,
        what="bundle",
    )
    if existing is not None:
        return existing, True
    checked = _check(
        path=path,
        record=record,
        digest=digest,
        recipe=recipe,
        spec=spec,
        storage=storage,
        pairs=pairs,
        provider=provider,
    )
    with new_folder_for(target) as folder:
        facts = _build(checked, folder, report)
        _publish(facts, folder, target)
    return _with_engines(target, spec, report), False


@dataclass(frozen=True)
class _Checked:
    """What an export works from, before anything is written.

    Args:
        manifest: the student's; empty where there is none.
        compared: pairs that the models are compared on.
        calibration: pairs for the scales of static int8.
    """

    path: Path
    record: StudentRecord
    digest: str
    recipe: str
    manifest: Mapping[str, Any]
    spec: ExportSpec
    provider: str
    compared: PairSet
    calibration: Sequence[tuple[str, str]]


def _check(
    path: Path,
    record: StudentRecord,
    digest: str,
    recipe: str,
    spec: ExportSpec,
    storage: Storage,
    pairs: PairsFile | None,
    provider: str,
) -> _Checked:
    """What can be refused before the student is loaded: the machine, the student's manifest, the pairs."""
    provider = provider_here(provider)
    if "tensorrt" in spec.formats:
        check_machine()
    manifest = student_manifest(path)
    compared, calibration = pairs_to_compare(
        path=path,
        record=record,
        manifest=manifest,
        spec=spec,
        pairs=pairs,
        storage=storage,
    )
    return _Checked(
        path=path,
        record=record,
        digest=digest,
        recipe=recipe,
        manifest=manifest,
        spec=spec,
        provider=provider,
        compared=compared,
        calibration=calibration,
    )


def _build(checked: _Checked, folder: Path, report: Report) -> dict[str, Any]:
    """Write the models with their tokenizer and loader, and compare them with the student.

    Returns:
        The bundle's manifest, parity included.
    """
    record = checked.record
    spec = checked.spec
    student = load_student(checked.path)
    # a served graph takes padded rows, however the student was trained
    student.texts = make_texts(replace(record, packs=False), student.tokenizer)
    write_tokenizer(student, folder)
    _write_loader(folder)
    contract = input_contract(student)
    encoder = Encoder(folder, contract)
    batches = [encoder.collate([row]) for row in encoder.encode(checked.calibration)]
    models, made = _write_models(
        student,
        folder,
        spec,
        batches,
        report,
    )
    rows = encoder.encode(checked.compared.pairs)
    parity = _compare(
        student=student,
        folder=folder,
        models=models,
        pairs=checked.compared,
        encoder=encoder,
        rows=rows,
        spec=spec,
        provider=checked.provider,
        report=report,
    )
    lengths = describe_lengths([len(ids) for ids, _ in rows])
    logits = {}
    if spec.logits:
        logits = {f"{name}_logits": grades for name, grades in record.heads.items()}
    if spec.triton:
        write_repository(
            bundle=folder,
            name=record.name,
            models=models,
            inputs=contract["names"],
            outputs=record.heads | logits,
        )
    return {
        "name": record.name,
        "grades": record.grades,
        "heads": record.heads,
        "temperature": record.temperature,
        "phi": record.phi if len(record.heads) > 1 else None,
        "inputs": {**contract, "lengths": plain(lengths)},
        "outputs": {"probabilities": list(record.heads), "logits": list(logits)},
        "models": plain(models),
        "default_precision": DEFAULT_PRECISION,
        "needs": {"onnxruntime": LEAST_ONNXRUNTIME},
        "lineage": _lineage(checked.digest, record.name, checked.manifest),
        "licence": {"bundle": spec.licence, "model": checked.manifest.get("model", {}).get("reference")},
        "spec": spec.model_dump(mode="json"),
        "made_by": {
            "relabel": importlib.metadata.version("relabel-ir"),
            "models": made,
            "versions": installed_versions(VERSIONS),
        },
        "recipe": checked.recipe,
        "parity": parity,
    }


def _publish(facts: dict[str, Any], folder: Path, target: Path) -> None:
    """Write the model card and seal the folder, or put it aside where a gate refused a model.

    Raises:
        GateError: names the models, and where the folder is.
    """
    judged = read_parity(facts["parity"], str(target))
    card = render_bundle_card(read_student_facts(facts, str(target)), judged)
    (folder / CARD_NAME).write_text(card, encoding="utf-8")
    refused = [model for model in judged.models if not model.has_passed]
    if refused:
        (folder / PARITY_NAME).write_bytes(readable_json(facts["parity"]))
        aside = target.with_name(target.name + ".refused")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        raise GateError(
            refusal_text(
                refused,
                f"All figures are in {aside / PARITY_NAME}. Leave that precision out of --precisions, or set its bound "
                "(--set parity.…).",
            )
        )
    seal_bundle(folder, facts)


def _with_engines(target: Path, spec: ExportSpec, report: Report) -> Bundle:
    """The sealed bundle, with the TensorRT engines that the spec asks for."""
    bundle = open_bundle(target)
    if "tensorrt" not in spec.formats:
        return bundle
    for precision in spec.precisions:
        if precision not in ENGINE_PRECISIONS:
            continue
        report(f"{precision}: building an engine")
        bundle = build_into(
            target,
            target,
            precision=precision,
            capability=None,
            is_replacing=True,
        )
    return bundle


def _write_loader(folder: Path) -> None:
    """Write `load.py`: the loader's own file, with the text of the one module of this package that it imports."""
    shared = inspect.getsource(portable).partition('"""\n')[2].strip("\n")
    source = inspect.getsource(loader).replace(IMPORTED, shared)
    (folder / LOADER).write_text(source, encoding="utf-8")


def _lineage(digest: str, name: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What a bundle was made of: the student, and the labels, gold and split of its manifest."""
    student = {"digest": digest, "name": name}
    for key in FROM_STUDENT:
        if key in manifest:
            student[key] = manifest[key]
    return {
        "student": student,
        "labels": manifest.get("labels"),
        "gold": manifest.get("gold"),
        "split": manifest.get("split"),
    }


def student_manifest(path: Path) -> dict[str, Any]:
    """A student's manifest, its files compared with it; empty where there is none.

    Raises:
        ManifestError: it is damaged, or a file changed since the student was trained.
    """
    file = path / "manifest.json"
    if not file.is_file():
        return {}
    advice = "Restore the folder from a copy, or train again."
    sealed = read_record(
        StudentFiles,
        file.read_bytes(),
        str(file),
        "not readable as a student's manifest",
        advice,
    )
    changed = first_changed(path, sealed.files)
    if changed:
        raise ManifestError(f"{path}: {changed} changed since the student was trained. {advice}")
    return dict(json.loads(file.read_bytes()))


def _opened(target: Path) -> tuple[Bundle, Recipe]:
    """A bundle, and the recipe that it was made by."""
    bundle = open_bundle(target)
    return bundle, Recipe(bundle.facts.get("recipe"), bundle.facts.get("spec") or {})


def pairs_to_compare(
    path: Path,
    record: StudentRecord,
    manifest: Mapping[str, Any],
    spec: ExportSpec,
    pairs: PairsFile | None,
    storage: Storage,
) -> tuple[PairSet, Sequence[tuple[str, str]]]:
    """Pairs to compare on, and pairs for the scales of static int8, none of which is compared; without it none.

    Raises:
        ConfigError: there are none, or the student takes no static int8.
        InputError, ManifestError, MissingExtraError: see the modules that raise them.
    """
    if pairs is None:
        whole, spare = lineage_pairs(manifest, storage, grades=record.grades)
    else:
        whole = spare = file_pairs(pairs, record.columns, storage, grades=record.grades)
    compared = draw_queries(whole, spec.parity.min_pairs, seed=spec.parity.seed)
    if STATIC not in spec.precisions:
        return compared, []
    if record.kind == "decoder":
        raise ConfigError(
            f"{path}: a decoder's first token has values far outside all others', of which int8-static, with one scale "
            "for all, leaves no digits. Take int8."
        )
    require_nncf()
    compared_names = set(compared.names)
    unused = spare.take(np.flatnonzero([name not in compared_names for name in spare.names]))
    if not unused.pairs:
        raise ConfigError(
            f"int8-static is calibrated on pairs that are not compared, and all {len(spare.pairs):,} are. Name more of "
            "them with --pairs, or compare on fewer (--set parity.min_pairs=…)."
        )
    # as many as NNCF takes by default
    return compared, draw_pairs(unused, 300, seed=spec.parity.seed)


# ------------------------------------------------------------------------------
# The input contract that every exported model keeps: the bundle's tokenizer and its loader.


def input_names(student: StudentModel) -> list[str]:
    """The graph's inputs, in order; every one int64 [B, T], but for `counts`, which is [B, 19]."""
    return list(student.texts.collate(student.texts.encode([("a", "b")])))


def input_contract(student: StudentModel) -> dict[str, Any]:
    """What the loader must know, see `loader.Inputs`; `inputs` in the bundle's manifest."""
    record = student.record
    tokenizer = student.tokenizer
    pads_left = KINDS[record.kind].pads_left
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    contract = {
        "kind": record.kind,
        "tokenizer": TOKENIZER,
        "max_tokens": record.max_tokens,
        "names": input_names(student),
        "padding_side": "left" if pads_left else "right",
        "pad_id": int(pad or 0),
        "pad_type_id": 0 if pads_left else int(tokenizer.pad_token_type_id),
        "truncation_side": tokenizer.truncation_side,
        "columns": record.columns,
    }
    if any(record.prompt):
        contract["prompt"] = list(record.prompt)
    if isinstance(student.texts, DecoderTexts):
        contract["prompt_ids"] = [list(piece) for piece in student.texts.prompt_ids]
    return contract


def write_tokenizer(student: StudentModel, folder: Path) -> None:
    """Write the tokenizer as the `tokenizers` library reads it, without the padding and cutting of its last
    user.

    Raises:
        ModelError: the tokenizer is written in Python alone.
    """
    backend = getattr(student.tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(
            f"{student.path}: its tokenizer ({type(student.tokenizer).__name__}) is written in Python, and a bundle "
            "needs one that the tokenizers library loads. Take a model with a tokenizer.json."
        )
    tokenizer = json.loads(backend.to_str())
    tokenizer["truncation"] = None
    tokenizer["padding"] = None
    (folder / TOKENIZER).write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


# ------------------------------------------------------------------------------
# Models in each precision, and their comparison with the student.


def _write_models(
    student: StudentModel, folder: Path, spec: ExportSpec, batches: Sequence[Mapping[str, np.ndarray]], report: Report
) -> tuple[list[ModelFile], dict[str, Any]]:
    """Write every ONNX file of a bundle: the graph as it is exported, and what is made of it in fewer bits.

    Args:
        batches: to calibrate static int8 on.
    Returns:
        The files as the manifest lists them, and what made each: versions, fusions that were found, operators
        quantized.
    Raises:
        ModelError: a step can't be done with this model.
    """
    full = folder / FILES["fp32"]
    made: dict[str, Any] = {}
    for precision in spec.onnx_precisions:
        target = folder / FILES[precision]
        report(f"{precision}: writing {target.name}")
        if precision == "fp32":
            made[precision] = export_onnx(student, full, spec)
        else:
            made[precision] = write_smaller(student, full, target, precision, batches)
    models = []
    for precision in spec.onnx_precisions:
        path = FILES[precision]
        drop_notes(folder / path)  # last: fp16 is made by the notes of fp32
        models.append(
            ModelFile(
                path=path,
                format="onnx",
                precision=precision,
                files=[name for name in (path, path + ".data") if (folder / name).is_file()],
            )
        )
    return models, made


def write_smaller(
    student: StudentModel, full: Path, target: Path, precision: str, batches: Sequence[Mapping[str, np.ndarray]] = ()
) -> dict[str, Any]:
    """Write fp16, int8 or static int8 of a student's float32 graph.

    Args:
        full: the graph.
        batches: to calibrate static int8 on.
    Returns:
        What made it, see `_write_models`.
    Raises:
        ModelError: it can't be done with this graph.
    """
    if precision == "fp16":
        config = student.module.inner.config
        return write_fp16(
            full,
            target,
            num_heads=config.num_attention_heads,
            hidden_size=config.hidden_size,
        )
    if precision == STATIC:
        return write_int8_static(full, target, batches)
    return write_int8(full, target, narrowing=KINDS[student.record.kind].int8_narrows)


def _compare(
    student: StudentModel,
    folder: Path,
    models: Sequence[ModelFile],
    pairs: PairSet,
    encoder: Encoder,
    rows: list[tuple[list[int], list[int]]],
    spec: ExportSpec,
    provider: str,
    report: Report,
) -> dict[str, Any]:
    """Every model of the folder against the student; `parity` in the bundle's manifest. What each answers of the
    reference pairs is written into the folder.

    Args:
        encoder: the bundle's own.
        rows: the pairs by that encoder.
    Raises:
        ModelError: the loader's tokens are not the student's.
        MissingExtraError: this machine can't run one of the models.
    """
    import onnxruntime

    report(f"parity: {len(pairs.pairs):,} pairs, the student in torch")
    _check_tokens(student, rows, pairs)
    reference = student.probabilities(pairs.pairs)
    reference_rows = choose_rows(pairs, spec.reference_pairs)
    parities = []
    reference_answers = {}
    for model in models:
        report(f"parity: {model.precision} on {provider}")
        run = model_runner(folder / model.path, provider, list(student.record.heads))
        parities.append(
            measure(
                model.precision,
                reference,
                {size: answers(run, encoder, rows, size) for size in spec.parity.batch_sizes},
                pairs,
                spec.parity,
            )
        )
        if reference_rows:  # each alone, so that no other pair of a batch changes them
            reference_answers[model.precision] = answers(run, encoder, [rows[row] for row in reference_rows], 1)
    write_reference(
        folder,
        [pairs.pairs[row] for row in reference_rows],
        reference_answers,
        parities,
        spec.parity,
    )
    return {
        "spec": spec.parity.model_dump(mode="json"),
        "pairs": pairs.about,
        "provider": provider,
        "onnxruntime": onnxruntime.__version__,
        "models": plain(parities),
    }


def _check_tokens(student: StudentModel, rows: list[tuple[list[int], list[int]]], pairs: PairSet) -> None:
    """Compare the loader's tokens with the student's.

    Args:
        rows: the loader's.
    Raises:
        ModelError: they differ, so no comparison of answers means anything.
    """
    expected_rows = student.texts.encode(pairs.pairs)
    for (source, row), (ids, segments), expected in zip(pairs.names, rows, expected_rows, strict=True):
        expected_segments = expected.types if expected.counts is None else expected.counts
        if ids != expected.ids or (expected_segments is not None and segments != expected_segments):
            raise ModelError(
                f"{student.path}: row {row} of {source} becomes other tokens in the bundle's loader than in the "
                "student. Its tokenizer does something that the tokenizers library alone does not; take another base "
                "model."
            )


def refusal_text(refused: Sequence[ModelParity], advice: str) -> str:
    """What a gate refused, and the rows that differ most."""
    lines = ["parity failed, so this was not made:"]
    for model in refused:
        for check in model.checks:
            if not check.has_passed:
                lines.append(f"  {model.precision}: {check.check} is {check.value:.3g}, the bound {check.bound:g}")
        for row in model.worst:
            where = "row {row} of {source}, batch of {batch_size}".format_map(row)
            if row["is_flip"]:
                where += ", flipped"
            before = np.round(np.array(row["student"], dtype=float), 3)
            after = np.round(np.array(row["model"], dtype=float), 3)
            lines.append(f"    {where}: {before} became {after}")
    if any(model.figures[0].judged_by == "student" for model in refused):
        lines.append(
            "  F1 and nDCG are by the student's own grades, for want of others, so that each changed grade is a loss: "
            "--gold COLUMN names trusted ones of --pairs."
        )
    return "\n".join([*lines, f"  {advice}"])


def write_repository(
    bundle: Path, name: str, models: Sequence[ModelFile], inputs: Sequence[str], outputs: Mapping[str, int]
) -> None:
    """Write a Triton model repository into a bundle: `triton/<name>-<precision>/config.pbtxt` and `…/1/model.onnx`.

    The model files are the bundle's own under a second name (a copy where the disk has no links): Triton wants them
    where its layout has them, and a published bundle's equal bytes are uploaded and downloaded once. Triton serves
    token ids, so the client encodes with the bundle's `load.py` (`Encoder`), and pads the rows of a batch alike.

    Args:
        bundle: folder of the bundle.
        models: ONNX files as in its manifest.
        inputs: names of the graph's inputs.
        outputs: number of grades by output.
    """
    safe_name = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-") or "student"  # as Triton and file systems take it
    for model in models:
        label = f"{safe_name}-{model.precision}"
        folder = bundle / "triton" / label
        (folder / "1").mkdir(parents=True)
        for file in model.files:  # data next to the graph keeps the name that the graph knows it by
            name = "model.onnx" if file == model.path else Path(file).name
            try:
                os.link(bundle / file, folder / "1" / name)
            except OSError:
                shutil.copy2(bundle / file, folder / "1" / name)
        lines = [
            f'name: "{label}"',
            'backend: "onnxruntime"',
            "max_batch_size: 128",
        ]
        for name in inputs:
            lines.append(f'input [{{ name: "{name}" data_type: TYPE_INT64 dims: [ -1 ] }}]')
        for name, grades in outputs.items():
            lines.append(f'output [{{ name: "{name}" data_type: TYPE_FP32 dims: [ {grades} ] }}]')
        lines += [
            f"dynamic_batching {{ preferred_batch_size: [ 8, 32 ] max_queue_delay_microseconds: {TRITON_DELAY_US} }}",
            "instance_group [{ count: 1 kind: KIND_AUTO }]",
            "",
        ]
        (folder / "config.pbtxt").write_text("\n".join(lines), encoding="utf-8")


# ------------------------------------------------------------------------------
# The student's graph as ONNX.

# B rows, T tokens, K grades

SAMPLE = [("red shoe", "a red running shoe of size nine"), ("lamp", "x"), ("a", "")]
"""Traced with: three rows of unequal length, so that neither dimension is 1 or the other one's size."""


class ServingModule(nn.Module):  # type: ignore[misc]
    """A student that answers with probabilities: softmax(logits / temperature) of every head, in float32.

    Args:
        module: the student's.
        names: what its forward calls the inputs, in the order in which they come here.
        temperature: by head.
        logits: also give the raw logits.
    """

    def __init__(self, module: nn.Module, names: list[str], temperature: Mapping[str, float], *, logits: bool) -> None:
        super().__init__()
        self.module = module
        self.names = names
        self.temperature = dict(temperature)
        self.logits = logits

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Probabilities [B, K] by head, then logits [B, K] by head if asked for."""
        by_name = dict(zip(self.names, inputs, strict=True))
        logits = {head: logits_BK.float() for head, logits_BK in self.module(**by_name).items()}
        outputs = []
        for head, logits_BK in logits.items():
            outputs.append(torch.softmax(logits_BK / self.temperature.get(head, 1.0), -1))
        if self.logits:
            outputs += logits.values()
        return tuple(outputs)


def export_onnx(student: StudentModel, path: Path, options: ExportSpec) -> dict[str, Any]:
    """Write the student as ONNX, its answers probabilities; see `trace_onnx`."""
    names = input_names(student)
    heads = list(student.record.heads)
    serving = ServingModule(student.module, names, student.record.temperature, logits=options.logits)
    batch = student.texts.collate(student.texts.encode(SAMPLE), pad_multiple=1)
    output_names = list(heads)
    if options.logits:
        output_names += [f"{name}_logits" for name in heads]
    return trace_onnx(
        student,
        serving,
        {name: batch[name] for name in names},
        output_names,
        path,
        opset=options.opset,
    )


def trace_onnx(
    student: StudentModel,
    serving: nn.Module,
    batch: Mapping[str, Tensor],
    output_names: Sequence[str],
    path: Path,
    *,
    opset: int,
) -> dict[str, Any]:
    """Write a module around a student as ONNX; weights are inside the file, or in `<file>.data` above the 2 GB that
    protobuf takes.

    Args:
        serving: takes the batch's values in their order.
        batch: inputs by name, int64 [B, T], but for `counts`, which is [B, 19].
    Returns:
        Versions of what made it.
    Raises:
        MissingExtraError: onnxscript is absent.
        ModelError: torch can't trace the model.
    """
    onnxscript = require("onnxscript", extra="cpu", purpose="An export")
    batch_axis = torch.export.Dim("batch", min=1, max=1 << 20)
    token_axis = torch.export.Dim("sequence", min=1, max=max(student.record.max_tokens, 2))
    shapes = [{0: batch_axis} if name == "counts" else {0: batch_axis, 1: token_axis} for name in batch]
    # attention as products and a softmax: torch's own operator becomes a graph that checks every weight for NaN, 5 %
    # slower on a CPU
    inner = student.module.inner
    before = student.module.inner.config._attn_implementation
    inner.set_attn_implementation("eager")
    with quiet(), torch.no_grad():
        try:
            program = torch.onnx.export(
                serving.eval(),
                tuple(batch.values()),
                dynamo=True,
                opset_version=opset,
                input_names=list(batch),
                output_names=list(output_names),
                dynamic_shapes=(tuple(shapes),),
                verbose=False,
            )
        except (RuntimeError, TypeError, ValueError) as exc:
            reason = str(exc).strip().splitlines()[-1][:300]
            raise ModelError(
                f"{student.path}: torch.onnx can't trace this {student.record.kind} ({reason}). Take another base "
                "model."
            ) from exc
        finally:
            inner.set_attn_implementation(before)
        program.save(path)
    return {"exporter": "torch", "torch": torch.__version__, "onnxscript": onnxscript.__version__}


# ------------------------------------------------------------------------------
# Smaller precisions of the graph: fp16 by onnxruntime's transformers optimizer, dynamic int8 by its quantization with
# int8 embedding tables of a scale for each row, and static int8 by NNCF.
#
# The fp32 file stays as it was exported, free of onnxruntime's own operators, since TensorRT builds from it
# (onnxruntime fuses it when it is loaded). fp16 is fused first: onnxruntime's loading-time fusions need float32. Heads
# stay float: they are a thousandth of the work.

LAYER_OPERATORS = {
    "LayerNormalization", "SkipLayerNormalization", "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization",
    "RMSNormalization", "MatMul", "Attention",
}  # fmt: skip
"""A layer of a transformer ends in one of these."""


def write_fp16(source: Path, target: Path, *, num_heads: int, hidden_size: int) -> dict[str, Any]:
    """Fuse a float32 graph and halve it; inputs, outputs, and what comes after the last layer stay float32.

    Args:
        num_heads, hidden_size: of the attention, which fusion needs.
    Returns:
        Which fusions were found, by name.
    Raises:
        ModelError: the graph can't be converted.
    """
    optimizer = require("onnxruntime.transformers.optimizer", extra="cpu", purpose="fp16")
    fused = {}
    with quiet():
        try:
            try:
                model = optimizer.optimize_model(
                    str(source),
                    model_type="bert",
                    num_heads=num_heads,
                    hidden_size=hidden_size,
                    opt_level=0,
                )
                fusions = model.get_fused_operator_statistics()
                fused = {name: int(count) for name, count in sorted(fusions.items()) if count}
            except IndexError:  # its fusions stumble over ModernBERT's rotated positions: halved as it is
                model = require("onnxruntime.transformers.onnx_model", extra="cpu", purpose="fp16").OnnxModel(
                    require("onnx", extra="cpu", purpose="fp16").load(str(source))
                )
            model.convert_float_to_float16(keep_io_types=True, node_block_list=_head_nodes(model.model.graph))
            _drop_twins(model.model.graph)
            model.topological_sort()
            model.save_model_to_file(str(target), use_external_data_format=is_big(source))
        except (ValueError, KeyError, RuntimeError, AttributeError, TypeError) as exc:
            raise ModelError(
                f"{source}: onnxruntime's optimizer can't halve this graph ({type(exc).__name__}: {exc})."
            ) from exc
    return {"fused": fused}


def drop_notes(path: Path) -> None:
    """Take out of a model file what nobody needs who runs it: where in whose code each node was traced, with paths of
    the machine that exported, so that the same student gives the same bytes anywhere; and the shapes between inputs and
    outputs, which are inferred.

    With shapes onnxruntime plans before the first run which result shall lie where another was, of symbols (batch,
    sequence) and not of sizes. For a MiniLM in float32 on a CPU that plan costs 5 to 6 % of the time from batches of 8
    on and 160 MB more at its peak (onnxruntime 1.31, 2026-11-20).
    """
    onnx = require("onnx", extra="cpu", purpose="An export")
    model = onnx.load(str(path), load_external_data=False)
    graph = model.graph
    del graph.value_info[:]
    for part in (model, graph, *graph.node, *graph.input, *graph.output, *model.functions):
        del part.metadata_props[:]
        part.doc_string = ""
    for tensor in graph.initializer:
        del tensor.metadata_props[:]
    path.write_bytes(model.SerializeToString())


def is_big(path: Path) -> bool:
    """Whether a model with its data passes what one protobuf file holds."""
    size_bytes = path.stat().st_size
    data = path.with_name(path.name + ".data")
    if data.is_file():
        size_bytes += data.stat().st_size
    # from here on weights are in a file of their own: protobuf ends at 2 GB
    return size_bytes > 1_800_000_000


def _head_nodes(graph: Any) -> list[str]:
    """Names of the nodes between the last layer and the outputs: pooling (a sum over a row's tokens, which halves can
    overflow), heads and softmax. They are few multiplications.
    """
    made_by = {name: node for node in graph.node for name in node.output}
    head_nodes: dict[str, None] = {}
    pending = [output.name for output in graph.output]
    while pending:
        node = made_by.get(pending.pop())
        if node is None or node.op_type in LAYER_OPERATORS or node.name in head_nodes:
            continue
        head_nodes[node.name] = None
        pending += list(node.input)
    return list(head_nodes)


def _drop_twins(graph: Any) -> None:
    """The converter casts a value once for each float32 node that reads it, under one name; one cast is enough."""
    seen: set[str] = set()
    nodes = []
    for number, node in enumerate(graph.node):
        if seen.isdisjoint(node.output[:1]):
            seen.update(node.output)
            node.name = f"{node.op_type}_{number}"
            nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


STEPS = 127
"""Of int8 on either side of zero."""
MIN_TABLE_VALUES = 1 << 14
"""A smaller table is not worth the operators that int8 takes."""


def quantize_embeddings(path: Path, *, is_big: bool) -> int:
    """Quantize, in place, the float tables that a graph gathers rows of and uses for nothing else: a value is off by at
    most a 254th of the largest in its row. onnxruntime's quantization has one scale for a whole table, or none; most of
    a small encoder's bytes are in this table (MiniLM: 47 of the 59 MB that int8 left).

    Args:
        is_big: its weights are in a file of their own.
    Returns:
        How many there were.
    """
    onnx = require("onnx", extra="cpu", purpose="int8")
    model = onnx.load(str(path))
    graph = model.graph
    tables = {}
    for tensor in graph.initializer:
        is_float = tensor.data_type == onnx.TensorProto.FLOAT
        if is_float and len(tensor.dims) == 2 and tensor.dims[0] * tensor.dims[1] >= MIN_TABLE_VALUES:
            tables[tensor.name] = tensor
    readers = Counter[str]()
    for node in graph.node:
        readers.update(node.input)
    nodes = []
    num_quantized = 0
    for node in graph.node:
        table = tables.get(node.input[0]) if node.op_type == "Gather" else None
        if table is None or readers[table.name] != 1 or any(attribute.i for attribute in node.attribute):
            nodes.append(node)
            continue
        nodes += _gathered(onnx, graph, node, table)
        num_quantized += 1
    if num_quantized == 0:
        return 0
    del graph.node[:]
    graph.node.extend(nodes)
    data = path.with_name(path.name + ".data")
    if is_big:
        data.unlink()  # it is held in memory, and onnx appends
    onnx.save_model(model, str(path), save_as_external_data=is_big, location=data.name)
    return num_quantized


def _gathered(onnx: Any, graph: Any, node: Any, table: Any) -> list[Any]:
    """The nodes in place of one Gather: rows in int8, their scales, and the product. Puts the two tables in place of
    the one.
    """
    values_VH = onnx.numpy_helper.to_array(table)
    largest_V1 = np.abs(values_VH).max(axis=1, keepdims=True)
    scales_V1 = np.where(largest_V1 > 0, largest_V1 / STEPS, 1.0).astype(np.float32)
    rows_VH = np.clip(np.rint(values_VH / scales_V1), -STEPS, STEPS).astype(np.int8)
    rows_name = f"{table.name}_int8"
    scales_name = f"{table.name}_scales"
    graph.initializer.remove(table)
    graph.initializer.append(onnx.numpy_helper.from_array(rows_VH, rows_name))
    graph.initializer.append(onnx.numpy_helper.from_array(scales_V1, scales_name))
    ids = node.input[1]
    out = node.output[0]
    make_node = onnx.helper.make_node
    rows = make_node("Gather", [rows_name, ids], [f"{out}_int8"], name=f"{node.name}_int8")
    steps = make_node(
        "Cast",
        [f"{out}_int8"],
        [f"{out}_steps"],
        name=f"{node.name}_steps",
        to=onnx.TensorProto.FLOAT,
    )
    scales = make_node("Gather", [scales_name, ids], [f"{out}_scales"], name=f"{node.name}_scales")
    product = make_node("Mul", [f"{out}_steps", f"{out}_scales"], [out], name=node.name)
    return [rows, steps, scales, product]


def write_int8(source: Path, target: Path, *, narrowing: bool) -> dict[str, Any]:
    """Dynamic int8: activations are scaled in every batch, over all of its rows.

    Args:
        narrowing: also the matrices that narrow. Not for decoders: the token that all others attend to, their first,
            brings values into the second matrix of a feed-forward layer that are far outside the others' (Sun et al.
            2024, arXiv:2402.17762), in every batch, and the scale of them all leaves the others no digits.
            SmolLM2-135M: what the layers give is off by 19 % with these matrices, by 4 % without (2026-11-20). Of an
            encoder's answers they cost little.
    Raises:
        ModelError: the graph can't be quantized.
    """
    quantization = require("onnxruntime.quantization", extra="cpu", purpose="int8")
    onnx = require("onnx", extra="cpu", purpose="int8")
    model = onnx.load(str(source))
    # `quantize_dynamic` infers shapes, and trips over those that torch wrote for symbols (a 384 against a 3)
    del model.graph.value_info[:]
    left_out = _nodes_left_out(model.graph, narrowing=narrowing)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        bare = Path(work) / "bare.onnx"
        onnx.save_model(model, str(bare), save_as_external_data=is_big(source), location=bare.name + ".data")
        del model  # the library loads it again
        try:
            with quiet():
                quantization.quantize_dynamic(
                    bare,
                    target,
                    op_types_to_quantize=["MatMul"],
                    nodes_to_exclude=left_out,
                    per_channel=True,
                    weight_type=quantization.QuantType.QInt8,
                    use_external_data_format=is_big(source),
                    extra_options={"MatMulConstBOnly": True},
                )
        except (ValueError, RuntimeError, KeyError, AttributeError) as exc:
            raise ModelError(f"{source}: onnxruntime can't quantize this graph ({type(exc).__name__}: {exc}).") from exc
    nodes = onnx.load(str(target), load_external_data=False).graph.node
    return {
        "kind": "dynamic",
        "quantized": sum(node.op_type in ("MatMulInteger", "DynamicQuantizeMatMul") for node in nodes),
        "tables": quantize_embeddings(target, is_big=is_big(source)),
    }


def _nodes_left_out(graph: Any, *, narrowing: bool) -> list[str]:
    """The heads (the library first turns a Gemm into a MatMul of another name); unless `narrowing`, also the products
    with a constant of more rows than columns.
    """
    shapes = {constant.name: list(constant.dims) for constant in graph.initializer}
    names = []
    for node in graph.node:
        if node.op_type == "Gemm":
            names += [node.name, node.name + "_MatMul"]
        elif node.op_type == "MatMul" and not narrowing:
            shape = shapes.get(node.input[1], [])
            if len(shape) == 2 and shape[0] > shape[1]:
                names.append(node.name)
    return names


def require_nncf() -> Any:
    """NNCF, without its reports of what it is used for, which it sends to Intel unless it is switched off.

    Raises:
        MissingExtraError: it is not installed.
    """
    os.environ.setdefault("NNCF_CI", "1")
    return require("nncf", extra="int8-static", purpose="The precision int8-static")


def write_int8_static(source: Path, target: Path, batches: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Any]:
    """Static int8: activations are scaled by what they are on some pairs, so that an answer does not depend on its
    batch; SmoothQuant (Xiao et al. 2023, arXiv:2211.10438) first moves into the weights what few channels have more of.

    The file is ONNX with QuantizeLinear and DequantizeLinear. OpenVINO runs it as fast as an IR of the same, and
    onnxruntime runs it too.

    Args:
        batches: the graph's inputs, of a pair each.
    Raises:
        ModelError: the graph can't be quantized.
    """
    nncf = require_nncf()
    onnx = require("onnx", extra="cpu", purpose="int8-static")
    try:
        with quiet():
            model = nncf.quantize(
                onnx.load(str(source)),
                nncf.Dataset(batches),
                model_type=nncf.ModelType.TRANSFORMER,
                subset_size=len(batches),
            )
    except Exception as exc:  # NNCF's errors and onnxruntime's share no other class
        raise ModelError(f"{source}: NNCF can't quantize this graph ({type(exc).__name__}: {str(exc)[:300]}).") from exc
    onnx.save_model(model, str(target), save_as_external_data=is_big(source), location=target.name + ".data")
    return {"kind": "static", "pairs": len(batches), "nncf": nncf.__version__}
