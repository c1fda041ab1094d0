"""A machine's devices by name, found without torch."""

from __future__ import annotations

from pathlib import Path

from relabel.manifests.process import device_names, usable_cores


def test_a_cpu_has_its_cores_and_each_kind_of_gpu_is_named_once(tmp_path: Path) -> None:
    for number, model in enumerate(("NVIDIA H200", "NVIDIA L4", "NVIDIA H200")):
        folder = tmp_path / f"0000:{number}0:00.0"
        folder.mkdir()
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 17\n")
    cpu, *gpus = device_names(tmp_path)
    assert cpu.endswith(f", {usable_cores()} cores")
    assert gpus == ["NVIDIA H200", "NVIDIA L4"]
    assert device_names(tmp_path / "absent") == [cpu]
