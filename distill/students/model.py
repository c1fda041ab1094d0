"""A student's folder and a student loaded from it: pairs as token rows, rows as batches of like length, and calibrated
distributions. Importing it does not load torch."""

import inspect
import itertools
import logging
import pkgutil
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from relabel.distill.students.portable import batch_tokens_on, length_batches, query_counts
from relabel.distill.students.spec import KINDS, STUDENT_NAME, StudentRecord, read_student
from relabel.manifests.chat_templates import ChatTemplate, start_ids
from relabel.manifests.errors import ConfigError, ModelError
from relabel.manifests.files import open_to_readers
from relabel.manifests.models import BACKBONE_NAME
from relabel.manifests.process import require
from relabel.manifests.records import digest_of, readable_json, sha256_file
from relabel.manifests.weights import read_tokenizer

logger = logging.getLogger(__name__)

# B rows, T tokens, K grades

# ------------------------------------------------------------------------------
# Pairs as token rows, and token rows as padded batches: the same for training, scoring and export.
#
# Documents are hostile: text that spells a control token (`[SEP]`, `<|im_end|>`) is encoded as the ordinary characters
# it consists of, so a document can neither end its segment nor open a turn of its own. A pair that is too long loses
# the end of its longer part (encoder) or of its document (decoder).


PAD_MULTIPLE = 8
"""Batches are padded to a multiple of this many tokens: tensor cores want it, and few shapes spare a compiler
recompilations.
"""


class TokenRow(NamedTuple):
    """One pair as token ids; `types` are segment numbers (0 query, 1 document), None where the model knows none.

    `is_cut` means that the pair was too long and lost an end (with a tokenizer written in Python: that it may have,
    being of full length). `counts` are the query's, for a student that reads them.
    """

    ids: list[int]
    types: list[int] | None = None
    is_cut: bool = False
    counts: list[int] | None = None


def pad_multiple_for(device: object) -> int:
    """What widths are rounded up to: 8 for a GPU's matrix units and compiled shapes; a CPU would do 5 to 10 % more work
    on product titles for nothing.

    Args:
        device: a torch device, or what torch calls one.
    """
    return 1 if str(device) == "cpu" else PAD_MULTIPLE


def mask_of(rows: Sequence[TokenRow], max_tokens: int, pad_multiple: int, *, is_left: bool = False) -> np.ndarray:
    """Where a batch has tokens and no padding, bool [B, T]."""
    lengths_B = np.array([len(row.ids) for row in rows])
    longest = int(lengths_B.max())
    width = min(-(-longest // pad_multiple) * pad_multiple, max(max_tokens, longest))
    columns_T = np.arange(width)
    if is_left:
        return columns_T >= width - lengths_B[:, None]
    return columns_T < lengths_B[:, None]


def padded(mask_BT: np.ndarray, rows: Sequence[Sequence[int]], pad: int) -> np.ndarray:
    """Rows of numbers put where the mask is set, int64 [B, T]."""
    out = np.full(mask_BT.shape, pad, dtype=np.int64)
    out[mask_BT] = list(itertools.chain.from_iterable(rows))
    return out


def tensors_of(**batch: Any) -> dict[str, Any]:
    """Arrays as int64 tensors."""
    import torch

    return {name: torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)) for name, values in batch.items()}


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
        """Token rows of (query, document) pairs, each at most `max_tokens` long; of two texts that do not fit together
        the longer one is cut first.
        """
        return self.token_rows([query for query, _ in pairs], [document for _, document in pairs])

    def token_rows(self, texts: list[str], others: list[str] | None = None) -> list[TokenRow]:
        """Token rows of texts, or of pairs of them."""
        if not texts:
            return []
        encoded = self._tokenizer(
            texts,
            others,
            truncation="longest_first",
            max_length=self.max_tokens,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=self._has_types,
        )
        absent = [None] * len(texts)
        types = encoded.token_type_ids if self._has_types else absent
        encodings = encoded.encodings or absent  # none of a tokenizer written in Python
        is_cut = [
            len(ids) >= self.max_tokens and (encoding is None or bool(encoding.overflowing))
            for ids, encoding in zip(encoded.input_ids, encodings, strict=True)
        ]
        return [TokenRow(*row) for row in zip(encoded.input_ids, types, is_cut, strict=True)]

    def collate(self, rows: Sequence[TokenRow], *, pad_multiple: int = PAD_MULTIPLE) -> dict[str, Any]:
        """Right-padded `input_ids`, `attention_mask` and, where the model knows segments, `token_type_ids`: int64
        tensors [B, T].
        """
        mask_BT = mask_of(rows, self.max_tokens, pad_multiple)
        ids_BT = padded(mask_BT, [row.ids for row in rows], self._tokenizer.pad_token_id or 0)
        of_rows = [row.types or [] for row in rows]
        pad_type = self._tokenizer.pad_token_type_id
        types = {"token_type_ids": padded(mask_BT, of_rows, pad_type)} if self._has_types else {}
        return tensors_of(input_ids=ids_BT, attention_mask=mask_BT, **types)


