"""`--workers` and `--gpus`: engines that go down are started again, rows to blame are set aside, nothing is lost,
no process is left.
"""

import json
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from relabel.jobs.run import workers as supervisor
from relabel.jobs.run.chunks import ChunkWork
from relabel.jobs.run.loop import MADE_UP
from relabel.jobs.run.workers import choose_gpus, gpu_groups, visible_gpus
from relabel.manifests.asks import Answer, Ask, Message
from relabel.manifests.errors import EngineCrashError, MissingExtraError, UsageError
from relabel.manifests.labels import QuarantineRow
from relabel.manifests.process import usable_cores
from tests.jobs.test_loop import Scripted, TwoStage, chunks_of, good, work_through
from tests.supervise.pool_jobs import command, files, is_worker, relabel, rows, verified, workers_of, write_job


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], dict[str, Any]]:
    """Labels and report of one process and an engine that stays up."""
    job = write_job(tmp_path_factory.mktemp("undisturbed"))
    code, report, _ = relabel(job)
    assert code == 0
    return files(job), report


@pytest.fixture(scope="module")
def undisturbed(alone: tuple[dict[str, str], dict[str, Any]]) -> dict[str, str]:
    return alone[0]


def wait_for(what: Any, *, within_s: float = 20.0) -> Any:
    until = time.monotonic() + within_s
    while not (found := what()):
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.05)
    return found


def ended_at_once(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=10)
    return not alive


def test_three_workers_give_the_labels_and_the_report_of_one_process(
    tmp_path: Path, alone: tuple[dict[str, str], dict[str, Any]]
) -> None:
    job, (labels, report) = write_job(tmp_path), alone
    pool = relabel(job, "--workers", "3")[1]
    assert files(job) == labels
    assert pool.pop("engine_restarts") == 0
    assert pool.keys() == report.keys()
    for same in (
        "exit_code",
        "shards",
        "busy_shards",
        "rows",
        "labelled",
        "quarantined",
        "rows_open",
        "stopped",
        "stages",
        "remarks",
    ):
        assert pool[same] == report[same], same
    for same in ("pairs", "statuses", "requests", "prompt_tokens", "output_tokens", "chunks_committed"):
        assert pool["this_run"][same] == report["this_run"][same], same
    code, again, _ = relabel(job, "--workers", "3")
    assert (code, again["engine_restarts"]) == (10, 0)


def test_two_workers_share_a_job_that_names_no_shards(tmp_path: Path) -> None:
    job = write_job(tmp_path, rows=240, shards=None, p_slow=1.0, slow_s=0.5)
    code, report, said = relabel(job, "--workers", "2")
    assert (code, report["labelled"]) == (0, 240), said
    receipts = [json.loads(path.read_bytes()) for path in (tmp_path / "out/receipts").rglob("*.json")]
    assert len({receipt["worker"] for receipt in receipts}) == 2
    assert verified(job)


def test_two_workers_share_a_job_that_one_engine_could_hold_whole(tmp_path: Path) -> None:
    """The first took every shard within a second, and the second had nothing to do. Each asks its half for longer than
    the other takes to start.
    """
    job = write_job(tmp_path, rows=240, shards=8, p_slow=1.0, slow_s=6.0, capacity=1024)
    code, report, said = relabel(job, "--workers", "2")
    assert (code, report["labelled"]) == (0, 240), said
    receipts = [json.loads(path.read_bytes()) for path in (tmp_path / "out/receipts").rglob("*.json")]
    rows_by_worker = Counter[str]()
    for receipt in receipts:
        rows_by_worker[receipt["worker"]] += receipt["rows"]
    assert sorted(rows_by_worker.values()) == [120, 120]


@pytest.mark.parametrize("crash", ["silence", pytest.param("hang", marks=pytest.mark.full)])
def test_a_row_that_the_engine_never_answers_is_found_too(tmp_path: Path, crash: str) -> None:
    job = write_job(tmp_path, rows=12, poison=(3,), crash=crash, run={"ask_timeout_s": 1.0})
    code, report, said = relabel(job, "--workers", "1")
    assert (code, report["quarantined_by_status"]) == (0, {"engine": 1}), said
    assert "ask_timeout_s" in rows(job, "quarantine")[3]["reason"]
    assert verified(job)


