"""Commands end to end with the fake engine: what a run leaves, and the exit code that a scheduler sees."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from relabel.jobs.cli import relabel
from relabel.jobs.output import exit_for
from relabel.jobs.run import results
from relabel.jobs.run.chunks import ChunkWork
from relabel.jobs.run.shards import choose_shards
from relabel.manifests.errors import RelabelError, UsageError
from relabel.manifests.files import FileLock
from relabel.manifests.plan import ChunkId
from relabel.manifests.rows import fitting_chunk_rows, fitting_shards
from relabel.manifests.run_manifest import RunManifest
from relabel.manifests.store import LocalStore, shard_lock_name


def job(
    folder: Path,
    *,
    rows: int = 40,
    queries: int = 8,
    labeler: dict[str, Any] | None = None,
    args: dict[str, Any] | None = None,
    **more: Any,
) -> Path:
    """Write pairs and a job file; returns the job file."""
    numbers = range(rows)
    table = {
        "query_id": [f"q{row * queries // rows}" for row in numbers],
        "query": [f"blue wool socks {row * queries // rows}" for row in numbers],
        "doc_id": [f"d{row}" for row in numbers],
        "document": ["" if row % 9 == 8 else f"Blue socks of wool, pair {row}, warm and soft." for row in numbers],
    }
    pq.write_table(pa.table(table), folder / "pairs.parquet")
    spec: dict[str, Any] = {
        "name": "job",
        "input": {"path": str(folder / "pairs.parquet")},
        "labeler": labeler or {"name": "direct"},
        "engine": {"name": "fake", "seed": 7, "args": args or {}},
        "output": str(folder / "out"),
        "shards": 4,
        "run": {"chunk_rows": 5},
        **more,
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


def call(*arguments: str | Path) -> tuple[int, Any]:
    """Run a command in this process; its exit code and its JSON result."""
    try:
        found = CliRunner().invoke(
            relabel, [*map(str, arguments), "--output", "json"], standalone_mode=False, catch_exceptions=False
        )
    except RelabelError as exc:
        return int(exit_for(exc)), str(exc)
    return int(found.return_value or 0), json.loads(found.stdout)


def labels_of(out: Path) -> list[dict[str, Any]]:
    manifest = json.loads((out / "manifest.json").read_bytes())
    rows = [row for file in manifest["labels"] for row in pq.read_table(out / file["path"]).to_pylist()]
    return sorted(rows, key=lambda row: row["row_id"])


def test_a_job_that_changed_before_its_first_label_says_how_to_plan_again(tmp_path: Path) -> None:
    path = job(tmp_path)
    assert call("plan", path)[0] == 0
    as_planned = path.read_text()
    path.write_text(as_planned.replace("seed: 7", "seed: 9"))
    code, refused = call("plan", path)
    assert code == 3
    assert "Nothing is labelled there yet" in refused
    path.write_text(as_planned)
    assert call("run", path)[0] == 0
    path.write_text(as_planned.replace("seed: 7", "seed: 9"))
    code, refused = call("plan", path)
    assert code == 3
    assert "Nothing is labelled" not in refused


@pytest.mark.parametrize("is_scattered", [False, True])
def test_a_plan_of_changed_settings_is_that_of_their_run_and_writes_nothing(tmp_path: Path, is_scattered: bool) -> None:
    def held() -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()}

    path = job(tmp_path)
    if is_scattered:
        table = pq.read_table(tmp_path / "pairs.parquet")
        pq.write_table(table.take([number * 7 % 40 for number in range(40)]), tmp_path / "pairs.parquet")
    other = ("--set", "engine.seed=9", "--set", "shards=3")
    code, tried = call("plan", path, *other, "--probe")
    assert (code, tried["is_trial"], tried["was_planned_now"]) == (0, True, False)
    assert (len(tried["shard_rows"]), tried["is_scattered"]) == (3, is_scattered)
    assert not (tmp_path / "out").exists()
    code, planned = call("plan", path)
    assert (code, planned["is_trial"], planned["was_planned_now"]) == (0, False, True)
    before = held()
    assert call("plan", path, *other)[1]["fingerprint"] == tried["fingerprint"] != planned["fingerprint"]
    shown = CliRunner().invoke(relabel, ["plan", str(path), *other], standalone_mode=False, catch_exceptions=False)
    assert "tried with --set, nothing is written" in shown.stdout
    assert "belongs to another job" in shown.stderr
    assert "engine.seed: was 7, is 9\n" in shown.stderr
    many = [*other, "--set", "labeler.name=r3a", "--set", "run.chunk_rows=3"]
    shown = CliRunner().invoke(relabel, ["plan", str(path), *many], standalone_mode=False, catch_exceptions=False)
    assert shown.stderr.startswith("note: `run` would refuse: ")
    assert re.search(r"\n  … and \d+ lines more; `relabel run` gives them all\n", shown.stderr)
    assert shown.stderr.count(": was ") == 4
    assert held() == before
    assert call("run", path)[0] == 0
    elsewhere = ("--set", f"output={tmp_path / 'elsewhere'}")
    assert call("run", path, *other, *elsewhere)[0] == 0
    again = call("plan", path, *other, *elsewhere)[1]
    assert (again["fingerprint"], again["chunks_open"], again["is_trial"]) == (tried["fingerprint"], 0, False)


def test_rows_beyond_the_limit_are_counted_in_plan_and_run(tmp_path: Path) -> None:
    path = job(tmp_path)
    spec = yaml.safe_load(path.read_text())
    spec["input"]["limit"] = 30
    path.write_text(yaml.safe_dump(spec))
    for command in ("plan", "run"):
        shown = CliRunner().invoke(relabel, [command, str(path)], standalone_mode=False, catch_exceptions=False)
        assert re.search(r"rows +30 of 40 \(input\.limit\)", shown.stdout), shown.stdout


@pytest.mark.parametrize("labeler", ["direct", "r3a", "graph-grpo"])
def test_a_run_labels_every_row_and_says_so(tmp_path: Path, labeler: str) -> None:
    path = job(tmp_path, labeler={"name": labeler})
    code, result = call("run", path)
    assert code == 0, result
    assert (result["labelled"], result["quarantined"], result["rows_open"]) == (40, 0, 0)
    rows = labels_of(tmp_path / "out")
    assert [row["row_id"] for row in rows] == list(range(40))
    for row in rows:
        assert row["grade"] in range(4 if labeler == "direct" else 3)
        assert sum(row["probs"]) == pytest.approx(1, abs=1e-5)
        assert row["expected_grade"] == pytest.approx(sum(k * p for k, p in enumerate(row["probs"])), abs=1e-5)
        assert ("phi_grade" in row) == (labeler == "graph-grpo")
        assert (row["intent"] is not None) == (labeler == "r3a")
    assert call("verify", path)[0] == 0
    assert call("run", path)[0] == 10
    assert call("run", path, "--done-ok")[0] == 0


def test_a_shard_does_its_own_share_and_the_last_one_finishes_the_run(tmp_path: Path) -> None:
    path = job(tmp_path)
    for shard in range(4):
        assert not (tmp_path / "out" / "manifest.json").exists()
        code, result = call("run", path, "--shard", f"{shard}/4")
        assert (code, result["shards"]) == (0, [shard])
    assert (tmp_path / "out" / "manifest.json").exists()
    assert call("run", path, "--shard", "2/4")[0] == 10
    assert call("verify", path)[0] == 0


def test_a_locked_shard_ends_in_75_and_a_free_one_is_done_meanwhile(tmp_path: Path) -> None:
    path = job(tmp_path)
    call("plan", path)
    lock = LocalStore(tmp_path / "out").lock(shard_lock_name(1), "shard 1")
    lock.acquire()
    assert call("run", path, "--shard", "1/4")[0] == 75
    code, result = call("run", path, "--shard", "0/1")
    assert (code, result["busy_shards"], result["rows_open"]) == (20, [1], 10)
    _, shown = call("status", path)
    assert [shard["state"] for shard in shown["shards"]] == ["done", "running", "done", "done"]
    lock.release()
    assert call("run", path)[0] == 0
    assert call("verify", path)[0] == 0


def test_quarantine_over_the_limit_ends_in_30_until_a_retry_or_a_new_limit(tmp_path: Path) -> None:
    path = job(tmp_path, labeler={"name": "r3a", "attempts": 1}, args={"p_garbage": 0.4})
    code, result = call("run", path)
    assert code == 30
    assert result["over_limit"] is True
    assert result["labelled"] + result["quarantined"] == 40
    assert call("run", path)[0] == 30
    assert call("verify", path)[0] == 0
    assert call("run", path, "--set", "run.max_failed_fraction=1.0")[0] == 0
    assert call("run", path, "--set", "run.max_failed_fraction=1.0")[0] == 10


@pytest.mark.parametrize(("num_pairs", "rows"), [(1, "1 row"), (2, "2 rows")])
def test_advice_after_a_run_counts_the_rows_in_quarantine(
    relabel: Callable[..., Any],
    write_job: Callable[..., str],
    write_pairs: Callable[..., Path],
    pairs: list[dict[str, Any]],
    num_pairs: int,
    rows: str,
) -> None:
    write_pairs(pairs[:num_pairs])
    path = write_job({"engine": {"args": {"p_garbage": 1.0}}, "run": {"max_failed_fraction": 1.0}})
    done = relabel("run", path)
    assert done.code == 0, done
    assert f"\n{rows} in out/ecom/quarantine; to ask again: relabel retry {path}" in done.out + done.err


def test_a_retry_asks_the_quarantined_rows_alone_with_other_seeds(tmp_path: Path) -> None:
    path = job(
        tmp_path,
        labeler={"name": "r3a", "attempts": 1},
        args={"p_garbage": 0.4},
        run={"chunk_rows": 5, "max_failed_fraction": 1.0},
    )
    _, first = call("run", path)
    before = {row["row_id"]: row for row in labels_of(tmp_path / "out")}
    asked = first["quarantined"]
    assert asked > 0
    for _ in range(30):
        code, result = call("retry", path)
        if code == 10:
            break
        assert code == 0, result
        assert result["this_run"]["pairs"] == asked
        asked = result["quarantined"]
        assert call("verify", path)[0] == 0
    after = {row["row_id"]: row for row in labels_of(tmp_path / "out")}
    assert len(after) == 40
    assert all(after[row_id] == row for row_id, row in before.items())


def test_rows_of_queries_that_have_labels_are_not_offered_to_a_retry(tmp_path: Path) -> None:
    """Documents alongside which no other fits are quarantined, and their query has labels of the one answer."""
    path = job(
        tmp_path,
        labeler={"name": "review", "window_tokens": 256},
        run={"chunk_rows": 5, "max_failed_fraction": 1.0},
    )
    table = pq.read_table(tmp_path / "pairs.parquet")
    longer = [f"{text} {row}. " * 12 for row, text in enumerate(table["document"].to_pylist())]
    pq.write_table(table.set_column(3, "document", pa.array(longer)), tmp_path / "pairs.parquet")
    ended = CliRunner().invoke(relabel, ["run", str(path)])
    tally = json.loads((tmp_path / "out" / "manifest.json").read_bytes())["rows"]
    assert (ended.exit_code, tally["labelled"] > 0, tally["quarantined"] > 0) == (0, True, True), ended.output
    said = f"Not asked again: {tally['quarantined']:,} quarantined row"
    assert said in ended.output
    assert "relabel retry" not in ended.output
    again = CliRunner().invoke(relabel, ["retry", str(path)])
    assert all(part in again.output for part in ("nothing to do", said, "labeler.window_tokens")), again.output
    assert call("retry", path)[0] == 10


def test_quarantined_rows_keep_their_text_and_reason(tmp_path: Path) -> None:
    path = job(tmp_path, labeler={"name": "r3a", "attempts": 2}, args={"p_truncated": 0.5, "p_refused": 0.2})
    call("run", path)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_bytes())
    rows = [
        row for file in manifest["quarantine"] for row in pq.read_table(tmp_path / "out" / file["path"]).to_pylist()
    ]
    assert {row["status"] for row in rows} == {"truncated", "refused"}
    for row in rows:
        assert row["reason"]
        assert len(row["tries"]) >= 2
        assert all(one["reason"] and one["text"] is not None for one in row["tries"])
    assert all(any(one["text"] for one in row["tries"]) for row in rows)


def test_a_finished_job_needs_neither_engine_nor_torch(tmp_path: Path) -> None:
    """The second run imports no engine at all: it would fail on an engine that can't start."""
    path = job(tmp_path)
    call("run", path)
    script = (
        "import sys\nfrom relabel.jobs.cli import main\n"
        f"sys.argv = ['relabel', 'run', {str(path)!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    code = end.code\n"
        "print(code, [name for name in ('torch', 'transformers', 'vllm', 'llguidance') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip().endswith("10 []")


def test_a_manifest_written_by_one_that_overslept_its_lock_is_put_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = job(
        tmp_path,
        labeler={"name": "direct", "attempts": 1},
        args={"p_garbage": 1.0},
        run={"chunk_rows": 5, "max_failed_fraction": 1.0, "stop_when_unreadable": False},
    )
    assert call("run", path)[0] == 0
    assert call("retry", path)[0] == 0
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_bytes())
    assert all(".2-" in file["path"] for file in manifest["quarantine"]), "no count changed, and the files did"
    (tmp_path / "out" / "manifest.json").unlink()
    write, calls = results.write_manifest, []

    def oversleep(store: Any, manifest: RunManifest) -> None:
        """Between the check of the receipts and the write, others take the lock over, retry every row, and conclude."""
        calls.append(manifest)
        if len(calls) == 1:
            with monkeypatch.context() as meanwhile:
                meanwhile.setattr(FileLock, "acquire", lambda self, *, waits=False: None)
                assert call("retry", path)[0] == 0
        write(store, manifest)

    monkeypatch.setattr(results, "write_manifest", oversleep)
    monkeypatch.setattr(FileLock, "is_lost", property(lambda self: self.path.name == "manifest.lock"))
    call("run", path)
    assert ".2-" in calls[0].quarantine[0].path, "the first to write knew of no second retry"
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_bytes())
    assert all(".3-" in file["path"] for file in manifest["quarantine"])
    assert call("verify", path)[0] == 0


