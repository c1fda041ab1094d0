"""A student's folder and a student loaded from it: pairs as token rows, logits of many rows, and scoring with a token
budget per batch."""

from __future__ import annotations

import logging
import pkgutil
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from relabel.distill.students.length_batches import batch_tokens_on, length_batches
from relabel.distill.students.manifest import STUDENT_NAME, StudentRecord, read_student
from relabel.distill.students.spec import KINDS
from relabel.distill.training.output import open_to_readers
from relabel.manifests.errors import ConfigError, ModelError
from relabel.manifests.labels import PhiTable
from relabel.manifests.models import ChatTemplate, read_tokenizer, start_ids
from relabel.manifests.process import require
from relabel.manifests.records import digest_of, readable_json, sha256_file

# ------------------------------------------------------------------------------
# Rows of tokens, padded to one width.


PAD_MULTIPLE = 8
"""Batches are padded to a multiple of this many tokens: tensor cores want it, and few shapes spare a compiler
recompilations.
"""


class TokenRow(NamedTuple):
    """One pair as token ids; `types` are segment numbers (0 query, 1 document), None where the model knows none.

    `is_cut` says that the pair was too long and lost an end (with a tokenizer written in Python: that it may have,
    being of full length). `counts` are the query's, for a student that reads them.
    """

    ids: list[int]
    types: list[int] | None = None
    is_cut: bool = False
    counts: list[int] | None = None


class PairTexts(Protocol):
    """What turns pairs into token rows and rows into a batch."""

    max_tokens: int

    def encode(self, pairs: Sequence[tuple[str, str]]) -> list[TokenRow]:
        """Token rows of (query, document) pairs, each at most `max_tokens` long."""
        ...

    def collate(self, rows: Sequence[TokenRow], *, pad_multiple: int = PAD_MULTIPLE) -> dict[str, Any]:
        """Padded int64 tensors [B, T] by the names that the student's module takes."""
        ...


def pad_multiple_for(device: object) -> int:
    """What widths are rounded up to: 8 for a GPU's matrix units and compiled shapes; a CPU would do 5 to 10 % more work
    on product titles for nothing.

    Args:
        device: a torch device, or what torch calls one.
    """
    return 1 if str(device) == "cpu" else PAD_MULTIPLE


def width_of(rows: Sequence[TokenRow], max_tokens: int, multiple: int) -> int:
    longest = max(len(row.ids) for row in rows)
    return min(-(-longest // multiple) * multiple, max(max_tokens, longest))


def padded(rows: Sequence[Sequence[int]], width: int, pad: int, *, is_left: bool) -> np.ndarray:
    out = np.full((len(rows), width), pad, dtype=np.int64)
    for number, row in enumerate(rows):
        if is_left:
            out[number, width - len(row) :] = row
        else:
            out[number, : len(row)] = row
    return out


def mask_of(rows: Sequence[TokenRow], width: int, *, is_left: bool) -> np.ndarray:
    lengths_B = np.array([len(row.ids) for row in rows])
    columns_T = np.arange(width)
    seen_BT = columns_T >= width - lengths_B[:, None] if is_left else columns_T < lengths_B[:, None]
    return seen_BT.astype(np.int64)


def tensors_of(batch: dict[str, np.ndarray]) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)) for name, values in batch.items()}


# ------------------------------------------------------------------------------
# Logits of many rows, softmax, and whether a row is answered alike alone and in a batch.


# B rows, X numbers of an answer

PROBES = (
    ("red running shoes for women with wide feet, size 40", "A light shoe with a soft sole. " * 8),
    ("red shoes", "Shoes for women."),
    ("shoes", ""),
)
"""Pairs of three lengths, the longest first: packed, the second one has a row before it and one after it."""
LEAK_TOLERANCE = 3e-5
"""Largest difference between a row's answer alone and in a batch, relative to the answer. In float32, sums in another
order make up to 1.5e-6 (MiniLM, SmolLM2, a Qwen of 1.5B, 80 tiny models); what leaks made 2e-4 to 1.4 (padded:
convbert, nystromformer, fnet, rwkv, xlstm; packed: opt, bloom, mpt, gpt_oss, and all with a recurrence but lfm2).
"""
COARSE_TOLERANCE = 1e-2
"""The same where torch may multiply in TF32 or bfloat16."""


