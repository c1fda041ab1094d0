"""A bundle's loader: texts in, probabilities out. In a bundle this file is `load.py`, and needs numpy, onnxruntime (or,
where it is asked for, openvino) and tokenizers alone.

    from load import Student

    student = Student("path/of/the/bundle")
    print(student.version, student.provider, student.precision)
    print(student.score([("red shoe", "A red running shoe, size 9")]))

`python load.py --check` asks the pairs again that were sealed at export, and compares this machine's answers with the
sealed ones: exit 0 where they agree, 5 where they do not, 3 where the bundle is damaged or can't be opened, 4 where a
library is missing.

Files that are not those of the manifest, and a session that fell back to another provider, are errors and not answers.
Text that spells a control token is ordinary text.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import importlib.util
import itertools
import json
import os
import stat
import sys
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from relabel.distill.students.portable import batch_tokens_on, length_batches, query_counts

LEAST_ONNXRUNTIME = "1.20"
"""Older ones know neither the graph's operators nor its file's format."""
NEEDS = (
    f"A bundle needs {{}}: pip install numpy 'onnxruntime>={LEAST_ONNXRUNTIME}' tokenizers (on a GPU: onnxruntime-gpu, "
    "never both).\n"
)
NEEDS_OPENVINO = "The provider openvino needs openvino: pip install 'openvino>=2026.4,<2027' numpy tokenizers.\n"

try:
    import numpy as np
except ModuleNotFoundError as missing:
    if __name__ != "__main__":
        raise
    sys.stderr.write(NEEDS.format(missing.name))
    raise SystemExit(4) from None

# B rows, T tokens, K grades of a head

PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "tensorrt_rtx": "NvTensorRTRTXExecutionProvider",
}
OPENVINO = "openvino"
"""A runtime of its own on the CPU, which reads the same files; taken only where it is asked for."""
STATIC = "int8-static"
HINTS = {"fp32": "f32", "bf16": "bf16", STATIC: "f32"}
"""The precision hint for OpenVINO, by precision: left to itself it takes bf16 wherever the CPU has any. That of static
int8 is for what the file does not quantize.
"""
ROUNDED = {"bf16": "fp32"}
"""Precisions that OpenVINO makes of the file of another one."""
VNNI = ("avx512_vnni", "avx_vnni")
"""CPU flags of sums of products in int8; without either static int8 takes as long as fp32."""
AMX, AVX512 = "amx_bf16", "avx512_bf16"
"""CPU flags of arithmetic in bf16. With AMX it takes a third of fp32's time; with AVX-512 alone a half, which is more
than int8 takes.
"""
BF16_TOLERANCE = 5e-3
"""The largest |Δp| between bf16 and what fp32 answered at export."""
DEFAULT_PRECISION = "fp32"
"""What an export states as `default_precision`, and what is meant where an older manifest states none: labels and
served scores, on every provider, are the same figures to rounding. In fp32 they were proven to be the student's
(|Δp| ≤ 1e-4), and do not depend on the other rows of a batch, as those of dynamic int8 do.
"""
SLOW_FUSIONS = {"cpu": ["SkipLayerNormFusion"]}
"""Fusions at loading that make a provider slower. On a CPU the fused kernel takes several times what addition and
normalization take, a tenth of a small BERT's whole time (onnxruntime 1.31).
"""
TENSORRT_LIBRARIES = {
    "tensorrt": ("libnvinfer.so", "libnvinfer.so.10"),
    "tensorrt_rtx": ("libtensorrt_rtx.so", "libtensorrt_rtx.so.1"),
}
CHARACTERS_PER_TOKEN = 8
"""Characters of a long text that are tokenized at first for each token that is wanted; English
prose has four or five.
"""
UNSETTLED_WORDS = 2
"""Words before a cut that the text after it may change: the one that was cut, and blanks or a letter before it that
belong together.
"""
NOT_OURS = ("__pycache__", ".gitattributes")
"""What may lie in a bundle's folder and is none of its files: Python's caches, and a note that hubs add."""
MANIFEST = "manifest.json"
LOADER = "load.py"
REFERENCE = "reference.json"


class BundleError(RuntimeError):
    """The bundle, or the machine, is not what it has to be."""


@dataclass(frozen=True)
class Inputs:
    """The manifest's `inputs`, as far as texts become tokens by them. A key that is unknown here is left to others.

    Args:
        tokenizer: its file.
        names: of the graph's inputs.
        prompt, prompt_ids: of a decoder, its three pieces and their tokens; of a logistic student, text before a query.
    """

    kind: str
    tokenizer: str
    max_tokens: int
    names: Sequence[str]
    padding_side: str
    pad_id: int
    pad_type_id: int
    truncation_side: str
    prompt: Sequence[str] = ("",)
    prompt_ids: Sequence[list[int]] = ()

    @classmethod
    def read(cls, contract: Mapping[str, Any]) -> Inputs:
        """Those of a manifest."""
        return cls(**{name: contract[name] for name in cls.__dataclass_fields__ if name in contract})


class Encoder:
    """Pairs as token ids, as the student that was exported encodes them.

    Args:
        folder: of the bundle.
        contract: the manifest's `inputs`.
    """

    def __init__(self, folder: Path, contract: Mapping[str, Any]) -> None:
        self.inputs = Inputs.read(contract)
        self.max_tokens = self.inputs.max_tokens
        tokenizer = _file(folder, self.inputs.tokenizer)
        self._opening = Opening(tokenizer)
        self._tokenizer = self._opening.tokenizer
        if self.inputs.kind != "decoder":
            side = self.inputs.truncation_side
            self._tokenizer = load_tokenizer(tokenizer)
            self._tokenizer.enable_truncation(self.max_tokens, strategy="longest_first", direction=side)

    def encode(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Token ids and segment numbers of each pair, at most `max_tokens` of them; what is longer is cut as in
        training. A logistic student reads the query alone, and has its counts in the place of segment numbers.

        Raises:
            TypeError: a row is not a pair of strings; names the row.
        """
        return [(ids, types) for ids, types, _ in self.encode_marked(pairs)]

    def encode_marked(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int], bool]]:
        """The same, and whether each pair was too long and lost an end."""
        texts = [_pair(row, pair) for row, pair in enumerate(pairs)]
        if not texts:
            return []
        if self.inputs.kind == "encoder":
            return [
                (one.ids, one.type_ids, self._is_cut(one))
                for one in self._tokenizer.encode_batch(self._openings(texts))
            ]
        return self._queries(texts) if self.inputs.kind == "logistic" else self._prompts(texts)

    def _is_cut(self, found: Any) -> bool:
        return len(found.ids) >= self.max_tokens and bool(found.overflowing)

    def _openings(self, texts: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """Pairs whose long documents are cut after the last token that can be kept. The longer text of a pair is cut
        first, so which one is longer must show.
        """
        wanted: dict[int, int] = {}
        if self.inputs.truncation_side == "right":
            places = [
                place
                for place, (_, document) in enumerate(texts)
                if len(document) > self._opening.shortest_cut(self.max_tokens)
            ]
            queries = [_clean(texts[place][0]) for place in places]
            found = self._opening.tokenizer.encode_batch(queries, add_special_tokens=False)
            wanted = {place: max(self.max_tokens, len(one.ids)) + 1 for place, one in zip(places, found, strict=True)}
        cut = self._opening.cut
        return [
            (_clean(query), cut(document, wanted[place]) if place in wanted else _clean(document))
            for place, (query, document) in enumerate(texts)
        ]

    def collate(
        self, rows: Sequence[tuple[list[int], list[int]]], *, width: int | None = None
    ) -> dict[str, np.ndarray]:
        """A padded batch, int64 [B, T], by the names that the model takes.

        Args:
            width: T; the longest row by default.
        """
        inputs = self.inputs
        width = width or max(len(ids) for ids, _ in rows)
        lengths_B1 = np.array([[len(ids)] for ids, _ in rows])
        places_T = np.arange(width)
        is_left = inputs.padding_side == "left"
        mask_BT = (places_T >= width - lengths_B1 if is_left else places_T < lengths_B1).astype(np.int64)
        batch = {
            "input_ids": _padded([ids for ids, _ in rows], mask_BT, inputs.pad_id),
            "attention_mask": mask_BT,
            "position_ids": np.maximum(mask_BT.cumsum(1) - 1, 0),
        }
        types = [found for _, found in rows]
        if "counts" in inputs.names:
            batch["counts"] = np.array(types, dtype=np.int64)
        elif "token_type_ids" in inputs.names:
            batch["token_type_ids"] = _padded(types, mask_BT, inputs.pad_type_id)
        return {name: batch[name] for name in inputs.names}

    def _queries(self, texts: list[tuple[str, str]]) -> list[tuple[list[int], list[int], bool]]:
        cut = self._opening.cut if self.inputs.truncation_side == "right" else lambda text, _: _clean(text)
        found = self._tokenizer.encode_batch(
            [cut(self.inputs.prompt[0] + query, self.max_tokens) for query, _ in texts]
        )
        return [(one.ids, query_counts(query), self._is_cut(one)) for one, (query, _) in zip(found, texts, strict=True)]

    def _prompts(self, texts: list[tuple[str, str]]) -> list[tuple[list[int], list[int], bool]]:
        before, between, after = self.inputs.prompt_ids
        room = self.max_tokens - len(before) - len(between) - len(after)
        queries, documents = ([self._opening.cut(pair[part], room) for pair in texts] for part in (0, 1))
        rows: list[tuple[list[int], list[int], bool]] = []
        encode = self._tokenizer.encode_batch
        for query, document in zip(
            encode(queries, add_special_tokens=False), encode(documents, add_special_tokens=False), strict=True
        ):
            kept = query.ids[:room]
            rows.append(
                (
                    before + kept + between + document.ids[: room - len(kept)] + after,
                    [],
                    len(query.ids) + len(document.ids) > room,
                )
            )
        return rows


def load_tokenizer(path: Path) -> Any:
    """A tokenizer that neither pads nor cuts, and to which `[SEP]` in a document is five characters."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    return tokenizer


class Opening:
    """Cuts a long text so that its first tokens stay what they are, without reading all of it.

    A tokenizer splits a text into words and each word into tokens. Text after a cut can change the words right
    before it, and a token that was added to the vocabulary whole, or a number (digits may be grouped from its end), by
    more: all of that is left out when the tokens before the cut are counted. A text without a word's end is read to its
    own end.

    Args:
        path: of the `tokenizer.json`.
    """

    def __init__(self, path: Path) -> None:
        self.tokenizer = load_tokenizer(path)
        added = self.tokenizer.get_added_tokens_decoder().values()
        self._margin = max((len(token.content) for token in added), default=0) + 1

    def shortest_cut(self, num_tokens: int) -> int:
        """Characters at which a text is cut first."""
        return num_tokens * CHARACTERS_PER_TOKEN + self._margin

    def cut(self, text: str, num_tokens: int) -> str:
        """The text, or a part from its beginning with the same first `num_tokens` tokens and no fewer."""
        size = self.shortest_cut(num_tokens)
        while size < len(text) and self._settled(_clean(text[:size])) < num_tokens:
            size *= 2
        return _clean(text[:size])

    def _settled(self, text: str) -> int:
        """Tokens of a text that stay what they are, whatever follows it."""
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        end = len(text) - self._margin
        while end > 0 and text[end - 1].isnumeric():
            end -= 1
        words = encoding.word_ids
        num_kept = next((place for place, (_, stop) in enumerate(encoding.offsets) if stop > end), len(words))
        for _ in range(UNSETTLED_WORDS):
            last = words[num_kept - 1] if num_kept else None
            while num_kept and words[num_kept - 1] == last:
                num_kept -= 1
        return num_kept


class Student:
    """A bundle that answers.

    Args:
        folder: of the bundle.
        provider: `cpu`, `cuda`, `tensorrt` (an engine of this bundle, or its ONNX on CUDA where no engine fits this
            machine), `openvino`, or `auto`: an engine of the default precision that fits, else CUDA where this
            onnxruntime has it, else the CPU.
        precision: `fp32`, `fp16`, `int8` … as the bundle has them, of openvino `fp32`, `bf16` or `int8-static`; by
            default the manifest's `default_precision`. That of openvino is bf16 where the CPU has AMX, else int8-static
            where it has VNNI and the bundle this precision; otherwise `cpu` is taken instead.
        threads: of the CPU; 0 is as many as this process may use (see `default_threads`).
        check_digests: compare the sha256 of every file first.
    Raises:
        BundleError: a file is missing or damaged, the precision is not there, or the provider is not to be had.
        ModuleNotFoundError: the provider's library is absent.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        provider: str = "auto",
        precision: str | None = None,
        threads: int = 0,
        check_digests: bool = True,
    ) -> None:
        self.folder = Path(folder).resolve()  # once: every file comes from the version that a link leads to now
        self.manifest = read_manifest(self.folder)
        if check_digests:
            check_files(self.folder, self.manifest)
        self.version = _sha256(self.folder / MANIFEST)[:16]
        """By which it was published, unless it was given another name: the first digits of its manifest's sha256."""
        self.refused: list[str] = []
        """Why engines that the bundle holds, or openvino, were not taken."""
        chosen = None
        if provider == OPENVINO:
            precisions = [model["precision"] for model in self.manifest["models"]]
            provider, precision, self.refused = choose_openvino(precision, cpu_flags(), precisions)
        if precision is None and provider != "tensorrt":  # who names engines takes what they were built in
            precision = default_precision(self.manifest)
        if provider in ("auto", "tensorrt"):
            chosen, self.refused = choose_engine(self.manifest["models"], Machine.here(), precision)
        if provider == OPENVINO:
            self.provider = OPENVINO
            chosen = choose_model(self.manifest["models"], ROUNDED.get(str(precision), str(precision)))
        elif chosen is None:
            self.provider = choose_provider("cuda" if provider == "tensorrt" else provider)
            chosen = choose_model(self.manifest["models"], precision or default_precision(self.manifest))
        else:
            self.provider = str(chosen["flavour"])
        self.precision = str(precision if provider == OPENVINO else chosen["precision"])
        self.heads: dict[str, int] = self.manifest["heads"]
        self.encoder = Encoder(self.folder, self.manifest["inputs"])
        path = _file(self.folder, chosen["path"])
        self.session = open_session(path, self.provider, precision=self.precision, threads=threads)
        # the manifest must be of this very graph
        wanted, asked = set(self.encoder.inputs.names), {one.name for one in self.session.get_inputs()}
        widths = {one.name: getattr(one, "shape", [None])[-1] for one in self.session.get_outputs()}
        has_heads = all(
            name in widths and (widths[name] == grades or not isinstance(widths[name], int))
            for name, grades in self.heads.items()
        )
        if asked != wanted or not has_heads:
            raise BundleError(f"{path}: is not the graph that the manifest describes. Export or pull the bundle again.")

    def probabilities(
        self, pairs: Sequence[tuple[str, str]], *, batch_tokens: int | None = None
    ) -> dict[str, np.ndarray]:
        """Calibrated distributions over grades.

        Args:
            pairs: (query, document) texts.
            batch_tokens: tokens of a batch, padding included; by default what suits the provider.
        Returns:
            By head, float32 [B, K] in the order given.
        """
        rows = self.encoder.encode(pairs)
        found = {name: np.zeros((len(rows), grades), dtype=np.float32) for name, grades in self.heads.items()}
        for places in length_batches([len(ids) for ids, _ in rows], batch_tokens or batch_tokens_on(self.provider)):
            for name, values_BK in zip(
                self.heads,
                self.session.run(list(self.heads), self.encoder.collate([rows[place] for place in places])),
                strict=True,
            ):
                found[name][places] = values_BK
        return found

    def expected_grades(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        """The mean of the relevance grades, weighted by their probabilities, float64 [B], from 0
        to the highest grade.
        """
        probs_BK = self.probabilities(pairs)["relevance"].astype(np.float64)
        return np.asarray(probs_BK @ np.arange(probs_BK.shape[1]))

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """One number a pair to rank by, from 0 to 1: the expected grade over the highest one."""
        return [float(grade) / (self.heads["relevance"] - 1) for grade in self.expected_grades(pairs)]

    def grades(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        """The most probable relevance grade of each pair, int64 [B]."""
        return np.asarray(self.probabilities(pairs)["relevance"].argmax(1))


@dataclass(frozen=True)
class Checked:
    """How a machine answers a bundle's reference pairs; as text, one sentence.

    Args:
        student: which, in words.
        tolerance: the largest |Δp| that counts as the same answer.
        differences: the largest |Δp| of any head by pair, in the order of `reference.json`.
    """

    student: str
    tolerance: float
    differences: list[float]

    @property
    def strayed(self) -> list[int]:
        """Places of pairs that are answered otherwise, the worst first."""
        places = [place for place, found in enumerate(self.differences) if not found <= self.tolerance]
        return sorted(places, key=lambda place: -self.differences[place])

    @property
    def has_passed(self) -> bool:
        """Whether all are answered as where the bundle was made."""
        return not self.strayed

    def __str__(self) -> str:
        number, strayed = len(self.differences), self.strayed
        if not strayed:
            furthest = f"at most {max(self.differences):.2g} apart (tolerance {self.tolerance:.2g})"
            return f"{self.student}: {number} reference pairs are answered as at export, {furthest}."
        return (
            f"{self.student}: {len(strayed)} of {number} reference pairs are answered otherwise than at export "
            f"(tolerance {self.tolerance:.2g}): pair {strayed[0]} by {self.differences[strayed[0]]:.2g} the furthest, "
            f"counted from 0 in {REFERENCE}. Do not serve it here: take another precision or provider, or the "
            "versions of onnxruntime and tokenizers that the manifest names."
        )


def check_answers(student: Student) -> Checked:
    """Ask the pairs again that were sealed into a bundle, each alone, and compare the answers with the sealed ones:
    OpenVINO's against those of the file that it computes from.

    Raises:
        BundleError: it has none, or none of this precision.
    """
    reference = _json(student.folder / REFERENCE)
    models = reference.get("models", {}) if reference.get("format") == 1 else {}
    precision, is_openvino = student.precision, student.provider == OPENVINO
    sealed = models.get(ROUNDED.get(precision, precision) if is_openvino else precision)
    if sealed is None:
        known = f"answers in {', '.join(models)} alone" if models else "no reference pairs"
        raise BundleError(
            f"{student.folder}: holds {known}, so {precision} can't be checked. Export the student again "
            "(`reference_pairs` says how many are sealed)."
        )
    tolerance = max(float(sealed["tolerance"]), BF16_TOLERANCE if is_openvino and precision == "bf16" else 0.0)
    answers = student.probabilities([(query, document) for query, document in reference["pairs"]], batch_tokens=1)
    largest_B = np.nan_to_num(
        np.max([np.abs(answers[name] - np.asarray(sealed["answers"][name])).max(1) for name in student.heads], axis=0),
        nan=np.inf,
    )
    name = f"{student.manifest['name']} {student.version}, {precision} on {student.provider}"
    return Checked(name, tolerance, largest_B.tolist())


def read_manifest(folder: Path) -> dict[str, Any]:
    """The bundle's manifest.

    Raises:
        BundleError: it is not there, or not of this format.
    """
    path = _file(folder, MANIFEST)
    try:
        held: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        is_whole = held["kind"] == "bundle" and held["format"] == 1 and _is_whole(held)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise BundleError(
            f"{path}: no readable manifest of a bundle ({type(exc).__name__}). Export or pull the bundle again."
        ) from exc
    if not is_whole:
        raise BundleError(f"{path}: is damaged, or not the manifest of a student's bundle of format 1.")
    return held


def default_precision(manifest: Mapping[str, Any]) -> str:
    """The precision that answers where none is named: all that score with a bundle ask here."""
    return str(manifest.get("default_precision", DEFAULT_PRECISION))


def _is_whole(held: Mapping[str, Any]) -> bool:
    """Whether a manifest holds what a loader reads of it.

    Raises:
        KeyError, TypeError, AttributeError: it lacks some of it.
    """
    inputs, heads = Inputs.read(held["inputs"]), held["heads"]
    texts = [held["name"], held.get("default_precision", ""), inputs.tokenizer, *inputs.names]
    texts += [entry[key] for entry in held["files"] for key in ("path", "sha256")]
    texts += [model[key] for model in held["models"] for key in ("path", "format", "precision")]
    are_right = all(isinstance(one, str) for one in texts) and all(
        type(one) is int and one >= 0 for one in [inputs.max_tokens, inputs.pad_id, inputs.pad_type_id, *heads.values()]
    )
    has_sides = {inputs.padding_side, inputs.truncation_side} <= {"left", "right"}
    is_known = inputs.kind in ("encoder", "decoder", "logistic") and has_sides
    has_prompt = len(inputs.prompt_ids) == 3 if inputs.kind == "decoder" else len(inputs.prompt) > 0
    return are_right and is_known and has_prompt and inputs.max_tokens > 0 and heads["relevance"] > 1


def check_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Compare every file with its sha256; none may be missing, and none may be added but Python's own caches. Links
    are followed, wherever they lead, but not where a pull serves: it wrote none.

    Raises:
        BundleError: names the first that differs.
    """
    wanted = {str(entry["path"]): str(entry["sha256"]) for entry in manifest["files"]}
    if pulled := _pulled_manifest(folder):  # nothing but what pull noted says what the manifest itself must be
        wanted[MANIFEST] = pulled
    for name, sha256 in wanted.items():
        path = _file(folder, name)
        if pulled and path.is_symlink():
            raise BundleError(f"{path}: is a link, and not what a pull wrote. Pull the bundle again.")
        if _sha256(path) != sha256:
            raise BundleError(f"{path}: its bytes are not those that the manifest names. Pull the bundle again.")
    for path in _files_in(folder, follows=pulled is None):
        if path.relative_to(folder).as_posix() not in wanted and path != folder / MANIFEST:
            raise BundleError(f"{path}: is not in the manifest. Move it away, or pull the bundle again.")


def choose_provider(wish: str) -> str:
    """The provider to use: the wish, or for `auto` the best that this onnxruntime was built with.

    Raises:
        BundleError: no such provider, or this onnxruntime has it not.
    """
    import onnxruntime

    there = onnxruntime.get_available_providers()
    if wish == "auto":
        return "cuda" if PROVIDERS["cuda"] in there else "cpu"
    if PROVIDERS.get(wish) not in there:
        raise BundleError(
            f"this onnxruntime has no {PROVIDERS.get(wish, wish)} (it has {', '.join(there)}). Take auto or cpu; for a "
            "GPU install onnxruntime-gpu."
        )
    return wish


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """What this CPU can, by Linux's names; none where the system does not report them.

    Args:
        root: where `proc` lies.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, found = line.partition(":")
            if name.strip() == "flags":
                return frozenset(found.split())
    return frozenset()


def choose_openvino(
    wish: str | None, flags: Collection[str], held: Collection[str]
) -> tuple[str, str | None, list[str]]:
    """Where and in what to compute when openvino was asked for: in the precision that was named, else in bf16 where the
    CPU has AMX, else in static int8 where the CPU has VNNI and the bundle such a model, else with onnxruntime.

    Args:
        wish: the precision that was named.
        flags: of the CPU.
        held: the bundle's precisions.
    Returns:
        Provider, precision (None: the bundle's default), and why it is not openvino.
    Raises:
        BundleError: openvino computes in no such precision.
    """
    if wish is not None and wish not in HINTS:
        raise BundleError(f"openvino computes in {' or '.join(HINTS)}, not in {wish}. Name one of them, or take cpu.")
    if wish is not None or AMX in flags:
        return OPENVINO, wish or "bf16", []
    if STATIC in held and not set(VNNI).isdisjoint(flags):
        return OPENVINO, STATIC, []
    has = f"{AVX512} alone" if AVX512 in flags else "no arithmetic in bf16"
    why = f"openvino: no {AMX} here (this CPU has {has}), so onnxruntime answers. Name a precision to take openvino."
    return "cpu", None, [why]


@dataclass(frozen=True)
class Machine:
    """What an engine has to fit.

    Args:
        capability: compute capability of the first GPU (`9.0`); None without one.
        tensorrt: version by flavour, as far as the library reports it (`10.9.0`).
        providers: of this onnxruntime, and openvino where it is installed.
        flags: of the CPU.
    """

    capability: str | None
    tensorrt: Mapping[str, str]
    providers: Sequence[str]
    flags: Collection[str] = ()

    @classmethod
    def here(cls) -> Machine:
        """This machine, by the driver's and TensorRT's own libraries."""
        import onnxruntime

        found = {
            flavour: version for flavour, names in TENSORRT_LIBRARIES.items() if (version := _tensorrt_version(names))
        }
        return cls(
            gpu_capability(),
            found,
            [*onnxruntime.get_available_providers(), *([OPENVINO] if importlib.util.find_spec(OPENVINO) else [])],
            cpu_flags(),
        )


def choose_engine(
    models: Sequence[Mapping[str, Any]], machine: Machine, precision: str | None
) -> tuple[Mapping[str, Any] | None, list[str]]:
    """The first engine that fits a machine, and why others do not."""
    refused: list[str] = []
    for model in models:
        if model["format"] != "tensorrt":
            continue
        fault = engine_fault(model, machine)
        if fault is None and precision not in (None, model["precision"]):
            fault = f"computes in {model['precision']}, and {precision} is wanted"
        if fault is None:
            return model, refused
        refused.append(f"{model['path']}: {fault}")
    return None, refused


def engine_fault(engine: Mapping[str, Any], machine: Machine) -> str | None:
    """Why an engine does not run on a machine; None if it does. Engines are tied to the GPU and to the TensorRT that
    built them.
    """
    flavour = str(engine["flavour"])
    if PROVIDERS.get(flavour) not in machine.providers:
        return f"this onnxruntime has no {PROVIDERS.get(flavour, flavour)}"
    if engine["capability"] != machine.capability:
        return f"built for compute capability {engine['capability']}, this machine has {machine.capability or 'no GPU'}"
    found = machine.tensorrt.get(flavour)
    if found is None or str(engine["tensorrt"]).split(".")[:3] != found.split("."):
        return f"built by {flavour} {engine['tensorrt']}, this machine has {found or 'none'}"
    return None


def choose_model(models: Sequence[Mapping[str, Any]], precision: str) -> Mapping[str, Any]:
    """The ONNX file to open.

    Raises:
        BundleError: the bundle has none of that precision.
    """
    graphs = {str(model["precision"]): model for model in models if model["format"] == "onnx"}
    if precision not in graphs:
        raise BundleError(f"the bundle has no ONNX model in {precision}; it has {', '.join(graphs)}.")
    return graphs[precision]


def open_session(path: Path, provider: str, *, precision: str = "fp32", threads: int = 0) -> Any:
    """A session on the provider that was asked for, and on no other.

    Args:
        precision: in what openvino computes; elsewhere the file says it.
    Raises:
        BundleError: onnxruntime fell back, openvino does not compute in that precision, or the model can't be opened.
        ModuleNotFoundError: the provider's library is absent.
    """
    if threads == 0 and (fewer := default_threads()) < (os.cpu_count() or 1):
        threads = fewer  # left to itself a runtime takes all cores of the machine
    if provider == OPENVINO:
        return OpenVinoSession(path, precision, threads=threads)
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    name = PROVIDERS[provider]
    # shapes are counted on the CPU even where there is a GPU
    wished = [name] if provider == "cpu" else [name, PROVIDERS["cpu"]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the fallback is reported below, as an error
        try:
            session = onnxruntime.InferenceSession(
                str(path), options, providers=wished, disabled_optimizers=SLOW_FUSIONS.get(provider)
            )
        except Exception as exc:  # onnxruntime's errors share no class but this
            raise BundleError(f"{path}: onnxruntime can't open it on {name}: {str(exc).splitlines()[0][:300]}") from exc
    session.disable_fallback()
    got = session.get_providers()
    if not got or got[0] != name:
        raise BundleError(
            f"{path}: asked for {name}, onnxruntime fell back to {', '.join(got)}. Fix its driver, or name the CPU."
        )
    return session


class OpenVinoSession:
    """An ONNX file in OpenVINO, asked as an onnxruntime session is, from any thread.

    Args:
        precision: of `HINTS`.
        threads: 0 is as many as OpenVINO takes.
    Raises:
        BundleError: it can't be opened, or this CPU does not compute in that precision.
        ModuleNotFoundError: openvino is absent.
    """

    def __init__(self, path: Path, precision: str, *, threads: int) -> None:
        import openvino

        settings = {
            "INFERENCE_PRECISION_HINT": HINTS[precision],
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,  # onnxruntime pins none: two processes would share one core
        }
        try:
            self._model = openvino.Core().compile_model(str(path), "CPU", settings)
        except RuntimeError as exc:
            raise BundleError(f"{path}: openvino can't open it: {str(exc).splitlines()[0][:300]}") from exc
        got = self._model.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        if got != HINTS[precision]:
            raise BundleError(f"{path}: openvino computes in {got} on this CPU, not in {HINTS[precision]}. Take fp32.")
        self._own = threading.local()

    def run(self, names: Sequence[str] | None, batch: Mapping[str, np.ndarray], _: Any = None) -> list[np.ndarray]:
        """Outputs in the order of their names, float32 [B, K] each; all of them where none is named."""
        if not hasattr(self._own, "request"):  # a request answers one caller at a time
            self._own.request = self._model.create_infer_request()
        found = self._own.request.infer(dict(batch))
        return [found[name] for name in names or [one.name for one in self.get_outputs()]]

    def get_inputs(self) -> list[SimpleNamespace]:
        """With a `name` each."""
        return [SimpleNamespace(name=one.get_any_name()) for one in self._model.inputs]

    def get_outputs(self) -> list[SimpleNamespace]:
        """With a `name` each."""
        return [SimpleNamespace(name=one.get_any_name()) for one in self._model.outputs]


def usable_cores() -> int:
    """Cores that this process may run on, whatever the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of time that this process's control group (v2) may take, the least of it and all around it; None
    without a limit.

    A container is often given a quota and not cores, so that no count of cores says what it gets.

    Args:
        root: where `proc` and `sys` lie.
    """
    try:
        own = (root / "proc/self/cgroup").read_text(encoding="utf-8").rpartition("0::")[2]
    except (OSError, ValueError):  # no Linux
        return None
    # a container may see only the end of its path, at the top
    steps = [step for step in own.strip().split("/") if step not in ("", "..")]
    quotas = []
    for depth in range(len(steps) + 1):
        with contextlib.suppress(OSError, ValueError):  # not there, or `max`
            limit_us, period_us = (
                root.joinpath("sys/fs/cgroup", *steps[:depth], "cpu.max").read_text(encoding="utf-8").split()
            )
            quotas.append(int(limit_us) / int(period_us))
    return min(quotas, default=None)


def default_threads(root: Path = Path("/")) -> int:
    """Threads that the usable cores and the quota keep busy, one at least; a thread beyond them stops all others
    whenever it is stopped. No more than `OMP_NUM_THREADS`, as torch and numpy take it.
    """
    quota = cpu_quota(root)
    wished = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # of nested regions, the outer one's
    limits = [usable_cores(), *([] if quota is None else [int(quota)]), *([int(wished)] if wished.isdecimal() else [])]
    return max(1, min(limits))


def gpu_capability() -> str | None:
    """Compute capability of the first GPU, asked of the driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    has_failed = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
        or driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    )
    return None if has_failed else f"{major.value}.{minor.value}"


def _tensorrt_version(names: Sequence[str]) -> str | None:
    """Major, minor and patch of a TensorRT library, asked of itself: 10.9.0 is given as 100900 (or 10900 before version
    10).
    """
    for name in names:
        try:
            number = int(ctypes.CDLL(name).getInferLibVersion())
        except (OSError, AttributeError):
            continue
        major = 10000 if number >= 100_000 or "rtx" in name else 1000
        return f"{number // major}.{number % major // 100}.{number % 100}"
    return None


def _padded(rows: Sequence[Sequence[int]], mask_BT: np.ndarray, pad: int) -> np.ndarray:
    """Rows where the mask is 1, padding elsewhere, int64 [B, T]."""
    out_BT = np.full(mask_BT.shape, pad, dtype=np.int64)
    out_BT[mask_BT == 1] = list(itertools.chain.from_iterable(rows))
    return out_BT


def _pair(row: int, pair: Any) -> tuple[str, str]:
    """A row's texts.

    Raises:
        TypeError: it is not a pair of strings.
    """
    if isinstance(pair, str | bytes) or not isinstance(pair, Sequence | np.ndarray) or len(pair) != 2:
        raise TypeError(f"row {row}: {_short(pair)} is not a pair of query and document.")
    for what, text in zip(("query", "document"), pair, strict=True):
        if not isinstance(text, str):
            raise TypeError(
                f"row {row}: the {what} is {_short(text)}, and must be a string. Leave the row out, or give it its "
                "text."
            )
    return pair[0], pair[1]


def _clean(text: str) -> str:
    """Half a surrogate pair is not text that a tokenizer takes; it becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _short(value: Any) -> str:
    return f"{repr(value)[:40]} ({type(value).__name__})"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pulled_manifest(folder: Path) -> str | None:
    """sha256 of the manifest that `relabel pull` noted; None for a folder that was not pulled."""
    place = folder.resolve()
    held = _json(place.parent.parent / ".pull.json") if place.parent.name == ".versions" else {}
    with contextlib.suppress(KeyError, TypeError):
        return next((str(one["manifest_sha256"]) for one in held["served"] if one["folder"] == place.name), None)
    return None


def _json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where none can be read."""
    try:
        held = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return held if isinstance(held, dict) else {}


def _files_in(folder: Path, *, follows: bool, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """All that lies below a folder and is not a folder, but for what is none of the bundle's.

    Args:
        follows: a link to a folder is that folder.
        above: the folders, resolved, that the walk is in: a link back to one of them is no folder.
    """
    above = above | {folder.resolve()}
    for entry in folder.iterdir():
        if entry.name in NOT_OURS:
            continue
        is_folder = entry.is_dir()
        if is_folder and entry.is_symlink():
            is_folder = follows and entry.resolve() not in above
        if is_folder:
            yield from _files_in(entry, follows=follows, above=above)
        else:
            yield entry


def _file(folder: Path, name: str) -> Path:
    """A file of the bundle. Its name has to stay in the folder; what lies there may be a link that leaves it, as in a
    hub's cache.

    Raises:
        BundleError: it is not there, is not a plain file, or its owner may not read it.
    """
    path = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise BundleError(f"{path} leaves the bundle's folder. Pull the bundle again.")
    try:
        mode = path.stat().st_mode
    except OSError as exc:
        if path.is_symlink():
            raise BundleError(
                f"{path} is a link to {os.readlink(path)}, where nothing is. Fetch the bundle again."  # noqa: PTH115
            ) from exc
        current = folder / "current"
        advice = f"A pull made this folder: give {current}." if current.is_dir() else "Pull the bundle again."
        raise BundleError(f"{path} is missing. {advice}") from exc
    if not stat.S_ISREG(mode) or not mode & stat.S_IRUSR:
        raise BundleError(f"{path} is not a plain file that can be read. Pull the bundle again.")
    return path


def main(arguments: Sequence[str]) -> int:
    """`python load.py --check`: the exit code."""
    parser = argparse.ArgumentParser("load.py", description="Check that a bundle answers here as where it was made.")
    parser.add_argument("--check", action="store_true", required=True, help="ask the sealed reference pairs again")
    parser.add_argument("--provider", default="auto", help=f"auto, {', '.join(PROVIDERS)}, {OPENVINO}")
    parser.add_argument("--precision", help="fp32, fp16, int8, bf16 …; by default the manifest's default_precision")
    asked = parser.parse_args(arguments)
    try:
        student = Student(Path(__file__).parent, provider=asked.provider, precision=asked.precision)
        checked = check_answers(student)
    except ImportError as exc:
        missing = NEEDS_OPENVINO if exc.name == OPENVINO else NEEDS.format(exc.name)
        is_missing = isinstance(exc, ModuleNotFoundError)
        sys.stderr.write(missing if is_missing else f"A library that is installed can't be imported: {exc}\n")
        return 4
    except BundleError as exc:
        sys.stderr.write(f"{exc}\n")
        return 3
    if asked.provider == OPENVINO:
        sys.stderr.writelines(f"{why}\n" for why in student.refused)
    (sys.stdout if checked.has_passed else sys.stderr).write(f"{checked}\n")
    return 0 if checked.has_passed else 5


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