class QueryTexts(EncoderTexts):
    """`[CLS] query [SEP]`, or what the tokenizer makes of one text, and the query's counts.

    Args:
        prompt: text before every query; not counted.
    """

    def __init__(self, tokenizer: Any, max_tokens: int, prompt: str = "") -> None:
        super().__init__(tokenizer, max_tokens, has_types=False)
        self._prompt = prompt

    def encode(self, pairs: Sequence[tuple[str, str]]) -> list[TokenRow]:
        """Token rows of the queries; a long one loses its end there, and is counted as a whole."""
        rows = self.token_rows([self._prompt + query for query, _ in pairs])
        return [row._replace(counts=query_counts(query)) for row, (query, _) in zip(rows, pairs, strict=True)]

    def collate(self, rows: Sequence[TokenRow], *, pad_multiple: int = PAD_MULTIPLE) -> dict[str, Any]:
        """Right-padded `input_ids` and `attention_mask`, and `counts` [B, 19]."""
        return super().collate(rows, pad_multiple=pad_multiple) | tensors_of(counts=[row.counts for row in rows])


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
        before, between, after = (
            list(tokenizer(piece, add_special_tokens=False).input_ids) if piece else [] for piece in pieces
        )
        if tokenizer.chat_template is None or not pieces[0].startswith(tokenizer.bos_token or "\0"):
            before = start_ids(tokenizer) + before
        self.prompt_ids = (before, between, after)
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
            query_ids = query[: self._room]
            document_ids = document[: self._room - len(query_ids)]
            ids = before + query_ids + between + document_ids + after
            rows.append(TokenRow(ids, None, len(query) + len(document) > self._room))
        return rows

    def _data_ids(self, texts: Sequence[str]) -> list[list[int]]:
        # characters far beyond the room need not be tokenized: a token holds under 64 characters but for runs of
        # blanks, and then the cut is still a cut of the document's end
        cut = [text[: self._room * 64] for text in texts]
        ids: list[list[int]] = self._tokenizer(cut, add_special_tokens=False, split_special_tokens=True).input_ids
        return ids

    def collate(self, rows: Sequence[TokenRow], *, pad_multiple: int = PAD_MULTIPLE) -> dict[str, Any]:
        """`input_ids`, `position_ids` and, where rows are padded, `attention_mask`: int64 tensors [B, T]. Packed rows
        are one, [1, T], with `last`, the place of each row's last token.
        """
        ids = [row.ids for row in rows]
        if self._packs:
            return tensors_of(
                input_ids=np.concatenate(ids)[None],
                position_ids=np.concatenate([np.arange(len(row)) for row in ids])[None],
                last=np.cumsum(list(map(len, ids))) - 1,
            )
        pad = self._tokenizer.pad_token_id
        if pad is None:
            pad = self._tokenizer.eos_token_id
        mask_BT = mask_of(rows, self.max_tokens, pad_multiple, is_left=True)
        return tensors_of(
            input_ids=padded(mask_BT, ids, pad or 0),
            attention_mask=mask_BT,
            position_ids=np.maximum(mask_BT.cumsum(1) - 1, 0),
        )