def logits_of_rows(
    module: Any, texts: PairTexts, rows: Sequence[TokenRow], heads: dict[str, int], *, batch_tokens: int | None = None
) -> dict[str, np.ndarray]:
    """Logits of token rows in their order, by head float32 [B, K]; longest rows first, so that memory peaks at once or
    never.

    Args:
        batch_tokens: tokens of a batch, padding included; by default what suits the module's device.
    """
    import torch

    out = {name: np.zeros((len(rows), grades), dtype=np.float32) for name, grades in heads.items()}
    device = next(module.parameters()).device
    with torch.inference_mode():
        for chosen in length_batches([len(row.ids) for row in rows], batch_tokens or batch_tokens_on(device.type)):
            batch = texts.collate([rows[place] for place in chosen], pad_multiple=pad_multiple_for(device))
            found = module(**{name: tensor.to(device) for name, tensor in batch.items()})
            for name, values_BK in found.items():
                out[name][chosen] = values_BK.float().cpu().numpy()
    return out


def refuse_leaks(answer: Callable[[list[Any]], np.ndarray], rows: Sequence[Any], where: str) -> None:
    """Answer a row alone and between others: an architecture that mixes rows, or reads their padding, gives scores that
    depend on the size of batches.

    Args:
        answer: one batch's answers, float [B, X], in the order of its rows.
        rows: of `PROBES`.
        where: what the message begins with.
    Raises:
        ModelError: the two differ by more than rounding, or the model can't take such a batch.
    """
    import torch

    try:
        alone_X, together_X = answer([rows[1]])[0], answer(list(rows))[1]
    except (TypeError, ValueError) as exc:
        raise ModelError(f"{where}: can't be run on padded batches ({type(exc).__name__}: {exc}).") from exc
    is_exact = torch.get_float32_matmul_precision() == "highest"
    difference = float(np.abs(together_X - alone_X).max() / (np.abs(alone_X).max() or 1.0))
    if difference > (LEAK_TOLERANCE if is_exact else COARSE_TOLERANCE):
        raise ModelError(
            f"{where}: its answer to a row changes with the other rows of a batch, by {difference:.1e} of the answer: "
            "scores would depend on --batch-tokens. If student.batching is packed, set it to padded; else take another "
            "model."
        )


def softmax(logits_BK: np.ndarray) -> np.ndarray:
    """Rows of probabilities, float32, from logits."""
    shifted = np.exp(logits_BK - logits_BK.max(axis=1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=1, keepdims=True), dtype=np.float32)


# ------------------------------------------------------------------------------
# A student's folder, and a student loaded from it. What `relabel score`, `evaluate` and the exporters rely on.
#
# The folder, every file but `checkpoints/` written once training has ended:
#
#     student.json                     what it is: `StudentRecord`; read without torch
#     config.json, model.safetensors   the language model of a decoder, as transformers' Auto classes load it; an
#                                      encoder's config is backbone.json, since they would give it a random head
#     heads.safetensors                an encoder's heads: `<head>.weight` [K, D], `<head>.bias` [K]
#     tokenizer.json, …                the tokenizer
#     manifest.json                    lineage: labels, row counts, split, spec, versions, metrics, gate, and the sha256
#                                      of every file
#     curves.parquet, curves.svg       losses and dev metrics by step
#     README.md                        the model card
#
# `read_student` gives the record and needs no torch; `load_student` gives a `StudentModel`, ready to answer.


# B rows, K grades, D hidden

HEADS_NAME = "heads.safetensors"

NOT_THE_MODEL = ("manifest.json", "README.md", "curves.parquet", "curves.svg")


StudentModule: TypeAlias = Any
"""A torch module with the members of `networks.EncoderStudent`: called with what its texts collate, it gives logits
[B, K] by head."""


def module_class(kind: str) -> StudentModule:
    """The class of a registered kind; loads torch."""
    return pkgutil.resolve_name(KINDS[kind].module)


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


def make_texts(record: StudentRecord, tokenizer: Any) -> Any:
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


# ------------------------------------------------------------------------------
# Pairs as token rows, and token rows as padded batches: the same for training, scoring and export.
#
# Documents are hostile: text that spells a control token (`[SEP]`, `<|im_end|>`) is encoded as the ordinary characters
# it consists of, so a document can neither end its segment nor open a turn of its own. A pair that is too long loses
# the end of its longer part (encoder) or of its document (decoder).


