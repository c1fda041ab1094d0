"""Input files that were written again since the plan, with equal size and footer, so that their stamp alone
(`InputFile.stamp`) shows it: a copy, a `touch`, or other texts of the same length.

The labels that are there decide whether a run may go on. Each carries the key of the texts that it was made of
(`manifests/label_keys.py`), which is compared with the key of the texts that its row holds now. So a copy goes on, and
no output holds labels of two states of a file. Stamps with which all labels agreed are kept in the output, and
the files are compared again when they have others.
"""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from relabel.jobs import logs
from relabel.jobs.job import OpenRun
from relabel.manifests.errors import StaleRunError
from relabel.manifests.label_keys import LabelKeys
from relabel.manifests.labels import LABELS
from relabel.manifests.plan import Receipt, chunk_row_ids
from relabel.manifests.records import read_record, sealed_json
from relabel.manifests.secrets import counted
from relabel.manifests.store import Store, read_if_there

STAMPS_NAME = "stamps.json"
VERSION = 1


@dataclass(frozen=True, slots=True)
class _AgreedStamps:
    """The stamp of each of the plan's files, in their order, as all labels last agreed with it."""

    version: int
    stamps: list[str | None]


def refuse_other_texts(opened: OpenRun, *, may_write: bool) -> None:
    """Compare the labels of files that were written again with the texts that are there.

    Args:
        may_write: keep the stamps if all agree; off for a dry run.
    Raises:
        StaleRunError: a label was made of another text; names the file and the row.
    """
    planned = [file.stamp for file in opened.plan.files]
    agreed = _agreed_stamps(opened.store) or planned
    now = [file.stamp for file in opened.dataset.files]
    rewritten = [number for number, stamp in enumerate(agreed) if stamp is not None and stamp != now[number]]
    if not rewritten:
        return
    names = opened.dataset.files[rewritten[0]].path
    if len(rewritten) > 1:
        names += f" and {counted(len(rewritten) - 1, 'other file')}"
    num_labels = _compare(opened, rewritten)
    outcome = "It has no label yet"
    if num_labels:
        outcome = f"The texts of all {counted(num_labels, 'label')} are still there"
    logs.write(
        f"note: {names}: written again since the plan, with equal size and footer. {outcome}, so the run goes on.",
        event="input",
    )
    if may_write:
        opened.store.put(STAMPS_NAME, sealed_json(asdict(_AgreedStamps(VERSION, now))))


def _agreed_stamps(store: Store) -> list[str | None] | None:
    """The stamps that were kept, None if none were.

    Raises:
        ManifestError: they can't be read.
    """
    data = read_if_there(store, STAMPS_NAME)
    if data is None:
        return None
    record = read_record(
        _AgreedStamps,
        data,
        f"{store.root}/{STAMPS_NAME}",
        "not the stamps of an input",
        "Restore it, or remove it if no input file was written since the plan.",
        version=VERSION,
    )
    return record.stamps


def _compare(opened: OpenRun, rewritten: Sequence[int]) -> int:
    """Compare all labels of these files. Returns how many there are that tell their texts."""
    plan = opened.plan
    ends_F = np.cumsum([file.rows for file in plan.files])
    is_rewritten_F = np.isin(np.arange(len(plan.files)), rewritten)
    keys = LabelKeys(plan.parts, opened.job.reads)
    num_labels = 0
    committed = opened.folder.receipts_in(opened.folder.listing())
    for shard, of_shard in itertools.groupby(committed, key=lambda receipts: receipts[0].shard):
        row_ids = chunk_row_ids(opened.store, plan.shards[shard])
        receipts_by_chunk: dict[int, list[Receipt]] = {}
        for receipts in of_shard:
            chunk = receipts[0].chunk
            if is_rewritten_F[np.searchsorted(ends_F, row_ids[chunk], side="right")].any():
                receipts_by_chunk[chunk] = receipts
        for chunk, pairs in opened.read(shard, list(receipts_by_chunk)):
            keys_now = dict(zip((pair.row_id for pair in pairs), keys.keys(pairs), strict=True))
            for receipt in receipts_by_chunk[chunk]:
                if receipt.labels is None:
                    continue
                labels = opened.folder.table(receipt.labels, LABELS, ["row_id", "key"], check_bytes=False)
                for row_id, key in zip(labels["row_id"].to_pylist(), labels["key"].to_pylist(), strict=True):
                    if key is None:  # a cascade's cheap label, which was made of no text here
                        continue
                    if keys_now[row_id] != key:
                        raise _other_text(opened, row_id)
                    num_labels += 1
    return num_labels


def _other_text(opened: OpenRun, row_id: int) -> StaleRunError:
    path, row = opened.dataset.file_row(row_id)
    output = opened.job.spec.output
    return StaleRunError(
        f"{path}: written again since the plan, with equal size and footer, and its row {row:,} is labelled by another "
        f"text than the one that is there now. Restore the file; or name another `output`, with `reuse: [{output}]` in "
        "the job for the labels of texts that stayed."
    )
