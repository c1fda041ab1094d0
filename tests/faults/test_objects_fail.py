"""Object storage that fails: each request of a run in turn is lost, hangs, is refused or answered in part; nothing is
lost, all is reported.

First in memory, where every call of a small run can be made to fail in every way; then a real server through a proxy,
where the failures are those of connections.
"""

import contextlib
import hashlib
import io
import itertools
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from relabel.jobs.cli import main
from relabel.manifests import objects as retries
from relabel.manifests.errors import InputError, StoreError
from relabel.manifests.files import Storage
from relabel.manifests.inputs import open_dataset
from relabel.manifests.objects import Found, TryAgainError
from relabel.manifests.plan import ShardPlan, load_receipt
from relabel.manifests.rows import read_chunks
from relabel.manifests.specs import InputSpec
from relabel.manifests.store import ObjectStore
from tests import seaweed
from tests.faults.conftest import Places, Sweep, count, some, undisturbed
from tests.faults.forks import Setup
from tests.faults.places import Place
from tests.manifests.memory_objects import MemoryObjects

HOWS = ("lost before", "lost after", "down before", "down after", "refused", "cut")
ALLOWED = {"lost": (0,), "down": (0, 20), "refused": (0, 3), "cut": (0, 3)}
"""Exit codes by what went wrong: one lost answer is asked for again; where the last calls of a run are refused (a
lease that is given back), nothing is missing.
"""
SMALL = 18


class Faulty:
    """Storage of which the nth call goes wrong, or all from the nth on.

    Args:
        how: `lost` (this one call; no answer, `before` it acted or `after`), `down` (from here on), `refused` (from
            here on, for good), `cut` (this one reply holds half of the bytes).
    """

    has_atomic_conditions = True

    def __init__(self, objects: MemoryObjects, nth: int, how: str) -> None:
        self._objects, self._nth, self._how = objects, nth, how
        self.count = 0

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        real = getattr(self._objects, verb)

        def called(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            is_due = self.count == self._nth or (self.count > self._nth and not self._how.startswith(("lost", "cut")))
            if not is_due:
                return real(*arguments, **options)
            if self._how == "refused":
                raise StoreError(f"{arguments[0]}: no permission (by the test)")
            if self._how == "cut":
                found = real(*arguments, **options)
                return found._replace(data=found.data[: len(found.data) // 2]) if isinstance(found, Found) else found
            if self._how.endswith("after"):
                real(*arguments, **options)
            raise TryAgainError(f"{self._how}, by the test")

        return called


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], Place]]:
    """`memory(objects)`: from here on, mem:// leads to these objects; gives the place of a small job there, with its
    input on disk.
    """
    monkeypatch.setattr(retries, "FIRST_PAUSE_S", 0.0)
    place = Place(tmp_path, str(tmp_path))

    def lead(objects: Any) -> Place:
        monkeypatch.setattr(
            "relabel.manifests.store.objects_of",
            lambda url, storage: (objects, url.partition("://")[2].strip("/")),
        )
        place.write(rows=SMALL, output="mem://bucket/out", shards=2, run={"store_retry_s": 0.2})
        return place

    return lead