# B rows, T tokens


class EncoderTexts:
    """`[CLS] query [SEP] document [SEP]`, or what the tokenizer makes of a pair.

    Args:
        tokenizer: a tokenizer of transformers.
        max_tokens: longest row, special tokens included.
        has_types: whether segment numbers are given, to a model that knows them.
    """

    def __init__(self, tokenizer: Any, max_tokens: int, *, has_types: bool = True) -> None:
        self.max_tokens = max_tokens
        self._tokenizer = tokenizer
        self._has_types = has_types and "token_type_ids" in tokenizer.model_input_names

    def encode(self, pairs: Sequence[tuple[str, str]]) -> list[TokenRow]:
        """Token rows of (query, document) pairs; of two texts that do not fit together the longer one is cut first."""
        if not pairs:
            return []
        queries, documents = zip(*pairs, strict=True)
        return self.token_rows(list(queries), list(documents))

    def token_rows(self, texts: list[str], others: list[str] | None = None) -> list[TokenRow]:
        """Token rows of texts, or of pairs of them; at least one."""
        found = self._tokenizer(
            texts,
            others,
            truncation="longest_first",
            max_length=self.max_tokens,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=self._has_types,
        )
        types = found.token_type_ids if self._has_types else [None] * len(texts)
        is_full = [len(ids) >= self.max_tokens for ids in found.input_ids]
        parts = found.encodings or [None] * len(texts)
        is_cut = [full and (part is None or bool(part.overflowing)) for full, part in zip(is_full, parts, strict=True)]
        return [TokenRow(*row) for row in zip(found.input_ids, types, is_cut, strict=True)]

    def collate(self, rows: Sequence[TokenRow], *, pad_multiple: int = PAD_MULTIPLE) -> dict[str, Any]:
        """Right-padded `input_ids`, `attention_mask` and, where the model knows segments, `token_type_ids`."""
        width = width_of(rows, self.max_tokens, pad_multiple)
        pad = self._tokenizer.pad_token_id or 0
        batch = {"input_ids": padded([row.ids for row in rows], width, pad, is_left=False)}
        batch["attention_mask"] = mask_of(rows, width, is_left=False)
        if self._has_types:
            pad_type = self._tokenizer.pad_token_type_id
            batch["token_type_ids"] = padded([row.types or [] for row in rows], width, pad_type, is_left=False)
        return tensors_of(batch)


class DecoderTexts:
    """A prompt around the pair that ends where the grade token would be.

    Args:
        tokenizer: a tokenizer of transformers.
        max_tokens: longest row.
        pieces: the prompt's text before the query, between query and document, and after the document; template text,
            in which control tokens count as such.
        packs: concatenate a batch's rows into one row without padding instead of padding them on the left.
    Raises:
        ConfigError: the prompt alone is longer than `max_tokens`.
    """

    def __init__(self, tokenizer: Any, max_tokens: int, pieces: Sequence[str], *, packs: bool = False) -> None:
        self.max_tokens = max_tokens
        self._tokenizer = tokenizer
        self._packs = packs
        before, between, after = pieces
        has_start = tokenizer.chat_template is None or not before.startswith(tokenizer.bos_token or "\0")
        start = start_ids(tokenizer) if has_start else []
        self.prompt_ids = (start + self._template_ids(before), self._template_ids(between), self._template_ids(after))
        """Tokens of the prompt before the query, between query and document, and after the document."""
        num_fixed = sum(map(len, self.prompt_ids))
        if num_fixed >= max_tokens:
            raise ConfigError(
                f"the prompt alone has {num_fixed} tokens, max_tokens is {max_tokens}. Raise it, or shorten "
                "student.prompt."
            )
        self._room = max_tokens - num_fixed

    def encode(self, pairs: Sequence[tuple[str, str]]) -> list[TokenRow]:
        """Token rows; what does not fit is cut from the document's end, and from the query's where the query alone is
        too long.
        """
        if not pairs:
            return []
        queries, documents = zip(*pairs, strict=True)
        before, between, after = self.prompt_ids
        rows = []
        for query, document in zip(self._data_ids(queries), self._data_ids(documents), strict=True):
            kept = query[: self._room]
            ids = before + kept + between + document[: self._room - len(kept)] + after
            rows.append(TokenRow(ids, None, len(query) + len(document) > self._room))
        return rows

    def collate(self, rows: Sequence[TokenRow], *, pad_multiple: int = PAD_MULTIPLE) -> dict[str, Any]:
        """`input_ids`, `position_ids` and `last` (the place of each row's last token), with `attention_mask` where rows
        are padded.
        """
        if self._packs:
            lengths = [len(row.ids) for row in rows]
            flat = {
                "input_ids": np.concatenate([row.ids for row in rows])[None],
                "position_ids": np.concatenate([np.arange(length) for length in lengths])[None],
                "last": np.cumsum(lengths) - 1,
            }
            return tensors_of(flat)
        width = width_of(rows, self.max_tokens, pad_multiple)
        pad = self._tokenizer.pad_token_id if self._tokenizer.pad_token_id is not None else self._tokenizer.eos_token_id
        mask = mask_of(rows, width, is_left=True)
        return tensors_of(
            {
                "input_ids": padded([row.ids for row in rows], width, pad or 0, is_left=True),
                "attention_mask": mask,
                "position_ids": np.maximum(mask.cumsum(1) - 1, 0),
            }
        )

    def _template_ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False).input_ids) if text else []

    def _data_ids(self, texts: Sequence[str]) -> list[list[int]]:
        # No document is longer than the room: characters far beyond it need not be tokenized (a token holds under 64
        # characters but for
        # runs of blanks, and then the cut is still a cut of the document's end).
        cut = [text[: self._room * 64] for text in texts]
        found: list[list[int]] = self._tokenizer(cut, add_special_tokens=False, split_special_tokens=True).input_ids
        return found


