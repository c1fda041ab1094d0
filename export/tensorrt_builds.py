"""An ONNX model built into an engine by TensorRT, for the GPU that is here."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from relabel.export.optimize import quiet
from relabel.export.token_lengths import TokenLengths
from relabel.manifests.errors import MissingExtraError, ModelError
from relabel.manifests.extras import require

MODULES = (("tensorrt", "tensorrt"), ("tensorrt_rtx", "tensorrt_rtx"), ("tensorrt_rtx", "tensorrt_rtx_bindings"))
OPT_BATCH, MAX_BATCH = 8, 128


class Profile(NamedTuple):
    """Shapes (rows, tokens) that an engine takes, and the one that it is tuned for."""

    low: tuple[int, int]
    tuned: tuple[int, int]
    high: tuple[int, int]


@dataclass(frozen=True)
class BuiltEngine:
    """What a build made.

    Args:
        engine: serialized.
        cache: timings to start a later build with; empty where this TensorRT keeps none.
    """

    engine: bytes
    cache: bytes


def plan_profile(lengths: TokenLengths, max_tokens: int) -> Profile:
    """The shape profile of a bundle: anything up to `max_tokens`, tuned for nine pairs in ten.

    One profile alone: onnxruntime runs an engine's first.
    """
    return Profile((1, 1), (OPT_BATCH, min(lengths.p90, max_tokens)), (MAX_BATCH, max_tokens))


def find_tensorrt() -> tuple[str, ModuleType]:
    """The TensorRT that is here: its flavour and module.

    Raises:
        MissingExtraError: there is none.
    """
    for flavour, name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(module, "Builder"):  # a stub of that name is no TensorRT
            return flavour, module
    raise MissingExtraError(
        "A TensorRT engine needs TensorRT: `pip install tensorrt` (or tensorrt-rtx) on the machine with the GPU."
    )


def capability_here() -> tuple[str | None, str | None]:
    """Name and compute capability (`9.0`) of the first GPU; None where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None, None
    line = [tool, "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=30)
    name, comma, capability = done.stdout.partition("\n")[0].rpartition(",")
    return (name.strip(), capability.strip()) if done.returncode == 0 and comma else (None, None)


def build(
    trt: Any, graph: Path, profile: Profile, *, precision: str, capability: str | None, cache: bytes = b""
) -> BuiltEngine:
    """Parse a plain ONNX graph and build an engine of it.

    Args:
        trt: the TensorRT module.
        precision: `fp32` as the graph is, `fp16` with the graph halved, `bf16` where this TensorRT chooses types
            itself.
        capability: build for this compute capability instead of the GPU that is here (TensorRT-RTX).
        cache: timings of an earlier build.
    Raises:
        ModelError: TensorRT can't parse or build it.
        MissingExtraError: this TensorRT can't do what was asked.
    """
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    flag = trt.NetworkDefinitionCreationFlag
    is_typed = precision != "bf16"
    network = builder.create_network(1 << int(flag.STRONGLY_TYPED) if is_typed else 0)
    parser = trt.OnnxParser(network, logger)
    parsed = parser.parse(_halved(graph)) if precision == "fp16" else parser.parse_from_file(str(graph))
    if not parsed:
        faults = "; ".join(parser.get_error(number).desc() for number in range(parser.num_errors))
        raise ModelError(f"{graph}: TensorRT {trt.__version__} can't parse it ({faults[:500]}).")
    config = builder.create_builder_config()
    if not is_typed:
        if not hasattr(trt.BuilderFlag, "BF16"):
            raise MissingExtraError(f"bf16: this TensorRT ({trt.__version__}) keeps the graph's own types. Take fp16.")
        config.set_flag(trt.BuilderFlag.BF16)
    if capability is not None:
        _aim(trt, config, capability)
    shapes = builder.create_optimization_profile()
    for number in range(network.num_inputs):
        shapes.set_shape(network.get_input(number).name, *profile)
    config.add_optimization_profile(shapes)
    # RTX chooses without timing, and warns of whoever keeps a cache
    has_cache = not trt.__name__.startswith("tensorrt_rtx")
    if has_cache:
        config.set_timing_cache(config.create_timing_cache(cache), False)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise ModelError(
            f"{graph}: TensorRT {trt.__version__} can't build it for {capability or 'the GPU here'}; its own lines "
            "say why."
        )
    return BuiltEngine(bytes(engine), bytes(config.get_timing_cache().serialize()) if has_cache else b"")


def _halved(graph: Path) -> bytes:
    """The graph in float16, inputs and outputs as they were."""
    onnx = require("onnx", extra="cpu", purpose="fp16")
    float16 = require("onnxruntime.transformers.float16", extra="cpu", purpose="fp16")
    with quiet():
        model = float16.convert_float_to_float16(onnx.load(str(graph)), keep_io_types=True, disable_shape_infer=False)
    return bytes(model.SerializeToString())


def _aim(trt: Any, config: Any, capability: str) -> None:
    name = "SM" + capability.replace(".", "")
    if not hasattr(trt, "ComputeCapability") or not hasattr(trt.ComputeCapability, name):
        known = [found for found in dir(getattr(trt, "ComputeCapability", None)) if found.startswith("SM")]
        raise MissingExtraError(
            f"--capability {capability}: this TensorRT builds for {', '.join(known) or 'no other GPU'}."
        )
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, name), 0)
