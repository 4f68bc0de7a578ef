"""Named points of a graph, at which two implementations are compared."""

from __future__ import annotations

import ast

import onnx_ir as ir

_TAP = "intaglio.tap"


def tap(value: ir.Value, name: str | None = None) -> ir.Value:
    """Marks ``value`` as the output of the module it was made in, and returns it.

    Its name is ``name``, or else that module's path, as in the published model: ``model.layers.0.mlp.down_proj``.
    """
    node = value.producer()
    assert node is not None, "only a computed value can be a tap"
    scopes = ast.literal_eval(node.metadata_props["pkg.onnxscript.name_scopes"])
    value.metadata_props[_TAP] = name or ".".join(scope for scope in scopes if scope)
    return value


def taps(graph: ir.Graph) -> dict[str, ir.Value]:
    """All taps of a graph, in the order of computation."""
    return {
        value.metadata_props[_TAP]: value for node in graph for value in node.outputs if _TAP in value.metadata_props
    }


def forget_taps(graph: ir.Graph) -> None:
    """Unmarks all taps that a graph has so far, for a stage that names its own."""
    for node in graph:
        for value in node.outputs:
            value.metadata_props.pop(_TAP, None)
