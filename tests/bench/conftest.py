"""A tiny student, its bundle in fp32 and int8, and copies of it to write into."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relabel.manifests.files import Storage
from tests.jobs.conftest import folder, no_scheduler, relabel  # noqa: F401
from tests.score.conftest import write_tiny_student
from tests.shared import made_once


@pytest.fixture(scope="session")
def pairs_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty pairs of different lengths."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.parquet"
    rows = [
        {
            "query_id": f"q{number % 5}",
            "query": "red running shoe",
            "doc_id": f"d{number}",
            "title": "shoe " * (1 + number % 9),
            "body": "size 9 kind of blue",
            "grade": number % 3,
        }
        for number in range(40)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.fixture(scope="session")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, 16 dimensions, positions for 64 tokens; it reads at most 24."""
    path = tmp_path_factory.mktemp("student") / "tiny"
    write_tiny_student(path, heads={"relevance": 3})
    return path


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, student: Path, pairs_file: Path) -> Path:
    """The bundle as it was exported; not to be written into."""
    from relabel.export.exporting import export_bundle
    from relabel.export.parity import PairsFile
    from relabel.export.specs import ExportSpec

    spec = ExportSpec(precisions="fp32,int8", triton=True, parity={"int8_max_f1_loss": 100})  # type: ignore[arg-type]
    pairs = PairsFile(str(pairs_file), "grade")
    return made_once(
        tmp_path_factory,
        "bench-bundle",
        lambda path: export_bundle(student, path, spec, Storage(), pairs=pairs, provider="cpu"),
    )


@pytest.fixture
def bundle(folder: Path, made: Path) -> Path:  # noqa: F811
    """A copy of the bundle in the working directory, as `bundle`."""
    shutil.copytree(made, folder / "bundle")
    return folder / "bundle"


@pytest.fixture
def inside() -> Callable[[Path], dict[str, bytes]]:
    """Every file below a folder, by name."""

    def read(top: Path) -> dict[str, bytes]:
        return {os.path.relpath(path, top): path.read_bytes() for path in sorted(top.rglob("*")) if path.is_file()}

    return read
