"""One score everywhere: all ways to score with a bundle that name no precision give the same figures for the same
pairs, offline as online, in the precision that the manifest states.
"""

import asyncio
import importlib.util
import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import relabel as package
from relabel.export.bundles import open_bundle, seal_bundle
from relabel.export.conform import RerankServer, conform
from relabel.export.loader import BundleError, Encoder, Student, read_manifest

SERVING = Path(__file__).parents[2] / "docs" / "deploy" / "serving"
TOP = 2
TOLERANCES = {"fp32": 1e-5, "fp16": 2e-3}
"""Of an expected grade: rows are padded with others, so sums come in another order."""

Pairs = Sequence[tuple[str, str]]


class World:
    """A bundle where a pull leaves it, and what one way to score with it needs."""

    def __init__(self, bundle: Path, pairs_file: Path, relabel: Any, serve: Callable[[Any], str], rerank: Any) -> None:
        self.bundle, self.pairs_file = bundle, pairs_file
        self.relabel, self.serve, self.rerank = relabel, serve, rerank

    def pairs(self) -> list[tuple[str, str]]:
        rows = pq.read_table(self.pairs_file).to_pylist()
        return [(row["query"], row["document"]) for row in rows]


def example(name: str) -> Any:
    """A file of docs/deploy/serving, not imported: that would leave its bytecode there."""
    module = ModuleType(name)
    path = SERVING / f"{name}.py"
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), vars(module))
    return module


def by_score(world: World) -> list[float]:
    """`relabel score BUNDLE`."""
    output = world.bundle.parent / "scores"
    done = world.relabel("score", str(world.bundle), "--input", str(world.pairs_file), "--to", str(output))
    assert done.code == 0, done.err
    manifest = json.loads((output / "manifest.json").read_bytes())
    assert manifest["engines"][0]["dtype"] == Student(world.bundle).precision
    rows = [row for file in manifest["labels"] for row in pq.read_table(output / file["path"]).to_pylist()]
    return [row["expected_grade"] for row in sorted(rows, key=lambda row: row["row_id"])]


def by_bundle(world: World) -> list[float]:
    """`relabel.Bundle`."""
    return list(package.Bundle(world.bundle).expected_grades(world.pairs()))


def by_load(world: World) -> list[float]:
    """The bundle's own `load.py`, in a process of its own."""
    code = "import json, sys; from load import Student; s = Student(sys.argv[1]); "
    code += "print(json.dumps(list(s.expected_grades(json.load(sys.stdin)))))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(world.bundle)],
        input=json.dumps(world.pairs()),
        capture_output=True,
        text=True,
        check=True,
        cwd=world.bundle,
    )
    return [float(grade) for grade in json.loads(done.stdout)]


def by_grader(world: World) -> list[float]:
    """`docs/deploy/serving/grader.py`, a query at a time."""
    dest = world.bundle.parent / "dest"
    dest.mkdir()
    (dest / "current").symlink_to(world.bundle)
    grader = example("grader").Grader(dest)
    return [float(grader.expected_grades(query, [document])[0]) for query, document in world.pairs()]


