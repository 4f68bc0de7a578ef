"""Other ways to run a portable stage, to compare an engine with: slow ones, independent of our kernels and lowering,
and our own in their exact accuracy, for what is too large to be run without them."""

from __future__ import annotations

import importlib
import importlib.metadata
import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Protocol

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from intaglio.engines import cpu
from intaglio.engines.cpu_session import open_session
from intaglio.engines.lowering.additive_mask import AdditiveMaskPass
from intaglio.engines.lowering.widen_dtype import WidenDtypePass
from intaglio.engines.onnxruntime_ import import_onnxruntime
from intaglio.errors import EngineError, InputError, RuntimeMissingError
from intaglio.kernels.grouped_quant import DOMAIN

Feeds = Mapping[str, np.ndarray]


class Reference(Protocol):
    """A portable graph in a runtime of others; ``version`` names that."""

    version: str

    def run(self, feeds: Feeds, outputs: Collection[str] | None = None) -> dict[str, np.ndarray]:
        """Runs the graph; ``outputs`` chooses by name (all by default). Raises EngineError."""


class OnnxruntimeReference:
    """The portable graph as it stands: function bodies instead of kernels, no optimisation.

    bfloat16, of which onnxruntime's CPU has no product, is widened to float32 as for an engine. Raises EngineError.
    """

    def __init__(self, graph: Path) -> None:
        ort = import_onnxruntime()
        self.version = f"onnxruntime {ort.__version__}"
        self._graph = graph
        options = ort.SessionOptions()
        # Folding would unpack all weights to float32 at load.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(graph.parent.resolve())
        )
        try:
            model = ir.load(graph)
            WidenDtypePass(ir.DataType.BFLOAT16, [DOMAIN])(model)
            data = ir.serde.serialize_model(model).SerializeToString()
            self._session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"], enable_fallback=0)
        except Exception as error:
            raise EngineError(f"{graph}: onnxruntime cannot load it: {error}") from error

    def run(self, feeds: Feeds, outputs: Collection[str] | None = None) -> dict[str, np.ndarray]:
        """Runs the graph; ``outputs`` chooses by name (all by default). Raises EngineError."""
        names = [o.name for o in self._session.get_outputs() if outputs is None or o.name in outputs]
        try:
            return dict(zip(names, self._session.run(names, dict(feeds)), strict=True))
        except Exception as error:
            raise EngineError(f"{self._graph}: onnxruntime cannot run it: {error}") from error


class TractReference:
    """The graph in tract, after inlining the functions it has none of and making masks additive.

    It is loaded anew for each run, with the sizes of its inputs: some operators of tract take no others. Raises
    RuntimeMissingError where tract is not installed, EngineError.
    """

    def __init__(self, graph: Path) -> None:
        self._tract = _import_tract()
        self.version = f"tract {importlib.metadata.version('tract')}"
        self._graph = graph
        self._load()

    def _load(self) -> ir.Model:
        try:
            model = lower_for_tract(ir.load(self._graph))
        except Exception as error:  # protobuf's, onnx_ir's and the passes' own
            raise EngineError(f"{self._graph}: cannot be read as ONNX ({error})") from error
        if any(value.dtype == ir.DataType.BFLOAT16 for value in model.graph.initializers.values()):
            raise EngineError(
                f"{self._graph}: has bfloat16 weights, a type that tract does not read; compare with onnxruntime"
            )
        return model

    def run(self, feeds: Feeds, outputs: Collection[str] | None = None) -> dict[str, np.ndarray]:
        """Runs the graph; ``outputs`` chooses by name (all by default). Raises EngineError."""
        graph, model = self._graph, self._load()
        _fix_shapes(model, feeds)
        names = [str(value.name) for value in model.graph.outputs]
        # Beside the bundle's files: tract takes no weights through a path that leads elsewhere, but a hard link.
        with tempfile.TemporaryDirectory(prefix=".tract-", dir=graph.parent) as folder:
            lowered = Path(folder) / graph.name
            lowered.write_bytes(ir.serde.serialize_model(model).SerializeToString())
            for file in {str(t.path) for t in _external(model)}:
                _link(Path(file), Path(folder) / Path(file).name)
            try:
                runnable = self._tract.onnx().load(str(lowered)).into_model().into_runnable()
                results = runnable.run([feeds[str(value.name)] for value in model.graph.inputs])
            except Exception as error:
                reason = str(error).partition("Stack backtrace")[0].strip()
                raise EngineError(f"{graph}: tract cannot run it: {reason}") from error
            pairs = zip(names, results, strict=True)
            return {name: result.to_numpy() for name, result in pairs if outputs is None or name in outputs}


