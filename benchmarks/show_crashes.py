"""A job of 100,000 pairs on S3 whose workers are killed all the time: nothing is lost, nothing is there twice, the
labels are the same.

    # four workers, one killed with -9 every few seconds
    python -m benchmarks.show_crashes PAIRS.parquet [PAIRS.parquet …]
    # three nodes of a Ray cluster, one killed now and then
    python -m benchmarks.show_crashes PAIRS.parquet … --ray

The pairs are the rows of the given files over and over. Input and output lie in a SeaweedFS that this script starts;
the fake engine answers slowly enough that the job takes minutes, and badly enough that some rows end in quarantine.
Each worker is a `relabel run` like every other: a killed one is started again at once, one that ends with 20 or 75
likewise, as the next tick of cron would be, and one that ends with 0 or 10 is done. Afterwards `relabel verify` must
find nothing, and pyarrow alone reads what the manifest lists: each row id once, and labels and quarantine equal to
those of an undisturbed run on the local disk, by value and by the digests of the files.
"""

import argparse
import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, Any

from benchmarks.shown_jobs import (
    Place,
    call,
    is_each_row_there_once,
    label_files,
    read_back,
    read_committed,
    receipts,
    relabel,
    repeated_pairs,
    seaweed_place,
    write_parts,
)

ANSWERS = {"p_garbage": 0.02, "p_truncated": 0.01, "p_refused": 0.005}
"""Chances of answers that do not read; asked twice, so that about one row in a thousand is quarantined."""
LATEST_S = 1500.0


def write_job(folder: Path, place: Place, *, args: dict[str, Any], shards: int) -> Path:
    """The job file: r3a over `<place>/pairs` into `<place>/out`."""
    job = {
        "name": "show",
        "input": {
            "path": f"{place.root}/pairs/",
            "columns": {"query_id": "query_id", "query": "query", "doc_id": "doc_id", "document": ["title", "body"]},
        },
        "labeler": {"name": "r3a", "attempts": 2},
        "engine": {"name": "fake", "seed": 11, "args": {**ANSWERS, **args}},
        "output": f"{place.root}/out",
        "shards": shards,
        "run": {"chunk_rows": 256, "lease_s": 10.0},
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))  # JSON is YAML
    return path


class Worker:
    """One place for a `relabel run`, killed and started again."""

    def __init__(self, job: Path, place: Place, folder: Path, name: str) -> None:
        self.name = name
        self._job, self._place, self._folder = job, place, folder
        self.kills = 0
        self.lost = 0
        self.codes: Counter[int] = Counter()
        self.is_done = False
        self._files: list[IO[bytes]]
        self.start()

    def start(self) -> None:
        """Begin another life."""
        self._files = [tempfile.TemporaryFile(dir=self._folder) for _ in range(2)]  # noqa: SIM115 (closed when it has ended)
        out, errors = self._files
        self.process = subprocess.Popen(
            relabel("run", self._job),
            env={**os.environ, **self._place.variables},
            stdout=out,
            stderr=errors,
            start_new_session=True,
        )

    def kill(self) -> None:
        """kill -9, unless it has just ended by itself."""
        if self.process.poll() is None:
            self.process.kill()
            self.kills += 1

    def check(self) -> None:
        """Take note of an end, and start it again unless it says that all is done.

        Raises:
            RuntimeError: it ended with a code that no worker should end with.
        """
        code = self.process.poll()
        if code is None or self.is_done:
            return
        self.codes[code] += 1
        out, errors = (read_back(file) for file in self._files)
        for file in self._files:
            file.close()
        if code not in (0, 10, 20, 75, -9):
            raise RuntimeError(f"worker {self.name} ended with {code}: {errors[-3000:]}")
        if out:
            self.lost += json.loads(out)["this_run"]["chunks_lost"]
        self.is_done = code in (0, 10)
        if not self.is_done:
            self.start()


def kill_workers_to_the_end(job: Path, place: Place, folder: Path, *, workers: int, every_s: float) -> dict[str, Any]:
    """Four workers, of which the next in turn is killed every few seconds, until all say that the run is complete."""
    crew = [Worker(job, place, folder, f"w{number}") for number in range(workers)]
    started = time.perf_counter()
    next_kill_s, turn = started + every_s, 0
    try:
        while not all(worker.is_done for worker in crew):
            now = time.perf_counter()
            if now - started > LATEST_S:
                raise RuntimeError(f"not done after {LATEST_S:.0f} s")
            if now >= next_kill_s:
                next_kill_s = now + every_s
                crew[turn % workers].kill()
                turn += 1
            for worker in crew:
                worker.check()
            time.sleep(0.05)
    finally:
        for worker in crew:
            if worker.process.poll() is None:
                worker.process.kill()
            worker.process.wait()
    return {
        "seconds": round(time.perf_counter() - started, 1),
        "kills": sum(worker.kills for worker in crew),
        "exit_codes": dict(sum((worker.codes for worker in crew), Counter())),
        "lost_races_of_survivors": sum(worker.lost for worker in crew),
    }


