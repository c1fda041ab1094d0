"""Which kinds of student there are. Adding one is one file with a `StudentModule` and one entry here.

What a kind's module can do is said by `StudentModule` in `students.py`; here stands what is known of it before its
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


KINDS = {
    "encoder": StudentKind(
        "distill.students.encoder:EncoderStudent",
        "An encoder",
        "encoder",
        has_nodes=True,
        refuses=("student.lora", "student.batching"),
    ),
    "decoder": StudentKind(
        "distill.students.decoder:DecoderStudent", "A decoder", "decoder", pads_left=True, int8_narrows=False
    ),
}


def takers(key: str) -> list[str]:
    """The kinds that take a key of the spec."""
    return [name for name, kind in KINDS.items() if key not in kind.refuses]
