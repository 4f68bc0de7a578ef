"""What a lowered graph hands to TensorRT, for the report: an engine cannot be looked into without a driver."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from intaglio.engines.lowering.packed_blocks import RESTS
from intaglio.engines.lowering.ternary_plugin import FEW_ROWS, MANY_ROWS
from intaglio.kernels.cuda.tiles import CODES_IN_WORD
from intaglio.kernels.grouped_quant import DOMAIN

# A type that more tensors have is the rule, and not what somebody would ask about.
_MOST_NAMED = 2
_QUANTIZED = {
    ir.DataType.INT4: "int4",
    ir.DataType.UINT4: "uint4",
    ir.DataType.INT8: "int8",
    ir.DataType.FLOAT8E4M3FN: "float8e4m3fn",
    ir.DataType.FLOAT4E2M1: "float4e2m1",
}


@dataclass
class HeldAs:
    """``count`` weights of one type in ``tensors``, in ``nbytes`` with their scales."""

    count: int = 0
    nbytes: int = 0
    tensors: list[str] = field(default_factory=list)

    def add(self, count: int, nbytes: int, tensor: ir.Value) -> None:
        """One tensor more."""
        self.count += count
        self.nbytes += nbytes
        self.tensors.append(_weight_name(tensor))

    def text(self, name: str) -> str:
        """``28,311,552 as int8 at 8.5 bits (model.embed_tokens.weight)``: tensors are named where they are few."""
        named = f" ({', '.join(self.tensors)})" if len(self.tensors) <= _MOST_NAMED else ""
        return f"{self.count:,} as {name} at {round(8 * self.nbytes / self.count, 3):g} bits{named}"


@dataclass(frozen=True)
class HandedOver:
    """``quantized_bytes`` are those of ``quantized_count`` weights that stay packed, with scales and what groups have
    added.

    ``dtypes`` are those of all weights and of what products compute in, ``attentions`` the nodes of the fused op.
    ``held_as`` are the weights of each type.
    """

    weight_bytes: int
    weight_count: int
    quantized_bytes: int
    quantized_count: int
    dtypes: tuple[str, ...]
    attentions: int
    operators: dict[str, int]
    held_as: dict[str, HeldAs]

    def notes(self) -> list[str]:
        """For the report: how many weights have which type."""
        return [f"weights: {'; '.join(held.text(name) for name, held in self.held_as.items())}"] if self.held_as else []

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
    held_as: dict[str, HeldAs] = defaultdict(HeldAs)
    packed, scales = dict[ir.Value, str](), set[ir.Value]()
    for node in graph.all_nodes():
        data, per_value, name = _packed_by(node)
        if data is None:
            continue
        if data not in packed:
            packed[data] = name
            held_as[name].add(_size(data) * per_value, _bytes(data), data)
        own = {value for value in node.inputs[1:] if value is not None and value.const_value is not None} - {data}
        held_as[name].nbytes += sum(map(_bytes, own - scales))
        scales |= own
    # What groups have added is in nodes of its own.
    held_by = {_weight_name(data): name for data, name in packed.items()}
    for value in set(weights) - packed.keys() - scales:
        if RESTS in str(value.name) and (held := held_by.get(_weight_name(value))) is not None:
            held_as[held].nbytes += _bytes(value)
            scales.add(value)
    quantized = HeldAs(sum(held.count for held in held_as.values()), sum(held.nbytes for held in held_as.values()))
    dense = [value for value in weights if value not in packed and value not in scales]
    for value in sorted(dense, key=_size, reverse=True):
        if _size(value) > 1 and value.dtype is not None and value.dtype.is_floating_point():
            held_as[_name(value.dtype)].add(_size(value), _bytes(value), value)
    return HandedOver(
        weight_bytes=sum(map(_bytes, weights)),
        weight_count=quantized.count + sum(map(_size, dense)),
        quantized_bytes=quantized.nbytes,
        quantized_count=quantized.count,
        dtypes=_dtypes(graph, weights),
        attentions=sum(node.op_type == "Attention" for node in graph.all_nodes()),
        operators=dict(Counter(node.op_type for node in graph.all_nodes()).most_common()),
        held_as=dict(held_as),
    )


def _weight_name(value: ir.Value) -> str:
    """Of what was made of a weight, the name of that."""
    return str(value.name).split(RESTS)[0].removesuffix(".values").removesuffix(".words")


def _packed_by(node: ir.Node) -> tuple[ir.Value | None, int, str]:
    """Of a node that reads packed weights: these, how many are in each of its values, and what they are called."""
    if node.op_type == "DequantizeLinear":
        data, per_value = node.inputs[0], 1
        name = _QUANTIZED.get(data.dtype) if data is not None and data.dtype is not None else None
    elif node.domain == DOMAIN and node.op_type in (MANY_ROWS, FEW_ROWS):
        # Our plugins read codes of 2 bits out of int32.
        data, per_value, name = node.inputs[1], CODES_IN_WORD, "codes of 2 bits"
    else:
        return None, 0, ""
    is_weight = data is not None and data.const_value is not None and name is not None
    return (data, per_value, name or "") if is_weight else (None, 0, "")


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
