"""Bytes that change: inputs replaced or overwritten in the middle of a run, flipped bytes in inputs and in committed
files.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.manifests.errors import InputError
from relabel.manifests.files import Storage
from relabel.manifests.inputs import open_dataset
from relabel.manifests.plan import KNOWN_NAME, ShardPlan
from relabel.manifests.rows import read_chunks
from relabel.manifests.specs import InputSpec
from tests.faults.conftest import Places, Sweep, count
from tests.faults.places import Place
from tests.faults.test_objects_fail import inside


@pytest.mark.parametrize("how", ["in place", "by another file"])
def test_rows_of_a_file_that_changes_while_it_is_read_are_never_taken_for_those_that_were_planned(
    tmp_path: Path, how: str
) -> None:
    """Same size, same layout, no checksums: nothing but the file's own change says."""
    path, other = tmp_path / "pairs.parquet", tmp_path / "other.parquet"
    rows = 6000  # several row groups beyond any read-ahead
    for target, letter in ((path, "a"), (other, "b")):
        table = {name: [f"{letter}{row % 7}" * 400 for row in range(rows)] for name in ("query", "document")}
        ids = [f"q{row // 10}" for row in range(rows)]
        pq.write_table(
            pa.table({"query_id": ids, "doc_id": ids, **table}),
            target,
            row_group_size=1000,
            compression="none",
            use_dictionary=False,
        )
    assert path.stat().st_size == other.stat().st_size
    dataset = open_dataset(InputSpec(path=(str(path),)), Storage())
    shard = ShardPlan(rows, 0, None, [100] * (rows // 100), 0, 0)
    chunks = read_chunks(dataset, shard, None, range(rows // 100))
    seen = [next(chunks)]
    if how == "in place":
        path.write_bytes(other.read_bytes())
    else:
        other.replace(path)
    with pytest.raises(InputError, match="changed while this run was under way"):
        seen.extend(chunks)
    assert {pair.document[0] for chunk in seen for pair in chunk.pairs} == {"a"}


def flip(path: Path, at: int) -> None:
    """One bit of one byte."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << at % 8
    path.write_bytes(bytes(data))


def test_verify_finds_a_flipped_byte_in_any_committed_file(local_place: Places, sweep: Sweep) -> None:
    """Of a run with a canary; locks, logs and what a plan knew of the input before prove nothing."""
    place = local_place()
    place.write(run={"max_tokens": 10_000_000}, canary=4, max_flip_rate=1.0)
    assert place.call("run --shard 1/3", "run", "verify").codes == [0, 0, 0]
    found = sorted(str(path.relative_to(place.output)) for path in Path(place.output).rglob("*.*") if path.is_file())
    names = [name for name in found if name != KNOWN_NAME and not name.startswith(("leases/", "logs/"))]
    assert {"canary", "receipts", "labels", "quarantine", "answers", "plan", "manifest.json"} <= {
        name.partition("/")[0] for name in names
    }, names
    rng = random.Random(13)
    places = [(name, rng.random()) for name in names for _ in range(count(full=20, short=1))]

    def attempt(schedule: tuple[str, float]) -> str | None:
        name, part = schedule
        path = Path(place.output, name)
        original = path.read_bytes()
        flip(path, int(part * len(original)))
        code, said = inside("verify", place.job)
        path.write_bytes(original)
        return None if code == 3 and path.name in said else f"exit code {code}: {said[-500:]}"

    sweep(places if count(full=1, short=0) else places[::2], attempt, at_a_time=1)
    assert inside("verify", place.job)[0] == 0


def test_a_flipped_byte_in_a_receipt_plan_or_manifest_is_never_a_traceback_nor_other_labels(
    local_place: Places, sweep: Sweep
) -> None:
    """JSON carries no checksum: a flip may fall where nothing hangs on it (a worker's name). What is read is refused or
    right.
    """
    place = local_place()
    place.write()
    assert place.call("run", "verify").codes == [0, 0]
    expected = place.committed()
    out = Path(place.output)
    names = [
        out / "plan.json",
        out / KNOWN_NAME,
        out / "manifest.json",
        *sorted((out / "receipts").rglob("*.json"))[:3],
    ]
    rng = random.Random(14)
    places = [(path, rng.random()) for path in names for _ in range(count(full=60, short=2))]
    copies = (tmp_copy(out, number) for number in itertools.count())

    def attempt(schedule: tuple[Path, float]) -> str | None:
        path, part = schedule
        copy = next(copies)
        original = path.read_bytes()
        flip(path, int(part * len(original)))
        outcomes = [inside(verb, place.job) for verb in ("verify", "status", "run")]
        found = held_labels(place)
        shutil.rmtree(out)
        copy.rename(out)
        wrong = [said[-1500:] for code, said in outcomes if code not in (0, 3, 5, 10, 30)]
        if wrong:
            return wrong[0]
        lost = {name for name, digest in expected.items() if found.get(name) != digest}
        return f"committed files changed or vanished: {sorted(lost)}" if lost else None

    sweep(places, attempt, at_a_time=1)


def held_labels(place: Place) -> dict[str, str]:
    out = Path(place.output)
    files = [path for kind in ("labels", "quarantine") for path in (out / kind).rglob("*.parquet")]
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def tmp_copy(out: Path, number: int) -> Path:
    copy = out.with_name(f"copy-{number}")
    shutil.copytree(out, copy)
    return copy
