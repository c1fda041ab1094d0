"""What relabel costs where there is a lot: plans of up to 100 million rows, and outputs of up to a million receipts.

    git worktree add /tmp/before edbb4e5
    python -m benchmarks.scale plan --before /tmp/before --rows 1e6 1e7 1e8
    python -m benchmarks.scale receipts --receipts 1e4 1e5 1e6
    python -m benchmarks.scale requests --chunks 256 512

`plan` cuts narrow synthetic Parquet (ids and one letter of text, 20 rows a query) into 64 shards, queries together and
scattered, with this tree and another one in turns; both must write the same plan. `receipts` puts receipts of 64
shards into a SeaweedFS, as entries of its own (`fs.meta.load`), since a million requests would take an hour, and a
manifest over them. Label files are not there: nothing here reads them. Each command is a process of its own, started by
one that holds nothing (`ru_maxrss` begins with its parent's), with one thread. Requests are counted by a proxy, in a
call of its own that is not timed. `requests` runs jobs with the fake engine and counts what a chunk takes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.paired import turns

if TYPE_CHECKING:
    from tests.seaweed import Server

HERE = Path(__file__).resolve().parents[1]
SHARDS, QUERY_ROWS, CHUNK_ROWS, FILE_ROWS = 64, 20, 16, 1_000_000


class Took(NamedTuple):
    """A process that has ended: by the clock, of the processor, and the most memory that it had."""

    code: int
    seconds: float
    cpu_s: float
    peak_mb: float
    said: str


def timed(command: list[str], *, tree: Path = HERE, variables: dict[str, str] | None = None) -> Took:
    """Run a command of a tree to its end."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", **(variables or {})}
    started = time.perf_counter()
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(command, cwd=tree, env=environment, stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        said = out.read().decode()
    seconds, cpu_s = time.perf_counter() - started, usage.ru_utime + usage.ru_stime
    return Took(process.returncode, seconds, cpu_s, usage.ru_maxrss / 1024, said)


def relabel(*arguments: str | Path, tree: Path = HERE, variables: dict[str, str] | None = None) -> Took:
    """Run one command of relabel."""
    took = timed([sys.executable, "-P", "-m", "relabel", *map(str, arguments)], tree=tree, variables=variables)
    assert took.code in (0, 10), (arguments, took)
    return took


def here(function: str, *arguments: object, variables: dict[str, str] | None = None) -> Took:
    """Call a function of this file in a process of its own."""
    program = f"import json, sys; from benchmarks.scale import {function}; {function}(*json.loads(sys.argv[1]))"
    took = timed([sys.executable, "-c", program, json.dumps(arguments)], variables=variables)
    assert took.code == 0, (function, took)
    return took


def write_rows(folder: str, rows: int, kind: str, query_rows: int) -> None:
    """Files of a million rows; one that is there already is left alone."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    Path(folder).mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    for first in range(0, rows, FILE_ROWS):
        row_R = np.arange(first, min(first + FILE_ROWS, rows))
        path = Path(folder, f"{first // FILE_ROWS:05d}.parquet")
        query_R = row_R // query_rows if kind == "together" else rng.integers(0, max(1, rows // query_rows), len(row_R))
        if path.exists():
            continue
        letter_R = pa.DictionaryArray.from_arrays(pa.array(np.zeros(len(row_R), np.int32)), ["x"]).cast(pa.string())
        ids = np.char.add("q", query_R.astype(str))
        table = pa.table({"query_id": ids, "query": letter_R, "doc_id": row_R, "document": letter_R})
        pq.write_table(table, path, row_group_size=FILE_ROWS // 4, compression="zstd")


def write_job(folder: Path, input_folder: Path, output: str, chunk_rows: int | None) -> Path:
    """A job of labeler `direct` in 64 shards."""
    job = {
        "name": "scale",
        "input": {"path": str(input_folder)},
        "labeler": {"name": "direct"},
        "engine": {"name": "fake"},
        "output": output,
        "shards": SHARDS,
        "run": {"chunk_rows": chunk_rows},
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))  # JSON is YAML
    return path


def plan_both(args: argparse.Namespace, scratch: Path) -> None:
    """A row of a table for each size, kind and tree."""
    trees = {"now": HERE} | ({"before": args.before.resolve()} if args.before else {})
    print("| rows | queries | tree | seconds | CPU seconds | peak MB |\n|---|---|---|---|---|---|", flush=True)
    for rows in map(int, args.rows):
        for kind in args.kinds:
            pairs = (args.inputs or scratch) / f"{kind}-{rows}"
            here("write_rows", str(pairs), rows, kind, QUERY_ROWS)
            digests = set()
            for number in range(args.rounds):
                for side in turns(list(trees), number):
                    output = scratch / "out"
                    took = relabel("plan", write_job(scratch, pairs, str(output), None), tree=trees[side])
                    digests.add(hashlib.sha256((output / "plan.json").read_bytes()).hexdigest())
                    shutil.rmtree(output)
                    figures = f"{took.seconds:.1f} | {took.cpu_s:.1f} | {took.peak_mb:.0f}"
                    print(f"| {rows:,} | {kind} | {side} | {figures} |", flush=True)
            assert len(digests) == 1, f"{kind}, {rows:,} rows: the trees write different plans"
            if args.inputs is None:
                shutil.rmtree(pairs)


def receipts_of_all(args: argparse.Namespace, scratch: Path) -> None:
    """A row of a table for each command and number of receipts."""
    from tests import seaweed

    print("| receipts | command | seconds | CPU seconds | peak MB | requests |\n|---|---|---|---|---|---|", flush=True)
    for count in map(int, args.receipts):
        folder = scratch / f"s3-{count}"
        folder.mkdir()
        pairs = scratch / "pairs"
        here("write_rows", str(pairs), count * CHUNK_ROWS, "together", CHUNK_ROWS)
        job = write_job(scratch, pairs, f"s3://{seaweed.BUCKET}/out", CHUNK_ROWS)
        with seaweed.serving(folder) as server:
            _show(count, "plan", server, "plan", job, counts=False)
            here("write_entries", str(job), str(folder / "entries"), variables=server.environment)
            loaded = time.perf_counter()
            _load(server, folder / "entries")
            print(f"(loaded in {time.perf_counter() - loaded:.0f} s)", file=sys.stderr, flush=True)
            if count <= args.most_read:
                _show(count, "status, no manifest", server, "status", job)
            took = here("write_run_manifest", str(job), variables=server.environment)
            _row(count, "the manifest, made and written", took, "")
            _show(count, "status, manifest", server, "status", job)
            _show(count, "run, nothing to do", server, "run", job)
        shutil.rmtree(folder)
        shutil.rmtree(pairs)


def _row(count: int, what: str, took: Took, requests: str) -> None:
    figures = f"{took.seconds:.1f} | {took.cpu_s:.1f} | {took.peak_mb:.0f} | {requests}"
    print(f"| {count:,} | {what} | {figures} |", flush=True)


def _show(count: int, what: str, server: Server, command: str, job: Path, *, counts: bool = True) -> None:
    took = relabel(command, job, variables=server.environment)
    _row(count, what, took, requests_of(server, command, job) if counts else "")


def requests_of(server: Server, command: str, job: Path) -> str:
    """Run a command through a proxy that counts its requests, by kind."""
    from tests import seaweed

    with seaweed.proxying(server) as proxy:
        relabel(command, job, variables=proxy.environment)
        seen = [("list" if "list-type" in one.path else one.method) for one in proxy.seen]
    return ", ".join(f"{seen.count(kind):,} {kind}" for kind in sorted(set(seen)))


def requests_of_runs(args: argparse.Namespace, scratch: Path) -> None:
    """A row of a table for each number of chunks."""
    from tests import seaweed

    print("| chunks | plan | run |\n|---|---|---|", flush=True)
    for count in map(int, args.chunks):
        folder = scratch / f"s3-{count}"
        folder.mkdir()
        pairs = scratch / f"pairs-{count}"
        here("write_rows", str(pairs), count * CHUNK_ROWS, "together", CHUNK_ROWS)
        job = write_job(scratch, pairs, f"s3://{seaweed.BUCKET}/out", CHUNK_ROWS)
        with seaweed.serving(folder) as server:
            print(f"| {count:,} | {requests_of(server, 'plan', job)} | {requests_of(server, 'run', job)} |", flush=True)


def write_entries(job_file: str, path: str) -> None:
    """A receipt for every chunk of a job's plan, as SeaweedFS dumps entries of its file system: each after its length,
    a `FullEntry` of its protocol (folder; name, attributes, content).
    """
    from dataclasses import asdict

    from relabel.jobs.job import load_job, open_run
    from relabel.manifests.records import readable_json

    now = int(time.time())
    run = open_run(load_job(job_file), may_plan=False)
    with Path(path).open("wb") as file:
        for receipt in _receipts(run.plan):
            folder, _, name = f"{run.store.root}/{receipt.id.receipt_name}".removeprefix("s3://").rpartition("/")
            body = readable_json(asdict(receipt))
            attributes = _number(1, len(body)) + _number(2, now) + _number(3, 0o660) + _number(6, now)
            attributes += _field(7, b"application/json") + _field(14, hashlib.md5(body).digest())
            entry = _field(1, name.encode()) + _field(4, attributes) + _field(9, body)
            full = _field(1, f"/buckets/{folder}".encode()) + _field(2, entry)
            file.write(len(full).to_bytes(4, "big") + full)
        file.write(len(full).to_bytes(4, "big") + full)  # once more, since `fs.meta.load` leaves the last one out


def _receipts(plan):  # type: ignore[no-untyped-def]
    from relabel.manifests.plan import FileRef, Receipt

    times = "2026-11-20T08:00:00.000+00:00", "2026-11-20T08:00:01.000+00:00"
    stages = {"score": {"asks": CHUNK_ROWS, "prompt_tokens": 9000, "cached_tokens": 8000, "output_tokens": CHUNK_ROWS}}
    for shard, planned in enumerate(plan.shards):
        for chunk, rows in enumerate(planned.chunks):
            digest = hashlib.sha256(f"{shard} {chunk}".encode()).hexdigest()
            labels = FileRef(f"labels/shard-{shard:05d}/chunk-{chunk:06d}-{digest[:16]}.parquet", rows, digest)
            yield Receipt(
                plan.fingerprint, shard, chunk, 1, rows, labels, None, {"ok": rows}, stages, 1.0, {"family": "fake"},
                f"node-{shard}", 1, *times,
            )  # fmt: skip


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _varint(value >> 7)


def _number(tag: int, value: int) -> bytes:
    return _varint(tag << 3) + _varint(value)


def _field(tag: int, data: bytes) -> bytes:
    return _varint(tag << 3 | 2) + _varint(len(data)) + data


def _load(server: Server, entries: Path) -> None:
    from tests import seaweed

    master, filer = (
        f"127.0.0.1:{server.ports[name]}.{server.ports[f'{name}.grpc']}" for name in ("master.port", "filer.port")
    )
    command = [str(seaweed.weed()), "shell", f"-master={master}", f"-filer={filer}"]
    subprocess.run(command, input=f"fs.meta.load {entries}\nexit\n".encode(), check=True, capture_output=True)
    entries.unlink()


def write_run_manifest(job_file: str) -> None:
    """The manifest over all receipts, as a run writes it, without the proof, which reads label files."""
    from relabel.jobs.job import load_job, open_run
    from relabel.manifests.plan import Fates
    from relabel.manifests.run_folder import digest_of_listing
    from relabel.manifests.run_manifest import MANIFEST_VERSION, RunManifest, write_manifest

    run = open_run(load_job(job_file), may_plan=False)
    listing = digest_of_listing(run.folder.listing())
    labels = [receipt.labels for receipt in _receipts(run.plan)]
    rows = Fates(run.plan.rows, 0, {}).by_kind()
    manifest = RunManifest(
        version=MANIFEST_VERSION,
        fingerprint=run.plan.fingerprint,
        receipts_sha256="0" * 64,
        receipts_listing_sha256=listing,
        rows=rows,
        quarantined_by_status={},
        max_failed_fraction=run.job.spec.run.max_failed_fraction,
        over_limit=False,
        stages={},
        worker_seconds=float(len(labels)),
        engines=[],
        engines_asked=[],
        reused_from=[],
        provenance=run.plan.parts,
        labels=labels,
        quarantine=[],
        answers=[],
    )
    write_manifest(run.store, manifest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    plan = commands.add_parser("plan")
    plan.add_argument("--before", type=Path, help="another tree to take turns with")
    plan.add_argument("--inputs", type=Path, help="where inputs are, or are written and kept")
    plan.add_argument("--rows", type=float, nargs="+", default=[1e6, 1e7, 1e8])
    plan.add_argument("--kinds", nargs="+", default=["together", "scattered"])
    plan.add_argument("--rounds", type=int, default=1)
    plan.set_defaults(measure=plan_both)
    receipts = commands.add_parser("receipts")
    receipts.add_argument("--receipts", type=float, nargs="+", default=[1e4, 1e5, 1e6])
    receipts.add_argument("--most-read", type=int, default=100_000, help="receipts that are read one by one")
    receipts.set_defaults(measure=receipts_of_all)
    requests = commands.add_parser("requests")
    requests.add_argument("--chunks", type=int, nargs="+", default=[256, 512])
    requests.set_defaults(measure=requests_of_runs)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="relabel-scale-") as scratch:
        args.measure(args, Path(scratch))


if __name__ == "__main__":
    main()