PairTexts: TypeAlias = EncoderTexts | DecoderTexts
"""What turns pairs into token rows, and rows into a batch by the names that the student's module takes."""


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
    if re.findall(r"\{query\}|\{document\}", user) != ["{query}", "{document}"]:
        raise ConfigError("`student.prompt.user` wants {query} and then {document}, once each.")
    text = "\n\n".join(filter(None, (system, user, ending)))
    if style == "chat":
        if not tokenizer.chat_template:
            raise ConfigError(
                "`student.prompt.style` is chat, and the model's tokenizer has no chat template. Use plain."
            )
        turns = [("user", user)]
        if system:
            turns.insert(0, ("system", system))
        try:
            text = ChatTemplate(tokenizer).text(turns)
        except (ConfigError, ModelError) as exc:
            raise type(exc)(f"{exc} Or use `student.prompt.style: plain`.") from exc
    pieces = re.split(r"\{query\}|\{document\}", text)
    if len(pieces) != 3:
        raise ConfigError("the chat template shows the pair not once; use `student.prompt.style: plain`.")
    return pieces[0], pieces[1], pieces[2]


def grade_token_ids(tokenizer: Any, grades: int, *, after: str) -> list[int]:
    """The tokens `0` to `K-1` as tokenized right after the prompt's end.

    Args:
        after: the prompt's last piece.
    Raises:
        ModelError: a grade is no single token there, is unknown, or two grades share one.
    """
    end = list(tokenizer(after, add_special_tokens=False).input_ids)
    grade_ids = list[int]()
    for grade in range(grades):
        ids = list(tokenizer(f"{after}{grade}", add_special_tokens=False).input_ids)
        is_one_token = ids[: len(end)] == end and len(ids) == len(end) + 1
        if not is_one_token or ids[-1] in (tokenizer.unk_token_id, *grade_ids):
            raise ModelError(
                f"the tokenizer has no token of its own for grade {grade} after the prompt's end {after[-20:]!r} (it "
                f"makes {ids[len(end) :] or ids} of it). Take another model, or end the prompt otherwise "
                "(student.prompt)."
            )
        grade_ids.append(ids[-1])
    return grade_ids


# ------------------------------------------------------------------------------
# Answers of a module to many rows, and whether a row is answered alike alone and in a batch.
#
# Batches follow from the rows that are given alone, never from what was answered before or at the same time, so that
# rows that are answered again have the same bits on the same machine (unless memory ran out, which makes batches
# smaller).


@dataclass(kw_only=True)
class RowModel:
    """A module that answers token rows in batches of like length.

    Args:
        module: in eval mode on `device`; of what `texts` collate it gives numbers by name, [B, K].
        heads: K by name.
        device: a torch device, or what torch calls one.
        batch_tokens: tokens of a batch, padding included.
    """

    module: Any
    texts: PairTexts
    heads: dict[str, int]
    device: Any
    batch_tokens: int

    def answers(
        self, rows: Sequence[TokenRow], on_batch: Callable[[int], bool] = lambda _: True
    ) -> dict[str, np.ndarray] | None:
        """What the module answers, by name float32 [B, K] in the order of the rows; longest rows first, so that memory
        peaks at once or never.

        Args:
            on_batch: called after each batch with the number of its rows; False gives up.
        Returns:
            None if `on_batch` gave up.
        """
        import torch

        order = list[int]()
        batches = list[dict[str, Any]]()
        with torch.inference_mode():
            for numbers in length_batches([len(row.ids) for row in rows], self.batch_tokens):
                batches.append(self._answer([rows[number] for number in numbers]))
                order += numbers
                if not on_batch(len(numbers)):
                    return None
            if not batches:
                return {name: np.zeros((0, grades), dtype=np.float32) for name, grades in self.heads.items()}
            in_order = np.argsort(order)
            answers: dict[str, np.ndarray] = {}
            for name in self.heads:  # one transfer a name: a GPU is not waited for between batches
                values_BK = torch.cat([batch[name] for batch in batches]).float().cpu().numpy()
                answers[name] = values_BK[in_order]
        return answers

    def _answer(self, rows: Sequence[TokenRow]) -> dict[str, Any]:
        """What the module answers to one batch, on its device."""
        batch = self.texts.collate(rows, pad_multiple=pad_multiple_for(self.device))
        answers: dict[str, Any] = self.module(**{name: tensor.to(self.device) for name, tensor in batch.items()})
        return answers


