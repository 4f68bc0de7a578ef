"""What onnxruntime's CUDA provider has kernels for. Other operators run on the CPU, with copies around them."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir
from onnx import defs

# The list that onnxruntime generates of its kernels (docs/OperatorKernels.md, of 1.24 and on), operators of ONNX.
_NAMES = """
Abs Add And ArgMax ArgMin Attention AveragePool BatchNormalization Cast Ceil Clip Concat ConstantOfShape Conv
ConvTranspose Cos CumSum DepthToSpace DequantizeLinear Div Dropout Einsum Elu Equal Erf Exp Expand EyeLike
Flatten Floor GRU Gather GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalMaxPool Greater
GreaterOrEqual GridSample HardSigmoid HardSwish Identity If InstanceNormalization IsInf IsNaN LRN LSTM
LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax Loop MatMul MatMulInteger Max MaxPool Min Mod Mul
Neg NonZero Not OneHot Or PRelu Pad Pow QuantizeLinear RMSNormalization RNN RandomNormal RandomNormalLike
RandomUniform RandomUniformLike Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax
ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize ReverseSequence RoiAlign
RotaryEmbedding Round Scan ScatterElements ScatterND Selu Shape Shrink Sigmoid Sign Sin Size Slice Softmax
Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Tanh TensorScatter ThresholdedRelu Tile TopK
Transpose Trilu Unsqueeze Upsample Where Xor
"""
_CUDA_OPS = frozenset(_NAMES.split())
_CONSTANTS = ("Constant",)


def runs_on_cpu(model: ir.Model) -> dict[str, int]:
    """Nodes of ONNX's operators that the provider has no kernel for and no body of others, counted by type."""
    names = [
        node.op_type
        for node in model.graph.all_nodes()
        if not node.domain and node.op_type not in _CUDA_OPS and node.op_type not in _CONSTANTS
    ]
    return {name: count for name, count in Counter(names).items() if not _has_body(name)}


def _has_body(op_type: str) -> bool:
    try:
        schema = defs.get_schema(op_type)
    except defs.SchemaError:
        return False
    # Stubs do not know them.
    return any(getattr(schema, name, False) for name in ("has_function", "has_context_dependent_function"))
