"""Small ONNX files as others might write them, odd ones included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

Shape = Sequence[int | str | None] | None
OUT = 3


def weight(rows: int = 4) -> np.ndarray:
    """The float32 weight ``[rows, OUT]`` of the product."""
    return np.random.default_rng(rows).normal(size=(rows, OUT)).astype(np.float32)


def product(
    path: Path,
    shape: Shape = ("batch", 4),
    *,
    external: str | None = None,
    constant: bool = False,
    rows: int = 4,
    edit: Callable[[onnx.ModelProto], object] | None = None,
) -> Path:
    """Writes ``y = x @ w``. ``external`` is where ``w`` lies, ``constant`` makes it a Constant node.

    ``edit`` changes the message before it is written.
    """
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20}, name="product")
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=None if shape is None else ir.Shape(shape))
    graph.inputs.append(x)
    if constant:
        node = ir.node("Constant", [], {"value": ir.tensor(weight(rows))})
        graph.append(node)
        w = node.outputs[0]
        w.name = "w"
    else:
        tensor: ir.TensorProtocol = ir.tensor(weight(rows), name="w")
        if external is not None:
            file = path.parent / external
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(weight().tobytes())
            tensor = ir.ExternalTensor(external, 0, weight().nbytes, tensor.dtype, shape=tensor.shape, name="w")
        w = ir.Value(name="w", type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
        graph.register_initializer(w)
    node = ir.node("MatMul", [x, w], name="product")
    graph.append(node)
    graph.outputs.append(node.outputs[0])
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    node.outputs[0].shape = ir.Shape([None, OUT])
    message = ir.serde.serialize_model(ir.Model(graph, ir_version=10, producer_name="others"))
    if edit is not None:
        edit(message)
    path.write_bytes(message.SerializeToString())
    return path


def unary(path: Path, op_type: str, shapes: Sequence[Shape], domain: str = "", function: bool = False) -> Path:
    """Writes ``y = Op(x0, x1, …)`` over float32 inputs; ``function`` gives the file a body for it (Identity)."""
    opsets = {"": 20, domain: 1} if domain else {"": 20}
    graph = ir.Graph([], [], nodes=[], opset_imports=opsets, name="unary")
    inputs = [
        ir.Value(name=f"x{i}", type=ir.TensorType(ir.DataType.FLOAT), shape=None if s is None else ir.Shape(s))
        for i, s in enumerate(shapes)
    ]
    graph.inputs.extend(inputs)
    node = ir.node(op_type, inputs, domain=domain)
    graph.append(node)
    graph.outputs.append(node.outputs[0])
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    node.outputs[0].shape = ir.Shape([None])
    functions = []
    if function:
        a = ir.Value(name="a")
        inner = ir.node("Identity", [a])
        body = ir.Graph([a], inner.outputs, nodes=[inner], opset_imports={"": 20})
        functions.append(ir.Function(domain, op_type, graph=body, attributes=[]))
    path.write_bytes(ir.serde.serialize_model(ir.Model(graph, ir_version=10, functions=functions)).SerializeToString())
    return path