def answers_of(
    module: Callable[..., dict[str, Any]],
    texts: PairTexts,
    rows: Sequence[TokenRow],
    heads: dict[str, int],
    device: Any,
    *,
    batch_tokens: int | None = None,
) -> dict[str, np.ndarray]:
    """What a module on a device answers to token rows, see `RowModel.answers`."""
    model = RowModel(
        module=module,
        texts=texts,
        heads=heads,
        device=device,
        batch_tokens=batch_tokens or batch_tokens_on(str(device)),
    )
    answers = model.answers(rows)
    assert answers is not None
    return answers


def logits_of_rows(
    module: Any, texts: PairTexts, rows: Sequence[TokenRow], heads: dict[str, int]
) -> dict[str, np.ndarray]:
    """Logits of token rows by head, on the device that the module is on."""
    return answers_of(
        module,
        texts,
        rows,
        heads,
        next(module.parameters()).device,
    )


def softmax(logits_BK: np.ndarray) -> np.ndarray:
    """Rows of probabilities, float32, from logits; a row that is not finite has NaN."""
    logits_BK = np.where(np.isfinite(logits_BK).all(axis=1, keepdims=True), logits_BK, np.nan)
    shifted = np.exp(logits_BK - logits_BK.max(axis=1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=1, keepdims=True), dtype=np.float32)


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


def refuse_leaks(module: Any, texts: PairTexts, heads: dict[str, int], rows: Sequence[TokenRow], where: str) -> None:
    """Answer a row alone and between others: an architecture that mixes rows, or reads their padding, gives scores that
    depend on the size of batches.

    Args:
        module: in eval mode, on the CPU: a GPU's convolutions round to ten bits, as much as a leak makes.
        rows: of `PROBES`.
        where: what the message begins with.
    Raises:
        ModelError: the two differ by more than rounding, or the model can't take such a batch.
    """
    import torch

    def answer_to(number: int, rows: Sequence[TokenRow]) -> np.ndarray:
        answers = answers_of(
            module,
            texts,
            rows,
            heads,
            "cpu",
            batch_tokens=len(rows) * texts.max_tokens,
        )
        return np.concatenate([values_BK[number] for values_BK in answers.values()])

    try:
        alone_X = answer_to(0, rows[1:2])
        together_X = answer_to(1, rows)
    except (TypeError, ValueError, IndexError) as exc:
        raise ModelError(f"{where}: can't be run on padded batches ({type(exc).__name__}: {exc}).") from exc
    difference = float(np.abs(together_X - alone_X).max() / (np.abs(alone_X).max() or 1.0))
    is_exact = torch.get_float32_matmul_precision() == "highest"
    if difference > (LEAK_TOLERANCE if is_exact else COARSE_TOLERANCE):
        raise ModelError(
            f"{where}: its answer to a row changes with the other rows of a batch, by {difference:.1e} of the answer: "
            "scores would depend on --batch-tokens. If student.batching is packed, set it to padded; else take another "
            "model."
        )


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


HEADS_NAME = "heads.safetensors"

