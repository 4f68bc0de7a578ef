"""Computes a whole graph in float32, for targets that lack its dtype."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from intaglio.engines.lowering.widen_products import widened_value


class WidenDtypePass(ir.passes.InPlacePass):
    """Turns every value of ``dtype`` into float32: inputs and outputs of the graph as well.

    1. Weights stay as they are in their file. One is cast where it is used, and becomes a float32 copy at load
       where the runtime folds constants; a table that is only gathered from is never cast whole.
    2. Nodes of ``domains`` read ``dtype`` themselves (scales of quantized weights) and take it as it is. Bodies of
       functions are left alone.

    Nothing is rounded to ``dtype`` any more, so that the results are closer to float32's than the graph says.
    """

    def __init__(self, dtype: ir.DataType, domains: Collection[str]) -> None:
        super().__init__()
        self._dtype, self._domains = dtype, frozenset(domains)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        stored = {v for v in graph.initializers.values() if v.dtype == self._dtype}
        modified = bool(stored)
        for value in graph.inputs:
            modified |= self._retype(value)
        widened: dict[ir.Value, ir.Value] = {}
        for node in list(graph):
            gathers = node.op_type == "Gather" and node.inputs[0] in stored
            for index, used in enumerate(node.inputs):
                if used in stored and node.domain not in self._domains and not (gathers and index == 0):
                    if used not in widened:
                        cast = widened_value(used)
                        graph.insert_before(node, cast)
                        widened[used] = cast.outputs[0]
                    node.replace_input_with(index, widened[used])
            self._retype_attributes(node)
            for output in node.outputs:
                if gathers and output.dtype == self._dtype:
                    stored.add(output)
                else:
                    modified |= self._retype(output)
        self._cast_outputs(graph, stored, widened)
        return ir.passes.PassResult(model, modified=modified)

    def _retype(self, value: ir.Value) -> bool:
        if value.dtype != self._dtype:
            return False
        value.dtype = ir.DataType.FLOAT
        return True

    def _retype_attributes(self, node: ir.Node) -> None:
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype == self._dtype:
                wide = ir.tensor(attribute.value.numpy().astype(np.float32))
                node.attributes[name] = ir.AttrTensor(name, wide)
            elif node.op_type == "Cast" and name == "to" and attribute.value == self._dtype:
                node.attributes[name] = ir.AttrInt64(name, ir.DataType.FLOAT)

    def _cast_outputs(self, graph: ir.Graph, stored: set[ir.Value], widened: dict[ir.Value, ir.Value]) -> None:
        for i, output in enumerate(graph.outputs):
            if output not in stored:
                continue
            if output not in widened:
                cast = widened_value(output)
                graph.append(cast)
                widened[output] = cast.outputs[0]
            name = output.name
            output.name = f"{name}.stored"
            widened[output].name = name
            graph.outputs[i] = widened[output]
