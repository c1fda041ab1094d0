"""Answers of chunks that a run left unfinished: kept in `refused/`, so that the run that continues need not ask them
again. Those that could not be read are for people too (`relabel ask --refused`).

A committed chunk has its own in its files, and the file here is no longer looked at. Nothing depends on one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from relabel.jobs.running.chunks import ChunkWork
from relabel.jobs.running.live import RefusedAnswer
from relabel.manifests.asks import Answer, EngineFacts
from relabel.manifests.digests import readable_json
from relabel.manifests.errors import RelabelError
from relabel.manifests.records import checked, plain, version_of
from relabel.manifests.runs.engine_identity import engines_differ
from relabel.manifests.runs.receipts import ChunkId
from relabel.manifests.runs.run_folder import RunFolder
from relabel.manifests.secrets.redaction import redacted_values
from relabel.manifests.storage.concurrency import map_concurrent
from relabel.manifests.storage.run_store_ports import RunStore, read_if_there

logger = logging.getLogger(__name__)

FOLDER = "refused"
VERSION = 2
_NAME = re.compile(FOLDER + r"/shard-(\d{5,})/chunk-(\d{6,})\.(\d+)\.json")


@dataclass(frozen=True, slots=True)
class _Kept:
    """`engine` gave the answers in `answered`, by the hex of their ask's key; `refused` of them could not be read."""

    version: int
    fingerprint: str
    engine: dict[str, Any]
    refused: list[RefusedAnswer]
    answered: dict[str, Answer]


def keep_answers(
    store: RunStore, fingerprint: str, engine: EngineFacts | None, unfinished: Sequence[ChunkWork]
) -> None:
    """Write down the answers of chunks that stay open. What can't be written is warned of, once."""

    def keep(work: ChunkWork) -> None:
        answered = {key.hex(): replace(answer, detail="", raw="") for key, answer in work.answered.items()}
        values = plain(_Kept(VERSION, fingerprint, asdict(engine) if engine else {}, work.refused, answered))
        # an answer stays as the model wrote it, as in a label: what is read of it again is the same
        values["refused"] = redacted_values(values["refused"])
        store.put(_name(work.id), readable_json(values))

    try:
        for _ in map_concurrent(store, keep, [work for work in unfinished if work.refused or work.answered]):
            pass
    except (OSError, RelabelError, ValueError) as exc:
        logger.warning("%s/%s: answers can't be kept (%s); they are asked again", store.root, FOLDER, exc)


def known_answers(store: RunStore, fingerprint: str, engine: EngineFacts | None, chunk: ChunkId) -> dict[bytes, Answer]:
    """Answers of a chunk that need not be asked again, by the key of their ask; none that another engine gave."""
    kept = _load(store, fingerprint, _name(chunk))
    if kept is None or engine is None or engines_differ([kept.engine, asdict(engine)]):
        return {}
    return {bytes.fromhex(key): answer for key, answer in kept.answered.items()}


def kept_answers(folder: RunFolder) -> Iterator[RefusedAnswer]:
    """Refused answers of all chunks that are still open, by shard and chunk."""
    attempts = folder.attempts_of_all()
    for name, chunk in listed(folder.store):
        if chunk.attempt not in attempts.get(chunk.shard, {}).get(chunk.chunk, ()):
            kept = _load(folder.store, folder.plan.fingerprint, name)
            yield from kept.refused if kept is not None else ()


def kept_chunks(store: RunStore) -> set[ChunkId]:
    """Chunks of which there are any, from one listing."""
    return {chunk for _, chunk in listed(store)}


def _load(store: RunStore, fingerprint: str, name: str) -> _Kept | None:
    """What a file holds; None where it is another version's or another job's, damaged, or gone."""
    with contextlib.suppress(ValueError):
        held = json.loads(read_if_there(store, name) or b"{}")
        if version_of(held) == VERSION and (kept := checked(_Kept, held)).fingerprint == fingerprint:
            return kept
    return None


def _name(chunk: ChunkId) -> str:
    return f"{FOLDER}/shard-{chunk.shard:05d}/chunk-{chunk.chunk:06d}.{chunk.attempt}.json"


def listed(store: RunStore) -> Iterator[tuple[str, ChunkId]]:
    """Files by name, with their chunk; what others laid there is left alone."""
    for name in store.etags(FOLDER):
        if found := _NAME.fullmatch(name):
            yield name, ChunkId(*map(int, found.groups()))
