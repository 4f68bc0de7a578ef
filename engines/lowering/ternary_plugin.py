"""Leaves products with ternary weights to the plugins of full TensorRT."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from intaglio.engines.lowering.graph_builder import GraphBuilder
from intaglio.engines.lowering.packed_blocks import lazy, read_tensor
from intaglio.kernels.cuda.tiles import CODES_IN_WORD, PLUGIN_GROUP
from intaglio.kernels.grouped_quant import DOMAIN

# The plugins' names: a plugin is good for many rows or for few, and holds one kernel for each.
MANY_ROWS, FEW_ROWS = "GroupedQuantMatMul", "GroupedQuantMatMulFewRows"
_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


class TernaryPluginPass(ir.passes.InPlacePass):
    """Replaces ``GroupedQuantMatMul`` of ternary weights by a node of three inputs, which a plugin answers.

    They are ``x`` in half precision, ``codes`` int32 ``[out, in / 16]``, the bytes of the format four by four, since
    TensorRT has no constants of uint8, and ``scales`` as they are; the attribute is ``group_size``. ``few_rows`` asks
    for the plugin for those. Other weights and dtypes stay. After the call ``count`` says how many were replaced.
    """

    def __init__(self, *, few_rows: bool = False) -> None:
        super().__init__()
        self._op_type = FEW_ROWS if few_rows else MANY_ROWS
        self.count = 0

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        nodes = [node for node in graph if _is_ternary(node)]
        for node in nodes:
            self._replace(graph, node)
        for name, value in list(graph.initializers.items()):
            if not value.uses() and not value.is_graph_output():
                del graph.initializers[name]
        self.count = len(nodes)
        return ir.passes.PassResult(model, modified=bool(nodes))

    def _replace(self, graph: ir.Graph, node: ir.Node) -> None:
        x, codes, scales, _ = node.inputs
        assert codes is not None and scales is not None and codes.const_value is not None
        tensor, output = codes.const_value, node.outputs[0]
        rows, width = tensor.shape.numpy()

        def words() -> np.ndarray:
            return read_tensor(tensor).view(np.dtype("<i4"))

        build = GraphBuilder(graph, str(output.name))
        packed = build.initializer(lazy(words, ir.DataType.INT32, (rows, width // 4), f"{codes.name}.words"))
        y = build(
            self._op_type,
            [x, packed, scales],
            output.dtype,
            output.shape,
            domain=DOMAIN,
            group_size=node.attributes["group_size"].as_int(),
        )
        build.replace(node, y)


def _is_ternary(node: ir.Node) -> bool:
    if (node.domain, node.op_type) != (DOMAIN, "GroupedQuantMatMul") or "bits" not in node.attributes:
        return False
    x, *rest = node.inputs
    weight = [value for value in rest if value is not None and value.const_value is not None]
    if x is None or x.dtype not in _HALVES or len(weight) != len(rest):
        return False
    bits, group_size, zero_point = (node.attributes[name].as_int() for name in ("bits", "group_size", "zero_point"))
    has_offsets = weight[2].shape is None or weight[2].shape.rank() != 0
    width = weight[0].shape[1] if weight[0].shape is not None else 0
    fits = group_size % PLUGIN_GROUP == 0 and isinstance(width, int) and width * 4 % CODES_IN_WORD == 0
    return (bits, zero_point) == (2, 1) and not has_offsets and fits
