"""What can be read off a lowered graph for the report."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx_ir as ir

from intaglio.kernels.grouped_quant import DOMAIN


def weight_size(model: ir.Model) -> tuple[int, int]:
    """Bytes of the weights a graph reads, and how many weights they stand for."""
    bits: dict[str, int] = {}
    for node in model.graph.all_nodes():
        if node.domain == DOMAIN and "bits" in node.attributes:
            for value in node.inputs:
                source = _gathered_from(value)
                if source is not None and source.dtype == ir.DataType.UINT8:
                    bits[str(source.name)] = node.attributes["bits"].as_int()
    total = count = 0
    for name, value in model.graph.initializers.items():
        if not isinstance(value.const_value, ir.ExternalTensor):
            continue
        total += value.const_value.nbytes
        if name in bits:
            count += value.const_value.nbytes * 8 // bits[name]
        elif not name.endswith((".scales", ".offsets")):
            count += value.const_value.size
    return int(total), int(count)


def widened_bytes(model: ir.Model) -> int:
    """Bytes of the float32 copies that casts make of the stored weights of a lowered graph."""
    copies: dict[str, int] = {}
    for node in model.graph:
        if node.op_type != "Cast" or node.attributes["to"].as_int() != ir.DataType.FLOAT:
            continue
        value = node.inputs[0]
        while value is not None and (producer := value.producer()) is not None and producer.op_type == "Transpose":
            value = producer.inputs[0]
        if value is not None and isinstance(value.const_value, ir.ExternalTensor):
            copies[str(value.name)] = 4 * value.const_value.size
    return sum(copies.values())


# Of one weight, and of one or several with their neighbours.
_PRODUCTS = ("GroupedQuantMatMul", "FusedGroupedQuantMatMul")


def count_exact_products(model: ir.Model) -> dict[str, int]:
    """Products with packed weights that run exact, counted by format."""
    formats = [
        f"{node.attributes['bits'].as_int()} bits in groups of {node.attributes['group_size'].as_int()}"
        for node in model.graph.all_nodes()
        if node.domain == DOMAIN and node.op_type in _PRODUCTS and "fast" not in node.attributes
    ]
    return dict(Counter(formats))


_ARITHMETIC = ("MatMul", "Gemm", "Conv", "Attention", "GroupedQuantMatMul")
_FLOATS = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE}


def activation_dtype(model: ir.Model) -> str:
    """The dtype of most of a graph's products, as NumPy spells it; float32 where there are none."""
    outputs = [node.outputs[0].dtype for node in model.graph if node.op_type in _ARITHMETIC]
    counts = Counter(dtype for dtype in outputs if dtype in _FLOATS)
    (dtype, _) = counts.most_common(1)[0] if counts else (ir.DataType.FLOAT, 0)
    assert dtype is not None
    return dtype.numpy().name


def _gathered_from(value: ir.Value | None) -> ir.Value | None:
    node = value.producer() if value is not None else None
    return node.inputs[0] if node is not None and node.op_type == "Gather" else value


def count_nodes(model: ir.Model, op_type: str, domain: str = "") -> int:
    """How many nodes of a domain, the standard one if none is named, have this type."""
    return sum(node.op_type == op_type and node.domain == domain for node in model.graph.all_nodes())


def count_fallbacks(model: ir.Model) -> dict[str, int]:
    """Nodes of our own ops that still have a body in the file, and so run as that body."""
    with_body = {key[1] for key in model.functions if key[0] == DOMAIN}
    return dict(Counter(node.op_type for node in model.graph.all_nodes() if node.op_type in with_body))


def output_order(graph: Path) -> list[str]:
    """The names of a graph's outputs in the order in which they are computed."""
    model = ir.load(graph)
    position = {value: i for i, node in enumerate(model.graph) for value in node.outputs}
    return [str(v.name) for v in sorted(model.graph.outputs, key=lambda value: position.get(value, -1))]