# ------------------------------------------------------------------------------
# What a decoder reads around a pair, and the tokens that it may answer with.


def render_prompt(tokenizer: Any, *, style: str, system: str, user: str, ending: str) -> tuple[str, str, str]:
    """The prompt's three pieces of template text, see `DecoderTexts`.

    Args:
        style: `chat` renders the tokenizer's chat template, `plain` joins system, user and `ending` by blank lines.
        user: text with `{query}` and `{document}`, once each and in this order.
    Raises:
        ConfigError: `user` lacks a place or has it twice, or `chat` is asked of a tokenizer without a chat template.
    """
    if user.count("{query}") != 1 or user.count("{document}") != 1 or user.index("{query}") > user.index("{document}"):
        raise ConfigError("`student.prompt.user` wants {query} and then {document}, once each.")
    if style == "chat":
        if not tokenizer.chat_template:
            raise ConfigError(
                "`student.prompt.style` is chat, and the model's tokenizer has no chat template. Use plain."
            )
        turns = [("system", system)] if system else []
        try:
            text = ChatTemplate(tokenizer).text([*turns, ("user", user)])
        except (ConfigError, ModelError) as exc:
            raise type(exc)(f"{exc} Or use `student.prompt.style: plain`.") from exc
    else:
        text = "\n\n".join(filter(None, (system, user, ending)))
    found = re.split(r"\{query\}|\{document\}", text)
    if len(found) != 3:
        raise ConfigError("the chat template shows the pair not once; use `student.prompt.style: plain`.")
    return found[0], found[1], found[2]


def grade_token_ids(tokenizer: Any, grades: int, *, after: str) -> list[int]:
    """The tokens `0` to `K-1` as tokenized right after the prompt's end.

    Args:
        after: the prompt's last piece.
    Raises:
        ModelError: a grade is no single token there, is unknown, or two grades share one.
    """
    end = list(tokenizer(after, add_special_tokens=False).input_ids)
    found = []
    for grade in range(grades):
        ids = list(tokenizer(f"{after}{grade}", add_special_tokens=False).input_ids)
        if ids[: len(end)] != end or len(ids) != len(end) + 1 or ids[-1] == tokenizer.unk_token_id:
            raise ModelError(
                f"the tokenizer has no token of its own for grade {grade} after the prompt's end {after[-20:]!r} (it "
                f"makes {ids[len(end) :] or ids} of it). Take another model, or end the prompt otherwise "
                "(student.prompt)."
            )
        found.append(ids[-1])
    if len(set(found)) != grades:
        raise ModelError(f"the tokenizer gives several grades one token ({found}); take another model.")
    return found


