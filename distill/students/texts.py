"""Pairs as token rows, and token rows as padded batches: the same for training, scoring and export.

Documents are hostile: text that spells a control token (`[SEP]`, `<|im_end|>`) is encoded as the ordinary characters it
consists of, so a document can neither end its segment nor open a turn of its own. A pair that is too long loses the end
of its longer part (encoder) or of its document (decoder).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from relabel.distill.students.token_rows import PAD_MULTIPLE, TokenRow, mask_of, padded, tensors_of, width_of
from relabel.manifests.errors import ConfigError
from relabel.manifests.models.chat_templates import start_ids

# B rows, T tokens


class EncoderTexts:
    """`[CLS] query [SEP] document [SEP]`, or what the tokenizer makes of a pair.

    Args:
        tokenizer: a tokenizer of transformers.
        max_tokens: longest row, special tokens included.
    """

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._tokenizer = tokenizer
        self._has_types = "token_type_ids" in tokenizer.model_input_names

    def encode(self, pairs: Sequence[tuple[str, str]]) -> list[TokenRow]:
        """Token rows of (query, document) pairs; of two texts that do not fit together the longer one is cut first."""
        if not pairs:
            return []
        queries, documents = zip(*pairs, strict=True)
        return self._token_rows(list(queries), list(documents))

    def _token_rows(self, texts: list[str], others: list[str] | None) -> list[TokenRow]:
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
        pad = self._tokenizer.pad_token_id
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
        packs: put a batch's rows behind each other into one row without padding instead of padding them on the left.
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
