"""Nodes that passes put in the place of others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import convenience


class GraphBuilder:
    """Collects the nodes that take the place of one; their values are named after ``name``.

    A call adds a node and gives its output, of ``dtype`` and, where it is given, of ``shape``.
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
        """A constant of the tensor's name, the one of that name if there is one."""
        assert tensor.name, "a constant has a name"
        if tensor.name not in self._graph.initializers:
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
        name = "int64." + "_".join(map(str, values))
        return self.initializer(ir.tensor(np.array(values, np.int64), name=name))

    def scalar(self, value: float, dtype: ir.DataType) -> ir.Value:
        """One number in ``dtype``."""
        name = f"{dtype.name.lower()}.{value!r}"
        return self.initializer(ir.Tensor(np.array(value, dtype.numpy()), dtype=dtype, name=name))

    def insert_after(self, node: ir.Node) -> None:
        """Puts what was collected behind ``node``, which stays."""
        self._graph.insert_after(node, self._nodes)
        self._nodes = []

    def replace(self, node: ir.Node, *outputs: ir.Value) -> None:
        """Puts what was collected where ``node`` was; its outputs, as many as there are ``outputs``, become these."""
        convenience.replace_nodes_and_values(
            self._graph, node, [node], self._nodes, node.outputs[: len(outputs)], outputs
        )
        self._nodes = []
