"""Nodes that passes put in the place of others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import convenience

from intaglio.errors import CompileError


class GraphBuilder:
    """Collects the nodes that take the place of one; their values are named after ``name``.

    Constants are added to ``graph``, the main one, which the body of an If or a Loop reads as well; nodes to the graph
    that the replaced node is in. A call adds a node and gives its output, of ``dtype`` and, where it is given, of
    ``shape``.
    """

    def __init__(self, graph: ir.Graph, name: str) -> None:
        self._graph, self._name = graph, name
        self._nodes: list[ir.Node] = []

    def __call__(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        dtype: ir.DataType | None,
        shape: Iterable[Any] | None = None,
        *,
        domain: str = "",
        **attributes: Any,
    ) -> ir.Value:
        node = ir.node(op_type, inputs, attributes, domain=domain, name=f"{self._name}.{op_type}_{len(self._nodes)}")
        value = node.outputs[0]
        value.name, value.shape = node.name, None if shape is None else ir.Shape(shape)
        value.type = None if dtype is None else ir.TensorType(dtype)
        self._nodes.append(node)
        return value

    def cast(self, value: ir.Value, dtype: ir.DataType | None) -> ir.Value:
        """``value`` in ``dtype``: itself, if it has it."""
        return value if value.dtype == dtype else self("Cast", [value], dtype, value.shape, to=dtype)

    def initializer(self, tensor: ir.TensorProtocol) -> ir.Value:
        """A constant of the tensor's name, the one of that name if a builder has made it before."""
        assert tensor.name, "a constant has a name"
        known = self._graph.initializers.get(tensor.name)
        if known is not None and (known.dtype != tensor.dtype or list(known.shape or ()) != list(tensor.shape.numpy())):
            raise CompileError(f"the graph has a constant {tensor.name!r}, which lowering adds another of; rename it")
        if known is None:
            value = ir.Value(
                name=tensor.name,
                type=ir.TensorType(tensor.dtype),
                shape=ir.Shape(tensor.shape.numpy()),
                const_value=tensor,
            )
            self._graph.register_initializer(value)
        return self._graph.initializers[tensor.name]

    def int64(self, values: Sequence[int]) -> ir.Value:
        """A vector of int64."""
        name = "int64.vector." + "_".join(map(str, values))
        return self.initializer(ir.tensor(np.array(values, np.int64), name=name))

    def scalar(self, value: float, dtype: ir.DataType) -> ir.Value:
        """One number in ``dtype``."""
        name = f"{dtype.name.lower()}.scalar.{value!r}"
        return self.initializer(ir.Tensor(np.array(value, dtype.numpy()), dtype=dtype, name=name))

    def insert_before(self, node: ir.Node) -> None:
        """Puts what was collected before ``node``, which stays."""
        _graph_of(node).insert_before(node, self._nodes)
        self._nodes = []

    def insert_after(self, node: ir.Node) -> None:
        """Puts what was collected behind ``node``, which stays."""
        _graph_of(node).insert_after(node, self._nodes)
        self._nodes = []

    def replace(self, node: ir.Node, *outputs: ir.Value) -> None:
        """Puts what was collected where ``node`` was; its outputs, as many as there are ``outputs``, become these."""
        convenience.replace_nodes_and_values(
            _graph_of(node), node, [node], self._nodes, node.outputs[: len(outputs)], outputs
        )
        self._nodes = []


def _graph_of(node: ir.Node) -> ir.Graph:
    graph = node.graph
    assert isinstance(graph, ir.Graph), "what is replaced is in a graph, and functions of others are inlined"
    return graph
