"""The GPU day keeps what it has: figures as they come, a part that hangs is cut, a pack comes whole or not at all."""

from __future__ import annotations

import hashlib
import io
import json
import struct
import tarfile
from pathlib import Path

import pytest

from benchmarks import gpu_day
from benchmarks.gpu_day_pack import ELF, PTX, thin, unpack


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_part_that_hangs_is_cut_and_the_next_one_runs(tmp_path: Path) -> None:
    results = tmp_path / "day.jsonl"
    kept = ["--results", str(results), "--scratch", str(tmp_path / "scratch")]
    assert gpu_day.main(["--only", "hang,score-host", "--rehearse", *kept]) == 1
    first, cut, figure, whole = lines_of(results)
    assert (first["part"], first["what"], cut["verdict"]) == ("hang", "before it hangs", "cut")
    assert (figure["part"], whole["verdict"]) == ("score-host", "whole")
    assert {"what", "figure", "baseline", "ratio", "verdict", "device", "versions", "unit"} <= set(figure)


def test_a_call_whose_time_is_used_up_begins_no_part(tmp_path: Path) -> None:
    results = tmp_path / "day.jsonl"
    assert gpu_day.main(["--only", "kill,score-bert", "--seconds", "5", "--results", str(results)]) == 1
    assert [(line["part"], line["verdict"]) for line in lines_of(results)] == [
        ("kill", "not run"),
        ("score-bert", "not run"),
    ]


def fatbin(*entries: tuple[int, int, bytes]) -> bytes:
    """A container as nvcc writes them: a header, then entries of kind, architecture and payload."""
    held = b"".join(
        struct.pack("<HHIQ", kind, 0x101, 64, len(payload)) + bytes(12) + struct.pack("<I", arch) + bytes(32) + payload
        for kind, arch, payload in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(held)) + held


def test_only_device_code_that_runs_stays_in_a_library() -> None:
    built = fatbin((ELF, 80, b"a" * 40), (ELF, 90, b"b" * 40), (PTX, 90, b"c" * 40))
    translated = fatbin((ELF, 86, b"d" * 24), (PTX, 80, b"e" * 24), (PTX, 120, b"f" * 24))
    library = bytearray(b"host code " + built + b" more " + translated + b" end")
    size = len(library)
    assert thin(library) == 40 + 40 + 24 + 24
    assert len(library) == size
    kept = {letter: bytes([letter]) * 20 in library for letter in b"abcdef"}
    assert bytes(letter for letter, is_kept in kept.items() if is_kept) == b"be"


def test_a_pack_is_installed_once_all_its_parts_came(tmp_path: Path) -> None:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:xz") as tar:
        tar.addfile(tarfile.TarInfo("./package/module.py"))
    data = held.getvalue()
    about = json.dumps({"parts": 2, "sha256": hashlib.sha256(data).hexdigest()})
    to = tmp_path / "host"
    for number, (part, outcome) in enumerate(
        [(data[:50], "waits for its other parts"), (b"damaged", None), (data[50:], "installed")]
    ):
        call = tmp_path / f"call-{number}"
        call.mkdir()
        (call / "base.json").write_text(about)
        (call / f"base.{min(number, 1)}").write_bytes(part)
        if outcome is None:
            with pytest.raises(ValueError, match="damaged"):
                unpack(call, to)
        else:
            assert unpack(call, to) == {"base": outcome}
    assert (to / "site/package/module.py").is_file()
