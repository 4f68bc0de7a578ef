"""Weights in every packed form, in graphs of one product or one look-up, for passes that lower them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnxscript import GraphBuilder

from intaglio.engines.lowering.external_weights import write_graph
from intaglio.kernels.functions import grouped_quant_dequantize, grouped_quant_matmul
from intaglio.kernels.grouped_quant import DOMAIN, GroupedQuantFormat, GroupedQuantRows, pack_codes

F32, F16, BF16 = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16
ROWS, WIDTH = 24, 512


class Weight:
    """A random weight in a format; narrow codes leave the upper half of those that 8 bits hold."""

    def __init__(self, form: GroupedQuantFormat, has_offsets: bool, scale_dtype: ir.DataType, narrow: bool = False):
        rng = np.random.default_rng()
        self.form, self.width = form, WIDTH - WIDTH % form.group_size
        top = 1 << (form.bits - 1 if narrow else form.bits)
        codes = pack_codes(rng.integers(0, top, (ROWS, self.width), np.uint8), form.bits)
        shape = form.groups_shape((ROWS, self.width))
        scales = rng.uniform(0.5, 2, shape) / (np.sqrt(self.width) * (1 << form.bits - 1))
        offsets = rng.standard_normal(shape) / np.sqrt(self.width) if has_offsets else np.zeros(())
        dtype = scale_dtype.numpy()
        self.rows = GroupedQuantRows(codes, scales.astype(dtype), offsets.astype(dtype))

    def values(self, graph: ir.Graph) -> list[ir.Value]:
        """Codes, scales and offsets as initializers."""
        arrays = {"codes": self.rows.codes, "scales": self.rows.scales, "offsets": self.rows.offsets}
        for name, array in arrays.items():
            tensor = ir.tensor(array, name=f"weight.{name}")
            graph.register_initializer(
                ir.Value(
                    name=tensor.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor
                )
            )
        return [graph.initializers[f"weight.{name}"] for name in arrays]


def new_graph(name: str, dtype: ir.DataType, shape: list[int | str]) -> ir.Graph:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 23, DOMAIN: 1}, name="blocks")
    graph.inputs.append(ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape)))
    return graph


def product(weight: Weight, dtype: ir.DataType) -> ir.Model:
    """``y = x @ weight.T``."""
    graph = new_graph("x", dtype, ["batch", "tokens", weight.width])
    op = GraphBuilder(graph).op
    y = op.call(grouped_quant_matmul(), graph.inputs[0], *weight.values(graph), **vars(weight.form))
    y.name, y.dtype, y.shape = "y", dtype, ir.Shape(["batch", "tokens", ROWS])
    graph.outputs.append(y)
    function = grouped_quant_matmul()
    return ir.Model(graph, ir_version=11, functions=[function])


def embedding(weight: Weight, dtype: ir.DataType, *, is_tied: bool = False) -> ir.Model:
    """Rows of the weight, as an embedding looks them up, and their product with it."""
    graph = new_graph("ids", ir.DataType.INT64, ["batch", "tokens"])
    op, ids, values = GraphBuilder(graph).op, graph.inputs[0], weight.values(graph)
    flat = op.Reshape(ids, [-1])
    flat.dtype = ir.DataType.INT64
    gathered = [op.Gather(value, flat) if value.shape else value for value in values]
    rows = op.call(grouped_quant_dequantize(), *gathered, **vars(weight.form))
    rows.dtype, rows.shape = F32, ir.Shape([None, weight.width])
    rows = rows if dtype == F32 else op.Cast(rows, to=dtype)
    y = op.Reshape(rows, op.Concat(op.Shape(ids), [weight.width], axis=0))
    y.dtype, y.shape, y.name = dtype, ir.Shape(["batch", "tokens", weight.width]), "y"
    graph.outputs.append(y)
    functions = [grouped_quant_dequantize()]
    if is_tied:
        logits = op.call(grouped_quant_matmul(), y, *values, **vars(weight.form))
        logits.dtype, logits.shape, logits.name = dtype, ir.Shape(["batch", "tokens", ROWS]), "logits"
        graph.outputs.append(logits)
        functions.append(grouped_quant_matmul())
    return ir.Model(graph, ir_version=11, functions=functions)


def written(model: ir.Model, folder: Path) -> Path:
    write_graph(model, folder / "lowered.onnx")
    return folder / "lowered.onnx"


def relative_l2(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    return float(np.linalg.norm(found.astype(np.float64) - expected) / np.linalg.norm(expected))
