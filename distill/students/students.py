"""A student's folder, and a student loaded from it. What `relabel score`, `evaluate` and the exporters rely on.

The folder, every file but `checkpoints/` written once training has ended:

    student.json                     what it is: `StudentRecord`; read without torch
    config.json, model.safetensors   the language model of a decoder, as transformers' Auto classes load it; an
                                     encoder's config is backbone.json, since they would give it a random head
    heads.safetensors                an encoder's heads: `<head>.weight` [K, D], `<head>.bias` [K]
    tokenizer.json, …                the tokenizer
    manifest.json                    lineage: labels, row counts, split, spec, versions, metrics, gate, and the sha256
                                     of every file
    curves.parquet, curves.svg       losses and dev metrics by step
    README.md                        the model card

`read_student` gives the record and needs no torch; `load_student` gives a `StudentModel`, ready to answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self, cast

import numpy as np

from relabel.distill.students.kinds import KINDS
from relabel.distill.students.logits import PROBES, logits_of_rows, refuse_leaks, softmax
from relabel.distill.students.specs import DistillSpec
from relabel.distill.students.student_record import STUDENT_NAME, StudentRecord, read_student
from relabel.distill.students.token_rows import PairTexts, TokenRow
from relabel.distill.training.disk_errors import open_to_readers
from relabel.manifests.digests import digest_of, readable_json, sha256_file
from relabel.manifests.errors import ModelError
from relabel.manifests.extras import require
from relabel.manifests.models.tokenizers import read_tokenizer
from relabel.manifests.registered import imported

# B rows, K grades, D hidden

HEADS_NAME = "heads.safetensors"

NOT_THE_MODEL = ("manifest.json", "README.md", "curves.parquet", "curves.svg", "seconds.parquet")


class StudentModule(Protocol):
    """The torch module of a kind. Called with what its texts collate, it gives logits [B, K] by head."""

    @staticmethod
    def own_parts(spec: DistillSpec, path: Path, tokenizer: Any, grades: int) -> dict[str, Any]:
        """Fields of the record that this kind alone fills.

        Args:
            path: folder of the model that it starts from.
        Raises:
            ModelError, ConfigError: the model or the spec does not go with it.
        """
        ...

    @staticmethod
    def texts(record: StudentRecord, tokenizer: Any) -> PairTexts:
        """What turns pairs into its batches."""
        ...

    @classmethod
    def start(cls, spec: DistillSpec, path: Path, tokenizer: Any, record: StudentRecord) -> Self:
        """The module to train, from the model in a folder.

        Raises:
            OSError, ValueError, RuntimeError: its weights can't be loaded.
            ModelError: it is no such model.
        """
        ...

    @classmethod
    def load(cls, record: StudentRecord, folder: Path) -> Self:
        """A trained one, from its folder."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights and config."""
        ...

    @property
    def inner(self) -> Any:
        """The model of transformers inside."""
        ...

    @property
    def layers(self) -> Any:
        """Its layers, for compiling them one by one."""
        ...

    def output_rows(self) -> dict[str, tuple[Any, Any]]:
        """By head, weight [K, D] and bias [K] of the linear layer behind the pooled vectors."""
        ...


def module_class(kind: str) -> type[StudentModule]:
    """The class behind a registered kind; loads torch."""
    return cast("type[StudentModule]", imported(KINDS[kind].module))


@dataclass
class StudentModel:
    """A student ready to answer.

    Args:
        module: a torch module in eval mode on `device`; `module(**texts.collate(texts.encode(pairs)))` gives the raw
            logits of one batch by head, [B, K], differentiable.
    """

    record: StudentRecord
    path: Path
    tokenizer: Any
    module: Any
    texts: PairTexts
    device: str

    def probabilities(
        self, pairs: Sequence[tuple[str, str]], *, batch_tokens: int | None = None
    ) -> dict[str, np.ndarray]:
        """Calibrated grade distributions of (query, document) pairs: by head, float32 [B, K], rows sum to 1, in the
        order given.
        """
        logits = self.logits(pairs, batch_tokens=batch_tokens)
        return {name: softmax(values_BK / self.record.temperature.get(name, 1.0)) for name, values_BK in logits.items()}

    def logits(self, pairs: Sequence[tuple[str, str]], *, batch_tokens: int | None = None) -> dict[str, np.ndarray]:
        """Raw logits, float32 [B, K] by head, in the order given; rows of like length share a batch."""
        return logits_of_rows(
            self.module, self.texts, self.texts.encode(pairs), self.record.heads, batch_tokens=batch_tokens
        )


def load_student(path: str | Path, *, device: str = "cpu") -> StudentModel:
    """Load a student to score with.

    Args:
        device: what torch calls it.
    Raises:
        ManifestError: the folder holds no student.
        ModelError: its weights or tokenizer can't be loaded, or its answer to a row depends on the batch.
    """
    record = read_student(path)
    folder = Path(path)
    library = require("transformers", extra="cpu", purpose="A student")
    library.utils.logging.disable_progress_bar()  # progress is the command's to show
    tokenizer = read_tokenizer(library, folder, str(folder))
    try:
        module: Any = module_class(record.kind).load(record, folder)
    except (OSError, ValueError, KeyError, RuntimeError) as exc:
        raise ModelError(
            f"{folder}: the student can't be loaded ({type(exc).__name__}: {exc}). Restore the folder from a copy."
        ) from exc
    texts = make_texts(record, tokenizer)
    check_batches(module.eval(), texts, record, str(folder))
    return StudentModel(record, folder, tokenizer, module.to(device), texts, device)


def check_batches(module: Any, texts: PairTexts, record: StudentRecord, where: str) -> None:
    """Compare a row's logits alone with those in a batch, made as the student makes them; see `refuse_leaks`.

    Args:
        module: in eval mode, on the CPU: a GPU's convolutions round to ten bits, as much as a leak makes.
    """

    def answer(rows: list[TokenRow]) -> np.ndarray:
        found = logits_of_rows(module, texts, rows, record.heads, batch_tokens=len(rows) * record.max_tokens)
        return np.concatenate(list(found.values()), axis=1)

    refuse_leaks(answer, texts.encode(PROBES), where)


def make_texts(record: StudentRecord, tokenizer: Any) -> PairTexts:
    """What turns pairs into this student's batches."""
    return module_class(record.kind).texts(record, tokenizer)


def write_student(folder: Path, record: StudentRecord, module: StudentModule, tokenizer: Any) -> None:
    """Write weights, config, tokenizer and record; `student.json` last."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    module.save(folder)
    (folder / STUDENT_NAME).write_bytes(readable_json(asdict(record)))
    open_to_readers(folder)


def student_file_names(path: str | Path) -> list[str]:
    """The files that decide what a student answers: weights, config, tokenizer and record; sorted."""
    found = (file.name for file in Path(path).iterdir() if file.is_file() and not file.name.startswith("."))
    return sorted(name for name in found if name not in NOT_THE_MODEL)


def student_files(path: str | Path) -> dict[str, str]:
    """sha256 by name of the files that decide what a student answers."""
    return {name: sha256_file(Path(path) / name) for name in student_file_names(path)}


def student_digest(path: str | Path) -> str:
    """sha256 over a student's files, 64 hex digits."""
    return digest_of(student_files(path))
