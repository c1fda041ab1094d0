"""`relabel bench` on a tiny bundle: what it writes, that the bundle stays whole, and what it says
of its own figures.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from relabel.export.bench.benching import CLOSED_NAME, LATENCY_SCHEMA, NAMES, OPEN_NAME
from relabel.export.bench.cells import OnnxRunner
from relabel.export.bench.records import BenchedBundle, machine_name, measurements_of, read_latency, write_measurements
from relabel.export.bundles import locked, open_bundle, seal_bundle
from relabel.export.loader import Student
from relabel.jobs.report.build import render_report
from relabel.manifests.errors import ManifestError
from relabel.manifests.files import Storage
from relabel.manifests.records import plain, readable_json
from tests.bench.made_up import bench_facts, latency_row, machine, model_facts

QUICK = ("--providers", "cpu", "--seconds", "1", "--threads", "1", "--output", "json")
Inside = Callable[[Path], dict[str, bytes]]


def kinds(result: dict[str, Any]) -> set[str]:
    return {finding["kind"] for finding in result["findings"]}


def test_a_bench_is_written_beside_the_bundle_which_stays_as_it_is(
    relabel: Callable[..., Any], bundle: Path, made: Path, inside: Inside
) -> None:
    done = relabel("bench", "bundle", *QUICK, "--seconds", "4", "--slo-ms", "40", "--to", "results")
    beside = relabel("bench", "bundle", *QUICK, "--precisions", "fp32", "--preset", "table3")
    assert (done.code, beside.code) == (0, 0), (done, beside)
    opened = open_bundle(bundle)
    assert inside(bundle) == inside(made)
    assert done.json["version"] == beside.json["version"] == opened.version
    assert sorted(path.name for path in bundle.parent.glob("*bundle*")) == ["bundle"]

    (file,) = Path("measurements/bundle").iterdir()
    assert beside.json["path"] == str(file.resolve())
    (facts,) = measurements_of(opened)
    assert plain(facts) == json.loads(file.read_bytes()) == {key: beside.json[key] for key in plain(facts)}
    assert file.name == f"{machine_name(facts.machine)}.json"
    assert facts.bundle == BenchedBundle(opened.version, opened.manifest.sha256)
    assert readable_json(plain(read_latency(file.read_bytes(), "here"))) == file.read_bytes()
    html = render_report([str(bundle)], Storage(), max_rows=0)
    assert html.count('<section id="latency"') == 1
    assert facts.measured_at in html
    assert "table3-100" in html

    assert {*inside(Path("results")), OPEN_NAME} == {*NAMES, "latency.md"}  # a busy machine may have no rate to plot
    held = json.loads(Path("results/latency.json").read_bytes())
    table = pq.read_table("results/latency.parquet")
    assert table.schema.equals(LATENCY_SCHEMA)
    rows = table.to_pylist()
    assert {(row["precision"], row["loop"]) for row in rows} == {
        (p, loop) for p in ("fp32", "int8") for loop in ("closed", "open")
    }
    assert rows == [row for model in held["models"] for row in (*model["closed"], *model["open"])]
    for row in rows:
        is_cut_off = (row["unanswered"] or 0) * 100 > row["samples"]
        assert (row["p99_ms"] is None) == (row["samples"] < 368 or is_cut_off)
        assert row["p999_ms"] is None or row["samples"] >= 3688
    closed = [row for row in rows if row["loop"] == "closed"]
    assert {"1xreplay", "8xreplay", "32xreplay"} < {row["cell"] for row in closed}
    assert all(row["peak_rss_bytes"] > 50e6 and row["seconds"] > 0 for row in closed)
    text = Path("results/latency.md").read_text()
    # nobody computes 128 tokens with positions for 64: said, and nothing else is lost for it
    assert {"not_run", "too_few_samples"} <= kinds(held)
    too_long = {cell for cell, why in held["models"][0]["not_run"] if "of that length" in why}
    assert too_long == {"1x128", "32x128", "1x384"}
    for finding in held["findings"]:
        assert finding["text"] in text
        assert finding["text"] in done.err
    comparison = held["comparisons"][0]
    assert (comparison["ours"], comparison["theirs"]) == ("int8", "fp32")
    assert (comparison["rounds"] < 20) == ("too_few_rounds" in kinds(held))
    if comparison["rounds"] >= 6:
        assert comparison["low"] <= comparison["ratio"] <= comparison["high"]


def test_what_was_pulled_is_measured_where_it_serves_and_pulls_leave_the_figures_alone(
    relabel: Callable[..., Any], bundle: Path, inside: Inside
) -> None:
    assert relabel("publish", "bundle", "store", "--channel", "stable").code == 0
    assert relabel("pull", "store/tiny", "dest").code == 0
    quick = (*QUICK, "--precisions", "fp32", "--preset", "table3")
    assert relabel("bench", "dest/current", *quick).code == 0
    served = open_bundle(Path("dest/current").resolve())
    assert relabel("pull", "store/tiny", "dest", "--check").code == 10
    assert relabel("verify", "dest").code == 0
    assert [facts.bundle.version for facts in measurements_of(served)] == [served.version]
    assert len(list(Path("dest/measurements").glob(f"{served.folder.name}/*.json"))) == 1
    assert Student(Path("dest/current"), provider="cpu").grades([("red shoe", "shoe")]).shape == (1,)


def test_measurements_are_those_of_this_very_bundle_newest_first_of_every_machine(bundle: Path) -> None:
    opened = open_bundle(bundle)
    this, other = (BenchedBundle("v", digest) for digest in (opened.manifest.sha256, "0" * 64))
    assert measurements_of(opened) == []
    gpu = machine(cpu="Other (R) CPU @ 2 GHz", usable_cores=8)
    old, new = (
        bench_facts(bundle=this, measured_at="2026-01-01"),
        bench_facts(bundle=this, measured_at="2026-02-01", machine=gpu),
    )
    for facts in (old, new):
        path = write_measurements(opened, facts)
    assert path.name == "other-r-cpu-2-ghz-8-cores.json"
    assert measurements_of(opened) == [new, old]
    again = bench_facts(bundle=this, measured_at="2026-03-01")
    assert write_measurements(opened, again).name == "some-cpu-2-cores.json"
    assert measurements_of(opened) == [again, new]
    write_measurements(opened, bench_facts(bundle=other, measured_at="2026-04-01"))
    assert measurements_of(opened) == [new], "figures of what lay here before"
    path.write_text("{")
    with pytest.raises(ManifestError, match="Measure them again"):
        measurements_of(opened)


def test_a_bundle_that_an_earlier_bench_wrote_into_is_read_as_ever(bundle: Path) -> None:
    facts = bench_facts(models=[model_facts(closed=[latency_row(mean_ms=1.5, pairs_per_s=9.0, p50_ms=1.4)])])
    own_facts = open_bundle(bundle).own_facts
    (bundle / "latency.json").write_bytes(readable_json(plain(facts)))
    seal_bundle(bundle, {**own_facts, "latency": {"format": 1}})
    assert measurements_of(open_bundle(bundle)) == [facts]
    assert '<section id="latency"' in render_report([str(bundle)], Storage(), max_rows=0)


def test_results_go_elsewhere_and_leave_the_bundle_alone(
    relabel: Callable[..., Any], bundle: Path, student: Path, pairs_file: Path, inside: Inside
) -> None:
    before = inside(bundle)
    shutil.copyfile(bundle / "model.onnx", "same.onnx")
    sides = (
        "--against",
        "torch",
        "--student",
        str(student),
        "--against",
        "same.onnx",
        "--pairs",
        str(pairs_file),
        "--to",
        "results",
    )
    longer = ("--rates", "100", "--seconds", "24")  # how much of the presets that suffices for depends on the machine
    done = relabel("bench", "bundle", *QUICK, "--preset", "table3,serving", "--precisions", "fp32", *sides, *longer)
    assert done.code == 0, done
    assert inside(bundle) == before
    # a busy machine may have too few samples of anything to plot
    assert {*inside(Path("results")), OPEN_NAME, CLOSED_NAME} == {*NAMES, "latency.md"}
    result = done.json
    (model,) = result["models"]
    assert model["closed"][0]["cell"] == "table3-1"
    assert {row["scope"] for row in (*model["closed"], *model["open"])} == {"texts"}
    assert {row["rows"] for row in model["open"]} <= {100}
    assert [(slo["figure"], slo["slo_ms"]) for slo in model["slo"]] in ([], [("mean", 150.0), ("p99", 150.0)])
    assert {one["theirs"] for one in result["comparisons"]} == {"torch", "same"}
    assert all(one["answers_differ_by"] < 1e-4 for one in result["comparisons"])
    assert result["workload"]["from"] == "pairs"
    assert "relevance" not in json.dumps(result["workload"])
    machine = result["machine"]
    assert machine["threads"] == 1
    assert machine["versions"]["onnxruntime"]


def test_a_missing_provider_is_refused_and_its_fallback_never_silent(
    relabel: Callable[..., Any], bundle: Path, inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = inside(bundle)
    relabel("bench", "bundle", "--providers", "cuda").refused(4, "CUDAExecutionProvider", "--allow-fallback")
    relabel("bench", "bundle", "--providers", "tensorrt").refused(4, "no engine", "relabel build-engine")
    assert inside(bundle) == before
    done = relabel(
        "bench", "bundle", *QUICK, "--providers", "cuda", "--allow-fallback", "--precisions", "fp32", "--to", "results"
    )
    assert done.code == 0, done
    assert "cpu_fallback" in kinds(done.json)
    assert {row["provider"] for row in pq.read_table("results/latency.parquet").to_pylist()} == {"cpu"}
    # an onnxruntime that says it has CUDA and then takes the CPU: nothing but the session knows
    monkeypatch.setattr(
        "onnxruntime.get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    relabel("bench", "bundle", "--providers", "cuda").refused(4, "fell back", "--allow-fallback")
    done = relabel(
        "bench", "bundle", *QUICK, "--providers", "cuda", "--allow-fallback", "--precisions", "fp32", "--to", "results"
    )
    assert done.code == 0, done
    assert "cpu_fallback" in kinds(done.json)


def test_a_gate_on_a_figure_ends_in_five_with_the_results_written(relabel: Callable[..., Any], bundle: Path) -> None:
    gates = ("--require", "cpu.fp32.1xreplay.mean_ms<=100000", "--require", "cpu.fp32.1xreplay.pairs_per_s>=1e12")
    done = relabel("bench", "bundle", *QUICK, "--precisions", "fp32", *gates)
    assert done.code == 5, done
    assert [gate["has_passed"] for gate in done.json["gates"]] == [True, False]
    assert len(measurements_of(open_bundle(bundle))) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (("--against", "torch"), 2, ("--student",)),
        (("--against", "absent.onnx"), 3, ("absent.onnx", "no such file")),
        (("--against", "a/model.onnx", "--against", "b/model.onnx"), 2, ("the name model is taken",)),
        (("--precisions", "fp64"), 2, ("fp64", "fp32, int8")),
        (("--preset", "grdi"), 3, ("presets", "grid")),
        (("--seconds", "0"), 2, ("--seconds",)),
        (("--require", "p99"), 2, ("--require p99",)),
        (("--pairs", "absent.parquet"), 3, ("absent.parquet",)),
        (
            ("--providers", "cpu", "--require", "cpu.int8/fp32.1x128.rato<=1"),
            3,
            ("cpu.int8/fp32.1x128.rato", "Did you mean", "ratio"),
        ),
        # no bound was named
        (
            ("--providers", "cpu", "--require", "cpu.fp32.grid.highest_rate>=1"),
            3,
            ("grid.highest_rate",),
        ),
        (("--to", "bundle"), 2, ("--to bundle", "is the bundle or inside it")),
        (("--to", "bundle/sub/../triton"), 2, ("is the bundle or inside it",)),
        (("--to", "link"), 2, ("is the bundle or inside it",)),
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
    Path("link").symlink_to("bundle")
    shutil.copytree("bundle", "another")
    before = inside(bundle)
    done = relabel("bench", "bundle", *arguments)
    done.refused(code, *parts)
    assert "opening" not in done.err
    assert inside(bundle) == inside(Path("another")) == before


def test_another_student_and_a_bundle_of_earlier_days_are_refused(
    relabel: Callable[..., Any], bundle: Path, student: Path, folder: Path
) -> None:
    shutil.copytree(student, folder / "other")
    (folder / "other" / "student.json").write_text((student / "student.json").read_text().replace("1.5", "1.6"))
    relabel("bench", "bundle", "--against", "torch", "--student", "other").refused(3, "not the student")
    facts = {key: value for key, value in open_bundle(bundle).facts.items() if key not in ("kind", "format", "files")}
    del facts["inputs"]["lengths"]["histogram"]
    seal_bundle(bundle, facts)
    relabel("bench", "bundle", "--providers", "cpu").refused(3, "histogram", "--pairs")
    (bundle / "model.onnx").write_bytes(b"x")
    relabel("bench", "bundle", "--providers", "cpu").refused(3, "model.onnx")


def test_a_bundle_that_a_kill_left_beside_its_place_is_brought_back_and_nobody_waits_for_another_bench(
    relabel: Callable[..., Any], bundle: Path, inside: Inside
) -> None:
    before, hidden = inside(bundle), Path(".bundle.relabel-old")
    bundle.rename(hidden)  # as a kill between an export's two renames leaves it
    quick = (*QUICK, "--precisions", "fp32", "--preset", "table3")
    assert relabel("bench", "bundle", *quick).code == 0
    assert inside(bundle) == before
    assert not hidden.exists()
    with locked(bundle):
        assert relabel("bench", "bundle", *quick).code == 0
        # beside its place, since its holder is between its renames: nobody brings it back under its hands
        bundle.rename(hidden)
        relabel("bench", "bundle", *QUICK[:-2]).refused(75, "is being worked on")
        hidden.rename(bundle)
    assert inside(bundle) == before


def test_a_bench_that_dies_while_it_writes_leaves_the_figures_as_they_were(
    relabel: Callable[..., Any], bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_bundle(bundle)
    earlier = bench_facts(bundle=BenchedBundle("v", opened.manifest.sha256))
    write_measurements(opened, earlier)

    def dies(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("relabel.export.bench.records.readable_json", dies)
    assert relabel("bench", "bundle", *QUICK, "--precisions", "fp32", "--preset", "table3").code == 130
    assert measurements_of(opened) == [earlier]


def test_a_bench_of_no_bundle_leaves_nothing_behind(relabel: Callable[..., Any], folder: Path) -> None:
    relabel("bench", "absent/bundle").refused(3, "no bundle")
    assert not Path("absent").exists()


@pytest.mark.parametrize("seconds", ["0.000001", "0.05", "1"])
def test_however_short_the_time_every_row_has_a_figure_and_what_is_left_out_is_counted(
    relabel: Callable[..., Any], bundle: Path, seconds: str
) -> None:
    line = ("--providers", "cpu", "--threads", "1", "--seconds", seconds, "--slo-ms", "40")
    done = relabel("bench", "bundle", *line, "--to", "results", "--output", "json")
    text = relabel("bench", "bundle", *line)
    assert (done.code, text.code) == (0, 0), (done, text)
    facts = read_latency(Path("results/latency.json").read_bytes(), "here")
    figures = [row.p50_ms if row.loop == "closed" else row.answered_rate for row in facts.rows]
    assert None not in figures
    assert all(row.p99_ms is None for row in facts.rows if row.samples < 368)
    for model in facts.models:
        rates = [row for row in facts.rows if row.loop == "open" and row.side == model.side]
        assert rates or any(name.startswith("open-grid") for name, _ in model.not_run)
        assert all(row.cell == "1xreplay" for row in model.closed[:1]), "one pair first"
    assert sum(finding.kind == "not_run" for finding in facts.findings) >= 2
    for said in (done.err, text.err, text.out):
        assert "not known" not in said
    assert f"of {float(seconds):g} s" in text.err
    assert re.search(r"suffice for nothing; not for 1 pair, .*requests by Poisson", text.err) or seconds != "0.000001"


@pytest.mark.parametrize("call_s", [0.0001, 0.003])
def test_a_bench_says_at_its_start_what_its_time_suffices_for(
    relabel: Callable[..., Any], bundle: Path, monkeypatch: pytest.MonkeyPatch, call_s: float
) -> None:
    """At 3 ms a pair four seconds give p99 of one pair, and of a batch of 256 not even a median."""
    run = OnnxRunner.__call__

    def slow(self: OnnxRunner, batch: Any) -> Any:
        time.sleep(call_s * len(batch["input_ids"]))
        return run(self, batch)

    monkeypatch.setattr(OnnxRunner, "__call__", slow)
    done = relabel("bench", "bundle", *QUICK, "--precisions", "fp32", "--seconds", "4", "--batches", "1,256")
    (first, *_), (model,) = [line for line in done.err.splitlines() if " suffice for " in line], done.json["models"]
    assert first.startswith("cpu fp32: ")
    suffices, _, lacks = first.partition("; not for ")
    assert re.search(r"suffice for 1 pair[^(]*\(p50, p99\)", suffices)
    assert model["closed"][0]["cell"] == "1xreplay"
    assert model["closed"][0]["p99_ms"] is not None
    # a busy machine may be slower than the sleeps, never faster
    if call_s > 0.001:
        assert "256 pairs" not in suffices
        assert "256 pairs" in lacks
        assert "256xreplay" not in [row["cell"] for row in model["closed"]]
