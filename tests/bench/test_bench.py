"""`relabel bench` on a tiny bundle: what it writes, that the bundle stays whole, and how it spends its time."""

import functools
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from relabel.export import bench, parity
from relabel.export.bench import (
    BenchFacts,
    machine_name,
    measurements_folder,
    measurements_of,
    serve,
    time_calls,
    write_results,
)
from relabel.export.bundles import Bundle, open_bundle
from relabel.export.loader import Student
from relabel.jobs.report.build import build_report
from relabel.manifests.errors import ManifestError
from relabel.manifests.files import Storage
from relabel.manifests.records import plain
from tests.bench.made_up import bench_facts, machine
from tests.bench.test_arrivals import MadeUpClock

QUICK = ("--providers", "cpu", "--seconds", "1", "--threads", "1", "--output", "json")
SHORT = (*QUICK, "--precisions", "fp32", "--shapes", "1xreplay")
Inside = Callable[[Path], dict[str, bytes]]


def measured(bundle: Bundle) -> list[BenchFacts]:
    return measurements_of(bundle.folder, bundle.manifest.sha256)


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`paced(seconds)`: a clock that only models move, by so much a pair; every machine is as fast."""

    def set_pace(pair_s: float) -> None:
        clock = MadeUpClock()

        class Session:
            def run(self, names: Any, batch: Mapping[str, np.ndarray]) -> list[None]:
                rows, tokens = batch["input_ids"].shape
                assert tokens <= 24
                clock.time += pair_s * rows
                return [None] * len(names)

        monkeypatch.setattr(parity, "open_session", lambda *_, **__: Session())
        monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=clock.now, process_time=clock.now))
        monkeypatch.setattr(bench, "time_calls", functools.partial(time_calls, clock=clock.now))
        monkeypatch.setattr(bench, "serve", functools.partial(serve, clock=clock.now, sleep=clock.sleep))

    return set_pace


def test_a_bench_is_written_next_to_the_bundle_which_stays_as_it_is(
    relabel: Callable[..., Any], bundle: Path, made: Path, inside: Inside
) -> None:
    done = relabel("bench", "bundle", *QUICK, "--slo-ms", "40", "--to", "results")
    own = relabel("bench", "bundle", *SHORT)
    assert (done.code, own.code) == (0, 0), (done, own)
    opened = open_bundle(bundle)
    assert inside(bundle) == inside(made)
    assert done.json["version"] == own.json["version"] == opened.version
    (file,) = Path("measurements/bundle").glob("*.json")
    assert own.json["path"] == str(file.resolve())
    (facts,) = measured(opened)
    assert plain(facts) == json.loads(file.read_bytes()) == {key: own.json[key] for key in plain(facts)}
    assert file.name == f"{machine_name(facts.machine)}.json"
    assert facts.bundle == {"version": opened.version, "manifest_sha256": opened.manifest.sha256}
    assert (facts.machine["threads"], facts.workload["from"]) == (1, "lengths")
    assert facts.machine["versions"]["onnxruntime"]
    html = build_report([str(bundle)], Storage(), max_rows=0).html
    assert html.count('<section id="latency"') == 1
    assert facts.measured_at in html


def test_every_figure_of_a_bench_is_in_its_file_table_and_plot(
    relabel: Callable[..., Any], bundle: Path, inside: Inside, paced: Callable[[float], None]
) -> None:
    paced(0.001)
    done = relabel("bench", "bundle", *QUICK, "--seconds", "240", "--slo-ms", "40", "--to", "results")
    assert done.code == 0, done
    file = Path(done.json["path"])
    assert {*inside(Path("results"))} == {f"{file.stem}{suffix}" for suffix in (".json", ".md", ".svg")}
    held, text = json.loads(file.read_bytes()), file.with_suffix(".md").read_text()
    assert [model["precision"] for model in held["models"]] == ["fp32", "int8"]
    for model in held["models"]:
        closed, opened = model["closed"], model["open"]
        assert {"1xreplay", "8xreplay", "32xreplay"} == {row["cell"] for row in closed}
        assert closed[0]["cell"] == "1xreplay"
        assert all(row["p50_ms"] == pytest.approx(row["rows"]) for row in closed)
        assert all(row["pairs_per_s"] == pytest.approx(1000) for row in closed)
        assert all(f" {row['cell']} |" in text for row in closed)
        assert model["capacity_per_s"] == pytest.approx(1000)
        (slo,) = model["slo"]
        # full batches take 32 ms: p99 is under 40 ms while hardly any request waits for the one before
        assert slo["highest_rate"] == max(row["offered_rate"] for row in opened if row["p99_ms"] <= 40)
        assert f"{slo['highest_rate']:,.1f}/s offered (highest with p99 ≤ 40 ms)" in text
        # the student reads at most 24 tokens, and nothing else is lost for it
        assert model["not_run"] == [[cell, bench.TOO_LONG] for cell in ("1x128", "32x128", "1x384")]
        for row in (*closed, *opened):
            assert (row["p99_ms"] is None) == (row["samples"] < 368 or (row["unanswered"] or 0) * 100 > row["samples"])


def test_time_goes_to_one_pair_first_and_then_as_far_as_it_suffices(
    relabel: Callable[..., Any], bundle: Path, paced: Callable[[float], None]
) -> None:
    """At 10 ms a pair p99 takes 4.3 s, and twenty calls of 32 pairs take 7.5 s."""
    paced(0.01)
    found = {}
    for seconds in ("3", "30", "240"):
        line = ("--providers", "cpu", "--precisions", "fp32", "--threads", "1", "--seconds", seconds)
        done = relabel("bench", "bundle", *line, "--to", "results", "--output", "json")
        assert done.code == 0, done
        (model,) = done.json["models"]
        rows = [*model["closed"], *model["open"]]
        assert all(row["p50_ms"] is not None and row["samples"] >= 18 for row in rows)
        assert sum(row["seconds"] for row in rows) <= float(seconds) * 1.5
        planned = {"1xreplay", "8xreplay", "32xreplay", "1x128", "32x128", "1x384"}
        assert planned <= {row["cell"] for row in rows} | {name for name, _ in model["not_run"]}
        found[seconds] = [(row["cell"], row["p99_ms"] is not None) for row in model["closed"]]
    assert found["3"][0] == ("1xreplay", False)
    assert found["30"][0] == ("1xreplay", True)
    assert {"1xreplay", "8xreplay", "32xreplay"} <= set(dict(found["240"]))


def test_a_bench_too_short_for_anything_is_refused_and_leaves_no_figures(
    relabel: Callable[..., Any], bundle: Path
) -> None:
    done = relabel("bench", "bundle", "--providers", "cpu", "--threads", "1", "--seconds", "0.000001", "--slo-ms", "40")
    done.refused(2, "Nothing was measured in --seconds 1e-06: give it more time.")
    assert measured(open_bundle(bundle)) == []


def test_what_was_pulled_is_measured_where_it_serves_and_pulls_leave_the_figures_alone(
    relabel: Callable[..., Any], bundle: Path, inside: Inside
) -> None:
    assert relabel("publish", "bundle", "store", "--channel", "stable").code == 0
    assert relabel("pull", "store/tiny", "dest").code == 0
    assert relabel("bench", "dest/current", *SHORT).code == 0
    served = open_bundle(Path("dest/current").resolve())
    assert relabel("pull", "store/tiny", "dest").code == 10
    assert relabel("verify", "dest").code == 0
    assert [facts.bundle["version"] for facts in measured(served)] == [served.version]
    assert len(list(Path("dest/measurements").glob(f"{served.folder.name}/*.json"))) == 1
    assert Student(Path("dest/current"), provider="cpu").grades([("red shoe", "shoe")]).shape == (1,)


def test_measurements_are_those_of_this_very_bundle_newest_first_of_every_machine(bundle: Path) -> None:
    opened = open_bundle(bundle)
    this, other = ({"version": "v", "manifest_sha256": digest} for digest in (opened.manifest.sha256, "0" * 64))
    assert measured(opened) == []
    gpu = machine(cpu="Other (R) CPU @ 2 GHz", usable_cores=8, gpu="NVIDIA H100")
    old, new = (
        bench_facts(bundle=this, measured_at="2026-01-01"),
        bench_facts(bundle=this, measured_at="2026-02-01", machine=gpu),
    )
    for facts in (old, new):
        path = write_results(measurements_folder(bundle), facts)
    assert path.name == "other-r-cpu-2-ghz-8-cores-nvidia-h100.json"
    assert measured(opened) == [new, old]
    write_results(measurements_folder(bundle), bench_facts(bundle=other, measured_at="2026-04-01"))
    assert measured(opened) == [new], "figures of what lay here before"
    path.write_text("{")
    with pytest.raises(ManifestError, match="Measure them again"):
        measured(opened)


def test_pairs_of_a_file_are_replayed_as_requests_of_many_documents_and_mean_and_p99_are_bounded(
    relabel: Callable[..., Any], bundle: Path, pairs_file: Path, paced: Callable[[float], None]
) -> None:
    paced(0.001)
    line = ("--shapes", "1xreplay,1000xreplay", "--request-pairs", "100", "--slo-ms", "150", "--slo-mean-ms", "150")
    done = relabel(
        "bench", "bundle", *QUICK, *line, "--precisions", "fp32", "--pairs", str(pairs_file), "--seconds", "240"
    )
    assert done.code == 0, done
    (model,) = done.json["models"]
    assert [(row["cell"], row["rows"]) for row in model["closed"]] == [("1xreplay", 1), ("1000xreplay", 1000)]
    assert {row["rows"] for row in model["open"]} == {100}
    assert [(slo["figure"], slo["slo_ms"]) for slo in model["slo"]] == [("mean", 150.0), ("p99", 150.0)]
    assert done.json["workload"]["from"] == "pairs"


def test_pairs_to_replay_may_have_columns_of_their_own_names(
    relabel: Callable[..., Any], bundle: Path, pairs_file: Path, tmp_path: Path, paced: Callable[[float], None]
) -> None:
    paced(0.001)
    pq.write_table(pq.read_table(pairs_file).rename_columns({"query_id": "qid"}), tmp_path / "own.parquet")
    line = ("bench", "bundle", *QUICK, "--shapes", "1xreplay", "--precisions", "fp32")
    line += ("--pairs", str(tmp_path / "own.parquet"), "--seconds", "240")
    refused = relabel(*line)
    assert refused.code == 3
    assert "no column `query_id` (--columns query_id=)" in refused.err
    assert relabel(*line, "--columns", "query_id=qid").json["workload"]["from"] == "pairs"


def test_a_missing_provider_is_refused(
    relabel: Callable[..., Any], bundle: Path, inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = inside(bundle)
    relabel("bench", "bundle", "--providers", "cuda").refused(4, "--providers cuda", "--providers cpu")
    assert inside(bundle) == before
    # an onnxruntime that claims to have CUDA and then takes the CPU: nothing but the session knows
    monkeypatch.setattr(
        "onnxruntime.get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    relabel("bench", "bundle", "--providers", "cuda").refused(4, "fell back")


def test_a_gate_on_a_figure_ends_in_five_with_the_results_written(
    relabel: Callable[..., Any], bundle: Path, paced: Callable[[float], None]
) -> None:
    paced(0.001)
    gates = ("--require", "cpu.fp32.1xreplay.mean_ms<=2", "--require", "cpu.fp32.1xreplay.pairs_per_s>=1e12")
    done = relabel("bench", "bundle", *QUICK, "--precisions", "fp32", *gates)
    assert done.code == 5, done
    assert [gate["has_passed"] for gate in done.json["gates"]] == [True, False]
    assert len(measured(open_bundle(bundle))) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (("--precisions", "fp64"), 2, ("fp64", "fp32, int8")),
        (("--shapes", "1x128,8xreplays"), 3, ("shapes", "8xreplays")),
        (
            ("--providers", "cpu", "--require", "cpu.int8.1x128.p99ms<=1"),
            3,
            ("cpu.int8.1x128.p99ms", "Did you mean", "p99_ms"),
        ),
        (("--to", "bundle"), 2, ("--to bundle", "manifest.json")),
        (("--to", "another"), 2, ("manifest.json",)),
    ],
)
def test_what_can_be_refused_is_refused_before_anything_is_measured(
    relabel: Callable[..., Any],
    bundle: Path,
    inside: Inside,
    arguments: tuple[str, ...],
    code: int,
    parts: tuple[str, ...],
) -> None:
    shutil.copytree("bundle", "another")
    before = inside(bundle)
    done = relabel("bench", "bundle", *arguments)
    done.refused(code, *parts)
    assert "opening" not in done.err
    assert inside(bundle) == inside(Path("another")) == before


@pytest.mark.parametrize("place", ["bundle", ".bundle.relabel-old"])
def test_a_damaged_bundle_is_refused_also_one_that_a_kill_left_aside(
    relabel: Callable[..., Any], bundle: Path, place: str
) -> None:
    (bundle / "model.onnx").write_bytes(b"x")
    bundle.rename(bundle.with_name(place))
    relabel("bench", "bundle", "--providers", "cpu").refused(3, "bundle/model.onnx")


def test_a_place_that_can_t_be_written_is_refused_before_anything_is_measured(
    relabel: Callable[..., Any], bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: Any, **__: Any) -> None:
        raise AssertionError("measured, for figures that can't be kept")

    monkeypatch.setattr("relabel.jobs.commands.bundles.bench_bundle", measure)
    Path("measurements").write_text("a file where a folder belongs")
    relabel("bench", str(bundle)).refused(3, "Not a directory", "--to DIR")
    relabel("bench", str(bundle), "--to", "/proc/self").refused(3, "--to DIR")
