"""The registry of further bundle formats, and the input contract that every exported model keeps: the bundle's
tokenizer and its loader."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import relabel.export.loader
from relabel.distill.students import portable
from relabel.distill.students.model import DecoderTexts, StudentModel
from relabel.distill.students.spec import KINDS
from relabel.export.parity import PairSet
from relabel.export.specs import ExportSpec
from relabel.manifests.errors import ModelError
from relabel.manifests.specs import Registry

FORMATS = {"tensorrt": "relabel.export.tensorrt_engines:ENGINES"}
"""Forms of a model that a bundle may hold next to its ONNX files, with the methods of `EngineFormat`."""
ONNX = "onnx"
"""What every bundle holds: other forms are made of it, and the loader falls back to it."""
TOKENIZER = "tokenizer.json"
LOADER = "load.py"
FUTURE = "from __future__ import annotations\n"
IMPORTED = "from relabel.distill.students.portable import batch_tokens_on, length_batches, query_counts"
"""What the loader imports of this package: the text of that module replaces it in `load.py`."""
_REGISTRY = Registry("format", "relabel.bundle_formats", FORMATS, built_in=(ONNX,))


def load_format(name: str) -> Any:
    """The form of a name, which has the methods of `EngineFormat`.

    Raises:
        ConfigError: no such form; names the nearest.
    """
    return _REGISTRY.load(name)


def input_names(student: StudentModel) -> list[str]:
    """The graph's inputs, in order; every one int64 [B, T], but for `counts`, which is [B, 19]."""
    return list(student.texts.collate(student.texts.encode([("a", "b")])))


def output_names(student: StudentModel, options: ExportSpec) -> list[str]:
    """The graph's outputs, in order: probabilities by head, then logits."""
    heads = list(student.record.heads)
    return [*heads, *(f"{name}_logits" for name in heads if options.logits)]


def input_contract(student: StudentModel) -> dict[str, Any]:
    """What the loader must know, see `loader.Inputs`; `inputs` in the bundle's manifest."""
    record, tokenizer = student.record, student.tokenizer
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
    held = json.loads(backend.to_str())
    plain = {**held, "truncation": None, "padding": None}
    (folder / TOKENIZER).write_text(json.dumps(plain, ensure_ascii=False), encoding="utf-8")


def write_loader(folder: Path) -> None:
    """Write `load.py`: the loader, with the text of the module that it imports of this package."""
    shared = inspect.getsource(portable).partition(FUTURE)[2].strip("\n")
    text = inspect.getsource(relabel.export.loader).replace(IMPORTED, shared)
    (folder / LOADER).write_text(text, encoding="utf-8")


def check_tokens(student: StudentModel, rows: list[tuple[list[int], list[int]]], pairs: PairSet) -> None:
    """Compare the loader's tokens with the student's.

    Args:
        rows: the loader's.
    Raises:
        ModelError: they differ, so no comparison of answers means anything.
    """
    for number, (row, want) in enumerate(zip(rows, student.texts.encode(pairs.pairs), strict=True)):
        segments = want.types if want.counts is None else want.counts
        if row[0] != want.ids or (segments is not None and row[1] != segments):
            source, place = pairs.names[number]
            raise ModelError(
                f"{student.path}: row {place} of {source} becomes other tokens in the bundle's loader than in the "
                "student. Its tokenizer does something that the tokenizers library alone does not; take another base "
                "model."
            )