def test_three_crashes_at_the_start_fail_the_run_with_the_last_words(tmp_path: Path) -> None:
    job = write_job(tmp_path, crash="start")
    code, report, said = relabel(job, "--workers", "1")
    assert (code, report["error"]) == (4, "EngineLostError")
    assert "crashed 3 times without a commit" in report["message"]
    assert said.count("it is started again") == 2
    assert "killed by signal 9" in report["message"]
    assert said.count("the engine crashed") == 3


@pytest.mark.full
def test_an_engine_that_hangs_while_it_starts_is_given_up(tmp_path: Path) -> None:
    job = write_job(tmp_path, crash="hang_start", run={"start_timeout_s": 3.0})
    code, report, _ = relabel(job, "--workers", "1")
    assert (code, report["error"]) == (4, "EngineLostError")
    assert "the engine has not started for" in report["message"]
    assert "(run.start_timeout_s is 3)" in report["message"]


def test_an_engine_that_fails_at_anything_blames_no_row(tmp_path: Path) -> None:
    """Each worker ends at the first request, a made-up pair's included: three of them, and no row is isolated."""
    job = write_job(tmp_path, p_crash=1.0)
    code, report, said = relabel(job, "--workers", "1")
    assert (code, report["error"]) == (4, "EngineLostError")
    assert said.count("the engine crashed") == 3
    assert "quarantine as `engine`" not in said
    assert not (tmp_path / "out" / "quarantine").exists()


