"""A student's graph in a folder for Hugging Face's libraries, under the names that they look for: sentence-transformers
with `backend="onnx"` and optimum's classes load it, and export nothing of their own. It takes what the folder's
tokenizer gives, and answers with the logits of the folder's form, or, of sentence-transformers' modules, with the
hidden states that the other modules read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from relabel.distill.students.examples import NO_GRADE
from relabel.distill.students.model import StudentModel
from relabel.export.bundle_facts import ModelParity
from relabel.export.exporting import SAMPLE, Report, drop_notes, refusal_text, trace_onnx, write_smaller
from relabel.export.hub_parity import (
    GRAPH,
    HEAD,
    HIDDEN,
    LOGITS,
    Form,
    answers_of_student,
    graph_asker,
    model_folder,
)
from relabel.export.parity import PairSet, measure
from relabel.export.specs import ExportSpec, ParitySpec
from relabel.manifests.errors import GateError
from relabel.manifests.process import require
from relabel.manifests.records import sha256_file

# B rows, T tokens, K grades, D hidden

GRAPHS = {"fp32": GRAPH, "fp16": "onnx/model_fp16.onnx", "int8": "onnx/model_quantized.onnx"}
"""By precision. The smaller ones have no fixed name: a caller gives it as `file_name`; these are transformers.js's."""


@dataclass(frozen=True)
class GraphFile:
    """A graph of a folder.

    Args:
        path: relative to the folder.
    """

    path: str
    precision: str
    sha256: str


class LogitsModule(nn.Module):  # type: ignore[misc]
    """An encoder's first token or a decoder's last one through the relevance head: a logit a grade, its temperature
    folded in, or the log-odds of the expected grade.

    Args:
        names: what the backbone calls the inputs, in the order in which they come here.
    """

    def __init__(self, student: StudentModel, form: Form, names: Sequence[str]) -> None:
        super().__init__()
        self.backbone = student.module.inner.base_model
        self.is_decoder = student.record.kind == "decoder"
        self.form = form
        self.names = list(names)
        weight_KD, bias_K = folded_head(student)
        self.register_buffer("weight_KD", weight_KD.float())
        self.register_buffer("bias_K", bias_K.float())

    def forward(self, *inputs: Tensor) -> Tensor:
        """Logits [B, K], or of form `rerank` [B, 1]."""
        by_name = dict(zip(self.names, inputs, strict=True))
        hidden_BTD = _hidden_states(self.backbone, by_name)
        read_BD = hidden_BTD[:, 0]
        if self.is_decoder:
            last_B11 = (by_name["attention_mask"].sum(1) - 1)[:, None, None]
            read_BD = hidden_BTD.gather(1, last_B11.expand(-1, 1, hidden_BTD.shape[2]))[:, 0]
        logits_BK = nn.functional.linear(read_BD, self.weight_KD, self.bias_K)
        return log_odds(logits_BK) if self.form == "rerank" else logits_BK


class HiddenModule(nn.Module):  # type: ignore[misc]
    """A backbone without a head.

    Args:
        names: what it calls the inputs, in the order in which they come here.
    """

    def __init__(self, student: StudentModel, names: Sequence[str]) -> None:
        super().__init__()
        self.backbone = student.module.inner.base_model
        self.names = list(names)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Hidden states [B, T, D]."""
        return _hidden_states(self.backbone, dict(zip(self.names, inputs, strict=True)))


def _hidden_states(backbone: Any, by_name: dict[str, Tensor]) -> Tensor:
    is_decoder = hasattr(backbone.config, "use_cache")
    options = {"use_cache": False} if is_decoder else {}
    hidden_BTD: Tensor = backbone(**by_name, **options).last_hidden_state
    return hidden_BTD.float()


def folded_head(student: StudentModel) -> tuple[Tensor, Tensor]:
    """The relevance head's weight [K, D] and bias [K] over its temperature."""
    weight_KD, bias_K = student.module.output_rows()[HEAD]
    temperature = student.record.temperature.get(HEAD, 1.0)
    return weight_KD.detach() / temperature, bias_K.detach() / temperature


def log_odds(logits_BK: Tensor) -> Tensor:
    """Log-odds of the expected grade e over the highest, [B, 1]: log e - log (top - e), of any number of grades."""
    top = logits_BK.shape[1] - 1
    grades_K = torch.arange(top + 1, dtype=torch.float32, device=logits_BK.device)
    grade_B = torch.logsumexp(logits_BK[:, 1:] + grades_K[1:].log(), 1)
    rest_B = torch.logsumexp(logits_BK[:, :-1] + (top - grades_K[:-1]).log(), 1)
    return (grade_B - rest_B)[:, None]