# ------------------------------------------------------------------------------
# Scoring many pairs with a student: token rows sorted by length, batches of a token budget, calibrated distributions
# in the order given.
#
# A call scores one block of rows (the run's chunk) and its batches follow from that block alone, never from what was
# scored before or at the same time, so that a block scored again gives the same bits on the same machine (unless memory
# ran out, which makes batches smaller).


logger = logging.getLogger(__name__)

# B rows, K grades


class PairScorer(Protocol):
    """What a score run asks: a student, or an exported one."""

    @property
    def phi(self) -> PhiTable:
        """The rule map of a student with subject and attribute heads."""
        ...

    def encode(self, pairs: Sequence[tuple[str, str]]) -> list[TokenRow]:
        """Token rows of (query, document) pairs, cut as in training."""
        ...

    def score(
        self, rows: Sequence[TokenRow], on_progress: Callable[[int], bool] = lambda _: True
    ) -> dict[str, np.ndarray] | None:
        """Calibrated distributions, see `Scorer.score`."""
        ...


class Scorer:
    """Scores pairs with a student.

    Args:
        student: on its device, in eval mode.
        batch_tokens: tokens of a batch, padding included; by default what suits the device.
    """

    def __init__(self, student: StudentModel, *, batch_tokens: int | None = None) -> None:
        self.student = student
        self.batch_tokens = batch_tokens or batch_tokens_on(student.device)
        self._pad_multiple = pad_multiple_for(student.device)

    @property
    def phi(self) -> PhiTable:
        """Of the student's record."""
        return self.student.record.phi

    def encode(self, pairs: Sequence[tuple[str, str]]) -> list[TokenRow]:
        """Token rows of (query, document) pairs, cut as in training."""
        return self.student.texts.encode(pairs)

    def score(
        self, rows: Sequence[TokenRow], on_progress: Callable[[int], bool] = lambda _: True
    ) -> dict[str, np.ndarray] | None:
        """Calibrated distributions.

        Args:
            rows: one or more.
            on_progress: called after each batch with the number of its rows; False gives up.
        Returns:
            By head, float32 [B, K] in the order of the rows; a row whose logits are not finite has NaN. None if
            `on_progress` gave up.
        Raises:
            ModelError: not even one pair fits into the device's memory.
        """
        import torch

        order: list[int] = []
        logits: list[dict[str, Any]] = []
        with torch.inference_mode():
            for places in length_batches([len(row.ids) for row in rows], self.batch_tokens):
                logits.append(self._forward([rows[place] for place in places]))
                order += places
                if not on_progress(len(places)):
                    return None
            # one transfer a head and block: a GPU is not waited for between batches
            found = {name: torch.cat([batch[name] for batch in logits]).float().cpu().numpy() for name in logits[0]}
        out = {}
        for name, values_BK in found.items():
            sorted_BK = np.empty_like(values_BK)
            sorted_BK[order] = values_BK
            out[name] = _distributions(sorted_BK, self.student.record.temperature.get(name, 1.0))
        return out

    def _forward(self, rows: list[TokenRow]) -> dict[str, Any]:
        """Logits of one batch, still on the device; a batch that does not fit into memory is halved, and so are all
        later ones.
        """
        import torch

        held = self.student.texts.collate(rows, pad_multiple=self._pad_multiple)
        batch = {name: tensor.to(self.student.device) for name, tensor in held.items()}
        try:
            found: dict[str, Any] = self.student.module(**batch)
            return found
        except torch.OutOfMemoryError as exc:
            if len(rows) == 1:
                raise ModelError(
                    f"a single pair of {len(rows[0].ids)} tokens does not fit into the memory of "
                    f"{self.student.device}. Free some, or name another --device."
                ) from exc
        middle = len(rows) // 2
        self.batch_tokens = max(1, self.batch_tokens // 2)
        torch.cuda.empty_cache()
        logger.warning(
            "a batch of %d rows does not fit into the device's memory; batches now hold %d tokens (--batch-tokens)",
            len(rows),
            self.batch_tokens,
        )
        halves = [self._forward(rows[:middle]), self._forward(rows[middle:])]
        return {name: torch.cat([half[name] for half in halves]) for name in halves[0]}


def _distributions(logits_BK: np.ndarray, temperature: float) -> np.ndarray:
    is_finite_B = np.isfinite(logits_BK).all(axis=1)
    found = np.full(logits_BK.shape, np.nan, dtype=np.float32)
    found[is_finite_B] = softmax(logits_BK[is_finite_B] / temperature)
    return found
