"""kill -9 amid `relabel rounds`, within its runs and between them, and two of them at once: the same command then ends
with the trajectories of an undisturbed search, byte for byte.
"""

import json
import shutil
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("polars")
pytest.importorskip("bm25s")

from relabel.manifests.failpoints import FAILPOINTS, ROUNDS_FAILPOINTS
from tests.faults import forks
from tests.faults.command_lines import SEARCH, inside, tree
from tests.faults.conftest import Sweep, count, some
from tests.faults.places import pairs


def write(folder: Path) -> Path:
    """Questions, corpus and job: ten questions, of which reviews fail."""
    folder.mkdir()
    pq.write_table(pairs(), folder / "pairs.parquet")
    texts = sorted(set(pairs()["document"].to_pylist()))
    documents = {"doc_id": [f"d{place}" for place in range(len(texts))], "document": texts}
    pq.write_table(pa.table(documents), folder / "docs.parquet")
    job = {**SEARCH, "rounds": {**SEARCH["rounds"], "corpus": "docs.parquet"}}
    (folder / "search.yaml").write_text(json.dumps(job))
    return folder


def made(folder: Path) -> dict[str, str]:
    """All files of the output that hold no times."""
    promised = ("rounds.json", "trajectories.parquet", "inputs/", "labels/", "quarantine/", "answers/")
    found = tree(folder / "out/search")
    return {name: digest for name, digest in found.items() if name.startswith(promised) or "/labels/" in f"/{name}"}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = write(tmp_path_factory.mktemp("undisturbed") / "world")
    ended = forks.call(["rounds", "search.yaml"], setup=inside(folder))
    assert ended.codes == [0], ended
    assert (folder / "out/search/round-3/manifest.json").exists()
    return made(folder)


@pytest.mark.full
def test_killed_at_a_failpoint_the_same_command_ends_with_the_same_trajectories(
    expected: dict[str, str], sweep: Sweep, tmp_path: Path
) -> None:
    def attempt(schedule: tuple[str, int]) -> str | None:
        name, hit = schedule
        folder = write(tmp_path / f"{name}-{hit}")
        killed = forks.call(["rounds", "search.yaml"], setup=inside(folder, "arm", f"{name}:{hit}"))
        if killed.code != -signal.SIGKILL and hit == 1:
            return f"not killed: {killed}"
        again = forks.call(["rounds", "search.yaml"], setup=inside(folder))
        if again.codes not in ([0], [10]):
            return f"the same command again: {again}"
        if (found := made(folder)) != expected:
            differ = sorted(one for one in found.keys() | expected.keys() if found.get(one) != expected.get(one))
            return f"other files than an undisturbed search leaves: {differ}"
        shutil.rmtree(folder)
        return None

    between = [(name, hit) for name in ROUNDS_FAILPOINTS for hit in ((1, 3) if "file" in name else (1,))]
    within = [(name, hit) for hit in (1, 3, 8, 20) for name in FAILPOINTS]
    sweep([*between, *some(within, short=8)], attempt, share=0.03)


def test_two_commands_at_once_make_one_search(expected: dict[str, str], sweep: Sweep, tmp_path: Path) -> None:
    def attempt(number: int) -> str | None:
        folder = write(tmp_path / f"two-{number}")
        children = [forks.start(["rounds", "search.yaml"], setup=inside(folder)) for _ in range(2)]
        ended = [child.wait() for child in children]
        # who finds all of a round in the other's hands ends with 75 or 20
        if any(one.codes[0] not in (0, 10, 20, 75) for one in ended):
            return f"{ended}"
        again = forks.call(["rounds", "search.yaml"], setup=inside(folder))
        if again.codes not in ([0], [10]):
            return f"the same command again: {again}"
        return None if made(folder) == expected else "other files than one command leaves"

    sweep(range(count(full=20, short=1)), attempt, at_a_time=1, share=0.01)
