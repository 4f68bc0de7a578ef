"""Constants of few bits that a Cast makes floats of, for targets that read such by DequantizeLinear only."""

from __future__ import annotations

import onnx_ir as ir

from intaglio.engines.lowering.fuse_nodes import is_standard
from intaglio.engines.lowering.graph_builder import GraphBuilder

_FLOAT = ir.DataType.FLOAT
_NARROW = (ir.DataType.INT8, ir.DataType.INT4, ir.DataType.UINT4)


class DequantizeCastsPass(ir.passes.InPlacePass):
    """Rewrites a Cast of a constant of 4 bits or INT8 to a DequantizeLinear with the scale 1, which is exact.

    A Gather of rows between the two is done behind it.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for node in [node for node in model.graph.all_nodes() if is_standard(node, "Cast")]:
            modified |= _replace(model.graph, node)
        for name, value in list(model.graph.initializers.items()):
            if not value.uses() and not value.is_graph_output() and not value.is_graph_input():
                del model.graph.initializers[name]
        return ir.passes.PassResult(model, modified=modified)


def _replace(graph: ir.Graph, cast: ir.Node) -> bool:
    gathered = cast.inputs[0]
    gather = gathered.producer() if gathered is not None else None
    constant = gather.inputs[0] if gather is not None and is_standard(gather, "Gather") else gathered
    if constant is None or constant.const_value is None or constant.is_graph_input() or constant.dtype not in _NARROW:
        return False
    output = cast.outputs[0]
    build = GraphBuilder(graph, str(output.name))
    floats = build("DequantizeLinear", [constant, build.scalar(1.0, _FLOAT)], _FLOAT, constant.shape)
    if constant is not gathered:
        assert gather is not None
        axis = {name: each.value for name, each in gather.attributes.items()}
        floats = build("Gather", [floats, gather.inputs[1]], _FLOAT, output.shape, **axis)
    build.replace(cast, build.cast(floats, ir.DataType(cast.attributes["to"].as_int())))
    if gather is not None and gather.graph is not None and constant is not gathered and not _is_read(gather.outputs[0]):
        gather.graph.remove(gather, safe=True)
    return True


def _is_read(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()
