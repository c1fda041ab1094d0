"""Folders of `relabel export --format hf` and `rerank` as optimum and sentence-transformers load their graphs: in an
environment of their own, with transformers 4, by a script that runs there. `make test-optimum` makes it.
"""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.distill.conftest import encoder_dir, labels_file, pairs_file  # noqa: F401
from tests.export.conftest import student  # noqa: F401
from tests.jobs.conftest import folder, relabel  # noqa: F401

HERE = Path(__file__).parent
PYTHON = os.environ.get("RELABEL_OPTIMUM", "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.timeout(900))
        if not PYTHON:
            item.add_marker(pytest.mark.skip(reason="optimum is not installed here: `make test-optimum`"))


@dataclass(frozen=True)
class Loaded:
    """What a library answered.

    Args:
        scores: of each pair, a number or a list.
        graph: the file that it runs, and its sha256 then.
    """

    scores: list[Any]
    graph: str
    sha256: str


@pytest.fixture
def load(folder: Path) -> Callable[..., Loaded]:  # noqa: F811
    """`load("cross-encoder", "hf", pairs, apply_softmax=True)`: a folder by a class of the other environment, in which
    an export of a graph is an error.
    """

    def ask(loader: str, place: str, pairs: list[tuple[str, str]], **options: Any) -> Loaded:
        asked = json.dumps({"loader": loader, "place": place, "pairs": pairs, **options})
        done = subprocess.run(
            [PYTHON, str(HERE / "ask_loader.py")],
            input=asked,
            capture_output=True,
            text=True,
            cwd=folder,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return Loaded(**json.loads(done.stdout.splitlines()[-1]))

    return ask
