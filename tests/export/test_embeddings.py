"""Tables of embeddings in int8: by row, and only those that are gathered from alone."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from relabel.export.exporting import STEPS, quantize_embeddings

V, H = 400, 64


def write(path: Path, table_VH: np.ndarray, *, axis: int = 0, is_shared: bool = False, is_big: bool = False) -> None:
    make, kind = onnx.helper.make_node, onnx.TensorProto
    nodes = [make("Gather", ["table", "ids"], ["rows"], name="gather", axis=axis)]
    if is_shared:  # as tied output layers are
        nodes.append(make("Transpose", ["table"], ["turned"], name="turn", perm=[1, 0]))
        nodes.append(make("MatMul", ["rows", "turned"], ["out"], name="product"))
    else:
        nodes.append(make("Identity", ["rows"], ["out"], name="same"))
    graph = onnx.helper.make_graph(
        nodes,
        "gather",
        [onnx.helper.make_tensor_value_info("ids", kind.INT64, ["B", "T"])],
        [onnx.helper.make_tensor_value_info("out", kind.FLOAT, ["B", "T", "N"])],
        [onnx.numpy_helper.from_array(table_VH.astype(np.float32), "table")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    onnx.save_model(model, str(path), save_as_external_data=is_big, location=path.name + ".data", size_threshold=0)


def answer(path: Path, ids: Any) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["out"], {"ids": np.array(ids, dtype=np.int64)})[0])


@pytest.mark.parametrize("is_big", [False, True])
def test_each_row_is_as_near_as_its_own_largest_value_allows(tmp_path: Path, is_big: bool) -> None:
    rng = np.random.default_rng(7)
    table_VH = rng.normal(size=(V, H)) * rng.uniform(1e-3, 1e3, size=(V, 1))  # rows of very different size
    table_VH[3] = 0.0
    path = tmp_path / "model.onnx"
    write(path, table_VH, is_big=is_big)
    before = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert quantize_embeddings(path, is_big=is_big) == 1
    onnx.checker.check_model(str(path))
    got_VH = answer(path, [list(range(V))])[0]
    bound_V = np.abs(table_VH).max(axis=1) / STEPS / 2
    assert (np.abs(got_VH - table_VH).max(axis=1) <= bound_V * 1.001).all()
    assert not got_VH[3].any()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 0.4 * before


@pytest.mark.parametrize(("shape", "options"), [((V, H), {"axis": 1}), ((V, H), {"is_shared": True}), ((20, 8), {})])
def test_what_is_gathered_otherwise_used_otherwise_or_small_stays_as_it_is(
    tmp_path: Path, shape: tuple[int, int], options: dict[str, Any]
) -> None:
    path = tmp_path / "model.onnx"
    write(path, np.random.default_rng(1).normal(size=shape), **options)
    before = path.read_bytes()
    assert quantize_embeddings(path, is_big=False) == 0
    assert path.read_bytes() == before
