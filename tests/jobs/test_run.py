"""Commands end to end with the fake engine: what a run leaves, and the exit code that a scheduler sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from click.testing import CliRunner

from relabel.jobs.cli import relabel
from relabel.jobs.exits import exit_for
from relabel.jobs.run import results
from relabel.manifests.errors import RelabelError
from relabel.manifests.files import FileLock
from relabel.manifests.manifest import OwnRunManifest
from relabel.manifests.store import LocalRunStore, shard_lock

DATA = Path(os.environ.get("RELABEL_TEST_DATA", Path(__file__).parents[3] / "shared" / "data")).resolve()


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
    lock = shard_lock(LocalRunStore(tmp_path / "out"), 1)
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
    text = "".join(file.read_text() for file in sorted((tmp_path / "out" / "logs").iterdir()))
    assert text.count("start: ") == text.count(" done\n") == 4
    assert "quarantined as format" in text


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
    said = f"{tally['quarantined']:,} quarantined rows are not asked again"
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


@pytest.mark.full
@pytest.mark.skipif(not DATA.is_dir(), reason=f"no real data at {DATA} (set RELABEL_TEST_DATA)")
@pytest.mark.parametrize(("name", "labeler"), [("crowdflower_ecom", "r3a"), ("llmjudge_dl23", "graph-grpo")])
def test_real_pairs_are_labelled_and_verified(tmp_path: Path, name: str, labeler: str) -> None:
    """llmjudge_dl23 holds a document of 450,000 characters, crowdflower_ecom scattered queries and empty bodies."""
    spec = {
        "name": name,
        "input": {"path": str(DATA / name / "pairs.parquet"), "limit": 3000},
        "labeler": {"name": labeler},
        "engine": {"name": "fake", "seed": 7},
        "output": str(tmp_path / "out"),
        "shards": 4,
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(spec))
    assert call("run", path)[0] == 0
    assert call("verify", path)[1]["labelled"] == 3000


def test_a_manifest_written_by_one_that_overslept_its_lock_is_put_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = job(
        tmp_path,
        labeler={"name": "direct", "attempts": 1},
        args={"p_garbage": 1.0},
        run={"chunk_rows": 5, "max_failed_fraction": 1.0},
    )
    assert call("run", path)[0] == 0
    assert call("retry", path)[0] == 0
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_bytes())
    assert all(".2-" in file["path"] for file in manifest["quarantine"]), "no count changed, and the files did"
    (tmp_path / "out" / "manifest.json").unlink()
    write, calls = results.write_manifest, []

    def oversleep(store: Any, manifest: OwnRunManifest) -> None:
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
