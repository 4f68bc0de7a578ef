"""ONNX models of one node, for tests of the Core ML target: run as saved packages and in onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from coreml_models import assert_same
from onnx import helper, numpy_helper

from intaglio.exporters.bundle import Dim

# An input is an array that is fed, a Weight, or None where it is left out.
Weight = tuple[np.ndarray]


def one_node(
    op: str, inputs: Sequence[Any], opset: int = 21, *, domain: str = "", outputs: int = 1, vary: str = "", **attributes: Any
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The model, and what it is fed. A tuple of one array is a weight.

    ``vary`` names the dims of the first input, such as ``"n,3,h,w"``.
    """
    while inputs[-1] is None:
        inputs = inputs[:-1]
    names = ["" if value is None else f"x{i}" for i, value in enumerate(inputs)]
    feeds = {n: v for n, v in zip(names, inputs, strict=True) if isinstance(v, np.ndarray)}
    weights = [numpy_helper.from_array(v[0], n) for n, v in zip(names, inputs, strict=True) if isinstance(v, tuple)]
    shapes: dict[str, Sequence[Any]] = {n: v.shape for n, v in feeds.items()}
    if vary:
        shapes[names[0]] = [int(s) if s.isdigit() else s for s in vary.split(",")]
    taken = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), shapes[n]) for n, v in feeds.items()]
    results = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(op, names, results, domain=domain, **attributes)
    given = [onnx.ValueInfoProto(name=n) for n in results]
    graph = helper.make_graph([node], "g", taken, given, weights)
    imports = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    return model, feeds


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
