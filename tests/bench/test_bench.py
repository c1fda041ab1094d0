"""`relabel bench` on a tiny bundle: what it writes, that the bundle stays whole, and what it says
of its own figures.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from export.bench.benching import Bench
from export.bench.latency_facts import read_latency
from export.bench.latency_plots import OPEN_NAME
from export.bench.latency_records import NAMES, put_into_bundle
from export.bench.latency_tables import LATENCY_SCHEMA
from export.bundle_places import locked
from export.bundles import OWN_KEYS, Bundle, open_bundle, seal_bundle
from export.loader import Student
from jobs.report.building import render_report
from jobs.report.bundle_page import REPORT_NAME, put_report, with_latency
from manifests.digests import readable_json
from manifests.errors import ManifestError, StoreError
from manifests.records import plain
from manifests.storage.context import Storage
from tests.bench.made_up import bench_facts

QUICK = ("--providers", "cpu", "--seconds", "1", "--threads", "1", "--output", "json")
Inside = Callable[[Path], dict[str, bytes]]


def kinds(result: dict[str, Any]) -> set[str]:
    return {finding["kind"] for finding in result["findings"]}


def test_a_bench_is_written_into_the_bundle_which_stays_whole(
    relabel: Callable[..., Any], bundle: Path, made: Path, inside: Inside
) -> None:
    done = relabel("bench", "bundle", *QUICK, "--slo-ms", "40")
    assert done.code == 0, done
    opened, before = open_bundle(bundle), open_bundle(made)
    assert done.json["version"] == opened.version != before.version
    found, was = inside(bundle), inside(made)
    assert set(found) - set(was) | {OPEN_NAME} == set(NAMES)  # on a busy machine no rate has the requests for a plot
    assert {name for name in was if found[name] != was[name]} == {"manifest.json", "README.md"}
    facts = json.loads(found["latency.json"])
    assert facts == {key: done.json[key] for key in facts}
    assert readable_json(plain(read_latency(found["latency.json"], "latency.json"))) == found["latency.json"]
    assert set(opened.facts["latency"]["files"]) == set(found) - set(was)
    assert {key: value for key, value in opened.facts.items() if key not in ("latency", "files")} == {
        key: value for key, value in before.facts.items() if key not in ("latency", "files")
    }
    assert sorted(path.name for path in bundle.parent.glob("*bundle*")) == [".bundle.relabel-lock", "bundle"]

    table = pq.read_table(bundle / "latency.parquet")
    assert table.schema.equals(LATENCY_SCHEMA)
    rows = table.to_pylist()
    assert {(row["precision"], row["loop"]) for row in rows} == {
        (p, loop) for p in ("fp32", "int8") for loop in ("closed", "open")
    }
    assert rows == [row for model in facts["models"] for row in (*model["closed"], *model["open"])]
    for row in rows:
        is_cut_off = (row["unanswered"] or 0) * 100 > row["samples"]
        assert (row["p99_ms"] is None) == (row["samples"] < 368 or is_cut_off)
        assert row["p999_ms"] is None or row["samples"] >= 3688
    closed = [row for row in rows if row["loop"] == "closed"]
    assert {"1xreplay", "8xreplay", "32xreplay"} < {row["cell"] for row in closed}
    assert all(row["peak_rss_bytes"] > 50e6 and row["seconds"] > 0 for row in closed)

    card = found["README.md"].decode()
    assert card.count("## Latency") == 1
    assert card.index("## Parity") < card.index("## Latency") < card.index("## Made of")
    # nobody computes 128 tokens with positions for 64: said, and nothing else is lost for it
    assert {"not_run", "too_few_samples"} <= kinds(facts)
    assert {cell for cell, _ in facts["models"][0]["not_run"]} == {"1x128", "32x128", "1x384"}
    for finding in facts["findings"]:
        assert finding["text"] in card
        assert finding["text"] in done.err
    comparison = facts["comparisons"][0]
    assert (comparison["ours"], comparison["theirs"]) == ("int8", "fp32")
    assert (comparison["rounds"] < 20) == ("too_few_rounds" in kinds(facts))
    if comparison["rounds"] >= 6:
        assert comparison["low"] <= comparison["ratio"] <= comparison["high"]

    assert Student(bundle, provider="cpu").grades([("red shoe", "shoe")]).shape == (1,)
    assert relabel("publish", "bundle", "store").code == 0
    assert relabel("show", f"store/tiny@{opened.version}").code == 0
    assert relabel("pull", f"store/tiny@{opened.version}", "dest").code == 0
    assert inside(Path("dest/current")) == found
    relabel("bench", "dest/current", "--providers", "cpu").refused(2, "was pulled", "--to")

    again = relabel("bench", "bundle", *QUICK, "--preset", "table3", "--precisions", "fp32")
    assert again.code == 0, again
    open_bundle(bundle)
    assert (bundle / "README.md").read_text().count("## Latency") == 1
    assert OPEN_NAME not in inside(bundle)  # of the earlier bench, and there is no open loop now


def test_the_page_of_a_benched_bundle_is_the_one_that_a_whole_report_would_draw(
    relabel: Callable[..., Any], bundle: Path, student: Path, tmp_path: Path
) -> None:
    put_report(open_bundle(bundle), student)
    page = bundle / REPORT_NAME
    before = page.read_text(encoding="utf-8")
    assert 'id="latency"' not in before
    for preset in ("grid", "table3"):  # the second bench takes the place of the first
        assert relabel("bench", "bundle", *QUICK, "--precisions", "fp32", "--preset", preset).code == 0
        found = page.read_text(encoding="utf-8")
        assert found == render_report([str(student), str(bundle)], Storage(), max_rows=0, is_inside_bundle=True)
        assert str(tmp_path) not in found
    facts = json.loads((bundle / "latency.json").read_text())
    assert found.count('<section id="latency"') == found.count('href="#latency"') == 1
    assert "table3-100" in found
    assert facts["measured_at"] in found
    assert facts["measured_at"][:10] in (bundle / "README.md").read_text()
    with_none = with_latency(found, tmp_path, name="tiny")
    assert with_none == before
    assert open_bundle(bundle).facts["latency"]["files"]


def test_a_bundle_without_a_page_gets_none_and_one_that_somebody_wrote_is_left_as_it_is(
    relabel: Callable[..., Any], bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quick = (*QUICK, "--precisions", "fp32", "--preset", "table3")
    assert relabel("bench", "bundle", *quick).code == 0
    assert not (bundle / REPORT_NAME).exists()
    facts = {key: value for key, value in open_bundle(bundle).facts.items() if key not in OWN_KEYS}
    (bundle / REPORT_NAME).write_text("<p>mine</p>")
    seal_bundle(bundle, facts)
    assert relabel("bench", "bundle", *quick).code == 0
    assert (bundle / REPORT_NAME).read_text() == "<p>mine</p>"
    assert "report.html of tiny is not a page that this relabel writes" in caplog.text


@pytest.mark.parametrize("name", ["seal_bundle", "latency_section"])
def test_a_bench_that_dies_while_it_draws_leaves_page_and_figures_as_they_were(
    relabel: Callable[..., Any], bundle: Path, student: Path, inside: Inside, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    put_report(open_bundle(bundle), student)
    before = inside(bundle)

    def dies(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(
        f"{'export.bench.latency_records' if name == 'seal_bundle' else 'jobs.report.bundle_page'}.{name}", dies
    )
    assert relabel("bench", "bundle", *QUICK, "--precisions", "fp32", "--preset", "table3").code == 130
    assert inside(bundle) == before
    assert sorted(path.name for path in bundle.parent.glob("*bundle*")) == [".bundle.relabel-lock", "bundle"]


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
    done = relabel("bench", "bundle", *QUICK, "--preset", "table3,serving", "--precisions", "fp32", *sides)
    assert done.code == 0, done
    assert inside(bundle) == before
    assert {*inside(Path("results")), OPEN_NAME} == {*NAMES, "latency.md"}
    result = done.json
    (model,) = result["models"]
    assert [row["cell"] for row in model["closed"]][:3] == ["table3-1", "table3-10", "table3-100"]
    assert {row["scope"] for row in (*model["closed"], *model["open"])} == {"texts"}
    assert {row["rows"] for row in model["open"]} == {100}
    assert [(slo["figure"], slo["slo_ms"]) for slo in model["slo"]] == [("mean", 150.0), ("p99", 150.0)]
    assert "mean ms" in Path("results/latency.md").read_text()
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
    assert open_bundle(bundle).facts["latency"] is not None


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


def test_a_bench_that_dies_while_it_writes_leaves_the_bundle_as_it_was(
    relabel: Callable[..., Any], bundle: Path, inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = inside(bundle)

    def dies(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("export.bench.latency_records.seal_bundle", dies)
        assert relabel("bench", "bundle", *QUICK, "--precisions", "fp32").code == 130
    assert inside(bundle) == before
    hidden = Path(".bundle.relabel-old")
    bundle.rename(hidden)  # as a kill between the two renames leaves it
    assert relabel("bench", "bundle", *QUICK, "--precisions", "fp32", "--to", "results").code == 0
    assert inside(bundle) == before
    bundle.rename(hidden)
    assert relabel("bench", "bundle", *QUICK, "--precisions", "fp32").code == 0
    open_bundle(bundle)
    assert not hidden.exists()


def made_up_bench(bundle: Bundle) -> Bench:
    """A bench that measured nothing."""
    return Bench(bench_facts(name=bundle.name), [])


def test_what_a_user_keeps_beside_a_bundle_is_left_alone(bundle: Path, student: Path, inside: Inside) -> None:
    kept = [bundle.with_name(f"bundle{ending}") for ending in (".old", ".bench", ".page", ".part")]
    for path in kept:
        path.mkdir()
        (path / "mine").write_text("precious")
    opened = open_bundle(bundle)
    sealed = put_into_bundle(opened, made_up_bench(opened), redraw=partial(with_latency, name="tiny"))
    facts = {key: value for key, value in sealed.facts.items() if key not in OWN_KEYS}
    put_report(seal_bundle(bundle, facts), student)
    assert [(path / "mine").read_text() for path in kept] == ["precious"] * 4
    assert sorted(path.name for path in bundle.parent.glob(".bundle*")) == [".bundle.relabel-lock"]


@pytest.mark.parametrize("name", ["model.onnx", "README.md", "report.html", "manifest.json", "strange", "load.py"])
def test_a_file_that_changed_while_it_was_measured_is_never_sealed_with_the_old_parity(
    bundle: Path, student: Path, inside: Inside, name: str
) -> None:
    opened = put_report(open_bundle(bundle), student)
    (bundle.parent / ".bundle.relabel-lock").unlink()
    if name == "load.py":
        (bundle / name).unlink()
    else:
        with (bundle / name).open("ab") as file:
            file.write(b" ")
    before = inside(bundle)
    with pytest.raises(ManifestError, match=rf"{name} changed since the bundle was opened.*(again|back)"):
        put_into_bundle(opened, made_up_bench(opened), redraw=partial(with_latency, name="tiny"))
    assert inside(bundle) == before
    assert [path.name for path in bundle.parent.glob("*bundle*")] == ["bundle"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_switch_that_is_broken_off_between_its_renames_leaves_the_bundle_where_it_was(
    bundle: Path, inside: Inside, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    opened, before, rename = open_bundle(bundle), inside(bundle), Path.rename

    def broken_off(path: Path, target: Path) -> Path:
        if path.name.endswith("relabel-part"):
            raise error
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", broken_off)
    with pytest.raises((KeyboardInterrupt, StoreError)):
        put_into_bundle(opened, made_up_bench(opened), redraw=partial(with_latency, name="tiny"))
    assert inside(bundle) == before


def test_two_benches_on_one_bundle_exclude_each_other_and_one_that_only_reads_does_not_wait(
    relabel: Callable[..., Any], bundle: Path, inside: Inside
) -> None:
    before = inside(bundle)
    with locked(bundle):
        done = relabel("bench", "bundle", *QUICK[:-2])
        done.refused(75, "bundle is being worked on by process", "Try again")
        assert "opening" not in done.err
        assert relabel("bench", "bundle", *QUICK, "--precisions", "fp32", "--to", "results").code == 0
        # beside its place, since its holder is between its renames: nobody brings it back under its hands
        bundle.rename(".bundle.relabel-old")
        relabel("bench", "bundle", *QUICK[:-2], "--to", "results").refused(75, "is being worked on")
        Path(".bundle.relabel-old").rename(bundle)
    assert inside(bundle) == before


def test_a_bench_of_no_bundle_leaves_nothing_behind(relabel: Callable[..., Any], folder: Path) -> None:
    relabel("bench", "absent/bundle").refused(3, "no bundle")
    assert not Path("absent").exists()


def test_a_bench_whose_time_is_used_up_at_once_still_ends_and_states_no_tail(
    relabel: Callable[..., Any], bundle: Path
) -> None:
    done = relabel("bench", "bundle", *QUICK, "--seconds", "0.01", "--slo-ms", "40")
    assert done.code == 0, done
    rows = pq.read_table(bundle / "latency.parquet").to_pylist()
    assert {row["loop"] for row in rows} == {"closed", "open"}
    assert all(row["p99_ms"] is None for row in rows if row["samples"] < 368)
    assert "too_few_samples" in kinds(done.json)
