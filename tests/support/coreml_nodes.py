"""ONNX models of one node, for tests of the Core ML target: run as saved packages and in onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from coreml_models import assert_same

from intaglio.exporters.bundle import Dim

# An input is an array that is fed, a Weight, or None where it is left out.
Weight = tuple[np.ndarray]


def one_node(
    op: str,
    inputs: Sequence[Any],
    opset: int = 21,
    *,
    domain: str = "",
    outputs: int = 1,
    vary: str = "",
    **attributes: Any,
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The model, and what it is fed. A tuple of one array is a weight.

    ``vary`` names the dims of the first input, such as ``"n,3,h,w"``.
    """
    while inputs[-1] is None:
        inputs = inputs[:-1]
    values: list[ir.Value | None] = []
    for i, each in enumerate(inputs):
        if each is None:
            values.append(None)
            continue
        tensor = ir.tensor(each[0] if isinstance(each, tuple) else each, name=f"x{i}")
        known = tensor if isinstance(each, tuple) else None
        shape = ir.Shape([int(s) if s.isdigit() else s for s in vary.split(",")]) if vary and i == 0 else tensor.shape
        values.append(ir.Value(name=f"x{i}", shape=shape, type=ir.TensorType(tensor.dtype), const_value=known))
    results = [ir.Value(name=f"y{i}") for i in range(outputs)]
    node = ir.node(op, values, attributes, domain=domain, outputs=results)
    given = [value for value in values if value is not None]
    graph = ir.Graph(
        [value for value in given if value.const_value is None],
        results,
        nodes=[node],
        initializers=[value for value in given if value.const_value is not None],
        opset_imports={"": opset, **({domain: 1} if domain else {})},
        name="g",
    )
    feeds = {f"x{i}": each for i, each in enumerate(inputs) if isinstance(each, np.ndarray)}
    return ir.to_proto(ir.Model(graph, ir_version=10)), feeds


def check_node(op: str, inputs: Sequence[Any], opset: int = 21, rtol: float = 1e-5, **rest: Any) -> None:
    """The saved package gives what onnxruntime gives."""
    dims: Mapping[str, Dim] | None = rest.pop("dims", None)
    model, feeds = one_node(op, inputs, opset, **rest)
    assert_same(model, feeds, dims=dims, rtol=rtol)


def floats(*shape: int) -> np.ndarray:
    """Fresh normal float32."""
    return np.random.default_rng().standard_normal(shape).astype(np.float32)


def weight(*shape: int) -> Weight:
    """Fresh normal float32 as a weight."""
    return (floats(*shape),)