@pytest.mark.parametrize("failpoint", ["after_labels:3", pytest.param("after_receipt:1", marks=pytest.mark.full)])
def test_a_worker_killed_in_every_commit_still_gets_on_and_loses_nothing(
    tmp_path: Path, undisturbed: dict[str, str], failpoint: str
) -> None:
    """After a receipt it dies before it can report; the supervisor finds the receipt, and counts it as progress."""
    job = write_job(tmp_path)
    code, report, said = relabel(job, "--workers", "1", variables={"RELABEL_FAILPOINT": failpoint})
    assert code == 0, said
    assert report["engine_restarts"] >= (2 if failpoint.endswith(":1") else 1)  # two commits may be under way
    assert files(job) == undisturbed
    assert verified(job)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_a_signal_drains_all_workers_and_leaves_none(
    tmp_path: Path, undisturbed: dict[str, str], number: signal.Signals
) -> None:
    # few chunks are begun at a time, or all would be by the signal
    job = write_job(tmp_path, p_slow=1.0, slow_s=0.2, capacity=1)
    process = subprocess.Popen(
        command(job, "--workers", "2"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    wait_for(lambda: list((tmp_path / "out" / "receipts").rglob("*.json")))
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 4, "two workers and a guard of each"
    sent = time.monotonic()
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert time.monotonic() - sent < 25
    assert process.returncode == 20
    assert json.loads(out)["stopped"] == ("SIGTERM" if number == signal.SIGTERM else "Ctrl-C")
    assert ended_at_once(family)
    write_job(tmp_path)
    assert relabel(job)[0] == 0
    assert files(job) == undisturbed


def test_a_worker_that_is_stopped_alone_is_started_again_and_the_others_go_on(
    tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    """As on a node of Ray that is taken away: its processes get SIGTERM, the run does not."""
    job = write_job(tmp_path, p_slow=1.0, slow_s=0.2, capacity=1)
    process = subprocess.Popen(
        command(job, "--workers", "2"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: list((tmp_path / "out" / "receipts").rglob("*.json")))
    stopped = wait_for(lambda: workers_of(job))[0]
    stopped.send_signal(signal.SIGTERM)
    out, said = process.communicate(timeout=60)
    report = json.loads(out)
    assert (process.returncode, report["stopped"], report["engine_restarts"]) == (0, None, 1), said
    assert "was stopped by SIGTERM; it is started again." in said
    assert files(job) == undisturbed


def test_a_worker_that_is_killed_by_kill_9_is_said_to_be_started_again(
    tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    job = write_job(tmp_path, p_slow=1.0, slow_s=0.2, capacity=1)
    process = subprocess.Popen(
        command(job, "--workers", "2"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: list((tmp_path / "out" / "receipts").rglob("*.json")), within_s=60.0)
    wait_for(lambda: workers_of(job), within_s=60.0)[0].kill()
    out, said = process.communicate(timeout=120)
    assert (process.returncode, json.loads(out)["engine_restarts"]) == (0, 1), said
    assert "the engine crashed (its process was killed by signal 9); it is started again." in said
    assert files(job) == undisturbed


def test_a_run_whose_shards_are_all_held_starts_no_worker(tmp_path: Path) -> None:
    job = write_job(tmp_path, rows=12, p_slow=1.0, slow_s=2.0, capacity=1)
    job.write_text(job.read_text().replace("shards: 3", "shards: 2"))
    first = subprocess.Popen(command(job, "--workers", "2"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: len(list((tmp_path / "out" / "crashes").glob("*.json"))) == 2)
        code, report, _ = relabel(job, "--workers", "2")
        assert (code, report["busy_shards"]) == (75, [0, 1])
        assert "engine_restarts" not in report
    finally:
        first.kill()
        first.wait(60)


@pytest.mark.parametrize("crash", [pytest.param("raise", marks=pytest.mark.full), "hang"])
def test_a_supervisor_killed_by_kill_9_leaves_no_process(
    tmp_path: Path, undisturbed: dict[str, str], crash: str
) -> None:
    """Also where the engines hang and would never read a pipe again."""
    job = write_job(tmp_path, p_slow=1.0, slow_s=5.0, crash=crash, **({"crash_on": "Red"} if crash == "hang" else {}))
    process = subprocess.Popen(
        command(job, "--workers", "2"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    while "makes its answers up" not in (line := process.stderr.readline()) and line:
        pass
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 4
    process.kill()
    process.wait()
    process.stderr.close()
    assert ended_at_once(family)
    write_job(tmp_path)
    assert relabel(job)[0] == 0
    assert files(job) == undisturbed


def test_one_process_alone_whose_engine_never_comes_back_ends_in_20(tmp_path: Path) -> None:
    job = write_job(tmp_path, rows=60, poison=(40,), crash="hang", capacity=4, run={"ask_timeout_s": 1.0})
    done = subprocess.run(command(job), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (20, ""), done.stderr
    assert "has not come back from its work" in done.stderr
    assert list((tmp_path / "out" / "receipts").rglob("*.json"))


@pytest.mark.parametrize(
    ("option", "name", "values"),
    [
        (("--gpus", "all"), "CUDA_VISIBLE_DEVICES", ["3", "5"]),
        (("--workers", "2"), "OMP_NUM_THREADS", [str(max(1, usable_cores() // 2))] * 2),
    ],
)
def test_each_worker_has_its_own_gpu_or_its_share_of_the_cores(
    tmp_path: Path, undisturbed: dict[str, str], option: tuple[str, str], name: str, values: list[str]
) -> None:
    job = write_job(tmp_path, p_slow=1.0, slow_s=0.1, capacity=4)
    environment_of = {}
    given = {key: value for key, value in psutil.Process().environ().items() if key != "OMP_NUM_THREADS"}
    process = subprocess.Popen(
        command(job, *option),
        env={**given, "CUDA_VISIBLE_DEVICES": "3,5"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: list((tmp_path / "out" / "receipts").rglob("*.json")))
    for child in psutil.Process(process.pid).children():
        if is_worker(child):
            environment_of[child.pid] = child.environ()[name]
    assert sorted(environment_of.values()) == values
    assert process.wait(60) == 0
    assert files(job) == undisturbed


# What the run loop does with suspects: they are asked apart, poison rows not at all, and a stalled engine is
# distinguished from a slow one.


class Probed(TwoStage):
    """Has an ask about a made-up pair."""

    def probe(self) -> list[Ask]:
        return [Ask("intent", (Message("user", ("made up",)),), None, 8)]


class Notes:
    """A journal that has suspects in one chunk, and keeps what happens."""

    def __init__(self, apart: list[list[int]], isolated_rows: dict[int, str]) -> None:
        self.apart, self.isolated_rows = apart, isolated_rows
        self.seen: list[Any] = []

    def begins(self, work: ChunkWork) -> None:
        if work.id.chunk == 1:
            work.apart, work.isolated_rows = self.apart, self.isolated_rows

    def tries(self, work: ChunkWork, indexes: list[int]) -> None:
        self.seen.append(("tries", [work.pairs[index].row_id for index in indexes]))

    def ends(self, work: ChunkWork, index: int) -> None:
        self.seen.append(("ends", work.pairs[index].row_id))

    def num_made_up(self, work: ChunkWork) -> int:
        return 1

    def took(self, work: ChunkWork, seconds: float) -> None:
        assert seconds >= 0.0

    def goes_on(self, work: ChunkWork) -> None:
        self.seen.append(("goes on", work.id.chunk))


class Polled(Scripted):
    """Notes which rows' documents it has at each poll."""

    def __init__(self, notes: Notes, **more: Any) -> None:
        super().__init__(good, **more)
        self.notes = notes

    def poll(self) -> list[Answer]:
        parts = [part for one in self.waiting for message in one.ask.messages for part in message.parts]
        self.notes.seen.append(("polls", {int(part.split()[1]) for part in parts if part.startswith("doc ")}))
        return super().poll()


class OncePerQuery(Probed):
    """Rows of a query take their labels from one answer."""

    uses_siblings = True


def watched(
    engine: Scripted, works: list[ChunkWork], journal: Any = None, labeler: Any = None, **more: Any
) -> list[ChunkWork]:
    return work_through(engine, works, journal=journal, labeler=labeler or Probed(None), **more)


def test_suspects_are_asked_with_nothing_else_in_flight_and_isolated_rows_never() -> None:
    works = chunks_of(6, 6, 6, queries=9)
    notes = Notes([[1, 2], [4]], {0: "it did it twice"})
    engine = Polled(notes, capacity=8, batch=3)
    committed = watched(engine, works, notes)
    assert sorted(work.id.chunk for work in committed) == [0, 1, 2]
    written = [note for note in notes.seen if note[0] in ("tries", "goes on")]
    assert written == [("tries", []), ("tries", [7, 8]), ("tries", []), ("tries", [10]), ("goes on", 1)]
    tried = [notes.seen.index(note) for note in notes.seen if note[0] == "tries" and note[1]]
    for start, group in zip(tried, ({7, 8}, {10}), strict=True):
        left = set(group)
        for kind, what in notes.seen[start + 1 :]:
            assert kind != "polls" or what <= group
            left -= {what} if kind == "ends" else set()
            if not left:
                break
    assert notes.seen.index(("commits", 0)) < notes.seen.index(("tries", [])), (
        "what was finished before is committed before anything is risked"
    )
    made_up = [request for request in engine.seen if request.ask.messages[0].parts == ("made up",)]
    assert len(made_up) == 2 * MADE_UP, "others pass before each group under the same conditions"
    row = works[1].rows[0]
    assert isinstance(row, QuarantineRow)
    assert (row.row_id, row.status, row.reason) == (6, "engine", "it did it twice")
    assert not any(
        "doc 6" in part for request in engine.seen for message in request.ask.messages for part in message.parts
    )
    assert all(
        row is not None and row.status == "ok" for work in works for row in work.rows if row is not works[1].rows[0]
    )


def test_an_isolated_row_takes_its_query_along_where_all_its_rows_would_be_asked_the_very_same() -> None:
    works = chunks_of(6, 6, queries=4)
    engine = Scripted(good)
    (whole, found) = watched(engine, works, Notes([[2], [4]], {1: "it did it twice"}), labeler=OncePerQuery(None))
    assert [row.status for row in whole.rows if row is not None] == ["ok"] * 6
    assert [row.status for row in found.rows if row is not None] == ["engine"] * 3 + ["ok"] * 3
    (reason,) = {row.reason for row in found.rows if isinstance(row, QuarantineRow)}
    assert reason.startswith("row 7: it did it twice. One ask is for rows 6, 7, 8 of this query")
    assert not any(request.ask.shared_by == "q2" for request in engine.seen)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time it is, so that a busy machine is no slow engine."""
    now = [0.0]
    monkeypatch.setattr("relabel.jobs.run.loop.time.perf_counter", lambda: now[0])
    return now


class Slow(Scripted):
    """Each poll takes a while by a clock; requests for one document are never answered."""

    def __init__(self, clock: list[float], *, poll_s: float, never: str = "\0", capacity: int = 4) -> None:
        super().__init__(good, capacity)
        self.clock, self.poll_s, self.never = clock, poll_s, never

    def poll(self) -> list[Answer]:
        self.clock[0] += self.poll_s
        kept = [
            request
            for request in self.waiting
            if any(self.never in part for m in request.ask.messages for part in m.parts)
        ]
        self.waiting = [request for request in self.waiting if request not in kept]
        answers = super().poll()
        self.waiting += kept
        return answers


def test_a_request_that_others_overtake_for_too_long_is_a_crash(clock: list[float]) -> None:
    with pytest.raises(EngineCrashError, match=r"not answered a request of stage 'verdict' .*ask_timeout_s is 0\.2"):
        watched(Slow(clock, poll_s=0.01, never="doc 3"), chunks_of(200, queries=40), ask_timeout_s=0.2)


def test_a_slow_engine_that_answers_each_request_in_time_is_none(clock: list[float]) -> None:
    assert len(watched(Slow(clock, poll_s=0.05, capacity=2), chunks_of(20), ask_timeout_s=0.4)) == 1


def test_time_that_the_process_was_stopped_is_no_silence(clock: list[float]) -> None:
    """A worker that is paused for an hour in the middle of a poll goes on where it was."""

    class Paused(Scripted):
        def poll(self) -> list[Answer]:
            clock[0] += 3600.0 if len(self.seen) == 9 else 0.5
            return super().poll()

    assert len(watched(Paused(good), chunks_of(20), ask_timeout_s=60.0)) == 1


# GPUs are found and given out without torch.


@pytest.mark.parametrize(
    ("said", "names"),
    [("0,1", ["0", "1"]), ("", []), ("GPU-aa,GPU-bb", ["GPU-aa", "GPU-bb"]), ("3, 1", ["3", "1"]), ("2,-1,0", ["2"])],
)
def test_what_a_scheduler_made_visible_is_what_counts(said: str, names: list[str]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": said}) == names


def test_the_driver_is_asked_first_then_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(supervisor, "_count_by_driver", lambda: 2)
    assert visible_gpus({}) == ["0", "1"]
    monkeypatch.setattr(supervisor, "_count_by_driver", lambda: 0)
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    monkeypatch.setattr(supervisor, "DRIVER_FOLDER", tmp_path / "gpus")
    assert visible_gpus({}) == ["0"]


def test_all_and_numbers_count_within_the_visible_ones() -> None:
    assert choose_gpus("all", ["4", "5"]) == ["4", "5"]
    assert choose_gpus("1", ["4", "5"]) == ["5"]
    for text, error in (("0,0", UsageError), ("two", UsageError), ("2", MissingExtraError), ("-1", MissingExtraError)):
        with pytest.raises(error, match="--gpus"):
            choose_gpus(text, ["4", "5"])
    with pytest.raises(MissingExtraError, match="--workers N"):
        choose_gpus("all", [])
    for slip in (",", "0,0", "two"):  # a slip is reported as one where there is no GPU, too
        with pytest.raises(UsageError, match="--gpus"):
            choose_gpus(slip, [])


def test_an_engine_that_spreads_over_two_gets_two_and_a_spare_one_stays_idle() -> None:
    assert gpu_groups(["0", "1", "2", "3", "4"], 2) == [["0", "1"], ["2", "3"]]
    with pytest.raises(MissingExtraError, match="tensor_parallel_size is 4"):
        gpu_groups(["0", "1"], 4)
