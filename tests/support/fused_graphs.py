"""Small graphs with quantized products for the passes that join nodes, and how they run before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnxscript import GraphBuilder, OpBuilder

from intaglio.kernels import functions
from intaglio.kernels.cpu.library import library_path
from intaglio.kernels.grouped_quant import DOMAIN, GroupedQuantFormat

FORM = GroupedQuantFormat(4, 32, 8)


class Graph:
    """A graph under construction: ``op`` builds nodes, ``product`` a quantized one with a weight of its own."""

    def __init__(self, inputs: Mapping[str, Sequence[int | str]], dtypes: Mapping[str, ir.DataType] | None = None):
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": functions.OPSET, DOMAIN: 1}, name="joined")
        self.op: OpBuilder = GraphBuilder(self.graph).op
        for name, shape in inputs.items():
            dtype = (dtypes or {}).get(name, ir.DataType.FLOAT)
            self.graph.inputs.append(ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape)))
        self._rng = np.random.default_rng(7)

    def __getitem__(self, name: str) -> ir.Value:
        return next(value for value in self.graph.inputs if value.name == name)

    def constant(self, array: np.ndarray, name: str) -> ir.Value:
        """An initializer."""
        value = ir.Value(
            name=name,
            type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
            shape=ir.Shape(array.shape),
            const_value=ir.tensor(array, name=name),
        )
        self.graph.register_initializer(value)
        return value

    def table(self, rows: int, width: int, name: str, form: GroupedQuantFormat = FORM) -> list[ir.Value]:
        """Codes, scales and offsets of a random weight."""
        groups = form.groups_shape((rows, width))
        arrays = {
            "codes": self._rng.integers(0, 256, form.codes_shape((rows, width)), dtype=np.uint8),
            "scales": (self._rng.normal(size=groups) / 50).astype(np.float16),
            "offsets": (self._rng.normal(size=groups) / 50).astype(np.float16),
        }
        return [self.constant(array, f"{name}.{part}") for part, array in arrays.items()]

    def product(self, x: ir.Value, rows: int, name: str, form: GroupedQuantFormat = FORM) -> ir.Value:
        """``x`` times the transpose of a random weight ``[rows, width of x]``."""
        assert x.shape is not None
        weight = self.table(rows, x.shape[-1], name, form)  # type: ignore[arg-type]
        y = self.op.GroupedQuantMatMul(x, *weight, **vars(form), _domain=DOMAIN)
        y.dtype, y.shape, y.name = ir.DataType.FLOAT, ir.Shape([*x.shape[:-1], rows]), name
        return y

    def model(self, **outputs: ir.Value) -> ir.Model:
        """The graph with these outputs."""
        for name, value in outputs.items():
            value.name = name
            self.graph.outputs.append(value)
        return ir.Model(self.graph, ir_version=11)


def run(model: ir.Model, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All outputs, with our kernels."""
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(library_path()))
    data = ir.serde.serialize_model(model).SerializeToString()
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, dict(feeds)), strict=True))


def random_feeds(model: ir.Model, **sizes: int) -> dict[str, np.ndarray]:
    """Normal numbers for all inputs."""
    rng = np.random.default_rng(5)
    return {
        str(value.name): rng.normal(size=[d if isinstance(d, int) else sizes[str(d.value)] for d in value.shape or ()])
        .astype(np.float32)
        for value in model.graph.inputs
    }  # fmt: skip


def ops(model: ir.Model) -> list[str]:
    """The op types of a graph in order, without constants."""
    return [node.op_type for node in model.graph if node.op_type != "Constant"]


def same_numbers(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], bound: float = 1e-6) -> None:
    """Asserts that outputs agree to ``bound`` in relative L2."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].shape == array.shape, name
        difference = np.linalg.norm(found[name].astype(np.float64) - array)
        assert difference <= bound * np.linalg.norm(array), f"{name}: {difference}"


def check_pass(model: ir.Model, lower: Any, feeds: Mapping[str, np.ndarray], expected_ops: list[str]) -> None:
    """Asserts that a pass makes these ops of a graph, keeps its numbers, and finds nothing to do a second time."""
    before = run(model, feeds)
    assert lower()(model).modified
    assert ops(model) == expected_ops
    same_numbers(run(model, feeds), before)
    assert not lower()(model).modified


def check_untouched(model: ir.Model, lower: Any) -> None:
    """Asserts that a pass leaves a graph alone."""
    before = ops(model)
    assert not lower()(model).modified
    assert ops(model) == before