def write_graphs(
    student: StudentModel, folder: Path, form: Form, library: str, precisions: Sequence[str], report: Report
) -> list[GraphFile]:
    """Write a folder's graphs, fp32 first.

    Args:
        library: whose classes load the folder.
        precisions: of `GRAPHS`.
    Raises:
        ModelError: torch can't trace the model, or onnxruntime can't make a smaller one.
        MissingExtraError: a library for it is absent.
    """
    from transformers import AutoTokenizer

    require("onnxruntime", extra="cpu", purpose="A graph's comparison with the student")
    model_path = model_folder(folder, library)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    batch = tokenizer(
        [query for query, _ in SAMPLE],
        [document for _, document in SAMPLE],
        truncation=True,
        padding=True,
        return_tensors="pt",
    )
    full = model_path / GRAPH
    full.parent.mkdir()
    report(f"fp32: writing {full.relative_to(folder)}")
    serving: nn.Module = HiddenModule(student, list(batch))
    output_name = HIDDEN
    if library == "transformers":
        serving = LogitsModule(student, form, list(batch))
        output_name = LOGITS
    trace_onnx(
        student,
        serving,
        dict(batch),
        [output_name],
        full,
        opset=ExportSpec().opset,
    )
    wanted = ["fp32", *(name for name in GRAPHS if name in precisions and name != "fp32")]
    for precision in wanted[1:]:
        smaller = model_path / GRAPHS[precision]
        report(f"{precision}: writing {smaller.relative_to(folder)}")
        write_smaller(student, full, smaller, precision)
    written = []
    for precision in wanted:
        path = model_path / GRAPHS[precision]
        drop_notes(path)  # last: fp16 is made by the notes of fp32
        rename_data(path)
        written.append(GraphFile(path.relative_to(folder).as_posix(), precision, sha256_file(path)))
    return written


def rename_data(path: Path) -> None:
    """Have the weights of a graph above 2 GB lie where optimum fetches them from the Hub: `<file>_data`."""
    data = path.with_name(path.name + ".data")
    if not data.is_file():
        return
    onnx = require("onnx", extra="cpu", purpose="An export")
    model = onnx.load(str(path), load_external_data=False)
    name = f"{path.name}_data"
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = name
    data.rename(path.with_name(name))
    path.write_bytes(model.SerializeToString())


def measure_graphs(
    student: StudentModel,
    folder: Path,
    form: Form,
    library: str,
    graphs: Sequence[GraphFile],
    pairs: PairSet,
    report: Report,
) -> list[ModelParity]:
    """Compare fp16 and int8 with the student, by the gates of bundles. A `rerank` folder has no grades: its answers
    count as two, above and below a half, and the student judges.

    Args:
        graphs: of the folder; fp32 is compared by `check_folder`.
        pairs: real ones.
    Raises:
        GateError: one is beyond its gate.
    """
    spec = ParitySpec()
    smaller = [graph for graph in graphs if graph.precision != "fp32"]
    if not smaller:
        return []
    want_NK = answers_of_student(student, form, pairs.pairs)
    if form == "rerank":
        want_NK = _as_two_grades(want_NK)
        pairs = replace(pairs, grades=np.full_like(pairs.grades, NO_GRADE), judge=None)
    measured = []
    for graph in smaller:
        report(f"parity: {len(pairs.pairs):,} pairs, {graph.precision}")
        ask = graph_asker(folder, form, library, folder / graph.path)
        answers_by_size = {}
        for size in spec.batch_sizes:
            answers_NK = ask(pairs.pairs, size)
            if form == "rerank":
                answers_NK = _as_two_grades(answers_NK)
            answers_by_size[size] = {HEAD: answers_NK}
        measured.append(
            measure(
                graph.precision,
                {HEAD: want_NK},
                answers_by_size,
                pairs,
                spec,
            )
        )
    refused = [parity for parity in measured if not parity.has_passed]
    if refused:
        raise GateError(refusal_text(refused, "Nothing is kept. Leave that precision out of --precisions."))
    return measured


def _as_two_grades(score_N1: np.ndarray) -> np.ndarray:
    """[N, 2]."""
    return np.concatenate([1 - score_N1, score_N1], 1)
