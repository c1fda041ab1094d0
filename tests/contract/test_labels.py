"""The labels of every labeler, to the byte, for the same input, engine and seed."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.jobs.conftest import Outcome, folder, no_scheduler, relabel  # noqa: F401

LABELERS = (
    "complexity",
    "direct",
    "ensemble",
    "evidence-set",
    "graph-grpo",
    "pointwise",
    "query",
    "r1",
    "r3a",
    "review",
    "route",
    "umbrela",
    "variants",
)
"""Written out: a labeler that is renamed or gone breaks users' jobs."""
FAULTS = {"p_garbage": 0.2, "p_truncated": 0.1, "p_refused": 0.05}
OF_THE_RUN = ("key", "origin")
"""Columns that follow from the fingerprint, which an update of a prompt may change."""


def write_job(folder: Path, name: str) -> str:  # noqa: F811
    path = folder / "job.yaml"
    job = {
        "name": "contract",
        "input": {"path": str(Path(__file__).with_name("pairs.parquet")), "columns": {"context": "context"}},
        "labeler": {"name": name, "attempts": 2},
        "engine": {"name": "fake", "seed": 11, "args": FAULTS},
        "output": "out",
        "shards": 2,
        "run": {"chunk_rows": 5, "max_failed_fraction": 1.0},
    }
    path.write_text(yaml.safe_dump(job))
    return str(path)


def rows_of(out: Path, kind: str) -> list[dict[str, Any]]:
    """Committed rows in the order of the manifest, which proves them."""
    files = json.loads((out / "manifest.json").read_text())[kind]
    return [row for file in files for row in pq.read_table(out / file["path"]).to_pylist()]


def digest_of(rows: list[dict[str, Any]]) -> str:
    plain = [{key: value for key, value in row.items() if key not in OF_THE_RUN} for row in rows]
    return hashlib.sha256(json.dumps(plain, default=str, sort_keys=True).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", LABELERS)
def test_labels_and_quarantine_are_those_of_the_golden(
    name: str,
    folder: Path,  # noqa: F811
    relabel: Callable[..., Outcome],  # noqa: F811
    golden: Callable[[str, str], None],
) -> None:
    done = relabel("run", write_job(folder, name))
    assert done.code == 0, done
    labels, quarantine = rows_of(folder / "out", "labels"), rows_of(folder / "out", "quarantine")
    assert sorted(row["row_id"] for row in labels + quarantine) == list(range(24))
    grades = " ".join(str(row["grade"]) for row in labels)
    lines = [f"labels {len(labels)} {digest_of(labels)}", f"quarantine {len(quarantine)} {digest_of(quarantine)}"]
    golden(f"contract/{name}.txt", "\n".join([*lines, f"grades {grades}", ""]))


@pytest.mark.parametrize("name", ["direct", "r3a"])
def test_another_number_of_shards_and_a_second_run_give_the_same_rows_and_bytes(
    name: str,
    folder: Path,  # noqa: F811
    relabel: Callable[..., Outcome],  # noqa: F811
) -> None:
    job = write_job(folder, name)
    seen = []
    for out, more in (("a", ()), ("b", ()), ("c", ("--set", "shards=1"))):
        assert relabel("run", job, "--set", f"output={out}", *more).code == 0
        files = json.loads((folder / out / "manifest.json").read_text())["labels"]
        rows = sorted(rows_of(folder / out, "labels"), key=lambda row: row["row_id"])
        seen.append(([file["sha256"] for file in files], digest_of(rows)))
    assert seen[0] == seen[1]
    assert seen[0][1] == seen[2][1]


# A student and a store that an earlier version wrote are still read, pulled, scored with and rolled back to.


PUBLISHED = Path(__file__).parent / "published"
PAIRS: list[tuple[str, str]] = [(query, text) for query, text in json.loads((PUBLISHED / "pairs.json").read_text())]
CLOSE = {"rtol": 0, "atol": 1e-5}
"""Fp32 on another CPU, or with another version of the runtime."""


def expected(version: str) -> dict[str, np.ndarray]:
    return {name: np.array(rows) for name, rows in json.loads((PUBLISHED / f"{version}.json").read_text()).items()}


@pytest.fixture
def store(folder: Path) -> str:  # noqa: F811
    shutil.copytree(PUBLISHED / "store", folder / "store")
    return "store"


def answers(bundle: Path) -> dict[str, np.ndarray]:
    """What the bundle's own loader gives, as a deployment uses it: a process with the folder alone."""
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); import load; "
        "found = load.Student(sys.argv[1]).probabilities([tuple(pair) for pair in json.loads(sys.argv[2])]); "
        "print(json.dumps({name: rows.tolist() for name, rows in found.items()}))"
    )
    call = [sys.executable, "-P", "-c", code, str(bundle), json.dumps(PAIRS)]
    done = subprocess.run(call, capture_output=True, text=True, check=True)
    return {name: np.array(rows) for name, rows in json.loads(done.stdout).items()}


def serving(folder: Path, version: str) -> bool:  # noqa: F811
    found = answers(folder / "served" / "current")
    return all(np.allclose(found[name], rows, **CLOSE) for name, rows in expected(version).items())


def test_the_store_is_pulled_scored_with_and_rolled_back(
    folder: Path,  # noqa: F811
    store: str,
    relabel: Callable[..., Outcome],  # noqa: F811
) -> None:
    assert relabel("pull", f"{store}/tiny@stable", "served").code == 0
    assert serving(folder, "two")
    assert not serving(folder, "one")
    assert relabel("rollback", f"{store}/tiny", "stable").code == 0
    assert relabel("pull", f"{store}/tiny@stable", "served").code == 0
    assert serving(folder, "one")
    assert relabel("pull", "served", "--rollback", "--to", "two").code == 0
    assert serving(folder, "two")
    assert relabel("gc", store).code in (0, 10)
    assert relabel("show", f"{store}/tiny").code == 0


@pytest.mark.parametrize("what", ["student", "bundle"])
def test_it_scores_pairs_as_it_did(
    what: str,
    folder: Path,  # noqa: F811
    store: str,
    relabel: Callable[..., Outcome],  # noqa: F811
) -> None:
    shutil.copytree(PUBLISHED / "student", folder / "student")
    assert relabel("pull", f"{store}/tiny@one", "served").code == 0
    rows: list[dict[str, Any]] = [
        {"query_id": f"q{row}", "query": query, "doc_id": "d", "document": document}
        for row, (query, document) in enumerate(PAIRS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), "pairs.parquet")
    source = "student" if what == "student" else "served/current"
    assert relabel("score", source, "--input", "pairs.parquet", "--to", "scores").code == 0
    files = json.loads(Path("scores/manifest.json").read_text())["labels"]
    scored = sorted(
        (row for file in files for row in pq.read_table(Path("scores", file["path"])).to_pylist()),
        key=lambda row: row["row_id"],
    )
    assert np.allclose([row["probs"] for row in scored], expected("one")["relevance"], **CLOSE)
    assert relabel("verify", "scores").code == 0
