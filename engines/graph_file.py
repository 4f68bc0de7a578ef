"""Reads graphs whose weights lie beside them."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from intaglio.errors import CompileError


def load_graph(path: Path) -> ir.Model:
    """The graph of a bundle, or of an ONNX file whose external data has been checked; weights are read when asked for.

    A weights file may have several names in the file system: an engine for the CPU, or a copy of a bundle, is such a
    hard link, which onnx_ir by itself takes for an attack. Raises CompileError for a file that cannot be read, and for
    external data that is named outside the graph's folder.
    """
    try:
        model = ir.load(path)
    except Exception as error:  # protobuf's and onnx_ir's own
        raise CompileError(f"{path}: cannot be read as ONNX ({_first(error)})") from error
    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = _beside(path, value.const_value)
    return model


def _first(error: BaseException) -> BaseException:
    """Of errors that were raised from one another, the one that says what is wrong."""
    return error if error.__cause__ is None else _first(error.__cause__)


def _beside(graph: Path, tensor: ir.ExternalTensor) -> ir.ExternalTensor:
    location = Path(tensor.location)
    if location.is_absolute() or ".." in location.parts:
        raise CompileError(f"{graph}: its weights lie in {location}, outside its folder")
    return ir.ExternalTensor(
        str((graph.parent / location).resolve()),
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=tensor.shape,
        name=tensor.name or "",
        base_dir="",
    )
