"""Writes a lowered graph and its weights, which are made one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir

# Smaller constants stay in the graph: shapes, axes, scalars.
_INLINE_BYTES = 1024


def write_graph(model: ir.Model, path: Path, advance: Callable[[int, int], None] | None = None) -> Path:
    """Writes ``path`` and, beside it, one file of weights, whose path is given back.

    A weight is in memory only while it is written; a weights file that the graph already refers to is left as it is.
    ``advance`` is told of the bytes written and of their sum after each weight.
    """
    weights = path.with_suffix(".data")
    values = [v for v in model.graph.initializers.values() if v.const_value is not None]
    large = [v for v in values if v.const_value is not None and v.const_value.nbytes > _INLINE_BYTES]
    total = sum(value.const_value.nbytes for value in large if value.const_value is not None)
    done = 0

    def written(tensor: ir.TensorProtocol, _: object) -> None:
        nonlocal done
        done += tensor.nbytes
        if advance is not None:
            advance(done, total)

    tensors = [value.const_value for value in large if value.const_value is not None]
    external = ir.external_data.convert_tensors_to_external(tensors, path.parent, weights.name, callback=written)
    for value, tensor in zip(large, external, strict=True):
        value.const_value = tensor
    for value in values:
        if isinstance(value.const_value, ir.ExternalTensor) and value not in large:
            value.const_value = ir.Tensor(value.const_value.numpy(), dtype=value.const_value.dtype, name=value.name)
    path.write_bytes(ir.serde.serialize_model(model).SerializeToString())
    return weights
