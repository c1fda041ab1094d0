"""Twenty million asks over hours while everything that works on them dies, on S3 or on a disk.

    python -m benchmarks.twenty_million FOLDER [--rows 200k] [--place s3|disk] [--every SECONDS]
        [--engine openai|metered]

A real `relabel run` labels the rows with a chat server of its own (`server.py`), or with a model in
each worker's process that reports to this server what it is asked (`metered.py`); eight workers are started under the
command line, as an indexed array, and on a Ray cluster, in turns: when a starter is killed, the next way goes on with
the same output. Every few seconds something dies (`chaos.py`). Afterwards polars reads what is there, with nothing of
relabel, and says of eight promises whether they hold (`evidence.py`). Stopped (Ctrl-C, a reboot) and called again with
the same folder, the show goes on where it was.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from benchmarks.shown_jobs import Place, call, relabel
from benchmarks.twenty_million import evidence
from benchmarks.twenty_million.chaos import DISK_FULL_S, MARK, STORE_DOWN_S, Chaos, processes_of, workers_of
from benchmarks.twenty_million.metered import install
from benchmarks.twenty_million.server import METER

WORKERS = 8
IN_FLIGHT = 16
"""Asks of a worker that are in flight at most."""
DONE = (0, 10)
AGAIN = (20, 75)
"""A scheduler starts such a worker again: it was stopped, or others hold what is left."""
CHUNK_ROWS = 1000
ROWS_OF_A_FILE = 100_000
SAMPLE = 100
"""The undisturbed run labels one row in so many."""
LEASE_S = 15.0
"""A worker on two busy cores may be without the processor for several seconds."""
RAY_TRIES = 5
"""Ray gives up a node that is not there after 30 s, which on a busy machine is too early."""
LOOK_S = 0.1
MEMORY_EVERY_S = 2.0
AGAIN_AFTER_S = 2.0


@dataclass(frozen=True)
class Show:
    """What all parts of the show need."""

    folder: Path
    place: Place
    rows: int
    port: int
    latency_s: float
    engine: str

    def engine_section(self, *, counts: str, latency_s: float) -> dict[str, Any]:
        """The job's engine: a chat server, or one in the worker's own process."""
        if self.engine == "openai":
            args: dict[str, Any] = {"base_url": f"http://127.0.0.1:{self.port}/v1", "served_model": "teacher"}
        else:
            args = {"meter": str(self.folder / counts / METER), "latency_s": latency_s}
        return {"name": self.engine, "args": {**args, "concurrency": IN_FLIGHT}}

    def job(self, name: str, **changes: Any) -> Path:
        """Write a job file: umbrela over this engine."""
        values = {
            "name": "million",
            "input": {"path": f"{self.place.root}/pairs/"},
            "labeler": {"name": "umbrela", "attempts": evidence.ATTEMPTS},
            "engine": self.engine_section(counts=".", latency_s=self.latency_s),
            "output": f"{self.place.root}/out",
            "shards": min(512, max(32, self.rows // 4096)),
            "run": {"lease_s": LEASE_S, "store_retry_s": 120.0, "chunk_rows": CHUNK_ROWS},
            **changes,
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(values))  # JSON is YAML
        return path

    @property
    def environment(self) -> dict[str, str]:
        """Of every process of the show."""
        return {**os.environ, **self.place.variables}


def variables_of(folder: Path) -> dict[str, str]:
    """What every process of the show has."""
    return {
        MARK: str(folder),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "",  # or each of thousands of starts compiles relabel for 3 s of a core
        "PYTHONPATH": os.pathsep.join(map(str, (install(folder), Path.cwd()))),
    }


def write_pairs(show: Show) -> None:
    """The input: ten documents a query, whose numbers stand in their texts."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    filesystem, root = show.place.filesystem()
    filesystem.create_dir(f"{root}/pairs")
    for start in range(0, show.rows, ROWS_OF_A_FILE):
        ids = range(start, min(start + ROWS_OF_A_FILE, show.rows))
        table = {
            "query_id": [f"q{row // 10}" for row in ids],
            "query": [f"red shoes {row // 10}" for row in ids],
            "doc_id": [f"d{row}" for row in ids],
            "document": [f"Red running shoes, size {row % 50}. Number {row}." for row in ids],
        }
        path = f"{root}/pairs/part-{start // ROWS_OF_A_FILE:05d}.parquet"
        pq.write_table(pa.table(table), path, filesystem=filesystem)


