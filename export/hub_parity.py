"""Whether a folder for Hugging Face's libraries answers as its student: it is loaded by those that will load it, and
asked pairs in batches as these make them, short and long ones padded together. A tokenizer decides half of what a
library does with a pair (the side that it pads and cuts, token types, the longest text), and its files alone decide
that.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import numpy as np

from relabel.distill.students.model import PROBES, DecoderTexts, StudentModel
from relabel.distill.students.spec import StudentRecord
from relabel.export.loader import open_session
from relabel.export.parity import PairSet, PairsFile, choose_rows, file_pairs, lineage_pairs
from relabel.export.specs import ParitySpec
from relabel.manifests.errors import GateError, InputError, ManifestError
from relabel.manifests.files import Storage
from relabel.manifests.secrets import counted

# B pairs, K grades

Form = Literal["hf", "rerank"]
Pair = tuple[str, str]
HEAD = "relevance"
"""The one head of a student that these libraries have a place for."""
MOST_APART = 1e-5
"""|Δp| at most between the student and what is loaded; of `rerank`, of the expected grade over the highest."""
NUM_REAL = 24
"""Real pairs that are asked, twice of each library."""
LEAST_SENTENCE_TRANSFORMERS = (6, 2)
"""Older ones have no modules for a cross-encoder."""
PARTS = ("0_Transformer", "1_Pooling", "2_Dense", "3_Dense")
"""Folders of sentence-transformers' modules; the last one where there are two layers."""
GRAPH = "onnx/model.onnx"
"""Where sentence-transformers and optimum look for a graph: below the folder, or below the one of its transformer."""
LOGITS = "logits"
HIDDEN = "last_hidden_state"
"""The graph's one output, by what optimum's classes for the two kinds of folder read."""


@dataclass(frozen=True)
class AskedPairs:
    """What a folder is asked.

    Args:
        real: pairs of users, evenly drawn.
        source: where those come from, as words.
    """

    real: list[Pair]
    source: str


@dataclass(frozen=True)
class LoadedBack:
    """What became of a folder in one library.

    Args:
        library: `transformers`, `sentence-transformers`, or `onnxruntime` with the folder's graph.
        version: of the library; None where it is not installed.
        max_abs: the largest |Δp|; None where it was not asked.
        reason: why it was not asked.
    """

    library: str
    version: str | None
    max_abs: float | None
    reason: str | None = None

    def __str__(self) -> str:
        if self.max_abs is None:
            return f"not checked with {self.library}: {self.reason}"
        return f"{self.library} {self.version}: at most {self.max_abs:.1g} from the student"


def choose_pairs(
    record: StudentRecord, manifest: Mapping[str, Any], pairs: PairsFile | None, storage: Storage
) -> AskedPairs:
    """Real pairs to ask: of a file, or of the student's own test split; where that can't be read any more, none.

    Raises:
        InputError: the file can't be read.
    """
    if pairs is not None:
        return _drawn(file_pairs(pairs, record.columns, storage, grades=record.grades), Path(pairs.path).name)
    try:
        tested, trained = lineage_pairs(manifest, storage, grades=record.grades)
    except (InputError, ManifestError) as exc:
        return AskedPairs([], f"pairs made here alone, since the student's own can't be read ({exc})")
    return _drawn(tested if tested.pairs else trained, "its own pairs")


def _drawn(pairs: PairSet, name: str) -> AskedPairs:
    real = [pairs.pairs[row] for row in choose_rows(pairs, NUM_REAL)]
    return AskedPairs(real, f"{len(real)} of {name}")


def check_folder(
    student: StudentModel, folder: Path, form: Form, library: str, asked: AskedPairs, report: Callable[[str], None]
) -> list[LoadedBack]:
    """Load a folder by each library that it is for, and compare its answers with the student's.

    Args:
        library: whose classes load it, as `write_model` returns; sentence-transformers loads each.
        report: called with a line a library.
    Returns:
        A library each, the ones that are not here among them.
    Raises:
        GateError: it answers otherwise than the student.
    """
    pairs = [*asked.real, *_made_pairs(student, asked.real)]
    if isinstance(student.texts, DecoderTexts):
        room = student.record.max_tokens - sum(len(ids) for ids in student.texts.prompt_ids)
        pairs = [pair for pair in pairs if _has_short_query(student, pair[0], room)]
    with _quiet(), _refuses_what_fails(student):
        checks = [
            _through_transformers(
                student,
                folder,
                form,
                library,
                pairs,
            ),
            _through_sentence_transformers(student, folder, form, pairs),
        ]
        if (model_folder(folder, library) / GRAPH).is_file():
            checks.append(
                _through_onnxruntime(
                    student,
                    folder,
                    form,
                    library,
                    pairs,
                )
            )
    report(f"loaded again and compared on {counted(len(pairs), 'pair')} ({asked.source}), padded together")
    for check in checks:
        report(str(check))
    return checks


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers reports what it loads no further: poolers that nothing asks, among others."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def _refuses_what_fails(student: StudentModel) -> Iterator[None]:
    """A folder that can't be loaded or asked is none that answers as its student.

    Raises:
        GateError: it can't.
    """
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError) as exc:
        raise GateError(
            f"{student.path}: what was written can't be loaded and asked ({type(exc).__name__}: {exc}). Nothing is "
            "kept of it: export it to a bundle, and report this with the model's name."
        ) from exc


