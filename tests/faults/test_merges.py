"""Any order of running, degrading, retrying, redoing, merging and dying on the way: no output ever holds other rows
than it should.

Three outputs, two of them of one job, and three merges of them, one of a merge. A model in memory says what each output
must hold: it sees only commits, knows nothing of folders, and chooses between parts of one run by the rule that
docs/reuse.md states. What an output does hold is read from its JSON and Parquet files here, not by relabel's own
readers; these are then checked against it.
"""

import functools
import io
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from relabel.distill.students.examples import load_labels
from relabel.distill.students.spec import LabelSource
from relabel.jobs.cli import relabel
from relabel.jobs.job import load_job, open_run
from relabel.jobs.merge import merge_outputs
from relabel.jobs.run.progress import Progress
from relabel.jobs.run.results import conclude
from relabel.jobs.run.session import Session
from relabel.jobs.run.stop import Stop
from relabel.manifests import failpoints, objects
from relabel.manifests.errors import InputError, ManifestError
from relabel.manifests.failpoints import FAILPOINTS
from relabel.manifests.files import Storage
from relabel.manifests.labels import LabelRow
from relabel.manifests.run_labels import open_run_labels
from tests.faults.conftest import IS_FULL, IS_LONG, count
from tests.faults.places import pairs
from tests.faults.test_states import FACTS, CrashError, Worker
from tests.manifests.memory_objects import MemoryObjects

SOURCES = {"a": "first", "b": "first", "c": "second"}
"""Outputs, and the job of each."""
TARGETS = {"ab": ("a", "b"), "cba": ("c", "b", "a"), "nested": ("ab", "c")}
AT_A_MERGE = (
    "before_receipt",
    "after_receipt",
    "before_manifest",
    "after_manifest",
    "before_temp_sync",
    "before_temp_rename",
)
"""Where a merge mostly dies; now and then elsewhere, at any failpoint that there is."""
pytestmark = pytest.mark.timeout(0 if IS_LONG else 1800)  # all sequences of a dialect are one test
NUM_SEQUENCES = count(full=40, short=2, long=200)

Commit = tuple[tuple[int, str, int], ...]
"""What one attempt at a chunk left: row id, status and stamp of each row. The stamp says which answer it was."""
Place = tuple[int, int]
"""Shard and chunk."""


class Part(NamedTuple):
    """A chunk of a merge to come: what the target has, what the best source has, and whether the one begins with the
    other.
    """

    held: list[Commit]
    wanted: list[Commit]
    goes_on: bool

    def on_the_way(self) -> list[list[Commit]]:
        """All that a merge that dies may leave."""
        first = len(self.held) if self.goes_on else 1
        return [self.held, *(self.wanted[:length] for length in range(first, len(self.wanted) + 1))]


def left(chain: list[Commit]) -> int:
    """Rows in quarantine."""
    return sum(status != "ok" for _, status, _ in chain[-1])


def states(chains: Iterable[list[Commit]]) -> dict[int, tuple[str, int]]:
    """Each row's state: that of its highest attempt."""
    return {row: (status, stamp) for chain in chains for commit in chain for row, status, stamp in commit}


def moved(chain: list[Commit], rows: int) -> list[Commit]:
    return [tuple((row + rows, status, stamp) for row, status, stamp in commit) for commit in chain]


@functools.lru_cache(4096)
def rows_in(data: bytes) -> list[tuple[int, str, int]]:
    """Row id, status and stamp of each row of a Parquet file."""
    held = pq.ParquetFile(io.BytesIO(data)).read(["row_id", "status", "output_tokens"], use_threads=False).to_pydict()
    return list(zip(*held.values(), strict=True))


def chains_in(tree: Mapping[str, bytes]) -> dict[Place, list[Commit]]:
    """What the receipts of an output amount to, read by hand."""
    found: dict[Place, dict[int, tuple[bool, Commit]]] = {}
    for name, data in tree.items():
        if match := re.fullmatch(r"receipts/shard-(\d+)/chunk-(\d+)(?:\.(\d+))?\.json", name):
            shard, chunk, attempt = (int(number or 1) for number in match.groups())
            held = json.loads(data)
            files = [held[kind]["path"] for kind in ("labels", "quarantine") if held[kind]]
            commit = tuple(sorted(row for path in files for row in rows_in(tree[path])))
            found.setdefault((shard, chunk), {})[attempt] = held["replaces"], commit
    chains: dict[Place, list[Commit]] = {}
    for place, attempts in found.items():
        assert sorted(attempts) == list(range(1, len(attempts) + 1)), f"{place}: attempts {sorted(attempts)}"
        for attempt in sorted(attempts):
            replaces, commit = attempts[attempt]
            chains[place] = [commit] if replaces else [*chains.get(place, []), commit]
    return chains