def by_rerank(world: World) -> list[float]:
    """`docs/deploy/serving/rerank.py`, over HTTP."""
    url = world.serve(world.rerank.open_student(str(world.bundle)))
    grades = []
    for query, document in world.pairs():
        body = json.dumps({"query": query, "documents": [document]}).encode()
        request = urllib.request.Request(f"{url}/rerank", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as reply:
            grades.append(json.load(reply)["results"][0]["relevance_score"] * TOP)
    return grades


def by_mlserver(world: World) -> list[float]:
    """`docs/deploy/serving/mlserver_bundle.py`, with the few names of mlserver that it uses."""
    names = {
        "mlserver": {"MLModel": object},
        "mlserver.codecs": {
            "NumpyCodec": SimpleNamespace(
                decode_input=lambda one: one.data,
                encode_output=lambda name, values: SimpleNamespace(name=name, data=values),
            )
        },
        "mlserver.types": {"InferenceResponse": lambda **held: SimpleNamespace(**held)},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, values in names.items():
            patch.setitem(sys.modules, name, SimpleNamespace(**values))
        model = example("mlserver_bundle").Bundle()
    model.name, model.settings = "ecom", SimpleNamespace(parameters=SimpleNamespace(uri=str(world.bundle)))
    asyncio.run(model.load())
    encoder = Encoder(world.bundle, read_manifest(world.bundle)["inputs"])
    batch = encoder.collate(encoder.encode(world.pairs()))
    inputs = [SimpleNamespace(name=name, data=ids) for name, ids in batch.items()]
    reply = asyncio.run(model.predict(SimpleNamespace(inputs=inputs)))
    probs_NK = next(one.data for one in reply.outputs if one.name == "relevance")
    return [float(grade) for grade in probs_NK @ np.arange(TOP + 1)]


WAYS: dict[str, Callable[[World], list[float]]] = {
    "score": by_score,
    "relabel.Bundle": by_bundle,
    "load.py": by_load,
    "grader.py": by_grader,
    "rerank.py": by_rerank,
    "mlserver_bundle.py": by_mlserver,
}


@pytest.fixture(params=["fp32", "fp16", None], ids=["fp32", "fp16", "an older manifest"])
def stated(request: pytest.FixtureRequest, bundle: Path, tmp_path: Path) -> tuple[Path, str]:
    """A bundle whose manifest states this default, and in which precision it has to answer."""
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    facts = open_bundle(copy).own_facts
    assert facts.pop("default_precision") == "fp32", "what an export states"
    if request.param is not None:
        facts["default_precision"] = request.param
    seal_bundle(copy, facts)
    return copy, request.param or "fp32"


def test_every_way_to_score_a_bundle_gives_the_same_figures_by_default(
    stated: tuple[Path, str], graded_file: Path, serve: Callable[[Any], str], rerank: Any, relabel: Any
) -> None:
    bundle, precision = stated
    world = World(bundle, graded_file, relabel, serve, rerank)
    wanted = Student(bundle, provider="cpu", precision=precision).expected_grades(world.pairs())
    other = Student(bundle, provider="cpu", precision="int8").expected_grades(world.pairs())
    between = np.abs(wanted - other).max()
    assert between > 5 * TOLERANCES["fp32"], "nothing would show in these pairs"
    tolerance = min(TOLERANCES[precision], between / 2)  # how far int8 is off depends on the processor
    for way, score in WAYS.items():
        apart = np.abs(np.asarray(score(world)) - wanted).max()
        assert apart <= tolerance, (way, apart, between)


def test_conform_bench_and_check_speak_of_the_default(
    stated: tuple[Path, str], serve: Callable[[Any], str], rerank: Any, relabel: Any
) -> None:
    bundle, precision = stated
    encoder = Encoder(bundle, read_manifest(bundle)["inputs"])
    found = conform(bundle, RerankServer(serve(rerank.open_student(str(bundle))), "cohere", "", None, encoder))
    assert (found.verdict, found.precision) == ("equal", precision)
    measured = str(bundle.parent / "measured")
    done = relabel("bench", str(bundle), "--providers", "cpu", "--seconds", "2", "--shapes", "1x8", "--to", measured)
    assert done.code == 0, done.err
    assert f"By default the bundle answers in {precision}." in done.out
    spec = importlib.util.spec_from_file_location("load_checked", bundle / "load.py")
    assert spec is not None
    assert spec.loader is not None
    load = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = load
    spec.loader.exec_module(load)
    assert f", {precision} on " in str(load.check_answers(load.Student(bundle)))


def test_a_manifest_that_states_a_precision_the_bundle_has_not_is_refused(bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    seal_bundle(copy, {**open_bundle(copy).own_facts, "default_precision": "fp8"})
    with pytest.raises(BundleError, match="no ONNX model in fp8"):
        Student(copy)
