"""TensorRT engines of a bundle's models: optimization profiles and builds.

An engine is built from the bundle's plain ONNX and fits one GPU's compute capability and one TensorRT version; the
manifest names which, and the loader takes ONNX where they differ. Next to each engine is a one-node ONNX graph
(onnxruntime's `EPContext`) that names it, so that the loader runs an engine through onnxruntime as it runs everything
else. TensorRT-RTX builds without a GPU for a compute capability that is named; TensorRT itself builds on the GPU that
it is for.
"""

import contextlib
import importlib
import io
import logging
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relabel.export.bundle_facts import EngineFile, TokenLengths, student_facts
from relabel.export.bundles import MANIFEST_NAME, Bundle, new_folder_for, open_bundle, seal_bundle
from relabel.export.loader import PROVIDERS, gpu_capability
from relabel.manifests.errors import ManifestError, MissingExtraError, ModelError, StaleRunError, UsageError
from relabel.manifests.process import require
from relabel.manifests.records import plain

Profile = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
"""Shapes (rows, tokens) that an engine takes: least, tuned for, most."""


def plan_profile(lengths: TokenLengths, max_tokens: int) -> Profile:
    """The shape profile of a bundle: anything up to `max_tokens`, tuned for nine pairs in ten.

    One profile alone: onnxruntime runs an engine's first.
    """
    return (1, 1), (8, min(lengths.p90, max_tokens)), (128, max_tokens)


def find_tensorrt() -> tuple[str, Any]:
    """The TensorRT that is here: its flavour and module.

    Raises:
        MissingExtraError: there is none.
    """
    for flavour, name in (
        ("tensorrt", "tensorrt"),
        ("tensorrt_rtx", "tensorrt_rtx"),
        ("tensorrt_rtx", "tensorrt_rtx_bindings"),
    ):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(module, "Builder"):  # a stub of that name is no TensorRT
            return flavour, module
    raise MissingExtraError(
        "A TensorRT engine needs TensorRT: `pip install tensorrt` (or tensorrt-rtx) on the machine with the GPU."
    )


def build(trt: Any, graph: Path, profile: Profile, *, precision: str, capability: str | None) -> bytes:
    """Parse a plain ONNX graph and build an engine of it.

    Args:
        trt: the TensorRT module.
        precision: `fp32` as the graph is, `fp16` with the graph halved, `bf16` where this TensorRT chooses types
            itself.
        capability: build for this compute capability instead of the GPU that is here (TensorRT-RTX).
    Returns:
        The serialized engine.
    Raises:
        ModelError: TensorRT can't parse or build it.
        MissingExtraError: this TensorRT can't do what was asked.
    """
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    is_typed = precision != "bf16"
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED) if is_typed else 0)
    parser = trt.OnnxParser(network, logger)
    if not (parser.parse(_halved(graph)) if precision == "fp16" else parser.parse_from_file(str(graph))):
        faults = "; ".join(parser.get_error(number).desc() for number in range(parser.num_errors))
        raise ModelError(f"{graph}: TensorRT {trt.__version__} can't parse it ({faults[:500]}).")
    config = builder.create_builder_config()
    if not is_typed:
        if not hasattr(trt.BuilderFlag, "BF16"):
            raise MissingExtraError(f"bf16: this TensorRT ({trt.__version__}) keeps the graph's own types. Take fp16.")
        config.set_flag(trt.BuilderFlag.BF16)
    if capability is not None:
        target = getattr(getattr(trt, "ComputeCapability", None), "SM" + capability.replace(".", ""), None)
        if target is None:
            raise MissingExtraError(f"--capability {capability}: this TensorRT builds for no such GPU.")
        config.num_compute_capabilities = 1
        config.set_compute_capability(target, 0)
    shapes = builder.create_optimization_profile()
    for number in range(network.num_inputs):
        shapes.set_shape(network.get_input(number).name, *profile)
    config.add_optimization_profile(shapes)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise ModelError(
            f"{graph}: TensorRT {trt.__version__} can't build it for {capability or 'the GPU here'}; its own lines "
            "say why."
        )
    return bytes(engine)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the steps, fusions, deprecations and advice that the exporters and onnxruntime's tools print."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


def _halved(graph: Path) -> bytes:
    """The graph in float16, inputs and outputs as they were."""
    onnx = require("onnx", extra="cpu", purpose="fp16")
    float16 = require("onnxruntime.transformers.float16", extra="cpu", purpose="fp16")
    with quiet():
        model = float16.convert_float_to_float16(onnx.load(str(graph)), keep_io_types=True, disable_shape_infer=False)
    return bytes(model.SerializeToString())