class Merges(RuleBasedStateMachine):
    """Args: dialect: `strict` (S3) or `local`."""

    dialect = ""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(
            tempfile.mkdtemp(prefix="relabel-merges-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
        )
        self.objects = MemoryObjects()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(objects, "FIRST_PAUSE_S", 0.0)
        self.patch.setattr(failpoints, "hit", self._hit)
        self.patch.setattr("relabel.manifests.store.READERS", 1)
        self.patch.setattr(
            "relabel.manifests.store.objects_of",
            lambda url, storage: (self.objects, url.partition("://")[2]),
        )
        pq.write_table(pairs(13), self.folder / "first.parquet")
        pq.write_table(pairs(7, touched=(2,)), self.folder / "second.parquet")
        self.jobs = {name: self._job(name) for name in SOURCES}
        self.numbers = itertools.count(1)
        self.armed, self.hits_left = "", 0
        self.at_hit: Callable[[], None] | None = None
        self.model: dict[str, dict[Place, list[Commit]]] = {name: {} for name in (*SOURCES, *TARGETS)}
        self.is_settled = dict.fromkeys(self.model, False)
        """Whether the last command over an output ended well: then it must prove."""

    def _job(self, name: str) -> Any:
        spec = {
            "name": "merges",
            "input": {"path": str(self.folder / f"{SOURCES[name]}.parquet")},
            "labeler": {"name": "direct", "grades": 3},
            "engine": {"name": "fake"},
            "output": self._root(name),
            "shards": 2,
            "run": {"chunk_rows": 4, "max_failed_fraction": 1.0},
        }
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(spec))
        return load_job(str(self.folder / f"{name}.yaml"), environment={})

    def _root(self, name: str) -> str:
        return str(self.folder / name) if self.dialect == "local" else f"mem://bucket/{name}"

    # What may happen

    @initialize(bits=st.integers(0, 31), other_bits=st.integers(0, 31), is_merged=st.booleans())
    def begin(self, bits: int, other_bits: int, is_merged: bool) -> None:
        """Every source is run once, so that there is something to merge from the start."""
        for name, stamp, chosen in (("a", 1, bits), ("b", 2, other_bits), ("c", 3, bits)):
            self._work(name, stamp, chosen)
        if is_merged:
            for target in TARGETS:
                self._merge(target)

    @rule(
        name=st.sampled_from(sorted(SOURCES)), stamp=st.integers(1, 4), bits=st.integers(0, 31), one_shard=st.booleans()
    )
    def run_to_the_end(self, name: str, stamp: int, bits: int, one_shard: bool) -> None:
        """What is open is asked, of an engine that degrades as it likes."""
        self._work(name, stamp, bits, shards=[0] if one_shard else [0, 1])

    @rule(name=st.sampled_from(sorted(SOURCES)), stamp=st.integers(1, 4), bits=st.integers(0, 31))
    def retry(self, name: str, stamp: int, bits: int) -> None:
        self._work(name, stamp, bits, is_retry=True)

    @rule(
        name=st.sampled_from(sorted(SOURCES)),
        stamp=st.integers(1, 4),
        bits=st.integers(0, 31),
        is_retry=st.booleans(),
        where=st.sampled_from(FAILPOINTS),
        hits=st.integers(1, 4),
    )
    def die_at_work(self, name: str, stamp: int, bits: int, is_retry: bool, where: str, hits: int) -> None:
        self.armed, self.hits_left = where, hits
        self._work(name, stamp, bits, is_retry=is_retry)

    @rule(
        name=st.sampled_from(sorted((*SOURCES, *TARGETS))),
        which=st.integers(0, 20),
        only_last=st.booleans(),
        runs=st.booleans(),
    )
    def redo(self, name: str, which: int, only_last: bool, runs: bool) -> None:
        """A chunk's receipts are moved away, or that of its last retry; then what wrote them is
        run again, or is not.
        """
        places = sorted(self.model[name])
        if not places:
            return
        place = places[which % len(places)]
        pattern = f"receipts/shard-{place[0]:05d}/chunk-{place[1]:06d}"
        found = sorted(
            (path for path in self._tree(name) if path.startswith(pattern)), key=lambda path: (len(path), path)
        )
        if only_last and name in SOURCES:
            self.model[name][place].pop()
            found = found[-1:]
        if not only_last or name not in SOURCES or not self.model[name][place]:
            del self.model[name][place]
        for path in found:
            self._remove(name, path)
        self.is_settled[name] = False
        if runs and name in SOURCES:
            self._work(name, 1 + which % 4, which)
        elif runs:
            self._merge(name)

    @rule(name=st.sampled_from(sorted(TARGETS)))
    def merge(self, name: str) -> None:
        """A merge, the first or once more."""
        self._merge(name)

    @rule(
        name=st.sampled_from(sorted(TARGETS)), where=st.sampled_from((*AT_A_MERGE, *FAILPOINTS)), hits=st.integers(1, 6)
    )
    def die_at_a_merge(self, name: str, where: str, hits: int) -> None:
        self.armed, self.hits_left = where, hits
        self._merge(name)

    @rule(
        name=st.sampled_from(sorted(TARGETS)),
        source=st.sampled_from(sorted(SOURCES)),
        stamp=st.integers(1, 4),
        bits=st.integers(0, 31),
        which=st.integers(0, 20),
    )
    def merge_what_is_damaged(self, name: str, source: str, stamp: int, bits: int, which: int) -> None:
        """A source goes on, and then a data file of it is not what was committed: a merge that needs it is refused, and
        what was whole stays so, though other files of it would have done.
        """
        before = self._tree(source)
        self._work(source, stamp, bits, is_retry=which > 3)
        files = [path for path in self._tree(source) if path.endswith(".parquet") and not path.startswith("plan")]
        files = [path for path in files if path not in before] or files
        if not files:
            return
        path = files[-1 - which % len(files)]
        data = self._tree(source)[path]
        self._write(source, path, data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        self._merge(name, is_damaged=True)
        self._write(source, path, data)

    @precondition(lambda self: self.dialect != "local")
    @rule(name=st.sampled_from(sorted(TARGETS)), hits=st.integers(1, 4))
    def two_merges_at_once(self, name: str, hits: int) -> None:
        """A merge oversleeps its lease; another one does all the work; the first goes on where it was."""
        if self._parts(name) is None:
            return

        def other() -> None:
            self.objects.now_s += 1000.0
            merge_outputs([self._root(source) for source in TARGETS[name]], self._root(name), Storage())

        self.armed, self.hits_left, self.at_hit = "before_receipt", hits, other
        self._merge(name)

    # How it is done

    def _work(
        self, name: str, stamp: int, bits: int, *, is_retry: bool = False, shards: list[int] | None = None
    ) -> None:
        worker, model = None, self.model[name]
        self.is_settled[name] = False
        self.objects.now_s += 1000.0
        try:
            opened = open_run(self.jobs[name])
            session = Session(opened, shards or [0, 1], is_retry=is_retry, stop=Stop(), progress=Progress())
            worker = Worker(stamp, session)
            session.worker, session.facts = f"w{next(self.numbers)}", FACTS
            for work in session.chunks():
                worker.fill(work, bits)
                commit = tuple(
                    sorted(
                        (row.row_id, row.status if isinstance(row, LabelRow) else "format", stamp)
                        for row in work.rows
                        if row is not None
                    )
                )
                try:
                    assert session.commit(work), "nobody else is there"
                finally:
                    if work.id.receipt_name in self._tree(name):
                        model.setdefault((work.id.shard, work.id.chunk), []).append(commit)
            session.close()
            conclude(session)
            self.is_settled[name] = set(model) == self._places(name)
        except CrashError:
            if worker is not None:
                worker.die()
        finally:
            self.armed = ""
        self._check(name)

    def _merge(self, name: str, *, is_damaged: bool = False) -> None:
        parts, before = self._parts(name), self._tree(name)
        self.objects.now_s += 1000.0
        refusal, is_dead, merged = "", False, None
        try:
            merged = merge_outputs([self._root(source) for source in TARGETS[name]], self._root(name), Storage())
        except CrashError:
            is_dead = True
        except ManifestError as exc:
            refusal = str(exc)
        finally:
            self.armed, self.at_hit = "", None
        now = self._tree(name)
        if refusal:
            assert parts is None or is_damaged, f"refused: {refusal}"
        if refusal and (parts is None or "manifest.json" in before):
            assert committed(now) == committed(before), f"a refused merge left something: {refusal}"
        else:
            assert parts is not None, "it went on without all of its sources"
            if merged is None:
                self._adopt(name, parts)
            else:
                assert merged[1] or committed(now) == committed(before), "it did something and said that it did not"
                self.model[name] = {place: part.wanted for place, part in parts.items()}
        self.is_settled[name] = (self.is_settled[name] and not is_dead) or merged is not None
        self._check(name)

    def _parts(self, name: str) -> dict[Place, Part] | None:
        """What a merge would amount to; None where it must be refused, for a source lacks chunks."""
        groups: dict[str, list[str]] = {}
        for source in TARGETS[name]:
            if "plan.json" not in self._tree(source):
                return None
            groups.setdefault(SOURCES.get(source, source), []).append(source)
        found: dict[Place, Part] = {}
        first_row = first_shard = 0
        for sources in groups.values():
            plan = json.loads(self._tree(sources[0])["plan.json"])
            for shard, chunk in self._places(sources[0]):
                offers = [
                    self.model[source][shard, chunk] for source in sources if (shard, chunk) in self.model[source]
                ]
                if not offers:
                    return None
                place = shard + first_shard, chunk
                held = self.model[name].get(place, [])
                chains = [moved(chain, first_row) for chain in offers]
                wanted = min(chains, key=lambda chain: (left(chain), chain[: len(held)] != held))
                found[place] = Part(held, wanted, wanted[: len(held)] == held)
            first_row += sum(file["rows"] for file in plan["files"])
            first_shard += len(plan["shards"])
        return found

    def _adopt(self, name: str, parts: dict[Place, Part]) -> None:
        """A merge died: each chunk is as it was, as it was to become, or on the way."""
        chains = chains_in(self._tree(name))
        for place, part in parts.items():
            found = chains.get(place, [])
            assert found in part.on_the_way(), f"{name} {place}: {found}, not of {part}"
            self.model[name].pop(place, None)
            if found:
                self.model[name][place] = found

    def _places(self, name: str) -> set[Place]:
        shards = json.loads(self._tree(name)["plan.json"])["shards"]
        return {(number, chunk) for number, shard in enumerate(shards) for chunk in range(len(shard["chunks"]))}

    def _hit(self, name: str) -> None:
        if name != self.armed:
            return
        self.hits_left -= 1
        if self.hits_left:
            return
        self.armed = ""
        if self.at_hit is None:
            raise CrashError(name)
        self.at_hit()

    # What must hold

    def _check(self, name: str) -> None:
        tree = self._tree(name)
        assert chains_in(tree) == self.model[name], f"{name}: other commits than those that were made"
        wanted = states(self.model[name].values())
        try:
            run = open_run_labels(self._root(name), Storage(), allow_partial=False)
        except (InputError, ManifestError):
            assert not self.is_settled[name], f"{name}: not readable after a command that ended well"
            return
        rows = [row for file in (*run.found.labels, *run.found.quarantine) for row in rows_in(tree[file.path])]
        assert len(rows) == len(wanted), f"{name}: rows lost or doubled"
        assert {row: (status, stamp) for row, status, stamp in rows} == wanted, f"{name}: readers get other rows"
        manifest = json.loads(tree["manifest.json"])
        ok = sum(status == "ok" for status, _ in wanted.values())
        assert manifest["rows"] == {"in": len(wanted), "labelled": ok, "reused": 0, "quarantined": len(wanted) - ok}
        assert relabel.main(["verify", self._root(name), "--output", "json"], standalone_mode=False) == 0

    def teardown(self) -> None:
        """However it is: everything is run to its end and merged once more, and each row is there, for those who
        train too.
        """
        try:
            for name, stamp in (("a", 1), ("b", 2), ("c", 3)):
                self._work(name, stamp, 31)
            for target in TARGETS:
                self._merge(target)
                assert not merge_outputs(
                    [self._root(source) for source in TARGETS[target]], self._root(target), Storage()
                )[1]
            for name in self.model:
                assert self.is_settled[name]
                ok = sorted(row for row, (status, _) in states(self.model[name].values()).items() if status == "ok")
                if ok:
                    table = load_labels(LabelSource(path=self._root(name)), Storage(), allow_over_limit=True)
                    assert sorted(pair.row_id for pair in table.pairs) == ok
        finally:
            self.patch.undo()
            shutil.rmtree(self.folder)

    # Files

    def _tree(self, name: str) -> dict[str, bytes]:
        if self.dialect == "local":
            root = self.folder / name
            return {
                str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()
            }
        prefix = f"bucket/{name}/"
        return {
            key.removeprefix(prefix): held[0]
            for key, held in sorted(self.objects.held.items())
            if key.startswith(prefix)
        }

    def _write(self, name: str, path: str, data: bytes) -> None:
        if self.dialect == "local":
            (self.folder / name / path).write_bytes(data)
        else:
            self.objects.put(f"bucket/{name}/{path}", data)

    def _remove(self, name: str, path: str) -> None:
        if self.dialect == "local":
            (self.folder / name / path).unlink()
        else:
            self.objects.delete(f"bucket/{name}/{path}")


def committed(tree: Mapping[str, bytes]) -> dict[str, bytes]:
    """What a reader goes by."""
    return {
        path: data
        for path, data in tree.items()
        if path.startswith("receipts/") or path in ("plan.json", "manifest.json")
    }


def machine(dialect: str) -> Any:
    """The test case of one dialect."""
    kind = type(f"Merges{dialect.title()}", (Merges,), {"dialect": dialect})
    case = kind.TestCase
    case.settings = settings(
        max_examples=NUM_SEQUENCES,
        stateful_step_count=30 if IS_FULL else 12,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
    return case


TestOnS3 = machine("strict")
TestLocal = machine("local")
