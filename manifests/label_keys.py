"""What makes two labels the same label: the key of a row, and of an answer that the rows of a query share.

A row's key is a digest of a *recipe* (all that a run settles once) and of the row's texts as far as the labeler reads
them. Two rows with one key would get the same label, so the one can be taken for the other.

The document and the context go in as they are, code point by code point: evidence is offsets into the document, and a
document of other code points is another document even if it looks the same. The query goes in as Unicode NFC with each
run of white space as one space and none at its ends: nothing points into it, and such differences are those between two
exports of one log, not between two questions.

An answer's key is a digest of the ask as it is rendered (templates and data, no normalisation) and of what the run
settles for the engine, so that an edited second stage leaves the first stage's answers as they were.
"""

import itertools
import unicodedata
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from relabel.manifests.asks import Ask
from relabel.manifests.labels import KEY_BYTES, Pair, Reads
from relabel.manifests.plan import PERSON_LABEL, SETTLED, recipe_digest
from relabel.manifests.records import canonical_json

_PERSON_ANSWER = b"relabel answer 1"


def stage_digests(asks: Sequence[Ask]) -> dict[str, str]:
    """A digest of each stage's ask, by stage: made of a labeler's `probe`, it shows what a labeler
    asks without any row.
    """
    found = {}
    for ask in asks:
        digest = blake2b(digest_size=KEY_BYTES, person=_PERSON_ANSWER)
        _add_ask(digest, ask, ())
        found[ask.stage] = digest.hexdigest()
    return found


def normalise_query(text: str) -> str:
    """NFC, each run of white space one space, none at the ends."""
    return " ".join(unicodedata.normalize("NFC", text).split())


class LabelKeys:
    """Keys of rows under one recipe.

    Rows of a query follow each other, so what they share is digested once.

    Args:
        parts: a plan's parts.
        reads: what the labeler looks at; what it does not look at is no part of the key.
    """

    def __init__(self, parts: dict[str, Any], reads: Reads) -> None:
        self._base = blake2b(recipe_digest(parts), digest_size=KEY_BYTES, person=PERSON_LABEL)
        self._reads = reads

    def keys(self, pairs: Sequence[Pair]) -> list[bytes]:
        """16 bytes a pair, in order."""
        keys = []
        _, reads_document, reads_columns, reads_siblings = self._reads
        queries = itertools.groupby(pairs, key=lambda pair: (pair.query, pair.context, id(pair.siblings)))
        for _, rows in queries:
            head: blake2b | None = None
            for row_id, _, query, _, document, context, columns, siblings, _ in rows:
                if head is None:
                    head = self._query_head(query, context, siblings)
                    positions = {sibling.row_id: position for position, sibling in enumerate(siblings)}
                digest = head.copy()
                if reads_siblings:
                    _add_text(digest, str(positions.get(row_id)))
                for column in reads_columns:
                    _add_text(digest, repr(columns.get(column.name) or None))
                if reads_document:
                    digest.update(document.encode("utf-8", "surrogatepass"))
                keys.append(digest.digest())
        return keys

    def _query_head(self, query: str, context: tuple[str, ...], siblings: tuple[Pair, ...]) -> blake2b:
        texts = [normalise_query(query)]
        if self._reads.context:
            texts += context
        digest = self._base.copy()
        digest.update(len(texts).to_bytes(8, "little"))
        for text in texts:
            _add_text(digest, text)
        if self._reads.siblings:
            digest.update(len(siblings).to_bytes(8, "little"))
            for sibling in siblings:
                _add_text(digest, sibling.doc_id)
                _add_text(digest, sibling.document)
                for column in self._reads.columns:
                    _add_text(digest, repr(sibling.columns.get(column.name) or None))
        return digest


class AnswerKeys:
    """Keys of shared answers under one engine and model."""

    def __init__(self, parts: dict[str, Any]) -> None:
        settled = {**{key: parts[key] for key in SETTLED}, "engine": parts["engine"]}
        self._base = blake2b(canonical_json(settled), digest_size=KEY_BYTES, person=_PERSON_ANSWER)

    def key(self, ask: Ask, round_number: int, sample: int, attempt: int) -> bytes:
        """16 bytes for an ask as rendered, in which round of retries, for which sample and attempt. Whose rows share it
        is left out.
        """
        digest = self._base.copy()
        _add_ask(digest, ask, (round_number, sample, attempt))
        return digest.digest()


def _add_ask(digest: blake2b, ask: Ask, which: tuple[int, ...]) -> None:
    settled = (ask.stage, ask.max_tokens, ask.prefill, ask.sampling, ask.decisions, ask.format, *which)
    _add_text(digest, repr(settled))
    for message in ask.messages:
        _add_text(digest, repr((message.role, message.fields, len(message.parts))))
        for part in message.parts:
            _add_text(digest, part)
    _add_text(digest, "" if ask.fragment_source is None else "=" + ask.fragment_source)


def _add_text(digest: blake2b, text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data)
