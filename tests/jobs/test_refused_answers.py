"""Answers of chunks that a stop left unfinished: kept, not asked again, and shown where they were refused; the run that
continues ends with the bytes of one that nobody stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relabel.jobs.run import execution
from relabel.jobs.run.loop import RunLoop
from relabel.manifests.errors import StoreError
from relabel.manifests.store import LocalRunStore

STOP_AFTER = 30
"""Answers: amid the first attempts of several chunks."""
GARBAGE: dict[str, Any] = {
    "labeler": {"name": "umbrela"},
    "engine": {"args": {"p_garbage": 0.6, "batch": 3}},
    "run": {"chunk_rows": 8, "max_failed_fraction": 1.0},
    "shards": 1,
}


def rows_of(folder: Path, output: str) -> dict[str, bytes]:
    """Labels and quarantine, by place and digest."""
    found = sorted(folder.glob(f"{output}/labels/*/*")) + sorted(folder.glob(f"{output}/quarantine/*/*"))
    return {str(path.relative_to(folder / output)): path.read_bytes() for path in found}


@pytest.fixture
def stopped(
    relabel: Callable[..., Any],
    write_job: Callable[..., str],
    write_pairs: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Any]:
    """Starts a run whose every other answer is refused, and stops it amid its chunks as a second Ctrl-C would."""
    write_pairs()
    write_job(GARBAGE)

    def run(*options: str) -> Any:
        class Stopped(RunLoop):
            def _poll(self) -> Any:
                if self.progress.requests >= STOP_AFTER:
                    self.stop.now()
                return super()._poll()

        with monkeypatch.context() as patch:
            patch.setattr(execution, "RunLoop", Stopped)
            return relabel("run", "job.yaml", *options)

    return run


def test_a_stop_keeps_refused_answers_and_says_what_was_open(
    stopped: Callable[..., Any], relabel: Callable[..., Any], folder: Path
) -> None:
    done = stopped()
    assert done.code == 20
    assert " of 3 chunks; " in done.out
    assert " begun here, " in done.out
    assert "relabel ask --refused job.yaml" in done.err
    shown = relabel("ask", "job.yaml", "--refused", "--output", "json").json["refused"]
    assert shown
    assert {one["status"] for one in shown} <= {"format", "truncated", "refused"}
    of_row = relabel("ask", "job.yaml", "--refused", "--row", str(shown[0]["row_id"]))
    assert f"row {shown[0]['row_id']} · {shown[0]['stage']}, attempt 1 · refused as " in of_row.out
    assert relabel("status", "job.yaml").code == 0
    assert list(folder.glob("out/ecom/refused/*/*"))


def test_the_run_that_continues_asks_none_of_them_again_and_ends_as_if_never_stopped(
    stopped: Callable[..., Any], relabel: Callable[..., Any], folder: Path
) -> None:
    first = stopped("--output", "json").json
    shown = relabel("ask", "job.yaml", "--refused", "--output", "json").json["refused"]
    kept = [json.loads(file.read_bytes())["answered"] for file in folder.glob("out/ecom/refused/*/*")]
    second = relabel("run", "job.yaml", "--output", "json").json
    assert second["rows_open"] == 0
    assert list(folder.glob("out/ecom/refused/*/*")) == []
    assert relabel("verify", "out/ecom").code == 0
    alone = relabel("run", "job.yaml", "--set", "output=out/alone", "--output", "json").json
    assert rows_of(folder, "out/ecom") == rows_of(folder, "out/alone")
    saved = sum(map(len, kept))
    assert saved > len(shown) > 0, "answers that were accepted are kept too"
    in_vain = first["this_run"]["in_vain"]["requests"]
    assert in_vain - saved == sum(one["finish"] not in ("stop", "length") for one in shown)
    asked = [one["this_run"]["requests"] for one in (first, second)]
    assert alone["this_run"]["requests"] == sum(asked) + saved


def test_damaged_and_others_files_are_asked_again(
    stopped: Callable[..., Any], relabel: Callable[..., Any], folder: Path
) -> None:
    stopped()
    files = sorted(folder.glob("out/ecom/refused/*/*"))
    files[0].write_bytes(b'{"version": 1, "finger')
    for file in files[1:]:
        file.write_bytes(file.read_bytes().replace(b'"fingerprint": "', b'"fingerprint": "0'))
    foreign = [files[0].parent.parent / "README.txt", files[0].with_name("chunk-one.json"), files[0].with_name("x")]
    for file in foreign:
        file.write_text("somebody's")
    assert relabel("ask", "job.yaml", "--refused", "--output", "json").json["refused"] == []
    assert relabel("run", "job.yaml").code == 0
    assert relabel("verify", "out/ecom").code == 0
    assert all(file.read_text() == "somebody's" for file in foreign)


def test_answers_of_another_engine_are_asked_again(
    stopped: Callable[..., Any], relabel: Callable[..., Any], folder: Path
) -> None:
    stopped()
    for file in folder.glob("out/ecom/refused/*/*"):
        held = json.loads(file.read_bytes())
        assert held["answered"]
        held["engine"]["version"] = "another"
        for answer in held["answered"].values():
            answer["text"] = "of another engine"
        file.write_text(json.dumps(held))
    assert relabel("run", "job.yaml").code == 0
    relabel("run", "job.yaml", "--set", "output=out/alone")
    assert rows_of(folder, "out/ecom") == rows_of(folder, "out/alone")


def test_answers_that_cannot_be_kept_end_no_run(
    stopped: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, relabel: Callable[..., Any]
) -> None:
    put = LocalRunStore.put

    def full(self: LocalRunStore, name: str, data: bytes) -> None:
        if name.startswith("refused/"):
            raise StoreError("no space")
        put(self, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(LocalRunStore, "put", full)
        done = stopped()
    assert done.code == 20
    assert done.err.count("answers can't be kept (no space)") == 1
    assert relabel("run", "job.yaml").code == 0
