"""The opsets that are converted."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from intaglio.errors import CompileError

# onnxruntime begins there too.
_OLDEST_OPSET = 7


def check_opset(model: ir.Model, where: str) -> None:
    """Refuses an opset that is not known, and ops of one so old that they mean something else. Raises CompileError."""
    imports = model.graph.opset_imports
    version = imports.get("", imports.get("ai.onnx"))
    if version is None:
        return
    newest = onnx.defs.onnx_opset_version()
    changed = ""
    if 1 <= version < _OLDEST_OPSET:
        # Before it ops broadcast by attributes, normalizations had a flag for training, and so on.
        for node in ir.traversal.RecursiveGraphIterator(model.graph):
            if node.domain in ("", "ai.onnx") and _since(node.op_type, version) != _since(node.op_type, _OLDEST_OPSET):
                changed = f", in which {node.op_type} ({node.name or node.outputs[0].name!r}) is another op than later"
                break
    if not 1 <= version <= newest or changed:
        raise CompileError(
            f"{where}: is of opset {version}{changed}; expected {_OLDEST_OPSET} to {newest}: convert it with "
            "onnx.version_converter, or export it for an opset between"
        )


def _since(op_type: str, version: int) -> int | None:
    try:
        return onnx.defs.get_schema(op_type, version).since_version
    except onnx.defs.SchemaError:
        return None
