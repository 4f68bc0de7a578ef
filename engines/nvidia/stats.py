"""What a lowered graph hands to TensorRT, for the report: an engine cannot be looked into without a driver."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from intaglio.engines.lowering.packed_blocks import RESTS
from intaglio.engines.lowering.ternary_plugin import FEW_ROWS, MANY_ROWS
from intaglio.kernels.grouped_quant import DOMAIN

_IN_WORD = 16
_QUANTIZED = {ir.DataType.INT4: "int4", ir.DataType.UINT4: "uint4", ir.DataType.INT8: "int8"}


@dataclass(frozen=True)
class HandedOver:
    """``quantized_bytes`` are those of ``quantized_count`` weights that stay packed, with scales and what groups have
    added.

    ``dtypes`` are those of all weights and of what products compute in, ``attentions`` the nodes of the fused op.
    """

    weight_bytes: int
    weight_count: int
    quantized_bytes: int
    quantized_count: int
    dtypes: tuple[str, ...]
    attentions: int
    operators: dict[str, int]

    def for_report(self) -> dict[str, Any]:
        """The fields of a stage's report."""
        bits = 8 * self.quantized_bytes / self.quantized_count if self.quantized_count else 0.0
        return {
            "dtype": ", ".join(self.dtypes),
            "weight_bytes": self.weight_bytes,
            "weight_count": self.weight_count,
            "quantized_bits_per_weight": round(bits, 3),
            "attention_fused": self.attentions,
            "operators": self.operators,
        }


def handed_over(model: ir.Model) -> HandedOver:
    """Counts what a lowered model holds. Reads no weight."""
    graph = model.graph
    weights = [value for value in graph.initializers.values() if value.const_value is not None]
    # A table that is looked up and multiplied by has two nodes, and is held once.
    values, scale_values = set[ir.Value](), set[ir.Value]()
    for node in graph.all_nodes():
        data = node.inputs[0] if node.op_type == "DequantizeLinear" else None
        if data is not None and data.const_value is not None and data.dtype in _QUANTIZED:
            values.add(data)
            scale_values.update(each for each in node.inputs[1:] if each is not None and each.const_value is not None)
    words = set[ir.Value]()
    for node in graph.all_nodes():
        # Our plugins read codes of 2 bits out of int32.
        if node.domain == DOMAIN and node.op_type in (MANY_ROWS, FEW_ROWS) and node.inputs[1] is not None:
            words.add(node.inputs[1])
            scale_values.update(value for value in node.inputs[2:] if value is not None)
    packed = sum(map(_bytes, values | words))
    count = sum(map(_size, values)) + sum(_IN_WORD * _size(value) for value in words)
    scale_values.update(value for value in weights if RESTS in str(value.name))
    scales = sum(map(_bytes, scale_values))
    return HandedOver(
        weight_bytes=sum(map(_bytes, weights)),
        weight_count=sum(
            _size(value) * (_IN_WORD if value in words else 1) for value in weights if value not in scale_values
        ),
        quantized_bytes=packed + scales,
        quantized_count=count,
        dtypes=_dtypes(graph, weights),
        attentions=sum(node.op_type == "Attention" for node in graph.all_nodes()),
        operators=dict(Counter(node.op_type for node in graph.all_nodes()).most_common()),
    )


def _dtypes(graph: ir.Graph, weights: list[ir.Value]) -> tuple[str, ...]:
    names = Counter[str]()
    for value in weights:
        if value.dtype is not None and (value.dtype.is_floating_point() or value.dtype in _QUANTIZED):
            names[_name(value.dtype)] += _size(value)
    for node in graph.all_nodes():
        dtype = node.outputs[0].dtype
        if node.op_type in ("MatMul", "Gemm", "Conv", "Attention") and dtype is not None:
            names[_name(dtype)] += 0
    return tuple(name for name, _ in names.most_common())


def _name(dtype: ir.DataType) -> str:
    return _QUANTIZED.get(dtype) or dtype.numpy().name


def _size(value: ir.Value) -> int:
    assert value.const_value is not None
    return math.prod(value.const_value.shape.numpy())


def _bytes(value: ir.Value) -> int:
    assert value.const_value is not None
    return math.ceil(_size(value) * value.const_value.dtype.bitwidth / 8)