def test_a_row_whose_context_was_cut_says_so(tmp_path: Path) -> None:
    path = job(tmp_path, labeler={"name": "r3a", "max_context_chars": 10})
    pairs = pq.read_table(tmp_path / "pairs.parquet")
    context = [["short"] if row % 2 else ["short", "much too long to be kept"] for row in range(40)]
    pq.write_table(pairs.append_column("context", pa.array(context)), tmp_path / "pairs.parquet")
    assert call("run", path)[0] == 0
    for row in labels_of(tmp_path / "out"):
        assert ("context_truncated" in row["flags"]) == (row["row_id"] % 2 == 0)


def test_a_format_that_leaves_no_room_for_the_prompt_is_refused_at_the_start(tmp_path: Path) -> None:
    code, message = call("run", job(tmp_path, labeler={"name": "r3a"}), "--set", "engine.max_prompt_tokens=64")
    assert code == 3
    assert "raise engine.max_prompt_tokens" in message


# Workers that are given INDEX/COUNT, by hand or by a scheduler, share all shards out and take none twice.


def slurm(index: int, first: int, last: int, step: int = 1, **more: str) -> dict[str, str]:
    count = (last - first) // step + 1
    names = {"ID": index, "MIN": first, "MAX": last, "STEP": step, "COUNT": count}
    return {**{f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in names.items()}, **more}


