"""Asks for the accuracy ``fast`` of products with grouped-quantized weights."""

from __future__ import annotations

import onnx_ir as ir

from intaglio.kernels.cpu.library import has_fast_matmul
from intaglio.kernels.grouped_quant import DOMAIN


class FastProductsPass(ir.passes.InPlacePass):
    """Sets ``fast`` on every ``GroupedQuantMatMul`` that the CPU kernels have in that accuracy.

    The others stay exact, which :func:`intaglio.engines.graph_stats.count_exact_products` tells the report.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in model.graph.all_nodes():
            if (node.domain, node.op_type) != (DOMAIN, "GroupedQuantMatMul"):
                continue
            bits, group_size = (node.attributes[name].as_int() for name in ("bits", "group_size"))
            codes = node.inputs[1]
            assert codes is not None and codes.shape is not None
            width = codes.shape[1]
            if isinstance(width, int) and has_fast_matmul(group_size, width * 8 // bits):
                node.attributes["fast"] = ir.AttrInt64("fast", 1)
                modified = True
        return ir.passes.PassResult(model, modified=modified)
