"""Takes ``GroupNormalization`` apart where a runtime would do it with more copies of the activation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import convenience


class GroupNormPass(ir.passes.InPlacePass):
    """Replaces ``GroupNormalization`` by its statistics and one multiplication and addition per channel.

    onnxruntime runs the op's function body, which casts float32 to float32, holds one more whole activation than this
    form, and adds up groups with forty times the error. All is computed in float32 here.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph if not node.domain and node.op_type == "GroupNormalization"]
        for node in nodes:
            added, value = _composed(model.graph, node)
            convenience.replace_nodes_and_values(model.graph, node, [node], added, node.outputs, [value])
        return ir.passes.PassResult(model, modified=bool(nodes))


def _composed(graph: ir.Graph, node: ir.Node) -> tuple[list[ir.Node], ir.Value]:
    nodes: list[ir.Node] = []
    output = node.outputs[0]

    def op(kind: str, inputs: Sequence[ir.Value | None], dtype: ir.DataType = ir.DataType.FLOAT, **more: Any) -> Any:
        added = ir.node(kind, inputs, more)
        added.outputs[0].name, added.outputs[0].dtype = f"{output.name}.{kind}_{len(nodes)}", dtype
        nodes.append(added)
        return added.outputs[0]

    def constant(name: str, value: Any, dtype: Any) -> ir.Value:
        name = f"group_norm.{name}"
        if name not in graph.initializers:
            array = np.array(value, dtype)
            tensor = ir.tensor(array, name=name)
            initializer = ir.Value(
                name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor
            )
            graph.register_initializer(initializer)
        return graph.initializers[name]

    def axes(*values: int) -> ir.Value:
        return constant("axes_" + "_".join(map(str, values)), values, np.int64)

    def wide(value: ir.Value | None) -> ir.Value:
        assert value is not None, "GroupNormalization has three inputs"
        return value if value.dtype == ir.DataType.FLOAT else op("Cast", [value], to=ir.DataType.FLOAT)

    groups = node.attributes["num_groups"].as_int()
    epsilon = node.attributes["epsilon"].as_float() if "epsilon" in node.attributes else 1e-5
    x, weight_C, bias_C = (wide(value) for value in node.inputs)
    assert node.inputs[0] is not None
    dtype = node.inputs[0].dtype or ir.DataType.FLOAT

    by_group = constant(f"groups_{groups}", [0, groups, -1], np.int64)

    def mean_of_rows(kind: str, value: ir.Value) -> ir.Value:
        # Along the last axis first: onnxruntime adds one by one, and over a whole group that loses three digits.
        rows = op("Reshape", [op(kind, [value, axes(-1)], keepdims=0), by_group])
        return op("ReduceMean", [rows, axes(2)], keepdims=1)

    mean_BG1 = mean_of_rows("ReduceMean", x)
    distance_BGN = op("Sub", [op("Reshape", [x, by_group]), mean_BG1])
    distance = op("Reshape", [distance_BGN, op("Shape", [x], ir.DataType.INT64)])
    width = op("Cast", [op("Shape", [x], ir.DataType.INT64, start=-1)], to=ir.DataType.FLOAT)
    variance_BG1 = op("Div", [mean_of_rows("ReduceSumSquare", distance), width])
    deviation_BG1 = op("Sqrt", [op("Add", [variance_BG1, constant(f"epsilon_{epsilon:g}", epsilon, np.float32)])])
    # Per group and channel in it, then as many axes as the input has: [B, C, 1, ...].
    in_groups = constant(f"in_groups_{groups}", [groups, -1], np.int64)
    weight_GC, bias_GC = op("Reshape", [weight_C, in_groups]), op("Reshape", [bias_C, in_groups])
    scale_BGC = op("Div", [weight_GC, deviation_BG1])
    shift_BGC = op("Sub", [bias_GC, op("Mul", [mean_BG1, scale_BGC])])
    assert node.inputs[0].shape is not None, f"{output.name}: the rank of its input is unknown"
    ones = [1] * (node.inputs[0].shape.rank() - 2)
    channels = constant(f"channels_{len(ones)}", [0, -1, *ones], np.int64)
    scaled = op("Mul", [x, op("Reshape", [scale_BGC, channels])])
    y = op("Add", [scaled, op("Reshape", [shift_BGC, channels])])
    y = y if dtype == ir.DataType.FLOAT else op("Cast", [y], dtype, to=dtype)
    y.shape = output.shape
    return nodes, y