@given(count=st.integers(1, 40), num_shards=st.integers(0, 200))
def test_workers_share_out_every_shard_once(count: int, num_shards: int) -> None:
    taken = [choose_shards(f"{index}/{count}", num_shards, {}) for index in range(count)]
    assert sorted(shard for shards in taken for shard in shards) == list(range(num_shards))
    assert max(map(len, taken)) - min(map(len, taken)) <= 1


@given(
    first=st.integers(0, 50),
    step=st.integers(1, 7),
    count=st.integers(1, 20),
    slack=st.integers(0, 6),
    num_shards=st.integers(1, 60),
)
def test_slurm_arrays_share_out_every_shard_once(
    first: int, step: int, count: int, slack: int, num_shards: int
) -> None:
    """Slurm's MAX may lie beyond the last task: 1-10:4 has the tasks 1, 5 and 9."""
    last = first + (count - 1) * step + min(slack, step - 1)
    tasks = range(first, last + 1, step)
    taken = [choose_shards("auto", num_shards, slurm(task, first, last, step)) for task in tasks]
    assert sorted(shard for shards in taken for shard in shards) == list(range(num_shards))


AWS = {"AWS_BATCH_JOB_ARRAY_INDEX": "1", "AWS_BATCH_JOB_ARRAY_SIZE": "3"}