def _made_pairs(student: StudentModel, real: Sequence[Pair]) -> list[Pair]:
    """Pairs that no test split is sure to have: of very different lengths, without a document, and too long."""
    longest = max((document for _, document in real), key=len, default="") or PROBES[0][1]
    most_characters = student.record.max_tokens * 8
    too_long = f"{longest} " * (most_characters // (len(longest) + 1) + 1)
    return [*PROBES, ("red shoes", too_long), ("red shoes", "Shoes [SEP] for </s> women. " * 3)]


def _has_short_query(student: StudentModel, query: str, room: int) -> bool:
    """Whether a query fills less than half of the tokens that a decoder's prompt leaves; these libraries cut others."""
    return 2 * len(student.tokenizer(query, add_special_tokens=False).input_ids) < room


# ------------------------------------------------------------------------------
# Each library, by the calls of the folder's card.


Ask = Callable[[list[Pair], int], np.ndarray]
"""Pairs and the size of a batch → probabilities [B, K], or of form `rerank` a number from 0 to 1, [B, 1]."""


def model_folder(folder: Path, library: str) -> Path:
    """Where config, weights and tokenizer lie: the folder itself, or the one of its first module."""
    return folder if library == "transformers" else folder / PARTS[0]


def _through_transformers(
    student: StudentModel, folder: Path, form: Form, library: str, pairs: list[Pair]
) -> LoadedBack:
    from transformers import AutoModel, AutoModelForSequenceClassification

    if library == "transformers":
        classifier = AutoModelForSequenceClassification.from_pretrained(folder).eval()

        def logits_of(batch: Mapping[str, Any]) -> Any:
            return classifier(**batch).logits
    else:
        backbone = AutoModel.from_pretrained(folder / PARTS[0]).eval()
        head = open_head(folder)

        def logits_of(batch: Mapping[str, Any]) -> Any:
            return head(backbone(**batch).last_hidden_state, batch["attention_mask"])

    release = version("transformers")
    apart = _most_apart(
        student,
        form,
        f"transformers {release}",
        asker(folder, form, library, logits_of),
        pairs,
    )
    return LoadedBack("transformers", release, apart)


def _through_onnxruntime(
    student: StudentModel, folder: Path, form: Form, library: str, pairs: list[Pair]
) -> LoadedBack:
    """The folder's graph, as optimum's classes run it."""
    import onnxruntime

    release = onnxruntime.__version__
    apart = _most_apart(
        student,
        form,
        f"onnxruntime {release}",
        graph_asker(folder, form, library, model_folder(folder, library) / GRAPH),
        pairs,
        limit=ParitySpec().fp32_max_abs,
    )
    return LoadedBack("onnxruntime", release, apart)


def graph_asker(folder: Path, form: Form, library: str, graph: Path) -> Ask:
    """How a graph of a folder is asked: on the CPU, between the folder's tokenizer and its head, if it has one.

    Args:
        library: whose classes load the folder.
    """
    import torch

    session = open_session(graph, "cpu")
    head = None
    if library != "transformers":
        head = open_head(folder)

    def logits_of(batch: Mapping[str, Any]) -> Any:
        inputs = {name: values_BT.numpy() for name, values_BT in batch.items()}
        if head is None:
            return torch.from_numpy(session.run([LOGITS], inputs)[0])
        hidden_BTD = torch.from_numpy(session.run([HIDDEN], inputs)[0])
        return head(hidden_BTD, batch["attention_mask"])

    return asker(folder, form, library, logits_of)


def asker(folder: Path, form: Form, library: str, logits_of: Callable[[Mapping[str, Any]], Any]) -> Ask:
    """How a folder is asked, by its own tokenizer.

    Args:
        library: whose classes load the folder.
        logits_of: a batch of that tokenizer → logits [B, K], or of form `rerank` [B, 1].
    """
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder(folder, library))

    def ask(pairs: list[Pair], batch_size: int) -> np.ndarray:
        logits = []
        for start in range(0, len(pairs), batch_size):
            asked = pairs[start : start + batch_size]
            batch = tokenizer(
                [query for query, _ in asked],
                [document for _, document in asked],
                truncation=True,
                padding=True,
                return_tensors="pt",
            )
            with torch.inference_mode():
                logits.append(logits_of(batch))
        logits_BK = torch.cat(logits)
        return np.asarray(logits_BK.softmax(1) if form == "hf" else logits_BK.sigmoid())

    return ask


