"""Turns a stage of an architecture into an ONNX model whose weights lie in the bundle's weights file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedOpsetsPass
from onnxscript import GraphBuilder, nn

from intaglio.errors import WeightsError
from intaglio.exporters.architecture import Stage
from intaglio.exporters.checkpoints.tensors import CheckpointTensor
from intaglio.exporters.layers.linear import WeightModule
from intaglio.exporters.layers.taps import taps
from intaglio.exporters.weights import Part
from intaglio.kernels.functions import OPSET
from intaglio.kernels.grouped_quant import DOMAIN, DOMAIN_VERSION

IR_VERSION = 11


def quantize_modules(model: nn.Module, weights: Mapping[str, CheckpointTensor]) -> None:
    """Gives each module whose weight is quantized in the checkpoint its packed parameters.

    Raises WeightsError for a quantized tensor that its module can only hold dense.
    """
    modules = dict(model.named_modules())
    for name, tensor in weights.items():
        if tensor.layout is None:
            continue
        module = modules[name.rpartition(".")[0]]
        if not isinstance(module, WeightModule) or not name.endswith(".weight"):
            raise WeightsError(f"{name}: is stored as {tensor.storage}, but can only be used unquantized")
        module.quantize(tensor.layout)


def add_low_rank_branches(model: nn.Module, ranks: Mapping[str, int]) -> None:
    """Gives the modules of quantized weights, named by ``ranks``, a branch of that rank."""
    modules = dict(model.named_modules())
    for name, rank in ranks.items():
        module = modules[name.rpartition(".")[0]]
        assert isinstance(module, WeightModule), f"{name}: only linear layers have a branch"
        module.add_low_rank(rank)


def stage_parameters(model: nn.Module, stage: Stage) -> set[str]:
    """The names of the parameters that ``stage`` uses of a ``model`` that is not quantized."""
    graph = build_graph("parameters", model, stage).graph
    return {name for name, value in graph.initializers.items() if value.const_value is None}


def build_graph(name: str, model: nn.Module, stage: Stage, *, with_taps: bool = False) -> ir.Model:
    """The stage as an ONNX model, its parameters without data. ``with_taps`` makes every tap an output."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET, DOMAIN: DOMAIN_VERSION}, name=name)
    builder = GraphBuilder(graph)
    inputs = {i.name: ir.Value(name=i.name, type=ir.TensorType(i.dtype), shape=ir.Shape(i.shape)) for i in stage.inputs}
    graph.inputs.extend(inputs.values())
    outputs = stage.forward(model, builder.op, inputs)
    if with_taps:
        outputs |= taps(graph)
    for output_name, value in outputs.items():
        if value in graph.outputs:  # two names for one value: a graph output has one
            value = builder.op.Identity(value)
        value.name = output_name
        graph.outputs.append(value)
    result = ir.Model(
        graph, ir_version=IR_VERSION, producer_name="intaglio", functions=tuple(builder.functions.values())
    )
    for node in graph:  # the builder's trace of Python scopes: of use while building only
        node.metadata_props.clear()
    RemoveUnusedOpsetsPass()(result)
    return result


def attach_weights(model: ir.Model, parts: Mapping[str, Part], weights_file: str) -> None:
    """Points every parameter of ``model`` at its place in the weights file."""
    for name, value in model.graph.initializers.items():
        if value.const_value is not None:
            continue
        part = parts[name]
        value.const_value = ir.ExternalTensor(
            weights_file, part.offset, part.nbytes, part.dtype, shape=ir.Shape(part.shape), name=name
        )


def save_graph(model: ir.Model, path: Path) -> None:
    """Writes the model; external tensors stay references."""
    path.write_bytes(ir.serde.serialize_model(model).SerializeToString(deterministic=True))