class ExactReference:
    """The graph lowered for the CPU in its exact accuracy, with our kernels. Raises EngineError."""

    def __init__(self, graph: Path) -> None:
        self.version = f"{cpu.compiler()} with the exact kernels"
        self._graph = graph
        try:
            model = cpu.lower(ir.load(graph), "exact")
            data = ir.serde.serialize_model(model).SerializeToString()
            self._session = open_session(data, graph.parent)
        except Exception as error:
            raise EngineError(f"{graph}: cannot be run with the exact kernels: {error}") from error

    def run(self, feeds: Feeds, outputs: Collection[str] | None = None) -> dict[str, np.ndarray]:
        """Runs the graph; ``outputs`` chooses by name (all by default). Raises EngineError."""
        names = [o.name for o in self._session.get_outputs() if outputs is None or o.name in outputs]
        try:
            return dict(zip(names, self._session.run(names, dict(feeds)), strict=True))
        except Exception as error:
            raise EngineError(f"{self._graph}: the exact kernels cannot run it: {error}") from error


def _import_tract() -> ModuleType:
    try:
        return importlib.import_module("tract")
    except ImportError as error:
        raise RuntimeMissingError(
            f"tract cannot be imported ({error}): install the extra `tract`, or the package of that name"
        ) from error


def lower_for_tract(model: ir.Model) -> ir.Model:
    """Inlines functions and makes masks additive, in place."""
    InlinePass()(model)
    AdditiveMaskPass()(model)
    return model


def _fix_shapes(model: ir.Model, feeds: Feeds) -> None:
    """Gives every dim that an input names the size it has in ``feeds``."""
    sizes: dict[str | None, int] = {}
    for value in model.graph.inputs:
        for dim, size in zip(value.shape or (), feeds[str(value.name)].shape, strict=False):
            if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
                sizes[str(dim.value)] = size
    for value in (*model.graph.inputs, *(value for node in model.graph for value in node.outputs)):
        if value.shape is not None:
            dims = (sizes.get(dim.value, dim) if isinstance(dim, ir.SymbolicDim) else dim for dim in value.shape)
            value.shape = ir.Shape(dims)


def _link(file: Path, target: Path) -> None:
    try:
        target.hardlink_to(file)
    except OSError:  # a file system without hard links
        shutil.copyfile(file, target)


def _external(model: ir.Model) -> list[ir.ExternalTensor]:
    values = model.graph.initializers.values()
    return [v.const_value for v in values if isinstance(v.const_value, ir.ExternalTensor)]


REFERENCES: dict[str, type[OnnxruntimeReference] | type[TractReference] | type[ExactReference]] = {
    "onnxruntime": OnnxruntimeReference,
    "tract": TractReference,
    "exact": ExactReference,
}


def check_reference(name: str) -> None:
    """Raises InputError unless there is a reference of this name."""
    if name not in REFERENCES:
        raise InputError(
            f"the reference {name!r} is unknown; there are {', '.join(REFERENCES)} and golden:DIR, a golden folder"
        )


def open_reference(name: str, graph: Path) -> Reference:
    """``graph``, loaded in the reference of this name. Raises InputError, EngineError, RuntimeMissingError."""
    check_reference(name)
    return REFERENCES[name](graph)
