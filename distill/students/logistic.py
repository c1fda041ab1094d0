"""A logistic student: a linear layer over a frozen encoder's vector of the query, and nineteen counts of its text.

The document is not read: what is predicted is a property of the query, say how complex it is.

Source: R2RAG, section 3.1 (logistic regression over a 128-dimensional embedding and 19 linguistic features, which the
paper does not list; these are ours).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from relabel.distill.students.embedding import read_settings, sentence_vectors
from relabel.distill.students.encoder import EncoderStudent, load_backbone
from relabel.distill.students.query_counts import COUNT_NAMES, query_counts
from relabel.distill.students.specs import DistillSpec
from relabel.distill.students.student_record import STUDENT_NAME, StudentRecord, read_student
from relabel.distill.students.texts import EncoderTexts
from relabel.distill.students.token_rows import PAD_MULTIPLE, PairTexts, TokenRow
from relabel.manifests.errors import ConfigError, ModelError

# B rows, T tokens, D hidden, C columns: D and the counts


class LogisticStudent(EncoderStudent):
    """A backbone that is not trained, and a linear head over its vectors and the logarithms of the counts."""

    extra_width: ClassVar[int] = len(COUNT_NAMES)

    def forward(  # type: ignore[override]  # torch calls a module by the names of its own batch
        self, input_ids: Tensor, attention_mask: Tensor, counts: Tensor
    ) -> dict[str, Tensor]:
        """Logits of every head, by head float [B, K].

        Args:
            input_ids, attention_mask: of the query, int64 [B, T].
            counts: int64 [B, 19].
        """
        columns_BC = self.columns(input_ids, attention_mask, counts)
        return {name: head(columns_BC) for name, head in self.heads.items()}

    def columns(self, input_ids: Tensor, attention_mask: Tensor, counts: Tensor) -> Tensor:
        """What the head reads, [B, C]: a vector of length 1, then log(1 + count)."""
        vectors_BD = sentence_vectors(self.backbone, input_ids, attention_mask, self.pooling)
        return torch.cat([vectors_BD, torch.log1p(counts.float()).to(vectors_BD.dtype)], dim=-1)

    @staticmethod
    def own_parts(spec: DistillSpec, path: Path, tokenizer: Any, _grades: int) -> dict[str, Any]:
        """Pooling and the text before a query, as the model's own files say."""
        if spec.train.class_balance == "sampler":
            raise ConfigError(
                "train.class_balance: a student of kind logistic sees all rows at once. Take weights, or none."
            )
        if (path / STUDENT_NAME).is_file():
            held = read_student(path)
            return {"pooling": held.pooling, "prompt": held.prompt}
        settings = read_settings(path)
        if settings.is_lower and tokenizer("ABC").input_ids != tokenizer("abc").input_ids:
            raise ModelError(f"{path}: wants lower-cased texts, and its tokenizer does not make them. Take another.")
        return {"pooling": settings.pooling, "prompt": (settings.prompts["query"], "", "")}

    @classmethod
    def start(cls, _spec: DistillSpec, path: Path, _tokenizer: Any, record: StudentRecord) -> Self:
        """With a head that is to be fitted: an earlier student's is not looked at."""
        return cls(load_backbone(path), record.heads, pooling=record.pooling)

    @staticmethod
    def texts(record: StudentRecord, tokenizer: Any) -> PairTexts:
        """The query alone."""
        return QueryTexts(tokenizer, record.max_tokens, record.prompt[0])


class QueryTexts(EncoderTexts):
    """`[CLS] query [SEP]`, or what the tokenizer makes of one text, and the query's counts.

    Args:
        prompt: text before every query; not counted.
    """

    def __init__(self, tokenizer: Any, max_tokens: int, prompt: str = "") -> None:
        super().__init__(tokenizer, max_tokens)
        self._has_types = False
        self._prompt = prompt

    def encode(self, pairs: Sequence[tuple[str, str]]) -> list[TokenRow]:
        """Token rows of the queries; a long one loses its end there, and is counted as a whole."""
        if not pairs:
            return []
        rows = self._token_rows([self._prompt + query for query, _ in pairs], None)
        return [row._replace(counts=query_counts(query)) for row, (query, _) in zip(rows, pairs, strict=True)]

    def collate(self, rows: Sequence[TokenRow], *, pad_multiple: int = PAD_MULTIPLE) -> dict[str, Any]:
        """Right-padded `input_ids` and `attention_mask`, and `counts` [B, 19]."""
        batch = super().collate(rows, pad_multiple=pad_multiple)
        return {**batch, "counts": torch.tensor([row.counts for row in rows], dtype=torch.int64)}


class HeadColumns(nn.Module):  # type: ignore[misc]
    """A logistic student that gives what its head reads, under the name `columns`."""

    def __init__(self, student: LogisticStudent) -> None:
        super().__init__()
        self.student = student

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        """[B, C]."""
        return {"columns": self.student.columns(**batch)}
