"""Runs of `route` as chats to train a router on: a line for each prompt that was asked, with what is right to answer.

The form is that of TRL's `SFTTrainer`, conversational prompt and completion: `{"prompt": [{"role": "system",
"content": …}, {"role": "user", "content": …}], "completion": [{"role": "assistant", "content": …}]}`.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from relabel.jobs.convert.acceptance import (
    NO_GOLD,
    NOT_AGREED,
    OTHER_THAN_GOLD,
    Acceptance,
    GoldNodes,
    Votes,
    check_several,
    rows_kept,
)
from relabel.jobs.convert.replaying import Replays, open_labeler
from relabel.jobs.files.durable_files import check_free, written
from relabel.labelers.registry import Labeler
from relabel.labelers.replays import Exchange
from relabel.manifests.errors import InputError
from relabel.manifests.judging.opened_labels import is_run
from relabel.manifests.judging.run_labels import RunLabels, open_run_labels
from relabel.manifests.labels import Pair
from relabel.manifests.runs.label_files import own_columns, read_labels
from relabel.manifests.storage.context import Storage

NOT_REPLAYED, NO_ACTION, REPEATED = "not_replayed", "without_action", "repeated"
REASONS = {
    NO_GOLD: "labels of rows that gold does not know",
    OTHER_THAN_GOLD: "labels with other nodes than gold's",
    NOT_AGREED: "labels that too few runs agree on",
    NOT_REPLAYED: "labels that don't lead to the same prompts and actions again",
    NO_ACTION: "steps without a legal action",
    REPEATED: "steps that are there already, with the same prompt and completion",
}
"""Why something is left out, in words; the order is that in which it is looked for."""


@dataclass
class TrajectoryConversion:
    """What a conversion came to.

    Args:
        labels: of all runs; `kept` of them are right and could be replayed.
        written: lines, one for each of their steps that is not left out.
        left_out: labels, then steps, by reason.
        quarantined: rows of the runs without a label.
    """

    sources: list[str]
    target: str
    target_format: str
    gold: str | None
    agree: int | None
    labels: int = 0
    kept: int = 0
    written: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    quarantined: int = 0
    notes: list[str] = field(default_factory=list)


def convert_trajectories(
    sources: Sequence[str],
    target: str,
    storage: Storage,
    acceptance: Acceptance,
    *,
    allow_partial: bool = False,
    force: bool = False,
) -> TrajectoryConversion:
    """Write the trajectories of runs into one file, which is there whole or not at all.

    Raises:
        UsageError: nothing says which labels are right, runs that can't agree, or the target is there already.
        InputError: a source is no run of a labeler with trajectories, its prompts or its input are not what they were,
            or gold is off.
        ManifestError: a run is unfinished, over its limit or damaged.
        DiskFullError, StoreError: the target can't be written; what was there before stays.
    """
    agree = acceptance.agreeing(len(sources))
    gold = () if acceptance.gold is None else (acceptance.gold,)
    check_free(target, (*sources, *gold), storage, force=force)
    for source in sources:
        if not is_run(source, storage):
            raise InputError(f"{source}: no run's output folder. Trajectories are those of runs of `route`.")
    runs = [open_run_labels(source, storage, allow_partial=allow_partial) for source in sources]
    labelers = [open_labeler(run, storage) for run in runs]
    for run in runs:
        check_free(target, [file.path for file in run.plan.files], storage, force=True)
    if agree is not None:
        check_several(runs)
    golds = [
        None if acceptance.gold is None else GoldNodes.of(run, acceptance.gold, acceptance.by, acceptance.doc, storage)
        for run in runs
    ]
    votes = None if agree is None else Votes(runs, agree)
    found = TrajectoryConversion([*sources], target, "trajectories", acceptance.gold, agree)
    left_out: Counter[str] = Counter()
    with written(target, storage) as path, path.open("wb") as file:
        lines = _Lines(file)
        for run, labeler, gold_nodes in zip(runs, labelers, golds, strict=True):
            found.notes += run.notes
            found.quarantined += run.num_quarantined
            found.labels += sum(one.rows for one in run.labels)
            found.kept += _write(run, labeler, gold_nodes, votes, storage, lines, left_out)
    found.written = lines.num_written
    found.left_out = {reason: left_out[reason] for reason in REASONS if left_out[reason]}
    return found


def _write(
    run: RunLabels,
    labeler: Labeler,
    gold: GoldNodes | None,
    votes: Votes | None,
    storage: Storage,
    lines: _Lines,
    left_out: Counter[str],
) -> int:
    """Write the trajectories of a run's labels that are right; how many labels there were such."""
    kept: dict[int, dict[str, Any]] = {}
    names = ["row_id", "query_id", "doc_id", "grade", *own_columns(run.plan.parts)]
    for one in run.labels:
        table = read_labels(run.folder, one, names)
        for row in table.take(rows_kept(table, gold, votes, left_out)).to_pylist():
            kept[row["row_id"]] = row
    replays = Replays(run, labeler, kept, storage)
    settings = (run.plan.parts.get("engine") or {}).get("chat_template_kwargs")
    for pair, exchanges in replays:
        for left in lines.add(pair, exchanges, settings):
            left_out[left] += 1
    left_out[NOT_REPLAYED] += replays.num_failed
    return len(kept) - replays.num_failed


class _Lines:
    """The file's lines, each prompt and completion once."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._seen = file, set[bytes]()
        self.num_written = 0

    def add(self, pair: Pair, exchanges: Sequence[Exchange], settings: dict[str, Any] | None) -> Iterator[str]:
        """Write a label's steps; why some are left out."""
        for number, (messages, completion) in enumerate(exchanges, start=1):
            if not completion:
                yield NO_ACTION
                continue
            chat: dict[str, Any] = {
                "prompt": [{"role": message.role, "content": message.text} for message in messages],
                "completion": [{"role": "assistant", "content": completion}],
            }
            if settings:
                chat["chat_template_kwargs"] = settings
            digest = hashlib.blake2b(_json(chat), digest_size=16).digest()
            if digest in self._seen:
                yield REPEATED
                continue
            self._seen.add(digest)
            place = {"query_id": pair.query_id, "doc_id": pair.doc_id, "step": number}
            self._file.write(_json({**chat, **place}) + b"\n")
            self.num_written += 1


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
