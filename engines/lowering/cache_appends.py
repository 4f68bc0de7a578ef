"""How a portable decoder appends to its key-value cache: the pattern that targets replace by their own.

An input, ``past_key_values.N.key|value``, is joined by a Concat to the new keys or values, and the output
``present.N.key|value`` is what comes of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from intaglio.engines.lowering.fuse_nodes import is_standard

TOKENS = 2  # the axis of a cache that grows


@dataclass(frozen=True)
class Append:
    """A past, the Concat that appends to it, and the output that this is."""

    past: ir.Value
    concat: ir.Node
    output: ir.Value

    @property
    def new(self) -> ir.Value:
        """The new keys or values."""
        value = self.concat.inputs[1]
        assert value is not None
        return value


def append_of(past: ir.Value) -> Append | None:
    """How the graph appends to an input; None where it does not. Casts on the way are looked through."""
    if past.shape is None or len(past.shape) != 4 or isinstance(past.shape[TOKENS], int):
        return None
    for reader in readers(past):
        for node, index in reader.uses():
            if index != 0 or not is_standard(node, "Concat") or len(node.inputs) != 2:
                continue
            output = _output_of(node.outputs[0])
            if node.attributes["axis"].as_int() in (TOKENS, TOKENS - 4) and output is not None:
                return Append(past, node, output)
    return None


def readers(past: ir.Value) -> list[ir.Value]:
    """The value itself, and casts of it."""
    casts = [node.outputs[0] for node, _ in past.uses() if is_standard(node, "Cast")]
    return [past, *casts]


def _output_of(value: ir.Value) -> ir.Value | None:
    """The output of the graph that a value is, or a cast of it that nothing else reads."""
    if value.is_graph_output():
        return value
    for node, _ in value.uses():
        cast = node.outputs[0]
        if is_standard(node, "Cast") and cast.is_graph_output() and not cast.uses():
            return cast
    return None
