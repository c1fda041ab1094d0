"""Students and bundles on the page: the chain by digests, curves, test figures, parity, latency, and a bundle's own
page.
"""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.distill.training.output import CURVE_SCHEMA
from relabel.export.bench import HighestRate, measurements_folder, write_results
from relabel.export.bundles import open_bundle, seal_bundle
from relabel.jobs.report.artifacts import open_artifacts
from relabel.jobs.report.build import build_report
from relabel.jobs.report.lineage import trace
from relabel.manifests.errors import InputError, ManifestError
from relabel.manifests.files import Storage
from relabel.manifests.records import digest_of, sha256_file, unsealed
from tests.bench.made_up import bench_facts, latency_row, model_facts
from tests.docs.worlds import call
from tests.report.conftest import Judgment, forge_run, plain_pairs, plots_of, table_of, tables_of, write_table

FILES = {"student.json": "ab" * 32, "model.safetensors": "cd" * 32}
FIGURES = {"rows": 40, "accuracy": 0.7, "f1_macro": 0.61, "auc_0/12": 0.8, "nll": 0.9}
TEACHER = {**FIGURES, "accuracy": 0.8}
BOUNDS = {
    "grade": 1,
    "constant": {"accuracy": 0.4},
    "random": {},
    "lexical": {},
}
NEAR = {"rows": 40, "kl": 0.05}
PART = {"rows": 40, "queries": 5}
CHECKED = {
    "is_finite": True,
    "max_abs": 1e-6,
    "flip_share": 0.01,
    "tau": 0.99,
    "judged_by": "gold",
    "f1_macro": {"student": 0.61, "model": 0.6, "loss_points": 1.0, "loss_low": -0.5, "loss_high": 2.5},
    "ndcg@10": {"student": 0.9, "model": 0.89, "loss": 0.01},
}
PARITY = {
    "spec": {"min_pairs": 2000, "batch_sizes": [1, 7]},
    "pairs": {},
    "provider": "cpu",
    "onnxruntime": "1.31",
    "models": [
        {
            "precision": "int8",
            "rows": 40,
            "queries": 5,
            "is_weak": True,
            "by_batch_size": {"1": CHECKED, "7": CHECKED},
            "checks": [],
            "has_passed": True,
            "worst": [
                {
                    "source": "p.parquet",
                    "row": 3,
                    "batch_size": 7,
                    "is_flip": True,
                    "max_abs": 0.1,
                    "student": [1, 0],
                    "model": [1, None],
                }
            ],
        }
    ],
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A label run."""
    pairs = write_table(tmp_path / "pairs.parquet", plain_pairs(8, 4))
    return forge_run(tmp_path / "run", pairs, lambda pair: Judgment(pair.row_id % 3), name="teacher-run")


@pytest.fixture
def student(tmp_path: Path, run: Path) -> Path:
    """A student's folder as far as a report reads it: manifest and curves."""
    folder = tmp_path / "student"
    folder.mkdir()
    source = {
        "path": str(run),
        "kind": "run",
        "name": "teacher-run",
        "labeler": "r3a",
        "labels": 32,
        "weight": 1.0,
        "rows": {"in": 32, "labelled": 32, "reused": 0, "quarantined": 0},
        "fingerprint": json.loads((run / "plan.json").read_text())["fingerprint"],
        "manifest_sha256": sha256_file(run / "manifest.json"),
    }
    check = {"gate": "macro_f1 >= 0.9*teacher", "figure": "f1_macro", "value": 0.61, "bound": 0.9, "has_passed": False}
    manifest = {
        "version": 1,
        "kind": "student",
        "relabel": "0.1.0",
        "name": "ecom",
        "fingerprint": "f" * 64,
        "model": {"reference": "hf:org/base", "digest": "e" * 64},
        "heads": {"relevance": 3},
        "temperature": {"relevance": 1.0},
        "phi": None,
        "labels": [source],
        "gold": {"path": "gold.parquet", "grade": "grade"},
        "rows": {"all": 128, "labelled": 128, "gold_alone": 0},
        "rows_by_head": {"relevance": 128},
        "split": {
            "by": "query_id",
            "seed": 0,
            "shares": {"dev": 0.1, "test": 0.3},
            "train": {"rows": 80, "queries": 10},
            "dev": {"rows": 8, "queries": 1},
            "test": PART,
            "sha256": "5" * 64,
        },
        "training": {"steps": 38, "epochs": 2.0, "best_step": None, "device": "cpu", "rows_per_s": 120.5}
        | {"batch_size": 8, "tokens_per_batch": None, "accumulation": 1, "was_batch_halved": False},
        "metrics": {
            "dev": {"rows": 8, "judged_by": "gold", "student": FIGURES},
            "test": {
                "rows": 40,
                "judged_by": "gold",
                "student": FIGURES,
                "teacher": TEACHER,
                "to_teacher": NEAR,
                "baselines": BOUNDS,
                "intervals": {"accuracy": [0.55, 0.82]},
            },
        },
        "gate": {"has_passed": False, "checks": [{**check, "text": "macro_f1 >= 0.9*teacher"}]},
        "notes": ["a note"],
        "versions": {},
        "spec": {},
        "student": {"kind": "encoder", "max_tokens": 64},
        "files": FILES,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    points = [(step, "train", "loss", 1 / step) for step in range(1, 901)] + [
        (step, "dev", "accuracy", step / 900) for step in (450, 900)
    ]
    columns = [pa.array([point[place] for point in points], field.type) for place, field in enumerate(CURVE_SCHEMA)]
    pq.write_table(pa.Table.from_arrays(columns, schema=CURVE_SCHEMA), folder / "curves.parquet")
    return folder


@pytest.fixture
def bundle(tmp_path: Path, student: Path) -> Path:
    """A sealed bundle of that student."""
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "model.onnx").write_bytes(b"graph")
    manifest = json.loads((student / "manifest.json").read_text())
    facts: dict[str, Any] = {
        "name": "ecom",
        "grades": 3,
        "heads": {"relevance": 3},
        "temperature": {"relevance": 1.0},
        "inputs": {
            "kind": "encoder",
            "tokenizer": "tokenizer.json",
            "max_tokens": 64,
            "names": ["input_ids"],
            "padding_side": "right",
            "pad_id": 0,
            "pad_type_id": 0,
            "truncation_side": "right",
            "columns": {},
            "lengths": {"rows": 1, "p50": 8, "p90": 8, "p99": 8, "max": 8, "histogram": [[8, 1]]},
        },
        "models": [{"path": "model.onnx", "format": "onnx", "precision": "int8", "files": ["model.onnx"]}],
        "licence": {"bundle": None, "model": "base"},
        "made_by": {"relabel": "0.1.0"},
        "parity": PARITY,
        "lineage": {
            "student": {"digest": digest_of(FILES), "name": "ecom", "model": manifest["model"]},
            "labels": manifest["labels"],
            "gold": None,
        },
    }
    seal_bundle(folder, facts)
    return folder


def edges(*paths: Path) -> set[tuple[str, str, bool | None]]:
    return {(a.kind, b.kind, same) for a, b, same in trace(open_artifacts([str(path) for path in paths], Storage()))}


def test_chain_holds_together_by_digests(run: Path, student: Path, bundle: Path) -> None:
    found = edges(run, student, bundle)
    assert found >= {
        ("data", "label run", None),
        ("label run", "student", True),
        ("student", "bundle", True),
        ("trusted grades", "student", None),
    }
    assert edges(bundle) >= {("student", "bundle", None), ("label run", "student", None)}


def test_run_that_changed_since_the_training_is_pointed_at(run: Path, student: Path) -> None:
    manifest = run / "manifest.json"
    manifest.write_text(json.dumps(unsealed(manifest.read_bytes()) | {"relabel": "0.1.1"}))
    assert ("label run", "student", False) in edges(run, student)
    assert "its manifest has changed since" in build_report([str(run), str(student)], Storage()).html


def test_another_student_is_not_taken_for_the_bundles(student: Path, bundle: Path) -> None:
    manifest = json.loads((student / "manifest.json").read_text())
    (student / "manifest.json").write_text(json.dumps({**manifest, "files": {**FILES, "model.safetensors": "00" * 32}}))
    assert ("student", "bundle", True) not in edges(student, bundle)
    assert (
        "bundle ecom was made of another student ecom than the one that is given here"
        in build_report([str(student), str(bundle)], Storage()).html
    )


def test_student_is_shown_with_its_curves_and_figures(student: Path) -> None:
    built = build_report([str(student)], Storage())
    assert built.sections == ["verdict", "ran", "lineage", "training", "student"]
    plots = plots_of(built.html)
    assert plots["Training loss, ecom"].startswith("loss: from 1 1.0000 to ")
    assert plots["On dev, ecom"] == "accuracy: 450 0.5000, 900 1.0000"
    figures = table_of(built.html, "ecom on its test split")
    assert ["accuracy", "0.7000", "0.5500 to 0.8200", "0.8000", "0.4000 constant"] in figures
    assert "macro_f1 &gt;= 0.9*teacher" in built.html
    assert "refused" in built.html


def with_metrics(student: Path, bundle: Path, test: dict[str, Any]) -> None:
    """A student, and its bundle, whose figures on the test split are others."""
    path = student / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["metrics"]["test"] |= test
    manifest["gate"] = {"has_passed": True, "checks": []}
    path.write_text(json.dumps(manifest))
    facts = json.loads((bundle / "manifest.json").read_text())
    facts["lineage"]["student"] |= {"metrics": manifest["metrics"], "gate": manifest["gate"]}
    (bundle / "manifest.json").unlink()
    seal_bundle(bundle, {key: value for key, value in facts.items() if key not in ("kind", "format", "files")})


def bounds(accuracy: float, lexical: float | None) -> dict[str, Any]:
    return {
        "grade": 1,
        "constant": {"accuracy": accuracy, "kappa": 0.0},
        "random": {},
        "lexical": {} if lexical is None else {"ndcg@10": lexical},
    }


VERDICTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "below BM25": (
        {"baselines": bounds(0.3, 0.9)},
        "is no better than BM25 (nDCG@10 0.500 against 0.900). On its test",
        "bad",
    ),
    "below one grade": (
        {"baselines": bounds(0.8, 0.1)},
        "is no better than the constant grade 1 (accuracy 0.700 against 0.800). On its test",
        "bad",
    ),
    "as good as one grade": ({"baselines": bounds(0.7, 0.1)}, "is no better than the constant grade 1", "bad"),
    "above by chance": (
        {"baselines": bounds(0.3, 0.1), "intervals": {"accuracy": [0.25, 0.9], "ndcg@10": [0.2, 0.8]}},
        "is not shown to be better than a baseline: accuracy 0.2500 to 0.9000 holds the constant baseline 0.3000. On",
        "warn",
    ),
    "above": ({"baselines": bounds(0.3, 0.1)}, "is above the baselines. On its test split", "good"),
    "without texts": ({"baselines": bounds(0.3, None)}, "is above the baselines", "good"),
    "an older student": ({"baselines": None}, "is not known: its manifest holds no baselines", "warn"),
}