# ------------------------------------------------------------------------------
# Ways to start eight workers. Each ends when its workers say that all is done, or when it was killed.


class Started:
    """A way of starting workers, from its start to its end."""

    def __init__(self, show: Show, job: Path) -> None:
        self.show = show
        self.job = job
        self.was_killed = False

    def tick(self) -> bool:
        """Look after the workers. Returns whether this way has ended."""
        raise NotImplementedError

    def kill(self) -> None:
        """End the starter at once, as its node's loss would."""
        raise NotImplementedError

    def log(self, name: str) -> IO[bytes]:
        """A file that takes what a process writes."""
        folder = self.show.folder / "logs"
        folder.mkdir(exist_ok=True)
        return (folder / f"{name}.log").open("ab")

    def start(self, name: str, *words: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start a command of relabel."""
        with self.log(name) as log:
            return subprocess.Popen(
                relabel("run", self.job, *words),
                env={**self.show.environment, **variables},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


class Pool(Started):
    """`relabel run --workers 8`; killed, the next way begins."""

    more: tuple[str, ...] = ()

    def __init__(self, show: Show, job: Path) -> None:
        super().__init__(show, job)
        self._words = ("--workers", str(WORKERS), *self.more)
        self._process = self.start(type(self).__name__, *self._words)
        self._again_s = 0.0

    def tick(self) -> bool:
        code = self._process.poll()
        if code is None:
            return False
        if code in DONE or self.was_killed:
            return True
        if code not in AGAIN:
            raise RuntimeError(f"{' '.join(self._words)} ended with {code}: see {self.show.folder}/logs")
        time.sleep(AGAIN_AFTER_S)
        self._process = self.start(type(self).__name__, *self._words)
        return False

    def kill(self) -> None:
        self.was_killed = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


class Array(Started):
    """An indexed job as Kubernetes has it: eight tasks, each started again until it says that it is done."""

    def __init__(self, show: Show, job: Path) -> None:
        super().__init__(show, job)
        self._done = set[int]()
        self._tasks = {index: self._task(index) for index in range(WORKERS)}

    def _task(self, index: int) -> subprocess.Popen[bytes]:
        return self.start(
            f"array-{index}",
            "--shard",
            "auto",
            JOB_COMPLETION_INDEX=str(index),
            RELABEL_SHARD_COUNT=str(WORKERS),
        )

    def tick(self) -> bool:
        if self.was_killed:
            return True
        for index, task in list(self._tasks.items()):
            code = task.poll()
            if code is None or index in self._done:
                continue
            if code in DONE:
                self._done.add(index)
            elif code in AGAIN or code < 0:
                self._tasks[index] = self._task(index)
            else:
                raise RuntimeError(f"task {index} of the array ended with {code}: see {self.show.folder}/logs")
        return len(self._done) == WORKERS

    def kill(self) -> None:
        self.was_killed = True
        for task in self._tasks.values():
            with contextlib.suppress(ProcessLookupError):
                task.kill()
        for task in self._tasks.values():
            task.wait()


class RayPool(Pool):
    """`relabel run --backend ray` on a cluster of three nodes, which are killed and replaced."""

    def __init__(self, show: Show, job: Path) -> None:
        self.show = show
        os.environ.update(show.environment)  # Ray's nodes are children of this process
        self.cluster = self._new_cluster()
        self.more = ("--backend", "ray", "--address", self.cluster.address)
        super().__init__(show, job)

    def _new_cluster(self) -> Any:
        from ray.cluster_utils import Cluster

        for tries_left in reversed(range(RAY_TRIES)):
            try:
                cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
                for _ in range(2):
                    cluster.add_node(num_cpus=3)
                return cluster
            except Exception:  # Ray has no type of its own for a node that took too long
                self._end_ray()
                if not tries_left:
                    raise
        raise AssertionError("no try")

    def _end_ray(self) -> None:
        for process in processes_of(self.show.folder):
            with contextlib.suppress(psutil.Error):
                if "ray" in " ".join(process.cmdline()):
                    process.kill()

    def tick(self) -> bool:
        has_ended = super().tick()
        if has_ended:
            self.cluster.shutdown()
            self._end_ray()
        return has_ended

    def kill_node(self) -> None:
        """Lose a node, and get another if it comes in time."""
        for node in list(self.cluster.worker_nodes)[:1]:
            self.cluster.remove_node(node, allow_graceful=False)
        with contextlib.suppress(Exception):
            self.cluster.add_node(num_cpus=3)

    def kill_head(self) -> None:
        """Lose the cluster; its user goes too, and the next way begins."""
        self.kill()
        self.cluster.remove_node(self.cluster.head_node, allow_graceful=False)


WAYS: dict[str, type[Started]] = {"pool": Pool, "array": Array, "ray": RayPool}


# ------------------------------------------------------------------------------
# Storage that dies.


@contextlib.contextmanager
def storage(folder: Path, kind: str, room: str) -> Iterator[tuple[Place, dict[str, Any]]]:
    """A bucket of a SeaweedFS or a folder of a small disk, and what of it can be killed."""
    if kind == "s3":
        with _bucket(folder) as server:
            from tests import seaweed

            def kill_store() -> None:
                server.kill()
                time.sleep(STORE_DOWN_S)
                server.start()

            yield Place(f"s3://{seaweed.BUCKET}", server.environment), {"store": kill_store}
        return
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    if not disk.is_mount():
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(disk)], check=True)

    def fill_disk() -> None:
        filler = disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(1 << 20))
                file.flush()
        time.sleep(DISK_FULL_S)
        filler.unlink()

    yield Place(str(disk), {}), {"disk": fill_disk}


@contextlib.contextmanager
def _bucket(folder: Path) -> Iterator[Any]:
    from tests import seaweed

    weed = folder / "weed"
    weed.mkdir(exist_ok=True)
    with seaweed.serving(weed) as server:
        yield server


@contextlib.contextmanager
def model_server(folder: Path, rows: int, latency_s: float, *, counts: str = ".") -> Iterator[int]:
    """The model's stand-in, at a port that is the same in every call of the show: it is part of the job.

    Args:
        counts: a folder in the show's folder, for what the server counts.
    """
    (folder / counts).mkdir(exist_ok=True)
    port_path = folder / "port"
    if not port_path.exists():
        import socket

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port_path.write_text(str(free.getsockname()[1]))
    port = int(port_path.read_text())
    words = [
        sys.executable,
        "-m",
        "benchmarks.twenty_million.server",
        str(port),
        str(folder / counts),
        str(rows),
        str(latency_s),
    ]
    process = subprocess.Popen(words)
    try:
        yield port
    finally:
        process.terminate()
        process.wait()


# ------------------------------------------------------------------------------


def label_the_sample(show: Show) -> None:
    """The undisturbed run over the first rows."""
    if call("run", _sample_job(show), place=show.place, codes=DONE).code == 0:
        print(f"undisturbed sample of {show.rows // SAMPLE:,} rows: labelled", flush=True)


def _sample_job(show: Show) -> Path:
    return show.job(
        "sample",
        input={"path": f"{show.place.root}/pairs/", "limit": show.rows // SAMPLE},
        engine=show.engine_section(counts="sample", latency_s=0.0),
        output=f"{show.place.root}/sample",
        shards=1,
    )


def kill_to_the_end(show: Show, chaos: Chaos, store_kinds: dict[str, Any], ways: list[str]) -> None:
    """Start workers in one way after the other, and kill, until one says that all is done.

    Args:
        ways: names of `WAYS`.
    """
    job = show.job("job")
    turn = sum(event["kind"] in ("starter", "head") for event in chaos.events())
    next_memory_s = 0.0
    chaos.note("begin")
    has_filled_disk = any(event["kind"] == "disk" for event in chaos.events())
    while True:
        way = WAYS[ways[turn % len(ways)]](show, job)
        print(f"{time.strftime('%H:%M:%S')} {type(way).__name__}", flush=True)
        chaos.kill_starter = way.kill
        chaos.others = {name: kill for name, kill in store_kinds.items() if name != "disk"}
        if isinstance(way, RayPool):
            chaos.others |= {"node": way.kill_node, "head": way.kill_head}
        while not way.tick():
            if not has_filled_disk and "disk" in store_kinds and len(chaos.events()) > 10:
                has_filled_disk = True
                chaos.note("disk")
                store_kinds["disk"]()
            chaos.tick()
            if time.monotonic() >= next_memory_s:
                next_memory_s = time.monotonic() + MEMORY_EVERY_S
                note_memory(show)
            time.sleep(LOOK_S)
        turn += 1
        if not way.was_killed:
            return


def note_memory(show: Show) -> None:
    """The largest worker now, and how far the run is by the server's count."""
    counted = show.folder / "answers_by_second.json"
    answers = 0
    with contextlib.suppress(OSError, ValueError):
        answers = sum(json.loads(counted.read_text()).values())
    sizes = []
    for worker in workers_of(show.folder):
        with contextlib.suppress(psutil.Error):
            sizes.append(worker.memory_info().rss / 2**20)
    if sizes:
        with (show.folder / "memory.jsonl").open("a") as file:
            file.write(json.dumps({"answers": answers, "rss_mb": round(max(sizes)), "workers": len(sizes)}) + "\n")


def rows_of(text: str) -> int:
    """`200k` or `20m` as a number."""
    units = {"k": 1_000, "m": 1_000_000}
    last = text[-1].lower()
    return int(text[:-1]) * units[last] if last in units else int(text)


def main() -> None:
    """Run the show, and print what holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="all that the show writes; called again, it goes on")
    parser.add_argument("--rows", type=rows_of, default=200_000)
    parser.add_argument("--place", choices=["s3", "disk"], default="s3")
    parser.add_argument(
        "--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="in which workers are started"
    )
    parser.add_argument(
        "--engine",
        choices=["openai", "metered"],
        default="openai",
        help="a chat server, or a model in each worker's process, which takes no time for HTTP",
    )
    parser.add_argument("--every", type=float, default=5.0, help="seconds between kills")
    parser.add_argument("--latency", type=float, default=0.05, help="seconds that an answer takes")
    parser.add_argument("--room", default="2g", help="of the small disk, with --place disk (needs root)")
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with storage(folder, args.place, args.room) as (bare_place, store_kinds):
        place = bare_place._replace(variables={**variables_of(folder), **bare_place.variables})
        with model_server(folder, args.rows, args.latency, counts="sample") as port:
            show = Show(folder, place, args.rows, port, args.latency, args.engine)
            if not (folder / "written").exists():
                write_pairs(show)
                (folder / "written").touch()
            label_the_sample(show)
        chaos = Chaos(folder, args.every, kill_starter=lambda: None)
        begun = time.time()
        with model_server(folder, args.rows, args.latency):
            try:
                kill_to_the_end(show, chaos, store_kinds, args.ways)
            finally:
                chaos.end()
                for process in processes_of(folder):
                    with contextlib.suppress(psutil.Error):
                        process.kill()
        chaos.note("end", seconds=time.time() - begun)
        verified = call("verify", show.job("job"), place=place, codes=(0, 1, 2, 3, 4, 5))
        report(show, chaos.events(), verified.code)
    if args.place == "disk":
        subprocess.run(["umount", str(folder / "disk")], check=False)
        shutil.rmtree(folder / "disk", ignore_errors=True)


def report(show: Show, events: list[dict[str, Any]], verified: int) -> None:
    """Judge what is left, and print it as a table of Markdown."""
    found = evidence.lines(show.folder, show.place, show.rows, events)
    evidence.write(show.folder, found)
    by_second = json.loads((show.folder / "answers_by_second.json").read_text())
    kills = Counter(event["kind"] for event in events if event["kind"] not in ("begin", "end"))
    listed = ", ".join(f"{count} {kind}" for kind, count in kills.most_common())
    text = [
        f"{show.rows:,} rows in {sum(event.get('seconds', 0) for event in events) / 3600:.2f} h, "
        f"{sum(by_second.values()) / len(by_second):.0f} answers/s; {kills.total()} kills: {listed}. "
        f"`relabel verify` ended with {verified}.",
        "",
        "| promise | holds | shown | evidence |",
        "|---|---|---|---|",
    ]
    for number, line in enumerate(found, start=1):
        holds = "yes" if line.holds else "**no**"
        text.append(f"| {line.name} | {holds} | {line.shown} | `evidence/{number}.json` |")
    (show.folder / "page.md").write_text("\n".join(text) + "\n")
    print("\n".join(text), flush=True)


if __name__ == "__main__":
    main()
