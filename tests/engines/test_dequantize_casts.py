"""``DequantizeCastsPass``: constants of few bits as floats, the same ones as onnxruntime's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from coreml_models import model
from onnx import TensorProto
from run_graph import run_onnxruntime
from tensorrt_rtx_builds import build_for_gpu

from intaglio.engines.lowering.dequantize_casts import DequantizeCastsPass

_TYPES = {"int8": (TensorProto.INT8, 8), "int4": (TensorProto.INT4, 4), "uint4": (TensorProto.UINT4, 4)}


def _file(folder: Path, body: str, dtype: str, inputs: str = "float[n,16] x", result: str = "float[n,24] y") -> Path:
    """A graph over ``w``, ``[16, 24]`` random numbers of the type."""
    proto = model(f"g ({inputs}) => ({result}) {{ {body} }}", opset=21)
    data_type, bits = _TYPES[dtype]
    raw = np.random.default_rng().bytes(16 * 24 * bits // 8)
    proto.graph.initializer.append(TensorProto(name="w", data_type=data_type, dims=[16, 24], raw_data=raw))
    onnx.save(proto, folder / "given.onnx")
    return folder / "given.onnx"


def _lowered(given: Path) -> tuple[Path, list[str]]:
    lowered = ir.load(given)
    assert DequantizeCastsPass()(lowered).modified
    ir.save(lowered, given.with_name("lowered.onnx"))
    return given.with_name("lowered.onnx"), [node.op_type for node in lowered.graph]


@pytest.mark.parametrize("dtype", _TYPES)
def test_a_cast_of_weights(tmp_path: Path, dtype: str) -> None:
    given = _file(tmp_path, "f = Cast<to=1>(w) y = MatMul(x, f)", dtype)
    lowered, ops = _lowered(given)
    assert ops == ["DequantizeLinear", "MatMul"]
    feeds = {"x": np.random.default_rng().normal(size=(3, 16)).astype(np.float32)}
    np.testing.assert_array_equal(run_onnxruntime(lowered, feeds)["y"], run_onnxruntime(given, feeds)["y"])
    if dtype != "uint4":  # which another pass shifts
        assert build_for_gpu(lowered, {"n": (1, 2, 4)}).failure == ""


@pytest.mark.parametrize("to", [TensorProto.FLOAT, TensorProto.FLOAT16])
def test_a_cast_of_rows_that_were_looked_up(tmp_path: Path, to: int) -> None:
    result = "float[n,24] y" if to == TensorProto.FLOAT else "float16[n,24] y"
    given = _file(tmp_path, f"r = Gather<axis=0>(w, i) y = Cast<to={to}>(r)", "int8", "int64[n] i", result)
    lowered, ops = _lowered(given)
    assert ops == ["DequantizeLinear", "Gather"] + ["Cast"] * (to != TensorProto.FLOAT)
    feeds = {"i": np.array([3, 0, 15, 3], np.int64)}
    np.testing.assert_array_equal(run_onnxruntime(lowered, feeds)["y"], run_onnxruntime(given, feeds)["y"])
    assert build_for_gpu(lowered, {"n": (1, 2, 4)}).failure == ""


def test_what_is_no_constant_stays(tmp_path: Path) -> None:
    onnx.save(model("g (int8[n] x) => (float[n] y) { y = Cast<to=1>(x) }"), tmp_path / "given.onnx")
    assert not DequantizeCastsPass()(ir.load(tmp_path / "given.onnx")).modified