@pytest.mark.parametrize("given", [("student",), ("bundle",), ("run", "student", "bundle")], ids=" and ".join)
@pytest.mark.parametrize("what", VERDICTS)
def test_the_first_thing_on_the_page_is_whether_a_student_beats_its_baselines(
    request: pytest.FixtureRequest, run: Path, student: Path, bundle: Path, what: str, given: tuple[str, ...]
) -> None:
    test, said, tone = VERDICTS[what]
    figures = {**FIGURES, "accuracy": 0.7, "kappa": 0.4, "ndcg@10": 0.5}
    with_metrics(student, bundle, {**test, "student": figures})
    built = build_report([str(request.getfixturevalue(name)) for name in given], Storage())
    assert built.sections[0] == "verdict"
    (verdict,) = built.verdicts
    assert said in verdict
    first = html_of_section(built.html, "verdict")
    assert f'class="text {tone}"' in first
    assert built.html.index('<section id="verdict"') < built.html.index('<section id="ran"')


def test_a_page_without_a_student_has_no_verdict(run: Path) -> None:
    built = build_report([str(run)], Storage())
    assert built.verdicts == []
    assert "verdict" not in built.sections


def test_a_page_says_first_that_answers_are_made_up(tmp_path: Path) -> None:
    pairs = write_table(tmp_path / "pairs.parquet", plain_pairs(2, 4))
    made_up = forge_run(tmp_path / "fake", pairs, lambda _: Judgment(1), family="fake")
    built = build_report([str(made_up)], Storage())
    assert built.verdicts == [
        "The answers of forged are made up (engine fake): no figure that rests on them means anything."
    ]


