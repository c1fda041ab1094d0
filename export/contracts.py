"""The input contract: all that the bundle's loader must know to turn texts into the tokens that the student saw in
training; and the files that the loader is and reads.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import relabel.export.loader
from relabel.distill.students import length_batches, query_counts
from relabel.distill.students.kinds import KINDS
from relabel.distill.students.students import StudentModel
from relabel.distill.students.texts import DecoderTexts
from relabel.export.exporters import input_names
from relabel.export.reference_pairs import PairSet
from relabel.export.student_facts import InputContract
from relabel.manifests.errors import ModelError

TOKENIZER = "tokenizer.json"
LOADER = "load.py"
FUTURE = "from __future__ import annotations\n"
IMPORTED = {
    "from relabel.distill.students.length_batches import batch_tokens_on, length_batches": length_batches,
    "from relabel.distill.students.query_counts import query_counts": query_counts,
}
"""What the loader imports of this package, and the module whose text stands there in `load.py`."""


def input_contract(student: StudentModel) -> InputContract:
    """What the loader must know; `inputs` in the bundle's manifest."""
    record, tokenizer = student.record, student.tokenizer
    pads_left = KINDS[record.kind].pads_left
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    texts = student.texts if isinstance(student.texts, DecoderTexts) else None
    return InputContract(
        kind=record.kind,
        tokenizer=TOKENIZER,
        max_tokens=record.max_tokens,
        names=input_names(student),
        padding_side="left" if pads_left else "right",
        pad_id=int(pad or 0),
        pad_type_id=0 if pads_left else int(tokenizer.pad_token_type_id),
        truncation_side=tokenizer.truncation_side,
        columns=record.columns,
        prompt=list(record.prompt) if any(record.prompt) else None,
        prompt_ids=[list(piece) for piece in texts.prompt_ids] if texts else None,
    )


def write_tokenizer(student: StudentModel, folder: Path) -> None:
    """Write the tokenizer as the `tokenizers` library reads it, without the padding and cutting of whoever used it
    last.

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
    """Write `load.py`: the loader, with the texts of the modules that it imports of this package."""
    text = inspect.getsource(relabel.export.loader)
    for line, module in IMPORTED.items():
        text = text.replace(line, inspect.getsource(module).partition(FUTURE)[2].strip("\n"))
    (folder / LOADER).write_text(text, encoding="utf-8")


def check_tokens(student: StudentModel, rows: list[tuple[list[int], list[int]]], pairs: PairSet) -> None:
    """Hold the loader's tokens against the student's.

    Args:
        rows: the loader's.
    Raises:
        ModelError: they differ, so no comparison of answers means anything.
    """
    for number, (row, want) in enumerate(zip(rows, student.texts.encode(pairs.pairs), strict=True)):
        beside = want.types if want.counts is None else want.counts
        if row[0] != want.ids or (beside is not None and row[1] != beside):
            source, place = pairs.names[number]
            raise ModelError(
                f"{student.path}: row {place} of {source} becomes other tokens in the bundle's loader than in the "
                "student. Its tokenizer "
                "does something that the tokenizers library alone does not; take another base model."
            )
