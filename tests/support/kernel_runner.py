"""One custom op of the CPU kernels as a model, and sessions that run it."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import DTypeLike

from intaglio.kernels import functions
from intaglio.kernels.cpu.library import library_path
from intaglio.kernels.grouped_quant import DOMAIN, GroupedQuantFormat, GroupedQuantRows


def random_rows(
    rng: np.random.Generator,
    shape: tuple[int, int],
    quantization: GroupedQuantFormat,
    dtype: DTypeLike = np.float16,
    has_offsets: bool = True,
) -> GroupedQuantRows:
    groups = quantization.groups_shape(shape)
    return GroupedQuantRows(
        codes=rng.integers(0, 256, quantization.codes_shape(shape), dtype=np.uint8),
        scales=rng.normal(size=groups).astype(dtype),
        offsets=rng.normal(size=groups).astype(dtype) if has_offsets else np.zeros((), dtype),
    )


def build_model(
    rows: GroupedQuantRows,
    attributes: dict[str, int],
    x_dtype: ir.DataType = ir.DataType.FLOAT,
    x_shape: list[int | str] | None = None,
    with_function: bool = False,
) -> ir.Model:
    """One GroupedQuantMatMul; without ``x_shape`` every rank of x is taken."""
    shape = None if x_shape is None else ir.Shape(x_shape)
    x = ir.Value(name="x", type=ir.TensorType(x_dtype), shape=shape)
    weights = [
        ir.Value(name=name, const_value=ir.tensor(array, name=name))
        for name, array in (("codes", rows.codes), ("scales", rows.scales), ("offsets", rows.offsets))
    ]
    node = ir.node(
        "GroupedQuantMatMul",
        inputs=[x, *weights],
        attributes=attributes,
        domain=DOMAIN,
        num_outputs=1,
    )
    y = node.outputs[0]
    y.name, y.type = "y", ir.TensorType(ir.DataType.FLOAT)
    imports = {"": functions.OPSET, DOMAIN: 1}
    graph = ir.Graph([x], [y], nodes=[node], initializers=weights, opset_imports=imports, name="matmul")
    function = [functions.grouped_quant_matmul()] if with_function else []
    return ir.Model(graph, ir_version=11, functions=function)


def session_options(threads: int = 2, library: pathlib.Path | None = None) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library or library_path()))
    return options


def load(model: ir.Model, threads: int = 2) -> Any:
    data = ir.serde.serialize_model(model).SerializeToString()
    return ort.InferenceSession(data, session_options(threads), providers=["CPUExecutionProvider"])


def run(session: Any, x: np.ndarray) -> np.ndarray:
    return session.run(None, {"x": x})[0]


def bits_of(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint32)


def has_chosen_instruction_set() -> bool:
    """Whether the one that the environment asks for is to be had."""
    quantization = GroupedQuantFormat(8, 2, 0)
    try:
        load(build_model(random_rows(np.random.default_rng(0), (1, 2), quantization), vars(quantization)))
    except Exception as error:
        if "this machine or this build lacks" in str(error):
            return False
        raise
    return True
