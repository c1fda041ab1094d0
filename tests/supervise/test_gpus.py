"""GPUs are found and given out without torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from relabel.jobs.pool import processes
from relabel.jobs.pool.processes import choose_gpus, gpu_groups, visible_gpus
from relabel.manifests.errors import MissingExtraError, UsageError


@pytest.mark.parametrize(
    ("said", "names"),
    [("0,1", ["0", "1"]), ("", []), ("GPU-aa,GPU-bb", ["GPU-aa", "GPU-bb"]), ("3, 1", ["3", "1"]), ("2,-1,0", ["2"])],
)
def test_what_a_scheduler_made_visible_is_what_counts(said: str, names: list[str]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": said}) == names


def test_the_driver_is_asked_first_then_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processes, "_count_by_driver", lambda: 2)
    assert visible_gpus({}) == ["0", "1"]
    monkeypatch.setattr(processes, "_count_by_driver", lambda: 0)
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    monkeypatch.setattr(processes, "DRIVER_FOLDER", tmp_path / "gpus")
    assert visible_gpus({}) == ["0"]


def test_all_and_numbers_count_within_the_visible_ones() -> None:
    assert choose_gpus("all", ["4", "5"]) == ["4", "5"]
    assert choose_gpus("1", ["4", "5"]) == ["5"]
    for text, error in (("0,0", UsageError), ("two", UsageError), ("2", MissingExtraError), ("-1", MissingExtraError)):
        with pytest.raises(error, match="--gpus"):
            choose_gpus(text, ["4", "5"])
    with pytest.raises(MissingExtraError, match="--workers N"):
        choose_gpus("all", [])
    for slip in (",", "0,0", "two"):  # a slip is reported as one where there is no GPU, too
        with pytest.raises(UsageError, match="--gpus"):
            choose_gpus(slip, [])


def test_an_engine_that_spreads_over_two_gets_two_and_a_spare_one_stays_idle() -> None:
    assert gpu_groups(["0", "1", "2", "3", "4"], 2) == [["0", "1"], ["2", "3"]]
    with pytest.raises(MissingExtraError, match="tensor_parallel_size is 4"):
        gpu_groups(["0", "1"], 4)
