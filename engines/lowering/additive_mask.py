"""Turns the boolean mask of ``Attention`` into a float one, for runtimes that take no other."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


class AdditiveMaskPass(ir.passes.InPlacePass):
    """Replaces boolean masks by 0 where a query sees a key and minus infinity elsewhere.

    One mask is converted once, however many attentions share it. No row may be wholly False: exporting sees to
    that (a padding row sees itself).
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        converted: dict[ir.Value, ir.Value] = {}
        for node in list(graph):
            if node.domain or node.op_type != "Attention" or len(node.inputs) < 4:
                continue
            mask = node.inputs[3]
            if mask is None or mask.dtype != ir.DataType.BOOL:
                continue
            if mask not in converted:
                converted[mask] = self._convert(graph, mask)
            node.replace_input_with(3, converted[mask])
        return ir.passes.PassResult(model, modified=bool(converted))

    def _convert(self, graph: ir.Graph, mask: ir.Value) -> ir.Value:
        scalars = []
        for name, number in (("additive_mask.visible", 0.0), ("additive_mask.hidden", -np.inf)):
            if name not in graph.initializers:
                tensor = ir.tensor(np.array(number, np.float32), name=name)
                value = ir.Value(
                    name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([]), const_value=tensor
                )
                graph.register_initializer(value)
            scalars.append(graph.initializers[name])
        where = ir.node("Where", [mask, *scalars])
        where.outputs[0].dtype, where.outputs[0].shape = ir.DataType.FLOAT, mask.shape
        where.outputs[0].name = f"{mask.name}.additive"
        producer = mask.producer()
        if producer is None:
            graph.insert_before(graph.node(0), where)
        else:
            graph.insert_after(producer, where)
        return where.outputs[0]
