"""A real Ray cluster of three nodes on this machine, each with an invalid GPU."""

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

HERE = Path(__file__).parent
# 30 by default, too little next to other tests on two cores
os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
IS_HERE = importlib.util.find_spec("ray") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents:
            continue
        for warning in (
            "ignore::ResourceWarning",  # Ray's cluster_utils leaves the logs of the nodes it starts open
            "ignore::pytest.PytestUnraisableExceptionWarning",  # and the processes of the nodes it kills
            "ignore::FutureWarning:ray.*",
            "ignore::DeprecationWarning:ray.*",
        ):
            item.add_marker(pytest.mark.filterwarnings(warning))
        if not IS_HERE and "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason="ray is not installed here: pip install 'relabel-ir[ray]'"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 1, "include_dashboard": False})
    try:
        for _ in range(2):
            made.add_node(num_cpus=2, num_gpus=1)
        yield made
    finally:
        made.shutdown()
        left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
        for child in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(left, timeout=10)
