"""Writes a lowered graph and its weights, which are made one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import onnx_ir as ir

from intaglio.engines.lowering.packed_blocks import read_tensor
from intaglio.errors import CompileError

# Smaller constants stay in the graph: shapes, axes, scalars.
_INLINE_BYTES = 1024
_ALIGNMENT = 4096
_CHUNK = 16 << 20


def write_graph(model: ir.Model, path: Path, advance: Callable[[int, int], None] | None = None) -> Path:
    """Writes ``path`` and, beside it, one file of weights, whose path is given back.

    A weight is in memory only while it is written, and one that lies in another file is copied in pieces.
    ``advance`` is told of the bytes written so far and of all after each weight. Raises CompileError for a file of
    weights that ends too early.
    """
    weights = path.with_suffix(".data")
    graphs = [model.graph, *model.graph.subgraphs()]
    values = [value for graph in graphs for value in graph.initializers.values() if value.const_value is not None]
    total = sum(value.const_value.nbytes for value in values if value.const_value is not None)
    done = 0
    with weights.open("wb") as file:
        for value in values:
            tensor = value.const_value
            assert tensor is not None
            value.const_value = _written(tensor, str(value.name), file, weights)
            done += tensor.nbytes
            if advance is not None:
                advance(done, total)
    path.write_bytes(ir.serde.serialize_model(model).SerializeToString())
    return weights


def _written(tensor: ir.TensorProtocol, name: str, file: BinaryIO, path: Path) -> ir.TensorProtocol:
    """The tensor as a file that was written refers to it: in it, or in the graph if it is small."""
    if tensor.dtype == ir.DataType.STRING:
        return tensor
    if tensor.nbytes <= _INLINE_BYTES:
        return ir.Tensor(read_tensor(tensor), dtype=tensor.dtype, name=name)
    offset = -(-file.tell() // _ALIGNMENT) * _ALIGNMENT
    file.seek(offset)
    if isinstance(tensor, ir.ExternalTensor):
        _copy(tensor, file)
    else:
        file.write(tensor.tobytes())
    if file.tell() != offset + tensor.nbytes:
        raise CompileError(f"{name}: there are {file.tell() - offset} bytes of its {tensor.nbytes}; export again")
    return ir.ExternalTensor(
        path.name,
        offset,
        tensor.nbytes,
        tensor.dtype,
        shape=ir.Shape(tensor.shape.numpy()),
        name=name,
        base_dir=path.parent,
    )


def _copy(tensor: ir.ExternalTensor, file: BinaryIO) -> None:
    left = tensor.nbytes
    with open(tensor.path, "rb") as source:
        source.seek(tensor.offset or 0)
        while left and (piece := source.read(min(left, _CHUNK))):
            file.write(piece)
            left -= len(piece)