ENGINE_PRECISIONS = ("fp32", "fp16", "bf16")


def check_machine() -> None:
    """Whether engines can be built here.

    Raises:
        MissingExtraError: no TensorRT, or no GPU.
    """
    find_tensorrt()
    if gpu_capability() is None:
        raise MissingExtraError(
            "--formats tensorrt: no GPU is here to build for. Export ONNX, and run `relabel build-engine` where it "
            "serves."
        )


def build_into(
    source: Path, target: Path, *, precision: str, capability: str | None, is_replacing: bool = False
) -> Bundle:
    """Make a bundle that holds another's files and an engine for this machine.

    Args:
        source: a whole bundle; stays as it is, unless it is the target.
        target: folder to make.
        precision: one of `ENGINE_PRECISIONS`.
        capability: see `build`.
        is_replacing: take the place of what is at `target`.
    Raises:
        StaleRunError: `target` exists.
        UsageError: a compute capability where this TensorRT takes none.
        MissingExtraError: no TensorRT, or no GPU to build for.
        ManifestError, ModelError: the bundle is damaged, or can't be built.
    """
    if target.exists() and not is_replacing:
        raise StaleRunError(f"{target}: exists already. Name another --to.")
    with new_folder_for(target, is_replacing=is_replacing) as part:
        _copy_with_engine(source, part, precision=precision, capability=capability)
    return open_bundle(target)


def _copy_with_engine(source: Path, part: Path, *, precision: str, capability: str | None) -> None:
    """Fill an empty folder with a bundle's files and an engine, and seal it; arguments and errors are those of
    `build_into`.
    """
    bundle = open_bundle(source)
    student = student_facts(bundle)
    graph = next((model for model in student.models if (model.precision, model.format) == ("fp32", "onnx")), None)
    if graph is None:
        raise ManifestError(f"{source}: lists no fp32 ONNX model to build from. Export the student again.")
    if "counts" in student.inputs.names:
        raise ModelError(f"{source}: the counts of a logistic student fit no engine's profile. Serve its ONNX.")
    flavour, trt = find_tensorrt()
    aimed = capability if capability is not None else gpu_capability()
    if aimed is None:
        raise MissingExtraError(
            "No GPU is here to build for. Build on the machine that serves, or name --capability (TensorRT-RTX alone)."
        )
    if capability is not None and flavour != "tensorrt_rtx":
        raise UsageError(
            "--capability: TensorRT builds for the GPU that it runs on; only TensorRT-RTX builds for another."
        )
    folder = f"engines/{flavour}-{trt.__version__}-sm{aimed.replace('.', '')}"
    profile = plan_profile(student.inputs.lengths, student.inputs.max_tokens)
    made = build(
        trt,
        source / graph.path,
        profile,
        precision=precision,
        capability=capability,
    )
    shutil.copytree(
        source, part, dirs_exist_ok=True, ignore=lambda at, _: {MANIFEST_NAME} if Path(at) == source else set()
    )
    (part / folder).mkdir(parents=True, exist_ok=True)
    engine = f"{folder}/{precision}.engine"
    context = f"{folder}/{precision}.onnx"
    (part / engine).write_bytes(made)
    write_context(
        plain=part / graph.path,
        target=part / context,
        engine=Path(engine).name,
        provider=PROVIDERS[flavour],
        capability=aimed,
        version=trt.__version__,
    )
    entry = EngineFile(
        path=context,
        format="tensorrt",
        precision=precision,
        files=[context, engine],
        flavour=flavour,
        tensorrt=trt.__version__,
        capability=aimed,
        profile=list(profile),
    )
    others = [model for model in student.models if model.path != context]
    seal_bundle(part, {**bundle.own_facts, "models": plain([*others, entry])})


def write_context(plain: Path, target: Path, engine: str, provider: str, capability: str, version: str) -> None:
    """A graph of one node that names an engine in the same folder, with the plain graph's inputs and outputs."""
    onnx = require("onnx", extra="cpu", purpose="A TensorRT engine")
    graph = onnx.load(str(plain), load_external_data=False).graph
    node = onnx.helper.make_node(
        "EPContext",
        [value.name for value in graph.input],
        [value.name for value in graph.output],
        domain="com.microsoft",
        main_context=1,
        embed_mode=0,
        ep_cache_context=engine,
        ep_sdk_version=version,
        hardware_architecture=capability.replace(".", ""),
        source=provider,
    )
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "engine", list(graph.input), list(graph.output)),
        opset_imports=[onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
    )
    onnx.save_model(model, str(target))
