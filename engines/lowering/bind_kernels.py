"""Leaves ``GroupedQuantMatMul`` to the target's own kernel."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from intaglio.errors import CompileError
from intaglio.kernels.grouped_quant import DOMAIN


class BindKernelsPass(ir.passes.InPlacePass):
    """Removes the bodies of functions that the target has kernels for.

    1. With a body in the file, a runtime that misses the kernel would run the body instead, and unpack all
       weights to float32 without a word. Without the body it refuses to load.
    2. Raises CompileError for a node whose ``bits`` no kernel reads.
    """

    def __init__(self, op_types: Collection[str], bits: Collection[int]) -> None:
        super().__init__()
        self._op_types, self._bits = frozenset(op_types), frozenset(bits)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        for node in model.graph.all_nodes():
            if node.domain != DOMAIN or node.op_type not in self._op_types:
                continue
            bits = node.attributes["bits"].as_int()
            if bits not in self._bits:
                raise CompileError(f"{node.name}: {node.op_type} of {bits} bits; the kernels read {sorted(self._bits)}")
        bound = [key for key in model.functions if key[0] == DOMAIN and key[1] in self._op_types]
        for key in bound:
            del model.functions[key]
        return ir.passes.PassResult(model, modified=bool(bound))