def inside(*arguments: str | Path) -> tuple[int, str]:
    """A command in this process: its exit code and all that it said."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), pytest.raises(SystemExit) as end:
        main([*map(str, arguments), "--output", "json"])
    return end.value.code, said.getvalue()


def held(objects: MemoryObjects) -> dict[str, bytes]:
    """The committed label and quarantine files, through the receipts."""
    store = ObjectStore(objects, "bucket/out", Storage(), root="mem://bucket/out")
    receipts = [load_receipt(store, name) for name in store.etags("receipts")]
    return {
        file.path: store.read(file.path)
        for one in receipts
        for file in (one.labels, one.quarantine)
        if file is not None
    }


def test_every_storage_call_may_fail_in_every_way_and_the_next_run_ends_whole(
    memory: Callable[[Any], Place], sweep: Sweep
) -> None:
    whole = MemoryObjects()
    counting = Faulty(whole, 0, "lost before")
    place = memory(counting)
    assert inside("run", place.job)[0] == 0
    expected, num_calls = held(whole), counting.count
    assert len(expected) > 4

    def attempt(schedule: tuple[int, str]) -> str | None:
        nth, how = schedule
        objects = MemoryObjects()
        place = memory(Faulty(objects, nth, how))
        code, said = inside("run", place.job)
        if code not in ALLOWED[how.partition(" ")[0]]:
            return f"exit code {code}: {said[-1500:]}"
        if code == 0 and held(objects) != expected:
            return "exit code 0, and the labels are not those of an undisturbed run"
        objects.now_s += 1000.0  # leases that were left are dead
        place = memory(objects)
        code, said = inside("run", place.job)
        if code not in (0, 10):
            return f"the second run: exit code {code}: {said[-1500:]}"
        code, said = inside("verify", place.job)
        if code != 0:
            return f"verify: {said[-1500:]}"
        return None if held(objects) == expected else "other labels than those of an undisturbed run"

    schedules = list(itertools.product(range(1, num_calls + 1), HOWS))
    random.Random(17).shuffle(schedules)  # where time runs out, what was tried lies all over the run
    sweep(some(schedules, short=20), attempt, at_a_time=1, share=0.08)


PROXY_HOWS = ("refuse", "drop", "503", "500", "507", "quota", "cut", "flip", "bare", "hang", "hang after")
READ_TIMEOUT_S = 2


@pytest.mark.s3
def test_every_request_to_a_real_server_may_fail_and_the_run_ends_whole(
    s3_server: seaweed.Server, s3_variables: dict[str, str], tmp_path: Path, sweep: Sweep
) -> None:
    """Connections refused, or dropped after the act, 503 and 500, bodies cut short, and a server that is silent beyond
    the time-out.
    """
    numbers = itertools.count()

    def new_place() -> Place:
        folder = tmp_path / f"place-{next(numbers)}"
        return Place(folder, f"s3://{seaweed.BUCKET}/proxy-{folder.name}", s3_variables)

    expected = undisturbed(new_place())

    def attempt(schedule: tuple[int, str]) -> str | None:
        nth, how = schedule
        place = new_place()
        seen = itertools.count(1)

        def decide(exchange: seaweed.Exchange) -> str:
            if next(seen) != nth:
                return "pass"
            if how == "hang":
                time.sleep(READ_TIMEOUT_S + 2)
                return "refuse"
            if how == "hang after":
                return "drop"
            return how

        place.write(run={"store_retry_s": 60.0})
        spec = yaml.safe_load(place.job.read_text())
        spec["storage_options"] = {"s3": {"config_kwargs": {"read_timeout": READ_TIMEOUT_S}}}
        place.job.write_text(yaml.safe_dump(spec))
        with seaweed.proxying(s3_server, decide) as proxy:
            ended = place.call(variables=proxy.environment)
            if len(proxy.seen) < nth:
                return None  # the run needed fewer requests
        is_full = how in ("507", "quota") and ended.codes == [20]
        if ended.codes not in ([0], [20]) or (is_full and "no space left in the bucket" not in ended.text):
            return f"{how} at request {nth}: {ended}"
        return place.finish(expected)

    with seaweed.proxying(s3_server) as counting:
        place = new_place()
        place.write()
        assert place.call(variables=counting.environment).codes == [0]
        num_requests = len(counting.seen)
    schedules = [(nth, PROXY_HOWS[nth % len(PROXY_HOWS)]) for nth in range(1, num_requests + 1)]
    sweep(some(schedules, short=2), attempt, share=0.08)


# Bytes that change: inputs replaced or overwritten in the middle of a run, flipped bytes in inputs and in committed
# files.


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
    """Of a run with a canary; locks prove nothing."""
    place = local_place()
    place.write(run={"max_tokens": 10_000_000}, canary=4, max_flip_rate=1.0)
    assert place.call("run --shard 1/3", "run", "verify").codes == [0, 0, 0]
    found = sorted(str(path.relative_to(place.output)) for path in Path(place.output).rglob("*.*") if path.is_file())
    names = [name for name in found if not name.startswith("leases/")]
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


# A local disk that fails: each call about the output in turn fails, or is the last before a kill; full disks; one
# turned read-only.


DISK_HOWS = ("error before", "error after", "full before", "kill before", "kill after")
ROOMY = "64m"


def failing(place: Place, nth: int, how: str, log: Path) -> Setup:
    return Setup("tests.faults.children", "fail_file_call", (place.output, nth, how, str(log)))


def test_every_call_about_the_output_may_fail_or_be_the_last_and_the_next_run_ends_whole(
    local_place: Places, sweep: Sweep, tmp_path: Path
) -> None:
    expected = undisturbed(local_place())
    place, log = local_place(), tmp_path / "calls"
    place.write()
    assert place.call(setup=failing(place, 10**9, "error before", log)).codes == [0]
    num_calls = int(log.read_text().removeprefix("calls "))
    assert num_calls > 100

    def attempt(schedule: tuple[int, str]) -> str | None:
        nth, how = schedule
        place, log = local_place(), tmp_path / f"call-{nth}-{how.replace(' ', '-')}"
        place.write()
        ended = place.call(setup=failing(place, nth, how, log))
        where = f"({log.read_text() if log.exists() else 'no call'})"
        was_killed = how.startswith("kill") and ended.code == -signal.SIGKILL
        if not was_killed and ended.codes[:1] not in ([0], [3], [20]):
            return f"{where} {ended}"
        wrong = place.finish(expected)
        return None if wrong is None else f"{where} {wrong}"

    every = list(itertools.product(range(1, num_calls + 1), DISK_HOWS))
    chosen = random.Random(6).sample(every, min(len(every), count(full=300, short=5)))
    sweep(chosen, attempt, share=0.1)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """`disk("size=64k")`: a small tmpfs of its own, where mounting is allowed."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"disk-{len(mounted)}"
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "relabel-test", folder], capture_output=True, check=False
        )
        if done.returncode != 0:
            pytest.skip("a tmpfs can't be mounted here: it takes root")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", folder], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True, capture_output=True)