@pytest.mark.parametrize(("outside", "is_drawn"), [(0.0, False), (0.02, True)])
def test_mass_outside_the_grades_is_drawn_where_there_is_any(tmp_path: Path, outside: float, is_drawn: bool) -> None:
    pairs = write_table(tmp_path / "pairs.parquet", plain_pairs(2, 4))
    run = forge_run(tmp_path / "run", pairs, lambda _: Judgment(1, outside=outside))
    html = build_report([str(run)], Storage()).html
    assert ("Mass outside the grades" in plots_of(html)) == is_drawn
    assert ("No probability lies outside the grades, in any of 8 labels." in html) != is_drawn


def test_the_command_prints_a_verdict_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = write_table(tmp_path / "pairs.parquet", plain_pairs(2, 4))
    names = ("one", "two")
    runs = [forge_run(tmp_path / name, pairs, lambda _: Judgment(1), name=name, family="fake") for name in names]
    assert call("report", *map(str, runs), "--to", str(tmp_path / "page.html")) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(" are ")[0] for line in said[1:3]] == ["  The answers of one", "  The answers of two"]


def html_of_section(page: str, name: str) -> str:
    return page[page.index(f'<section id="{name}"') :].partition("</section>")[0]


def test_bundle_is_shown_with_its_parity(bundle: Path) -> None:
    html = build_report([str(bundle)], Storage()).html
    assert table_of(html, "Parity of ecom")[0][:4] == ["int8", "1.0e-06", "1.00%", "0.9900"]
    assert "a weak result" in html


