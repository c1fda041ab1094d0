"""Answers that could not be read, of chunks that a run left unfinished: kept in `refused/`, for people (`relabel ask
--refused`) and for the run that continues, which need not ask them again.

A committed chunk has its own in quarantine, and the file here is no longer looked at. Nothing depends on one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from jobs.running.live import RefusedAnswer
from manifests.asks import Answer
from manifests.digests import readable_json
from manifests.errors import RelabelError
from manifests.records import checked, plain, version_of
from manifests.runs.receipts import ChunkId
from manifests.runs.run_folder import RunFolder
from manifests.secrets.redaction import redacted_values
from manifests.storage.run_store_ports import RunStore, read_if_there

logger = logging.getLogger(__name__)

FOLDER = "refused"
VERSION = 1
_NAME = re.compile(FOLDER + r"/shard-(\d{5,})/chunk-(\d{6,})\.(\d+)\.json")


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """An answer and why it was refused.

    Args:
        key: of its ask, in hex; empty where it tells nothing of what the engine would say again.
        answer: without its text, which `refused` has.
    """

    refused: RefusedAnswer
    key: str
    answer: Answer


@dataclass(frozen=True, slots=True)
class _Kept:
    version: int
    fingerprint: str
    answers: list[KeptAnswer]


def kept_of(refused: RefusedAnswer, key: bytes, answer: Answer, *, is_shared: bool) -> KeptAnswer:
    """What is kept of a refused answer. One that the engine failed at, or that rows share, is asked again."""
    may_stand = answer.finish in ("stop", "length") and not is_shared
    return KeptAnswer(refused, key.hex() if may_stand else "", replace(answer, text="", detail="", raw=""))


def keep_refused(store: RunStore, fingerprint: str, refused: Mapping[ChunkId, list[KeptAnswer]]) -> None:
    """Write down the refused answers of chunks that stay open. What can't be written is warned of, once."""
    for chunk, answers in refused.items():
        if not answers:
            continue
        name = _name(chunk)
        values = plain(_Kept(VERSION, fingerprint, answers))
        try:
            store.put(name, readable_json(redacted_values(values)))
        except (OSError, RelabelError) as exc:
            logger.warning("%s/%s: refused answers can't be kept (%s); they are asked again", store.root, name, exc)
            return


def known_answers(store: RunStore, fingerprint: str, chunk: ChunkId) -> dict[bytes, Answer]:
    """Refused answers of a chunk that need not be asked again, by the key of their ask."""
    return {
        bytes.fromhex(one.key): replace(one.answer, text=one.refused.text)
        for one in _load(store, fingerprint, _name(chunk))
        if one.key
    }


def kept_answers(folder: RunFolder) -> Iterator[RefusedAnswer]:
    """Refused answers of all chunks that are still open, by shard and chunk."""
    attempts = folder.attempts_of_all()
    for name, chunk in listed(folder.store):
        if chunk.attempt not in attempts.get(chunk.shard, {}).get(chunk.chunk, ()):
            yield from (one.refused for one in _load(folder.store, folder.plan.fingerprint, name))


def kept_chunks(store: RunStore) -> set[ChunkId]:
    """Chunks of which there are any, from one listing."""
    return {chunk for _, chunk in listed(store)}


def _load(store: RunStore, fingerprint: str, name: str) -> list[KeptAnswer]:
    """What a file holds; nothing where it is another version's or another job's, damaged, or gone."""
    with contextlib.suppress(ValueError):
        held = json.loads(read_if_there(store, name) or b"{}")
        if version_of(held) == VERSION:
            kept = checked(_Kept, held)
            return kept.answers if kept.fingerprint == fingerprint else []
    return []


def _name(chunk: ChunkId) -> str:
    return f"{FOLDER}/shard-{chunk.shard:05d}/chunk-{chunk.chunk:06d}.{chunk.attempt}.json"


def listed(store: RunStore) -> Iterator[tuple[str, ChunkId]]:
    """Files by name, with their chunk; what others laid there is left alone."""
    for name in store.etags(FOLDER):
        if found := _NAME.fullmatch(name):
            yield name, ChunkId(*map(int, found.groups()))