@pytest.mark.parametrize(
    ("choice", "num_shards", "environment", "taken"),
    [
        pytest.param("3/64", 200, {}, [3, 67, 131, 195], id="the shards that leave the index"),
        pytest.param(" 0/1 ", 3, {}, [0, 1, 2], id="blanks"),
        pytest.param(None, 3, slurm(1, 0, 3), [0, 1, 2], id="no choice takes all even under a scheduler"),
        pytest.param("7/8", 4, {}, [], id="a worker beyond the shards takes none"),
        pytest.param("auto", 12, slurm(10, 4, 13, 3), [2, 6, 10], id="slurm counts from the array's first task"),
        pytest.param("auto", 8, AWS, [1, 4, 7], id="aws batch gives index and size"),
        pytest.param("auto", 8, {**AWS, "RELABEL_SHARD_COUNT": "4"}, [1, 5], id="our own variable wins"),
        pytest.param("auto", 8, {"JOB_COMPLETION_INDEX": "3", "RELABEL_SHARD_COUNT": "4"}, [3, 7], id="kubernetes"),
    ],
)
def test_a_choice_takes_its_shards(
    choice: str | None, num_shards: int, environment: dict[str, str], taken: list[int]
) -> None:
    assert choose_shards(choice, num_shards, environment) == taken