def write_latency(bundle: Path, **values: Any) -> Path:
    """The file."""
    opened = open_bundle(bundle)
    facts = bench_facts(bundle={"version": opened.version, "manifest_sha256": opened.manifest.sha256}, **values)
    return write_results(measurements_folder(opened.folder), facts)


def test_latency_is_shown_as_it_was_measured(bundle: Path) -> None:
    closed = [latency_row(cell=f"1x{n}", tokens=n, p50_ms=n / 10, p99_ms=n / 5) for n in (16, 64)]
    opened = [latency_row(cell="open", offered_rate=10.0, p50_ms=1.5, p99_ms=3.0)]
    bound = HighestRate(
        figure="mean",
        slo_ms=150,
        highest_rate=10.0,
        mean_ms=None,
        p99_ms=None,
        is_at_least=True,
    )
    write_latency(bundle, models=[model_facts(precision="int8", closed=closed, open=opened, slo=[bound])])
    html = build_report([str(bundle)], Storage()).html
    tables = {caption.split(" of ")[0]: rows[1:] for caption, rows in tables_of(html).items()}
    assert [(row[1], row[5], row[6]) for row in tables["Latency"]] == [
        *((f"1x{n}", f"{n / 10:.2f}", f"{n / 5:.2f}") for n in (16, 64)),
        ("open, 10.0/s offered (highest with mean ≤ 150 ms)", "1.50", "3.00"),
    ]


@pytest.mark.parametrize("wrong", [None, [1]])
def test_manifest_that_is_damaged_anywhere_ends_in_no_traceback(student: Path, bundle: Path, wrong: Any) -> None:
    """Every key of both manifests in turn holds something else."""
    refused: list[str] = []
    for folder, name in ((student, "manifest.json"), (bundle, "manifest.json")):
        whole = json.loads((folder / name).read_text())
        for key in whole:
            (folder / name).write_text(json.dumps({**whole, key: wrong}))
            try:
                build_report([str(folder)], Storage())
            except ManifestError as exc:
                refused.append(str(exc))
            except InputError:
                assert key == "kind"  # of a bundle: it is none then
        (folder / name).write_text(json.dumps(whole))
    assert len(refused) > 3
    assert all(str(student.parent) in message for message in refused)
