"""A portable stage as TensorRT takes it."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import (
    InlinePass,
    LiftConstantsToInitializersPass,
    RemoveUnusedFunctionsPass,
    RemoveUnusedOpsetsPass,
)

from intaglio.engines.lowering.attention_plugin import AttentionPluginPass
from intaglio.engines.lowering.block_dequantize import BlockDequantizePass
from intaglio.engines.lowering.check_packed import check_packed
from intaglio.engines.lowering.decompose_attention import DecomposeAttentionPass, heads_of
from intaglio.engines.lowering.dequantize_casts import DequantizeCastsPass
from intaglio.engines.lowering.float_integers import FloatIntegersPass
from intaglio.engines.lowering.fuse_gather import FuseGatherPass
from intaglio.engines.lowering.fuse_nodes import attribute
from intaglio.engines.lowering.infer_shapes import infer_shapes
from intaglio.engines.lowering.plain_attention import PlainAttentionPass
from intaglio.engines.lowering.same_value import same_value
from intaglio.engines.lowering.scatter_cache import ScatterCachePass
from intaglio.engines.lowering.split_attention_cache import SplitAttentionCachePass
from intaglio.engines.lowering.symmetric_dequantize import SymmetricDequantizePass
from intaglio.engines.lowering.ternary_plugin import TernaryPluginPass
from intaglio.errors import InputError
from intaglio.kernels.grouped_quant import DOMAIN

FLAVOURS = ("tensorrt-rtx", "tensorrt")
# Head sizes of the fused attention of both flavours.
_SMALLEST_HEAD, _LARGEST_HEAD = 16, 256


def lower(model: ir.Model, flavour: str = "tensorrt-rtx", *, context: int = 0, few_rows: bool = False) -> list[str]:
    """Lowers a portable stage in place; what the report is to say of it.

    A key-value cache becomes buffers of ``context`` tokens (:mod:`intaglio.engines.lowering.scatter_cache` says which
    inputs that changes), or stays as it is with 0. ``tensorrt`` has plugins: ternary products, of which ``few_rows``
    chooses the kernels for a few rows at a time, and attention that TensorRT has no kernel for, are left to them.

    Weights stay unread until the graph is written (:func:`intaglio.engines.lowering.external_weights.write_graph`).
    Raises CompileError, InputError for an unknown flavour.
    """
    if flavour not in FLAVOURS:
        raise InputError(f"the flavour {flavour!r} of TensorRT is unknown; there are {', '.join(FLAVOURS)}")
    # Functions of others may hold what the passes look for; ours are taken as nodes.
    InlinePass(criteria=lambda function: function.domain != DOMAIN)(model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    if any(value.dtype is None or value.shape is None for node in model.graph.all_nodes() for value in node.outputs):
        infer_shapes(model)
    check_packed(model)
    FloatIntegersPass()(model)
    DequantizeCastsPass()(model)
    symmetric = SymmetricDequantizePass()
    symmetric(model)
    # A cache of Attention's own is then the portable one.
    SplitAttentionCachePass()(model)
    if context:
        ScatterCachePass(context)(model)
    notes = list(symmetric.notes)
    if flavour == "tensorrt":
        ternary, plugged = TernaryPluginPass(few_rows=few_rows), AttentionPluginPass(why_not_fused)
        for each in (ternary, plugged):
            each(model)
        notes += [f"{ternary.count} ternary products as a plugin"] if ternary.count else []
        notes += plugged.notes
    weights, attention = BlockDequantizePass(), DecomposeAttentionPass(why_not_fused)
    for lowering in (FuseGatherPass(), weights, attention, PlainAttentionPass()):
        lowering(model)
    # What is left of functions has a body that the parser takes or names.
    for common in (InlinePass(), RemoveUnusedFunctionsPass(), RemoveUnusedOpsetsPass()):
        common(model)
    return [*notes, *weights.notes, *attention.notes]


def why_not_fused(node: ir.Node) -> str | None:
    """Why TensorRT has no fused kernel for an Attention node; None if it has one. Raises CompileError."""
    query, key = node.inputs[:2]
    if query is not None and query.dtype == ir.DataType.FLOAT:
        return "float32 has no fused kernel"
    if attribute(node, "softcap", 0.0):
        return "softcap has no fused kernel"
    heads = heads_of(node)
    size = heads.size
    if size is None or size != heads.value_size:
        return "heads of keys and values differ in size"
    if not _SMALLEST_HEAD <= size <= _LARGEST_HEAD or size % 4:
        return f"heads of {size} have no fused kernel"
    # TensorRT joins equal nodes, and crashes where that makes them one.
    if same_value(query, key):
        return "queries and keys are one tensor"
    return None