@contextlib.contextmanager
def ray_cluster(*, gpus: int = 1) -> Iterator[Any]:
    """Three nodes on this machine, each with a pretended GPU; no process of theirs is left on leaving."""
    import psutil
    from ray.cluster_utils import Cluster

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": gpus, "include_dashboard": False})
    try:
        for _ in range(2):
            made.add_node(num_cpus=2, num_gpus=gpus)
        yield made
    finally:
        made.shutdown()
        left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
        for child in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(left, timeout=10)


def kill_nodes_to_the_end(job: Path, place: Place, *, every_s: float) -> dict[str, Any]:
    """One `relabel run --backend ray` on a cluster whose nodes die and are replaced."""
    lost = 0
    with ray_cluster() as cluster, ThreadPoolExecutor(1) as pool:
        started = time.perf_counter()
        running = pool.submit(call, "run", job, "--backend", "ray", "--address", cluster.address, place=place)
        while not wait([running], timeout=every_s).done:
            cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
            lost += 1
            if not wait([running], timeout=every_s / 4).done:
                cluster.add_node(num_cpus=2, num_gpus=1)  # from the main thread alone, says Ray
        ended = running.result()
        seconds = round(time.perf_counter() - started, 1)
    did = ended.said["this_run"]
    return {
        "seconds": seconds,
        "nodes_killed": lost,
        "exit_code": ended.code,
        "engine_restarts": ended.said["engine_restarts"],
        "lost_races_counted": did["chunks_lost"],
    }


def judge(job: Path, place: Place, undisturbed: Place, rows: int) -> dict[str, Any]:
    """What is left: relabel's own proof, then pyarrow's."""
    verify = call("verify", job, place=place)
    again = call("run", job, place=place, codes=(10,))
    found, wanted = read_committed(place, "out"), read_committed(undisturbed, "out")
    proofs = receipts(place, "out")
    return {
        "verify": verify.code,
        "run_again": f"exit {again.code} in {again.seconds:.2f} s",
        "chunks_committed": len(proofs),
        "receipts_by_epoch": dict(sorted(Counter(proof["epoch"] for proof in proofs).items())),
        "workers_that_committed": len({proof["worker"] for proof in proofs}),
        "label_files_of_no_receipt": label_files(place, "out") - sum(proof["labels"] is not None for proof in proofs),
        "labelled": found.labels.num_rows,
        "quarantined": found.quarantine.num_rows,
        "each_row_once": is_each_row_there_once(found, rows),
        "labels_equal": found.labels.equals(wanted.labels),
        "quarantine_equal": found.quarantine.equals(wanted.quarantine),
        "files_equal": found.files == wanted.files,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "pairs", nargs="+", type=Path, help="Parquet files with query_id, query, doc_id, and title or body"
    )
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--every", type=float, help="seconds between kills; 4, or 25 with --ray")
    parser.add_argument("--ray", action="store_true")
    parser.add_argument(
        "--together", action="store_true", help="sort the pairs by query, so that a killed worker reads little again"
    )
    parser.add_argument("--latency", type=float, default=0.1, help="seconds that the fake engine takes for 16 answers")
    args = parser.parse_args()
    slow = {"latency_s": args.latency, "batch": 16, "capacity": 256}
    with tempfile.TemporaryDirectory(prefix="relabel-show-") as scratch:
        folder = Path(scratch)
        table = repeated_pairs(args.pairs, args.rows)
        if args.together:
            table = table.sort_by("query_id")
        local = Place(str(folder / "local"), {})
        (folder / "local").mkdir()
        write_parts(table, local, "pairs", parts=10)
        whole = call("run", write_job(folder / "local", local, args={}, shards=args.shards), place=local)
        print(
            f"{args.rows} pairs; undisturbed on the local disk: exit {whole.code} in {whole.seconds:.1f} s", flush=True
        )
        with seaweed_place(folder / "weed") as s3:
            write_parts(table, s3, "pairs", parts=10)
            del table
            job = write_job(folder, s3, args=slow, shards=args.shards)
            plan = call("plan", job, place=s3)
            facts = ("files", "shards", "chunks", "queries", "is_scattered", "read_ratio")
            shape = {name: plan.said[name] for name in facts}
            print(f"plan on S3: {plan.seconds:.1f} s, {shape}", flush=True)
            if args.ray:
                did = kill_nodes_to_the_end(job, s3, every_s=args.every or 25.0)
            else:
                did = kill_workers_to_the_end(job, s3, folder, workers=args.workers, every_s=args.every or 4.0)
            print(json.dumps(did, indent=2), flush=True)
            print(json.dumps(judge(job, s3, local, args.rows), indent=2), flush=True)


if __name__ == "__main__":
    main()
