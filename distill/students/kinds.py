"""Which kinds of student there are. Adding one is one file with a `StudentModule` and one entry here.

What a kind's module can do is said by `StudentModule` in `students.py`; here is what is known of it before its
file, and torch with it, is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BaseKind = Literal["encoder", "decoder"]


@dataclass(frozen=True)
class StudentKind:
    """A kind of student.

    Args:
        module: import path of its `StudentModule`.
        title: what its card calls it.
        does: and what it says that it does.
        reads_query: whether it reads the query alone.
        trainer: import path of its `Trainer` (`trainers.py`).
        base: the model of transformers that it starts from.
        has_nodes: whether it can have heads beside relevance.
        refuses: keys of the spec that are for other kinds.
        pads_left: whether its batches are padded on the left.
        int8_narrows: whether dynamic int8 takes the matrices that narrow as well (see `export/quantize.py`).
    """

    module: str
    title: str
    base: BaseKind
    has_nodes: bool = False
    refuses: tuple[str, ...] = ()
    pads_left: bool = False
    int8_narrows: bool = True
    does: str = "grades how relevant a document is to a query"
    reads_query: bool = False
    trainer: str = "relabel.distill.students.loop:train_student"


_STEPWISE = (
    "epochs", "max_steps", "batch_size", "tokens_per_batch", "group_by_length", "accumulation", "learning_rate",
    "head_learning_rate", "schedule", "warmup", "max_grad_norm", "early_stopping", "eval_every", "save_every",
    "keep_checkpoints", "precision", "compile", "strategy", "gradient_checkpointing", "report_to",
)  # fmt: skip
"""Keys of `train` for kinds that take one batch after the other."""
KINDS = {
    "encoder": StudentKind(
        "relabel.distill.students.encoder:EncoderStudent",
        "An encoder",
        "encoder",
        has_nodes=True,
        refuses=("student.lora", "student.batching"),
    ),
    "decoder": StudentKind(
        "relabel.distill.students.decoder:DecoderStudent",
        "A decoder",
        "decoder",
        refuses=("train.head_learning_rate",),
        pads_left=True,
        int8_narrows=False,
    ),
    "logistic": StudentKind(
        "relabel.distill.students.logistic:LogisticStudent",
        "A logistic regression",
        "encoder",
        refuses=(
            *(f"student.{name}" for name in ("lora", "batching", "prompt", "pooling", "dropout")),
            *(f"train.{name}" for name in _STEPWISE),
        ),
        does="grades a query by its own text",
        reads_query=True,
        trainer="relabel.distill.students.logistic_fit:fit_student",
    ),
}


def takers(key: str) -> list[str]:
    """The kinds that take a key of the spec."""
    return [name for name, kind in KINDS.items() if key not in kind.refuses]
