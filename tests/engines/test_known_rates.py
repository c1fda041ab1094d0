"""First estimates: how fast a model answers here, and how long its answers are, is known from its last run or a probe,
or is reported as unknown. Nothing but estimates depends on that.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.jobs.cli import main
from tests.labelers.driving import caps


class Home:
    """Jobs in one folder, with a cache of their own."""

    def __init__(self, folder: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.model, self.capsys = folder, model, capsys
        self.cache = folder / "cache"

    def job(self, name: str, first: int, *, labeler: str = "umbrela", **engine: Any) -> Path:
        """A job over 24 rows from the first on, four to a query."""
        rows = [
            {
                "query_id": f"q{n // 4}",
                "query": f"red shoe {n // 4}",
                "doc_id": f"d{n}",
                "document": f"a shoe of kind {n} " * (1 + n % 5),
            }
            for n in range(first, first + 24)
        ]
        pq.write_table(pa.Table.from_pylist(rows), self.folder / f"{name}.parquet")
        args = {"cache_dir": str(self.cache), "device": "cpu", "dtype": "float32", "num_threads": 1}
        spec = {
            "name": name,
            "input": {"path": str(self.folder / f"{name}.parquet")},
            "labeler": {"name": labeler, **caps(labeler, think=6, text=4)},
            "engine": {"name": "transformers", "model": str(self.model), "args": args, **engine},
            "output": str(self.folder / "out" / name),
            "run": {"max_failed_fraction": 1.0},
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(spec))
        return path

    def call(self, *arguments: str | Path, code: int = 0) -> dict[str, Any]:
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([*map(str, arguments), "--output", "json"])
        said = self.capsys.readouterr()
        assert end.value.code == code, said.err
        found: dict[str, Any] = json.loads(said.out) if said.out else {"error": said.err}
        return found

    def estimate(self, path: Path, *more: str) -> dict[str, Any]:
        found: dict[str, Any] = self.call("plan", path, *more)["estimate"]
        return found

    @property
    def kept(self) -> list[Path]:
        return sorted((self.cache / "rates").glob("*"))


@pytest.fixture
def home(tmp_path: Path, model_dir: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> Home:
    return Home(tmp_path, model_dir(), capsys)


def width(interval: list[float]) -> float:
    return interval[2] / interval[0]


def test_the_next_plan_with_a_model_and_labeler_knows_the_rate_of_their_last_run(home: Home) -> None:
    first = home.job("first", 0)
    before = home.estimate(first)
    assert before["seconds"] is None
    assert before["basis"]["seconds"].startswith("no run of this model on this device is known")
    ran = home.call("run", first)
    (kept,) = home.kept
    held = json.loads(kept.read_bytes())
    for stage, seen in held["stages"].items():
        came = ran["stages"][stage]
        assert {
            "asks": seen["answers"],
            **{name: seen[name] for name in ("prompt_tokens", "cached_tokens", "output_tokens")},
        } == came
    assert (held["source"], held["rows"]) == ("run", 24)
    second = home.job("second", 100)
    after = home.estimate(second)
    assert after["basis"]["seconds"].startswith("this model's last run on this device (24 rows, 2")
    assert after["basis"]["output_tokens"] == after["basis"]["seconds"]
    assert after["seconds"][0] > 0
    for name in ("prompt_tokens", "output_tokens", "seconds"):
        assert width(after[name]) < 4
    came = home.call("run", second)["stages"]
    for name in ("asks", "prompt_tokens", "output_tokens"):
        low, _, high = after[name]
        assert low <= sum(stage[name] for stage in came.values()) <= high
    assert home.estimate(home.job("third", 200, labeler="r1"))["seconds"] is None


def test_the_plan_is_the_same_whatever_the_cache_holds(home: Home) -> None:
    home.call("run", home.job("first", 0))
    known, path = {}, home.job("second", 100)
    for cache in ("cache", "other"):
        home.cache = home.folder / cache
        path = home.job("second", 100)
        known[cache] = home.estimate(path, "--set", f"output={home.folder}/out/{cache}")["seconds"] is not None
    assert known == {"cache": True, "other": False}
    plans = {(home.folder / "out" / cache / "plan.json").read_bytes() for cache in known}
    assert len(plans) == 1


def test_a_probe_measures_and_leaves_the_output_with_a_plan_alone(home: Home) -> None:
    path = home.job("probed", 0)
    found = home.estimate(path, "--probe")
    assert found["basis"]["seconds"].startswith("a probe (16 rows, 2")
    assert found["seconds"][0] > 0
    there = {one.name for one in (home.folder / "out/probed").rglob("*") if one.suffix == ".json"}
    assert there == {"inputs.json", "plan.json"}
    assert home.estimate(path)["seconds"] == found["seconds"]
    home.call("run", path)
    again = home.call("plan", path, "--probe")["estimate"]
    assert again["seconds"] == [0, 0, 0]


def test_the_rate_of_a_run_outlasts_later_probes_unless_they_use_another_precision(home: Home) -> None:
    """A probe of 16 rows once replaced the rate of a run of millions."""
    args = {"cache_dir": str(home.cache), "device": "cpu", "num_threads": 1}
    home.call("run", home.job("first", 0, args=args))
    (kept,) = home.kept
    of_run = kept.read_bytes()
    path = home.job("second", 100, args=args)
    known = home.estimate(path)["seconds"]
    assert home.estimate(path, "--probe")["basis"]["seconds"].startswith("a probe (16 rows, 2")
    assert kept.read_bytes() == of_run
    found = home.estimate(path)
    assert found["seconds"] == known
    when = json.loads(of_run)["measured"][:16].replace("T", " ")
    assert found["basis"]["seconds"] == f"this model's last run on this device (24 rows, {when} UTC)"
    dtype = json.loads(of_run)["dtype"]
    other = {"float32": "bfloat16", "bfloat16": "float32"}[dtype]
    kept.write_text(json.dumps({**json.loads(of_run), "dtype": other}))
    (home.folder / "out/second/engine.json").write_text(json.dumps({"version": 1, "resolved": {"dtype": dtype}}))
    probed = home.estimate(path, "--probe")
    assert home.estimate(path)["seconds"] == probed["seconds"]
    home.call("run", path)
    assert json.loads(kept.read_bytes())["source"] == "run"


def test_a_probe_asks_whole_queries_where_the_labeler_sees_them(home: Home) -> None:
    found = home.estimate(home.job("probed", 0, labeler="review"), "--probe")
    assert found["basis"]["seconds"].startswith("a probe (")
    assert json.loads(home.kept[0].read_bytes())["rows"] % 4 == 0


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 1}'])
def test_rates_that_cannot_be_used_are_ignored_with_a_remark(home: Home, text: str) -> None:
    home.call("run", home.job("first", 0))
    (kept,) = home.kept
    kept.write_text(text)
    found = home.estimate(home.job("second", 100))
    assert found["seconds"] is None
    assert f"{kept} can't be used" in found["basis"]["seconds"]


def test_an_output_in_another_precision_knows_no_rates(home: Home) -> None:
    args = {"cache_dir": str(home.cache), "device": "cpu", "num_threads": 1}
    home.call("run", home.job("first", 0, args=args))
    dtype = json.loads(home.kept[0].read_bytes())["dtype"]
    other = {"float32": "bfloat16", "bfloat16": "float32"}[dtype]
    path = home.job("second", 100, args=args)
    assert home.estimate(path)["seconds"] is not None
    (home.folder / "out/second/engine.json").write_text(json.dumps({"version": 1, "resolved": {"dtype": other}}))
    found = home.estimate(path)
    assert found["seconds"] is None
    assert found["basis"]["seconds"] == f"the last run here was in {dtype}, and this output is in {other}"


def test_a_cache_that_cannot_be_written_ends_no_run(home: Home) -> None:
    home.cache.mkdir()
    (home.cache / "rates").write_text("no folder")
    assert home.call("run", home.job("first", 0))["rows_open"] == 0
    assert home.estimate(home.job("second", 100))["seconds"] is None


def test_a_retry_gives_no_rate_for_other_rows(home: Home) -> None:
    path = home.job("first", 0, labeler="r3a")
    assert home.call("run", path)["quarantined"] > 0, "a random model quotes nothing"
    before = home.kept[0].read_bytes()
    home.call("retry", path)
    assert home.kept[0].read_bytes() == before


def test_batches_are_not_probed(home: Home) -> None:
    path = home.job("first", 0)
    spec = json.loads(path.read_text())
    spec["engine"] = {
        "name": "openai",
        "args": {"served_model": "teacher", "base_url": "http://127.0.0.1:9/v1", "mode": "chat", "batch": True},
    }
    path.write_text(json.dumps(spec))
    assert "answered hours later" in home.call("plan", path, "--probe", code=2)["message"]
    assert home.estimate(path)["basis"]["seconds"] == "batches are answered hours later, at no rate of their own"
