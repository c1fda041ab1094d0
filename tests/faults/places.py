"""Where the jobs of these tests lie, on a local disk or on object storage, and what a reader finds there afterwards."""

import hashlib
import io
import json
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from relabel.manifests.files import Storage
from relabel.manifests.store import Store, open_run_store
from tests.faults import forks

ROWS = 60
FAULTY = {"p_garbage": 0.2, "p_truncated": 0.1, "p_refused": 0.05}
SLOW = {**FAULTY, "p_slow": 0.5, "slow_s": 0.01, "capacity": 8}
"""A fake engine that takes its time, so that there are instants to be killed at."""
CALLS_TO_FINISH = 20
_is_writing = threading.Lock()


def pairs(rows: int = ROWS, touched: Sequence[int] = ()) -> pa.Table:
    """Pairs of ten scattered queries, legal duplicates among them; the touched rows have another document."""
    numbers = range(rows)
    return pa.table(
        {
            "query_id": [f"q{row % 10}" for row in numbers],
            "query": [f"red shoes number {row % 10}" for row in numbers],
            "doc_id": [f"d{row % 55}" for row in numbers],
            "document": [
                "Blue." if row in touched else f"Red running shoes, size {row % 7}, for number {row % 10}." * (row % 3)
                for row in numbers
            ],
        }
    )


@dataclass(frozen=True)
class Place:
    """A folder or prefix with one job.

    Args:
        folder: where the job file lies.
        root: folder or URL of the input and the output.
        variables: what a process needs in its environment to get there.
        disk: folder of the output, where it lies apart from the input.
    """

    folder: Path
    root: str
    variables: Mapping[str, str] = field(default_factory=dict)
    disk: Path | None = None

    @property
    def job(self) -> Path:
        return self.folder / "job.yaml"

    @property
    def output(self) -> str:
        return f"{self.disk or self.root}/out"

    @property
    def is_local(self) -> bool:
        return "://" not in self.root

    def write(
        self,
        *,
        args: dict[str, Any] = FAULTY,
        run: dict[str, Any] | None = None,
        rows: int = ROWS,
        touched: Sequence[int] = (),
        **changes: Any,
    ) -> None:
        """Write the input and the job: three shards, chunks of six rows."""
        self.folder.mkdir(parents=True, exist_ok=True)
        sink = io.BytesIO()
        pq.write_table(pairs(rows, touched), sink, row_group_size=16)
        self.put("pairs.parquet", sink.getvalue())
        spec = {
            "name": "faults",
            "input": {"path": f"{self.root}/pairs.parquet"},
            "labeler": {"name": "r3a", "attempts": 2, "samples": 1},
            "engine": {"name": "fake", "seed": 3, "args": args},
            "output": self.output,
            "shards": 3,
            "run": {"chunk_rows": 6, "max_failed_fraction": 1.0, "lease_s": 3.0, **(run or {})},
        }
        for key, value in changes.items():
            held = spec.get(key)
            spec[key] = {**held, **value} if isinstance(held, dict) and isinstance(value, dict) else value
        self.job.write_text(yaml.safe_dump(spec))

    def put(self, name: str, data: bytes) -> None:
        """Write a file next to the output."""
        if self.is_local:
            Path(self.root, name).write_bytes(data)
            return
        with _is_writing:
            open_run_store(self.root, Storage(), single_writer=True).put(name, data)

    def store(self) -> Store:
        return open_run_store(self.output, Storage(), single_writer=True)

    def start(
        self, *verbs: str, setup: forks.Setup | None = None, variables: Mapping[str, str] | None = None
    ) -> forks.Child:
        """Begin commands over the job in one fork."""
        calls = [[*verb.split(), self.job] for verb in verbs or ("run",)]
        calls = [[words[0], words[-1], *words[1:-1], "--output", "json"] for words in calls]
        return forks.start(*calls, variables={**self.variables, **(variables or {})}, setup=setup)

    def call(
        self, *verbs: str, setup: forks.Setup | None = None, variables: Mapping[str, str] | None = None
    ) -> forks.Ended:
        return self.start(*verbs, setup=setup, variables=variables).wait()

    def finish(self, expected: Mapping[str, str], *, verb: str = "run") -> str | None:
        """Run again to the end; what is wrong with the outcome, or None.

        On object storage a killed worker's lease lives for some seconds, during which `retry` finds its shards busy: as
        cron does, we call again.
        """
        for _ in range(CALLS_TO_FINISH):
            ended = self.call(verb, "verify")
            if ended.codes[:1] not in ([20], [75]):
                break
            time.sleep(1.0)
        if len(ended.codes) != 2 or ended.codes[0] not in (0, 10) or ended.codes[1] != 0:
            return f"the second run did not end well: {ended}"
        return self.differs(expected)

    def differs(self, expected: Mapping[str, str]) -> str | None:
        """What sets the committed files apart from those expected, or None."""
        found = self.committed()
        if found == dict(expected):
            return None
        return (
            f"other files: missing {sorted(expected.keys() - found.keys())}, more "
            f"{sorted(found.keys() - expected.keys())}"
        )

    def committed(self) -> dict[str, str]:
        """What a reader sees: every label and quarantine file that the manifest names, with the digest of its bytes."""
        store, manifest = self.store(), self.manifest()
        found = {
            file["path"]: hashlib.sha256(store.read(file["path"])).hexdigest()
            for file in manifest["labels"] + manifest["quarantine"]
        }
        assert found == {file["path"]: file["sha256"] for file in manifest["labels"] + manifest["quarantine"]}
        return found

    def manifest(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.store().read("manifest.json"))
        return found

    def row_ids(self) -> Counter[int]:
        """The multiset of row ids in the committed files of a run without retries."""
        store = self.store()
        return Counter(
            row_id
            for name in self.committed()
            for row_id in pq.read_table(io.BytesIO(store.read(name))).column("row_id").to_pylist()
        )

    def state(self) -> str:
        """How far a run came."""
        store = self.store()

        def is_there(name: str) -> bool:
            try:
                return bool(store.read(name))
            except FileNotFoundError:
                return False

        if is_there("manifest.json"):
            return "finished"
        if store.etags("receipts"):
            return "some chunks committed"
        return "planned" if is_there("plan.json") else "nothing written"
