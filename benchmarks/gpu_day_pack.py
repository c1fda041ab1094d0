"""What a GPU host without an index lacks, packed to be carried in calls of at most 64 MiB: wheels for Python 3.12 on
x86-64, unpacked and reduced to what an H100 or H200 runs.

A CUDA library holds each kernel once for every architecture, in containers ("fatbins") of which the driver takes the
entry that fits. Payloads of all other entries are overwritten with zeros, headers stay as they are, so the compressed
library is a fraction of its size: onnxruntime-gpu's provider, 231 MB in its wheel, is about 50 MB then.
"""

import hashlib
import json
import lzma
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

CALL_BYTES = 55 << 20
"""Of a call: the working tree travels in the same 64 MiB."""
FILTERS = [
    {"id": lzma.FILTER_X86},
    {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 256 << 20},
]
"""Minutes here, a call less there."""
ARCH = 90
FATBIN = struct.pack("<IHH", 0xBA55ED50, 1, 16)
PTX, ELF = 1, 2
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]
PACKS = {
    "base": [
        "annotated-types==0.8.0", "datasets==5.2.0", "dill==0.4.1", "llguidance==1.7.6", "multiprocess==0.70.19",
        "pydantic==2.12.5", "pydantic_core==2.41.5", "trl==1.16.0", "typing-inspection==0.4.5",
    ],
    "vllm": [
        "vllm==0.26.0", "apache-tvm-ffi==0.1.11", "astor==0.8.1", "blake3==1.0.11", "cachetools==8.0.0",
        "cbor2==6.2.1", "compressed-tensors==0.17.0", "depyf==0.20.0", "distro==1.9.0", "fastapi==0.136.3",
        "httptools==0.9.0", "ijson==3.6.0", "jiter==0.19.0", "jmespath==1.1.0", "lark==1.2.2", "loguru==0.7.3",
        "model-hosting-container-standards==0.1.16", "msgspec==0.22.0", "openai==2.54.0", "openai-harmony==0.0.8",
        "partial-json-parser==0.2.1.1.post7", "prometheus-fastapi-instrumentator==8.1.0", "pybase64==1.5.1",
        "python-json-logger==4.2.0", "pyzmq==27.3.0", "setproctitle==1.3.8", "sniffio==1.3.1", "starlette==1.3.1",
        "uvicorn==0.54.0", "watchfiles==1.3.0", "websockets==17.4", "xgrammar==0.2.8",
        "lm-format-enforcer==0.11.3", "interegular==0.3.3", # vLLM imports it where a grammar is asked for

    ],
    "ort": ["onnxruntime-gpu==1.31.1"],
}  # fmt: skip
"""Wheels by pack, in addition to what the host has (torch 2.11, transformers 5.17, pyarrow, onnx, pytest ...)."""
LEFT_OUT = (
    "vllm/vllm-rs", "vllm/_rust_tool_parser.abi3.so", "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    "vllm/_moe_C_stable_libtorch.abi3.so",
    "vllm/third_party/deep_gemm/_C.cpython-310*", "vllm/third_party/deep_gemm/_C.cpython-311*",
    "vllm/third_party/deep_gemm/_C.cpython-313*", "vllm/third_party/deep_gemm/_C.cpython-314*",
    "onnxruntime/capi/libonnxruntime_providers_tensorrt.so",
)  # fmt: skip
"""What nothing here calls: FlashAttention 2, where 3 is there; kernels of mixtures of experts, which vLLM does without;
a Rust front end; other Pythons; TensorRT.
"""


def thin(library: bytearray) -> int:
    """Overwrite device code that ARCH can't run with zeros; returns the bytes overwritten."""
    at = overwritten = 0
    while (at := library.find(FATBIN, at)) >= 0:
        (size,) = struct.unpack_from("<Q", library, at + 8)
        place, end, entries = at + 16, at + 16 + size, []
        while place < end:
            kind, _, header, payload = struct.unpack_from("<HHIQ", library, place)
            (arch,) = struct.unpack_from("<I", library, place + 28)
            entries.append((kind, arch, place + header, payload))
            place += header + payload
        is_built = any((kind, arch) == (ELF, ARCH) for kind, arch, *_ in entries)
        for kind, arch, start, payload in entries:
            is_run = arch == ARCH if kind == ELF else not is_built and arch <= ARCH
            if not is_run:
                library[start : start + payload] = bytes(payload)
                overwritten += payload
        at = end
    return overwritten


def pack(folder: Path) -> dict[str, Any]:
    """Fetch, reduce and compress the packs; folders `call-1`, `call-2` ... hold what one call carries."""
    found: dict[str, Any] = {}
    shutil.rmtree(folder, ignore_errors=True)
    call, left = 0, 0
    for name, wanted in PACKS.items():
        data = archive_of(wanted)
        parts = 0
        about = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        places, at = [], 0
        while at < len(data):
            if not left:
                call, left = call + 1, CALL_BYTES
            places.append(folder / f"call-{call}")
            places[-1].mkdir(parents=True, exist_ok=True)
            piece = data[at : at + left]
            (places[-1] / f"{name}.{parts}").write_bytes(piece)
            at, left, parts = at + len(piece), left - len(piece), parts + 1
        for place in places:
            (place / f"{name}.json").write_text(json.dumps(about | {"parts": parts}))
        found[name] = about | {"calls": sorted({place.name for place in places})}
    return found


def archive_of(wanted: list[str]) -> bytes:
    """Wheels, unpacked and reduced, in one archive."""
    with tempfile.TemporaryDirectory() as made:
        wheels, site = Path(made, "wheels"), Path(made, "site")
        line = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(wheels)]
        line += ["--python-version", "3.12", "--implementation", "cp", *(f"--platform={one}" for one in PLATFORMS)]
        subprocess.run([*line, *wanted], check=True)
        for wheel in wheels.iterdir():
            zipfile.ZipFile(wheel).extractall(site)
        for place in (place for pattern in LEFT_OUT for place in site.glob(pattern)):
            place.unlink()
        for place in (place for place in site.rglob("*.so*") if place.is_file()):
            library = bytearray(place.read_bytes())
            if thin(library):
                place.write_bytes(library)
        archive = Path(made, "archive")
        with lzma.open(archive, "wb", filters=FILTERS) as file, tarfile.open(fileobj=file, mode="w|") as tar:
            tar.add(site, ".")
        return archive.read_bytes()


def unpack(folder: Path, to: Path) -> dict[str, Any]:
    """Keep the parts of this call below `to`, and install each pack of which all parts came.

    Raises:
        ValueError: a pack is damaged.
    """
    kept = to / "parts"
    kept.mkdir(parents=True, exist_ok=True)
    for part in folder.iterdir():
        shutil.copy(part, kept)
    found = {}
    for file in sorted(kept.glob("*.json")):
        about = json.loads(file.read_text())
        parts = [kept / f"{file.stem}.{number}" for number in range(about["parts"])]
        if not all(part.is_file() for part in parts):
            found[file.stem] = "waits for its other parts"
            continue
        archive = kept / "archive"
        archive.write_bytes(b"".join(part.read_bytes() for part in parts))
        if hashlib.sha256(archive.read_bytes()).hexdigest() != about["sha256"]:
            raise ValueError(f"{file.stem}: its parts are damaged. Carry them again.")
        with tarfile.open(archive, "r:xz") as tar:
            tar.extractall(to / "site", filter="data")
        for part in (file, archive, *parts):
            part.unlink()
        found[file.stem] = "installed"
    return found