def test_a_full_disk_ends_the_run_with_exit_code_20_and_room_lets_it_go_on(
    local_place: Places, sweep: Sweep, tmp_path: Path, disk: Callable[[str], Path]
) -> None:
    expected = undisturbed(local_place())
    rng = random.Random(9)
    sizes = sorted(rng.sample(range(2, 60), count(full=30, short=2)))
    inodes = sorted(rng.sample(range(3, 50), count(full=15, short=1)))
    limits = [f"size={4 * pages}k" for pages in sizes] + [f"nr_inodes={number}" for number in inodes]

    def attempt(limit: str) -> str | None:
        folder = disk(limit)
        place = replace(local_place(), disk=folder)
        place.write()
        ended = place.call()
        if ended.codes not in ([20], [0]):
            return str(ended)
        if ended.codes == [20] and "no space left" not in ended.text:
            return f"exit code 20, and not a word of the disk: {ended}"
        remount(folder, f"size={ROOMY},nr_inodes=100000")
        return place.finish(expected)

    sweep(limits, attempt, at_a_time=1)


def test_an_output_that_turns_read_only_ends_the_run_with_exit_code_3_and_loses_nothing(
    local_place: Places, disk: Callable[[str], Path]
) -> None:
    expected = undisturbed(local_place())
    folder = disk(f"size={ROOMY}")
    place = replace(local_place(), disk=folder)
    place.write()
    assert place.call("run --shard 0/3").codes == [0]
    before = sorted((folder / "out" / "receipts").rglob("*.json"))
    remount(folder, "ro")
    ended = place.call("run", "verify", "status")
    assert ended.codes[0] == 3, ended
    assert "an't" in ended.text
    assert ended.codes[2] == 0, ended  # looking needs no writing
    remount(folder, "rw")
    assert sorted((folder / "out" / "receipts").rglob("*.json")) == before
    assert place.finish(expected) is None