NOT_THE_MODEL = ("manifest.json", "README.md", "curves.parquet", "curves.svg")


def module_class(kind: str) -> Any:
    """The class of a registered kind, a subclass of `networks.StudentNetwork`; loads torch."""
    return pkgutil.resolve_name(KINDS[kind].module)


@dataclass(kw_only=True)
class StudentModel(RowModel):
    """A student ready to answer; `module(**texts.collate(texts.encode(pairs)))` gives the raw logits of one batch by
    head, differentiable.
    """

    record: StudentRecord
    path: Path
    tokenizer: Any

    def encode(self, pairs: Sequence[tuple[str, str]]) -> list[TokenRow]:
        """Token rows of (query, document) pairs, cut as in training."""
        return self.texts.encode(pairs)

    def score(
        self, rows: Sequence[TokenRow], on_batch: Callable[[int], bool] = lambda _: True
    ) -> dict[str, np.ndarray] | None:
        """Calibrated distributions of token rows: by head, float32 [B, K] in the order of the rows; a row whose logits
        are not finite has NaN. None if `on_batch` gave up, see `answers`.

        Raises:
            ModelError: not even one pair fits into the device's memory.
        """
        logits = self.answers(rows, on_batch)
        if logits is None:
            return None
        temperature = self.record.temperature
        return {name: softmax(values_BK / temperature.get(name, 1.0)) for name, values_BK in logits.items()}

    def probabilities(self, pairs: Sequence[tuple[str, str]]) -> dict[str, np.ndarray]:
        """Calibrated grade distributions of (query, document) pairs: by head, float32 [B, K], rows sum to 1, in the
        order given.
        """
        return self.score(self.encode(pairs)) or {}

    def logits(self, pairs: Sequence[tuple[str, str]]) -> dict[str, np.ndarray]:
        """Raw logits, float32 [B, K] by head, in the order given."""
        return self.answers(self.encode(pairs)) or {}

    def _answer(self, rows: Sequence[TokenRow]) -> dict[str, Any]:
        """As a `RowModel`; a batch that does not fit into memory is halved, and so are all later ones."""
        import torch

        try:
            return super()._answer(rows)
        except torch.OutOfMemoryError as exc:
            if len(rows) == 1:
                raise ModelError(
                    f"a single pair of {len(rows[0].ids)} tokens does not fit into the memory of {self.device}. Free "
                    "some, or name another --device."
                ) from exc
        self.batch_tokens = max(1, self.batch_tokens // 2)
        torch.cuda.empty_cache()
        logger.warning(
            "a batch of %d rows does not fit into the device's memory; batches now hold %d tokens (--batch-tokens)",
            len(rows),
            self.batch_tokens,
        )
        middle = len(rows) // 2
        halves = [self._answer(rows[:middle]), self._answer(rows[middle:])]
        return {name: torch.cat([half[name] for half in halves]) for name in halves[0]}


def load_student(path: str | Path, *, device: str = "cpu", batch_tokens: int | None = None) -> StudentModel:
    """Load a student to score with.

    Args:
        device: what torch calls it.
        batch_tokens: tokens of a batch, padding included; by default what suits the device.
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
        module = module_class(record.kind).load(record, folder).eval()
    except (OSError, ValueError, KeyError, RuntimeError) as exc:
        raise ModelError(
            f"{folder}: the student can't be loaded ({type(exc).__name__}: {exc}). Restore the folder from a copy."
        ) from exc
    drop_unknown_types(tokenizer, module.inner)
    texts = make_texts(record, tokenizer)
    refuse_leaks(
        module,
        texts,
        record.heads,
        texts.encode(PROBES),
        str(folder),
    )
    return StudentModel(
        module=module.to(device),
        texts=texts,
        heads=record.heads,
        device=device,
        batch_tokens=batch_tokens or batch_tokens_on(device),
        record=record,
        path=folder,
        tokenizer=tokenizer,
    )


def make_texts(record: StudentRecord, tokenizer: Any) -> PairTexts:
    """What turns pairs into this student's batches."""
    if KINDS[record.kind].base == "decoder":
        return DecoderTexts(tokenizer, record.max_tokens, record.prompt, packs=record.packs)
    if KINDS[record.kind].reads_query:
        return QueryTexts(tokenizer, record.max_tokens, record.prompt[0])
    return EncoderTexts(tokenizer, record.max_tokens)


def drop_unknown_types(tokenizer: Any, inner: Any) -> None:
    """Have a tokenizer give no token types to a model that knows one type or none: the document's, 1, would be read
    beyond its table. Called by training and by loading, so that both read a pair alike.

    Args:
        inner: the model of transformers.
    """
    takes_types = "token_type_ids" in inspect.signature(inner.forward).parameters
    if not takes_types or getattr(inner.config, "type_vocab_size", 2) < 2:
        tokenizer.model_input_names = [name for name in tokenizer.model_input_names if name != "token_type_ids"]


READS_BY = ("model_input_names", "padding_side", "truncation_side")
"""What a tokenizer may know of its tokenizer.json, of its class or of us alone, and transformers then does not save."""


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer with all that decides how it reads a pair, and without the padding and cutting of its last
    user.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_padding()
        backend.no_truncation()
    for name in READS_BY:
        tokenizer.init_kwargs[name] = getattr(tokenizer, name)  # save_pretrained writes what is named there
    tokenizer.save_pretrained(folder)


def check_tokenizer_is_kept(
    record: StudentRecord, tokenizer: Any, config: Any, pairs: Sequence[tuple[str, str]], where: str
) -> None:
    """Write the tokenizer as a student's folder has it, load it, and read pairs with both: a student whose folder reads
    them otherwise would answer otherwise than it was trained. Called before training.

    Args:
        config: of the model that it belongs to.
        where: what the message begins with: the model as the user knows it.
    Raises:
        ModelError: the loaded one reads a pair otherwise, or can't be loaded.
    """
    library = require("transformers", extra="cpu", purpose="A student")
    config_name = "config.json" if KINDS[record.kind].base == "decoder" else BACKBONE_NAME
    with tempfile.TemporaryDirectory(prefix="relabel-tokenizer-") as scratch:
        folder = Path(scratch)
        save_tokenizer(tokenizer, folder)
        config.to_json_file(folder / config_name)
        loaded = read_tokenizer(library, folder, where)
    rows = make_texts(record, tokenizer).encode(pairs)
    rows_loaded = make_texts(record, loaded).encode(pairs)
    for (query, document), row, row_loaded in zip(pairs, rows, rows_loaded, strict=True):
        if row == row_loaded:
            continue
        raise ModelError(
            f"model {where!r}: its tokenizer ({type(tokenizer).__name__}) can't be kept with the student. Of "
            f"{query[:40]!r} and {document[:40]!r} it makes {len(row.ids)} tokens {row.ids[:8]}…, and, written and "
            f"loaded again, {len(row_loaded.ids)} tokens {row_loaded.ids[:8]}…. Take another model."
        )


def write_student(folder: Path, record: StudentRecord, module: Any, tokenizer: Any) -> None:
    """Write weights, config, tokenizer and record; `student.json` last."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, folder)
    module.save(folder)
    (folder / STUDENT_NAME).write_bytes(readable_json(asdict(record)))
    open_to_readers(folder)


def student_files(path: str | Path) -> dict[str, str]:
    """sha256 by name of the files that decide what a student answers: weights, config, tokenizer and record."""
    files = (file for file in sorted(Path(path).iterdir()) if file.is_file() and not file.name.startswith("."))
    return {file.name: sha256_file(file) for file in files if file.name not in NOT_THE_MODEL}


def student_digest(path: str | Path) -> str:
    """sha256 over a student's files, 64 hex digits."""
    return digest_of(student_files(path))
