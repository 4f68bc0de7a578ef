"""Other ways to run a portable stage, to compare an engine with: slow, independent of our kernels and lowering."""

from __future__ import annotations

import importlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from intaglio.engines.lowering.additive_mask import AdditiveMaskPass
from intaglio.engines.lowering.widen_dtype import WidenDtypePass
from intaglio.engines.onnxruntime_ import import_onnxruntime
from intaglio.errors import EngineError, InputError, RuntimeMissingError
from intaglio.kernels.grouped_quant import DOMAIN

Feeds = Mapping[str, np.ndarray]


def run_onnxruntime(graph: Path, feeds: Feeds) -> dict[str, np.ndarray]:
    """Runs the portable graph as it stands: function bodies instead of kernels, no optimisation.

    bfloat16, of which onnxruntime's CPU has no product, is widened to float32 as for an engine. Raises EngineError.
    """
    ort = import_onnxruntime()
    model = ir.load(graph)
    options = ort.SessionOptions()
    # Folding would unpack all weights to float32 at load.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(graph.parent.resolve())
    )
    WidenDtypePass(ir.DataType.BFLOAT16, [DOMAIN])(model)
    try:
        data = ir.serde.serialize_model(model).SerializeToString()
        session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"], enable_fallback=0)
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(names, dict(feeds)), strict=True))
    except Exception as error:
        raise EngineError(f"{graph}: onnxruntime cannot run it: {error}") from error


def run_tract(graph: Path, feeds: Feeds) -> dict[str, np.ndarray]:
    """Runs the graph with tract, after inlining the functions it has none of and making masks additive.

    Raises RuntimeMissingError where tract is not installed, EngineError.
    """
    try:
        tract = importlib.import_module("tract")
    except ImportError as error:
        raise RuntimeMissingError(
            f"tract cannot be imported ({error}): install the extra `tract`, or the package of that name"
        ) from error
    try:
        model = lower_for_tract(ir.load(graph))
    except Exception as error:  # protobuf's, onnx_ir's and the passes' own
        raise EngineError(f"{graph}: cannot be read as ONNX ({error})") from error
    if any(value.dtype == ir.DataType.BFLOAT16 for value in model.graph.initializers.values()):
        raise EngineError(f"{graph}: has bfloat16 weights, a type that tract does not read; compare with onnxruntime")
    names = [str(value.name) for value in model.graph.outputs]
    # Beside the bundle's files: tract takes no weights through a path that leads elsewhere, but a hard link.
    with tempfile.TemporaryDirectory(prefix=".tract-", dir=graph.parent) as folder:
        lowered = Path(folder) / graph.name
        lowered.write_bytes(ir.serde.serialize_model(model).SerializeToString())
        for file in {str(t.path) for t in _external(model)}:
            _link(Path(file), Path(folder) / Path(file).name)
        try:
            runnable = tract.onnx().load(str(lowered)).into_model().into_runnable()
            results = runnable.run([feeds[str(value.name)] for value in model.graph.inputs])
        except Exception as error:
            reason = str(error).partition("Stack backtrace")[0].strip()
            raise EngineError(f"{graph}: tract cannot run it: {reason}") from error
        return {name: result.to_numpy() for name, result in zip(names, results, strict=True)}


def lower_for_tract(model: ir.Model) -> ir.Model:
    """Inlines functions and makes masks additive, in place."""
    InlinePass()(model)
    AdditiveMaskPass()(model)
    return model


def _link(file: Path, target: Path) -> None:
    try:
        target.hardlink_to(file)
    except OSError:  # a file system without hard links
        shutil.copyfile(file, target)


def _external(model: ir.Model) -> list[ir.ExternalTensor]:
    values = model.graph.initializers.values()
    return [v.const_value for v in values if isinstance(v.const_value, ir.ExternalTensor)]


REFERENCES: dict[str, Callable[[Path, Feeds], dict[str, np.ndarray]]] = {
    "onnxruntime": run_onnxruntime,
    "tract": run_tract,
}


def reference(name: str) -> Callable[[Path, Feeds], dict[str, Any]]:
    """The reference of this name. Raises InputError."""
    if name not in REFERENCES:
        raise InputError(f"the reference {name!r} is unknown; there are {', '.join(REFERENCES)}")
    return REFERENCES[name]
