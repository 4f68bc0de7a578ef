"""Writes ``Attention`` without what TensorRT's parser refuses and its kernels do anyway."""

from __future__ import annotations

import onnx_ir as ir

from intaglio.engines.lowering.decompose_attention import narrowed_mask
from intaglio.engines.lowering.fuse_nodes import attribute
from intaglio.engines.lowering.graph_builder import GraphBuilder

# Values of attributes that mean nothing.
_NEUTRAL = {"softcap": 0.0, "qk_matmul_output_mode": 0}


class PlainAttentionPass(ir.passes.InPlacePass):
    """Removes neutral attributes and unused outputs of ``Attention``, and brings float masks to the queries' dtype.

    ``softmax_precision`` goes as well: fused kernels accumulate in float32, and there is no way to ask for it. A mask
    is cast once in a graph, however many attentions share it.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        masks: dict[tuple[object, ir.Value, ir.DataType], ir.Value] = {}
        for node in [node for node in model.graph.all_nodes() if not node.domain and node.op_type == "Attention"]:
            modified |= self._clear(node)
            query, mask = node.inputs[0], node.inputs[3] if len(node.inputs) > 3 else None
            dtype = query.dtype if query is not None else None
            if mask is None or dtype is None or mask.dtype in (dtype, ir.DataType.BOOL):
                continue
            known = node.graph, mask, dtype
            if known not in masks:
                build = GraphBuilder(model.graph, f"{mask.name}.{dtype.name.lower()}")
                masks[known] = narrowed_mask(build, mask, dtype)
                build.insert_before(node)
            node.replace_input_with(3, masks[known])
            modified = True
        return ir.passes.PassResult(model, modified=modified)

    def _clear(self, node: ir.Node) -> bool:
        gone = [name for name, neutral in _NEUTRAL.items() if attribute(node, name, None) == neutral]
        gone += ["softmax_precision"] if "softmax_precision" in node.attributes else []
        for name in gone:
            del node.attributes[name]
        has_unused = len(node.outputs) > 1 and not any(
            output.uses() or output.is_graph_output() for output in node.outputs[1:]
        )
        if has_unused:
            node.resize_outputs(1)
        return bool(gone) or has_unused