def open_head(folder: Path) -> Callable[[Any, Any], Any]:
    """What sentence-transformers' modules compute after the transformer, by torch alone: hidden states [B, T, D] and
    mask [B, T] → logits [B, K].
    """
    import torch
    from safetensors.torch import load_file

    pooling = json.loads((folder / PARTS[1] / "config.json").read_bytes())["pooling_mode"]
    layers = []
    for name in PARTS[2:]:
        dense = folder / name
        if dense.is_dir():
            config = json.loads((dense / "config.json").read_bytes())
            layers.append((load_file(dense / "model.safetensors"), config))

    def head(hidden_BTD: Any, mask_BT: Any) -> Any:
        if pooling == "lasttoken":
            last_B = mask_BT.sum(1) - 1
            values = hidden_BTD[torch.arange(len(last_B)), last_B]
        elif pooling == "mean":
            values = (hidden_BTD * mask_BT[..., None]).sum(1) / mask_BT.sum(1, keepdim=True)
        else:
            values = hidden_BTD[:, 0]
        for weights, config in layers:
            values = values @ weights["linear.weight"].T + weights["linear.bias"]
            if config["activation_function"].endswith("Tanh"):
                values = values.tanh()
        return values

    return head


def _through_sentence_transformers(student: StudentModel, folder: Path, form: Form, pairs: list[Pair]) -> LoadedBack:
    library = "sentence-transformers"
    try:
        release = version(library)
    except PackageNotFoundError:
        return LoadedBack(library, None, None, "not installed (pip install 'relabel-ir[hf]')")
    if tuple(int(part) for part in re.findall(r"\d+", release)[:2]) < LEAST_SENTENCE_TRANSFORMERS:
        return LoadedBack(library, release, None, f"{release} is older than 6.2")
    try:
        cross_encoders = importlib.import_module("sentence_transformers")
    except ImportError as exc:
        return LoadedBack(library, release, None, f"{release} can't be imported: {exc}")
    model = cross_encoders.CrossEncoder(str(folder), device="cpu", local_files_only=True)
    is_odds = type(model.activation_fn).__name__ == "Identity"

    def ask(pairs: list[Pair], batch_size: int) -> np.ndarray:
        options = {"batch_size": batch_size, "show_progress_bar": False}
        if form == "hf":
            return np.asarray(model.predict(pairs, apply_softmax=True, **options))
        scores_B1 = np.asarray(model.predict(pairs, **options)).reshape(-1, 1)
        return 1 / (1 + np.exp(-scores_B1)) if is_odds else scores_B1

    apart = _most_apart(
        student,
        form,
        f"{library} {release}",
        ask,
        pairs,
    )
    return LoadedBack(library, release, apart)


def answers_of_student(student: StudentModel, form: Form, pairs: list[Pair]) -> np.ndarray:
    """What a folder should answer: probabilities [B, K]; of form `rerank` expected grade over the highest, [B, 1]."""
    want_BK = student.probabilities(pairs)[HEAD]
    if form == "hf":
        return want_BK
    top = student.record.grades - 1
    return want_BK @ np.arange(top + 1)[:, None] / top


def _most_apart(
    student: StudentModel, form: Form, library: str, ask: Ask, pairs: list[Pair], *, limit: float = MOST_APART
) -> float:
    """The largest difference from the student, over two ways to batch the pairs: as they come, and, turned round, all
    together.

    Raises:
        GateError: it is beyond the limit.
    """
    want_BK = answers_of_student(student, form, pairs)
    in_turn_BK = np.abs(ask(pairs, 8) - want_BK)
    together_BK = np.abs(ask(pairs[::-1], len(pairs))[::-1] - want_BK)
    apart_B = np.maximum(in_turn_BK, together_BK).max(1)
    worst = int(np.nan_to_num(apart_B, nan=np.inf).argmax())
    apart = float(apart_B[worst])
    if apart <= limit:
        return apart
    query, document = pairs[worst]
    raise GateError(
        f"{student.path}: what was written, loaded again by {library}, answers up to {apart:.2g} from the student "
        f"({limit:g} is the limit), farthest for {query[:60]!r} with {document[:60]!r}. Nothing is kept of it: "
        "export it to a bundle, and report this with the model's name."
    )
