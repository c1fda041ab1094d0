"""A tiny random model, pairs with grades, and runs of labelers over them that the fake engine has answered."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from relabel.distill.teachers.spec import read_teacher_spec, teacher_schema
from relabel.jobs.cli import main
from relabel.manifests.files import Storage
from tests.distill.conftest import make_pairs
from tests.engines.conftest import make_model, make_tokenizer
from tests.labelers.driving import caps
from tests.reuse.test_estimates import treed_rows
from tests.teachers.chunked import write_questions
from tests.teachers.models import write_tiny_decoder

NUM_PAIRS = 12


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def fresh(tokenizer: Any) -> Any:
    """A tiny model; to be copied before it is trained."""
    return make_model("qwen2", len(tokenizer))


@pytest.fixture(scope="session")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal language model whose prompts fit: 2 layers, ChatML."""
    return write_tiny_decoder(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="session")
def short_templates(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prompts of a few bytes, so that a step takes milliseconds."""
    folder = tmp_path_factory.mktemp("templates")
    (folder / "system.j2").write_text("Judge.")
    (folder / "user.j2").write_text("{{ query }}: {{ document }}")
    return str(folder)


@pytest.fixture(scope="session")
def check_schema() -> Callable[[dict[str, Any]], None]:
    """Whether a spec is as the published schema has it."""
    validator = jsonschema.Draft202012Validator(teacher_schema())
    return lambda values: validator.validate(values)


@pytest.fixture(scope="session")
def pairs_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.parquet"
    pq.write_table(pa.Table.from_pylist(make_pairs()[:NUM_PAIRS]), path)
    return path


def relabel(*arguments: str) -> int:
    """A command in this process; its exit code."""
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    return int(end.value.code or 0)


@pytest.fixture(scope="session")
def run_of(pairs_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`run_of("r3a", max_think_tokens=4)`: the output of a finished run, made once."""
    made: dict[str, Path] = {}

    def make(labeler: str, **options: Any) -> Path:
        key = f"{labeler} {sorted(options.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp(labeler)
            values = {
                "name": "run",
                "input": {"path": str(pairs_path)},
                "labeler": {"name": labeler, **caps(labeler, think=8, text=6), **options},
                "engine": {"name": "fake"},
                "output": str(folder / "out"),
            }
            (folder / "job.yaml").write_text(yaml.safe_dump(values))
            assert relabel("run", str(folder / "job.yaml")) == 0
            made[key] = folder / "out"
        return made[key]

    return make


@pytest.fixture(scope="session")
def questions_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions over chunked documents, with wanted sets and answers."""
    return write_questions(tmp_path_factory.mktemp("questions") / "similar.parquet")


def write_treed_pairs(path: Path) -> Path:
    """Pairs whose documents have trees, with one passage each."""
    rows = [{**row, "passages": row["passages"][:1]} for row in treed_rows(1, 3)]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.fixture(scope="session")
def treed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a finished run of `route`."""
    folder = tmp_path_factory.mktemp("route")
    values = {
        "name": "run",
        "input": {"path": str(write_treed_pairs(folder / "pairs.parquet"))},
        "labeler": {"name": "route", "temperature": 0.7},
        "engine": {"name": "fake", "seed": 1},
        "output": str(folder / "out"),
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(values))
    assert relabel("run", str(folder / "job.yaml")) == 0
    return folder / "out"


def plain_values(base: Path, folder: Path) -> dict[str, Any]:
    """A small spec without its data."""
    return {
        "name": "tiny",
        "method": "sft",
        "init": str(base),
        "train": {"epochs": 1, "batch_size": 4, "learning_rate": 1e-3, "seed": 7},
        "output": str(folder / "out"),
    }


@pytest.fixture
def values(base_dir: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Plain values of a small spec; sections are merged, other keys replaced."""

    def make(**changes: Any) -> dict[str, Any]:
        held = plain_values(base_dir, tmp_path)
        for key, value in changes.items():
            held[key] = {**held.get(key, {}), **value} if isinstance(value, dict) else value
        return held

    return make


@pytest.fixture
def teach(values: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
    """Train a small spec in this process."""
    from relabel.distill.teachers.teaching import train_teacher

    def go(start: Any = "new", say: Callable[[str], None] = lambda _: None, **changes: Any) -> Any:
        spec = read_teacher_spec(values(**changes), where="teacher.yaml")
        return train_teacher(spec, Storage(), start=start, report=say)

    return go
