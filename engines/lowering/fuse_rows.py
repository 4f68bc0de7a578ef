"""All passes that join nodes around quantized products and on rows of activations, in their order."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from intaglio.engines.lowering.fuse_adaptive_norm import FuseAdaptiveNormPass
from intaglio.engines.lowering.fuse_gated_add import FuseGatedAddPass
from intaglio.engines.lowering.fuse_gates import FuseGatesPass
from intaglio.engines.lowering.fuse_gather import FuseGatherPass
from intaglio.engines.lowering.fuse_head_norms import FuseHeadNormsPass
from intaglio.engines.lowering.fuse_norms import FuseNormsPass
from intaglio.engines.lowering.fuse_projections import FuseProjectionsPass
from intaglio.engines.lowering.fuse_residuals import FuseResidualsPass
from intaglio.engines.lowering.fuse_splits import FuseSplitsPass
from intaglio.engines.lowering.fuse_swiglu import FuseSwiGLUPass

# A norm joins what the passes before it made of its readers, and parts are read in place before their Split goes.
_PASSES = (
    FuseGatherPass,
    FuseAdaptiveNormPass,
    FuseGatedAddPass,
    FuseGatesPass,
    FuseSwiGLUPass,
    FuseHeadNormsPass,
    FuseSplitsPass,
    FuseResidualsPass,
    FuseProjectionsPass,
    FuseNormsPass,
)


def fuse_rows(model: ir.Model) -> None:
    """Joins nodes in place. A value that is an output of the graph, or that other nodes read, stays; what nothing reads
    goes."""
    for fuse in _PASSES:
        fuse()(model)
    RemoveUnusedNodesPass()(model)