def kubernetes(index: str) -> dict[str, str]:
    return {"JOB_COMPLETION_INDEX": index, "RELABEL_SHARD_COUNT": "4"}


@pytest.mark.parametrize(
    ("choice", "environment", "message"),
    [
        pytest.param(
            "auto",
            {**slurm(3, 1, 7), "SLURM_ARRAY_TASK_COUNT": "3"},
            r"1-7:1 has gaps.*0-6, or give INDEX/COUNT",
            id="gaps in an array, whose shards would fall to nobody",
        ),
        ("auto", slurm(3, 4, 8, 1), "auto, here -1/5: the index must be below the count"),
        ("auto", {"SLURM_ARRAY_TASK_ID": "2"}, r"SLURM_ARRAY_TASK_MAX is not set.*--shard 3/64"),
        *(
            ("auto", {name: "3"}, f"{name} gives an index but no count. Set RELABEL_SHARD_COUNT")
            for name in ("JOB_COMPLETION_INDEX", "AWS_BATCH_JOB_ARRAY_INDEX")
        ),
        (
            "auto",
            {"RELABEL_SHARD_COUNT": "4"},
            r"SLURM_ARRAY_TASK_ID, AWS_BATCH_JOB_ARRAY_INDEX, JOB_COMPLETION_INDEX.*Give INDEX/COUNT",
        ),
        *(
            ("auto", kubernetes(junk), re.escape(f"JOB_COMPLETION_INDEX is {junk!r}"))
            for junk in ("", "x", "-1", "1.5", "1/4")
        ),
        ("auto", kubernetes("5"), "auto, here 5/4: the index must be below the count"),
        *(
            (text, {}, r"want INDEX/COUNT, counted from 0 \(the first of four is 0/4\), or auto")
            for text in ("", "3", "3/", "/4", "a/b", "-1/4", "1/-4", "1.0/4", "1/4/2", "1:4", "AUTO", "1 / 4")
        ),
        *((text, {}, f"--shard {text}: the index must be below the count") for text in ("4/4", "9/4")),
        *((text, {}, f"--shard {text}: the index must be below the count") for text in ("0/0", "3/0")),
    ],
)
def test_a_choice_that_names_no_shards_is_refused_with_what_to_give(
    choice: str, environment: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        choose_shards(choice, 8, environment)


# What `relabel run` prints at its end is golden, text and JSON, down to the order of keys.


Relabel = Callable[..., Any]


def test_the_result_of_a_run_is_golden(
    folder: Path,
    relabel: Relabel,
    write_pairs: Callable[..., Path],
    write_job: Callable[..., str],
    golden: Callable[[str, str], None],
) -> None:
    """But for what the clock says."""
    write_pairs()
    job = write_job({})
    found = re.sub(r'(seconds|start_s)": [0-9.e-]+', r'\1": 0.5', relabel("run", job, "--output", "json").out)
    golden("run/result.json", json.dumps(json.loads(found), indent=1) + "\n")
    shutil.rmtree(folder / "out")
    golden("run/result.txt", re.sub(r"in [0-9.]+ s, [0-9.,]+ pairs/s|[0-9.,]+ tokens/s", "…", relabel("run", job).out))


# What is durable is counted, whatever becomes of its neighbours.


def chunk(number: int) -> ChunkWork:
    return ChunkWork(ChunkId(0, number), [])


# Whether a run has work left is asked with one listing, however many shards it has.


def test_a_run_that_lists_once_still_sees_a_receipt_that_went_and_one_that_came(
    write_pairs: Callable[..., Any], write_job: Callable[..., Path], relabel: Callable[..., Any], folder: Path
) -> None:
    write_pairs()
    job = write_job({"run": {"max_failed_fraction": 1.0}, "engine": {"args": {"p_garbage": 0.3}}})
    assert relabel("run", job).code == 0
    manifest = folder / "out/ecom/manifest.json"
    before = manifest.read_bytes()
    assert relabel("retry", job).code == 0
    after = manifest.read_bytes()
    assert after != before
    manifest.write_bytes(before)  # as of a retry that was killed before its manifest: receipts came
    assert relabel("run", job).code == 0
    assert manifest.read_bytes() == after
    next((folder / "out/ecom/receipts").rglob("chunk-000001.json")).rename(folder / "away")
    assert relabel("run", job).code != 10


# How a job that names no size of chunks is cut: by its shards' rows alone, and never again once it was planned.


UNNAMED: dict[str, Any] = {"run": {"chunk_rows": None}, "shards": 1}


@pytest.mark.parametrize(
    ("rows", "size"), [(1, 8), (24, 8), (128, 8), (129, 9), (192, 12), (4080, 255), (4096, 256), (16_384, 256)]
)
def test_a_chunk_is_a_sixteenth_of_a_small_shard(rows: int, size: int) -> None:
    assert fitting_chunk_rows(rows) == size


@pytest.mark.parametrize(("rows", "size"), [(16_385, 257), (62_500, 977), (65_536, 1024), (1_000_000, 1024)])
def test_a_chunk_is_a_64th_of_a_large_shard(rows: int, size: int) -> None:
    assert fitting_chunk_rows(rows) == size


@pytest.mark.parametrize(
    ("rows", "chunk_rows", "together", "scattered"),
    [
        (1, None, 1, 1),
        (127, None, 1, 1),
        (200, None, 3, 3),
        (1024, None, 16, 4),
        (10**9, None, 16, 4),
        (2000, 4, 16, 4),
        (2000, 500, 4, 4),
        (100, 2048, 1, 1),
    ],
)
def test_a_job_that_names_no_shards_has_some_for_other_workers(
    rows: int, chunk_rows: int | None, together: int, scattered: int
) -> None:
    assert fitting_shards(rows, chunk_rows=chunk_rows, is_scattered=False) == together
    assert fitting_shards(rows, chunk_rows=chunk_rows, is_scattered=True) == scattered


@pytest.fixture
def plan(relabel: Callable[..., Any], write_pairs: Callable[..., Path], folder: Path) -> Callable[..., dict[str, Any]]:
    """Plans a job and gives what its plan holds."""
    write_pairs()

    def planned(job: str) -> dict[str, Any]:
        assert relabel("plan", job).code == 0
        held: dict[str, Any] = json.loads((folder / "out/ecom/plan.json").read_bytes())
        return held

    return planned


@pytest.mark.parametrize("size", [256, 5])
def test_an_output_that_was_planned_keeps_its_chunks_and_fingerprint(
    plan: Callable[..., dict[str, Any]],
    relabel: Callable[..., Any],
    write_job: Callable[..., str],
    folder: Path,
    size: int,
) -> None:
    """256 was the default once: such an output goes on with a job file that names no size."""
    was = plan(write_job({"run": {"chunk_rows": size}, "shards": 2}))
    job = write_job({**UNNAMED, "shards": 2})
    assert relabel("run", job, "--shard", "1/2").code == 0
    assert relabel("run", job).code == 0
    assert json.loads((folder / "out/ecom/plan.json").read_bytes()) == was
    assert was["parts"]["cut"] == {"shards": 2, "chunk_rows": size}
    assert len(list(folder.glob("out/ecom/receipts/*/*.json"))) == sum(len(one["chunks"]) for one in was["shards"])
    assert relabel("verify", "out/ecom").code == 0


@pytest.mark.parametrize("shards", [1, 3])
def test_an_output_that_was_planned_keeps_its_shards(
    plan: Callable[..., dict[str, Any]],
    relabel: Callable[..., Any],
    write_job: Callable[..., str],
    folder: Path,
    shards: int,
) -> None:
    """One shard was the default once: such an output goes on with a job file that names no number."""
    was = plan(write_job({"shards": shards}))
    job = write_job({"shards": None})
    assert relabel("run", job).code == 0
    assert json.loads((folder / "out/ecom/plan.json").read_bytes()) == was
    assert len(was["shards"]) == shards


def test_a_task_beyond_the_shards_says_so(
    plan: Callable[..., dict[str, Any]], relabel: Callable[..., Any], write_job: Callable[..., str]
) -> None:
    job = write_job({"shards": None})
    plan(job)
    ended = relabel("run", job, "--shard", "3/64")
    assert "--shard 3/64 has no shard: the plan has 1 of them" in ended.err


def test_another_size_or_number_of_shards_is_another_cut(
    plan: Callable[..., dict[str, Any]], relabel: Callable[..., Any], write_job: Callable[..., str]
) -> None:
    plan(write_job(UNNAMED))
    relabel("run", write_job({**UNNAMED, "run": {"chunk_rows": 8}})).refused(3, "cut.chunk_rows: was null, is 8")
    relabel("run", write_job({**UNNAMED, "shards": 2})).refused(3, "cut.shards: was 1, is 2")
