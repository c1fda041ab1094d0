"""TensorRT engines: built from the bundle's plain ONNX, for one GPU and one TensorRT, with a shape profile of real
lengths.

An engine fits the GPU's compute capability and the TensorRT version that built it, and the manifest says which; the
loader holds both against its machine and takes ONNX where they differ. Beside each engine lies a one-node ONNX graph
(onnxruntime's `EPContext`) that names it, so that the loader runs an engine through onnxruntime as it runs everything
else.

TensorRT-RTX builds without a GPU for a compute capability that is named; TensorRT itself builds on the GPU that it is
for.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from relabel.export.bundle_places import locked, made_beside, switch
from relabel.export.bundles import MANIFEST_NAME, Bundle, open_bundle, seal_bundle
from relabel.export.student_facts import EngineFile, student_facts
from relabel.export.tensorrt_builds import build, capability_here, find_tensorrt, plan_profile
from relabel.manifests.errors import ManifestError, MissingExtraError, ModelError, StaleRunError, UsageError
from relabel.manifests.extras import require
from relabel.manifests.records import plain

FLAVOURS = {"tensorrt": "TensorrtExecutionProvider", "tensorrt_rtx": "NvTensorRTRTXExecutionProvider"}
"""Module → the onnxruntime provider that runs its engines."""
PRECISIONS = ("fp32", "fp16", "bf16")
FOLDER = "engines"
CACHE_NAME = "timing.cache"


class EngineFormat:
    """Engines for this machine, as a bundle's format; see `export.bundle_formats`."""

    precisions = PRECISIONS

    def check(self) -> None:
        """Whether engines can be built here.

        Raises:
            MissingExtraError: no TensorRT, or no GPU.
        """
        find_tensorrt()
        if capability_here()[1] is None:
            raise MissingExtraError(
                "--formats tensorrt: no GPU is here to build for. Export ONNX, and run `relabel build-engine` where it "
                "serves."
            )

    def add(self, bundle: Path, precision: str) -> Bundle:
        """Put an engine for this machine into a bundle, which is sealed anew."""
        with made_beside(bundle) as part:
            _copy_with_engine(bundle, part, precision=precision, capability=None)
            with locked(bundle, waits=True):
                switch(part, bundle)
        return open_bundle(bundle, check_bytes=False)


ENGINES = EngineFormat()


def build_into(source: Path, target: Path, *, precision: str, capability: str | None) -> Bundle:
    """Make a bundle that holds another's files and an engine for this machine.

    Args:
        source: a whole bundle; stays as it is.
        target: folder to make.
        capability: see `build`.
    Raises:
        StaleRunError: `target` exists.
        UsageError: no such precision, or a compute capability where this TensorRT takes none.
        MissingExtraError: no TensorRT, or no GPU to build for.
        ManifestError, ModelError: the bundle is damaged, or can't be built.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"--precision {precision}: engines are built in {', '.join(PRECISIONS)}.")
    _check_free(target)
    with made_beside(target) as part:
        _copy_with_engine(source, part, precision=precision, capability=capability)
        with locked(target, waits=True):
            _check_free(target)
            switch(part, target)
    return open_bundle(target, check_bytes=False)


def _check_free(target: Path) -> None:
    if target.exists():
        raise StaleRunError(f"{target}: exists already. Name another --to.")


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
    gpu, here = capability_here()
    aimed = capability if capability is not None else here
    if aimed is None:
        raise MissingExtraError(
            "No GPU is here to build for. Build on the machine that serves, or name --capability (TensorRT-RTX alone)."
        )
    if capability is not None and flavour != "tensorrt_rtx":
        raise UsageError(
            "--capability: TensorRT builds for the GPU that it runs on; only TensorRT-RTX builds for another."
        )
    folder = f"{FOLDER}/{flavour}-{trt.__version__}-sm{aimed.replace('.', '')}"
    old_cache = source / folder / CACHE_NAME
    cache = old_cache.read_bytes() if old_cache.is_file() else b""
    profile = plan_profile(student.inputs.lengths, student.inputs.max_tokens)
    built = build(trt, source / graph.path, profile, precision=precision, capability=capability, cache=cache)
    shutil.copytree(
        source, part, dirs_exist_ok=True, ignore=lambda at, _: {MANIFEST_NAME} if Path(at) == source else set()
    )
    (part / folder).mkdir(parents=True, exist_ok=True)
    if built.cache:
        (part / folder / CACHE_NAME).write_bytes(built.cache)
    engine, context = f"{folder}/{precision}.engine", f"{folder}/{precision}.onnx"
    (part / engine).write_bytes(built.engine)
    write_context(part / graph.path, part / context, Path(engine).name, FLAVOURS[flavour], aimed, trt.__version__)
    entry = EngineFile(
        path=context,
        format="tensorrt",
        precision=precision,
        files=[context, engine],
        flavour=flavour,
        tensorrt=trt.__version__,
        capability=aimed,
        gpu=gpu if capability is None else None,
        profile=list(profile),
        is_compared=False,
    )
    others = [model for model in student.models if model.path != context]
    seal_bundle(part, {**bundle.own_facts, "models": plain([*others, entry])})


def write_context(plain: Path, target: Path, engine: str, provider: str, capability: str, version: str) -> None:
    """A graph of one node that stands for an engine beside it, with the plain graph's inputs and outputs."""
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
    made = onnx.helper.make_graph([node], "engine", list(graph.input), list(graph.output))
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("com.microsoft", 1)]
    onnx.save_model(onnx.helper.make_model(made, opset_imports=opsets, ir_version=10), str(target))
