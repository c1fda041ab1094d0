"""A container's quota of CPU time: read wherever it is, and no session takes more threads than it keeps busy."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

from relabel.export import loader
from relabel.export.loader import cpu_quota, default_threads, open_session, usable_cores

GROUPS = "sys/fs/cgroup"
Machine = Callable[[str, dict[str, str]], Path]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """`machine(groups, files)`: a root whose process lies in these groups, with these files below `/sys/fs/cgroup`."""

    def make(groups: str, files: dict[str, str]) -> Path:
        for name, text in {
            "proc/self/cgroup": groups,
            **{f"{GROUPS}/{name}": text for name, text in files.items()},
        }.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),  # a container with groups of its own
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        # around it
        (
            "0::/pods/one/main\n",
            {"pods/one/main/cpu.max": "max 100000", "pods/one/cpu.max": "50000 20000"},
            2.5,
        ),
        # the least of them
        (
            "0::/pods/one\n",
            {"pods/one/cpu.max": "400000 100000", "pods/cpu.max": "100000 100000"},
            1.0,
        ),
        ("0::/../../pods/one\n", {"cpu.max": "200000 100000"}, 2.0),  # what a container sees of a group outside it
        ("0::/\n", {"cpu.max": "much\n"}, None),
    ],
)
def test_the_least_quota_in_force_is_found(
    machine: Machine, groups: str, files: dict[str, str], quota: float | None
) -> None:
    assert cpu_quota(machine(groups, files)) == quota


def test_a_system_without_control_groups_has_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    assert default_threads(tmp_path) == usable_cores()


@pytest.fixture(autouse=True)
def _no_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(
    ("quota", "wished", "threads"),
    [(0.5, "", 1), (1.9, "", 1), (100.0, "", 8), (100.0, "3", 3), (2.0, "4,2", 2), (100.0, "0", 1), (100.0, "all", 8)],
)
def test_threads_are_those_that_a_quota_keeps_busy_and_that_are_wished(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, quota: float, wished: str, threads: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", wished)
    monkeypatch.setattr(loader, "usable_cores", lambda: 8)
    assert default_threads(machine("0::/\n", {"cpu.max": f"{quota * 100_000:.0f} 100000"})) == threads


def test_cores_are_those_of_the_process_and_not_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4})
    assert usable_cores() == 2


@pytest.mark.parametrize(("quota", "asked", "taken"), [(2.0, 0, 2), (2.0, 7, 7), (None, 0, 0)])
def test_a_session_takes_no_more_threads_than_the_quota_unless_it_is_asked_to(
    made: Path, monkeypatch: pytest.MonkeyPatch, quota: float | None, asked: int, taken: int
) -> None:
    options, seen = onnxruntime.SessionOptions, []

    def telling() -> Any:
        seen.append(options())
        return seen[-1]

    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(loader, "usable_cores", lambda: 8)
    monkeypatch.setattr(loader, "cpu_quota", lambda _: quota)
    monkeypatch.setattr("onnxruntime.SessionOptions", telling)
    open_session(made / "model.onnx", "cpu", threads=asked)
    assert seen[0].intra_op_num_threads == taken
