"""Outputs with label files of version 2, whose nodes were one struct, as relabel wrote them before labelers had columns
of their own.

python -m tests.reuse.old_labels        made labels_2.tar.gz; only relabel before version 3 of the label files can make
it again
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
import tempfile
from pathlib import Path

from manifests.records import unsealed
from manifests.storage.temp_files import HERE
from tests.reuse.conftest import Days, Row, rows_of

ARCHIVE = Path(__file__).parent / "labels_2.tar.gz"
ROOT = "/where/it/was/made"
"""Stands in the archive for the folder of the outputs and their inputs."""
SPOILT = 0.4
ROWS: dict[str, list[Row]] = {"monday": rows_of(2, 3), "tuesday": rows_of(4, 3)[6:], "plain": rows_of(2, 2)}
JOBS = {
    "monday": {"labeler": {"name": "graph-grpo", "attempts": 1}, "engine": {"args": {"p_garbage": SPOILT}}},
    "tuesday": {"labeler": {"name": "graph-grpo", "attempts": 1}, "engine": {"args": {"p_garbage": SPOILT}}},
    "plain": {"labeler": {"name": "direct"}},
}
COMMON = {"shards": 1, "run": {"max_failed_fraction": 1.0}}


def unpack(folder: Path) -> Days:
    """The outputs `monday`, `tuesday` and `plain` in a folder, with their inputs and job files, as if they had been
    made there.
    """
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    days = Days(folder)
    for day, rows in ROWS.items():
        held = (folder / f"{day}.parquet").read_bytes()
        days.job(day, rows, **COMMON, **JOBS[day])
        (folder / f"{day}.parquet").write_bytes(held)  # the very file that was planned, whichever pyarrow wrote it
        for file in days.out(day).rglob("*.json"):
            file.write_text(file.read_text().replace(ROOT, str(folder)))
        manifest = unsealed((days.out(day) / "manifest.json").read_bytes())
        manifest["plan_sha256"] = hashlib.sha256((days.out(day) / "plan.json").read_bytes()).hexdigest()
        (days.out(day) / "manifest.json").write_text(json.dumps(manifest))
    return days


def _pack(folder: Path) -> None:
    days, sink = Days(folder), io.BytesIO()
    for day, rows in ROWS.items():
        days.run(day, rows, **COMMON, **JOBS[day])
    with tarfile.open(fileobj=sink, mode="w") as archive:
        inputs = [folder / f"{day}.parquet" for day in ROWS]
        outputs = [
            file for day in ROWS for file in days.out(day).rglob("*.*") if file.parent.name not in ("logs", "leases")
        ]
        for file in sorted([*inputs, *outputs]):
            data = file.read_bytes()
            if file.suffix == ".json":
                data = data.replace(str(folder).encode(), ROOT.encode()).replace(HERE.encode() + b"-", b"host-")
            entry = tarfile.TarInfo(str(file.relative_to(folder)))
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    ARCHIVE.write_bytes(gzip.compress(sink.getvalue(), mtime=0))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        _pack(Path(made))
