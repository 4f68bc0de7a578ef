"""The graph that TensorRT is given, run by onnxruntime: what can be compared where no GPU is."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from intaglio.engines.onnxruntime_ import import_onnxruntime
from intaglio.engines.shapes import Interface, check_feeds
from intaglio.errors import EngineError
from intaglio.exporters.bundle import Dim


class LoweredGraph:
    """The face of a session over the lowered graph of a stage. Raises EngineError, CompileError, RuntimeMissingError."""

    def __init__(
        self, name: str, graph: Path, stage: Interface, dims: Mapping[str, Dim], options: Mapping[str, str]
    ) -> None:
        from intaglio.engines.lowering.external_weights import write_graph
        from intaglio.engines.nvidia.build import lowered_model
        from intaglio.engines.nvidia.options import RtxOptions

        self.name, self.stage, self.dims = name, stage, dict(dims)
        model, _ = lowered_model(graph, RtxOptions.model_validate(dict(options)))
        ort = import_onnxruntime()
        settings = ort.SessionOptions()
        # Otherwise products would have activations of 8 bits, which TensorRT's have not.
        settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        settings.log_severity_level = 4
        with tempfile.TemporaryDirectory(prefix="intaglio-lowered-") as folder:
            path = Path(folder) / f"{name}.onnx"
            write_graph(model, path)
            try:
                self._session = ort.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
            except Exception as error:  # onnxruntime's errors have no common base of their own
                raise EngineError(f"{graph}: onnxruntime cannot load the lowered graph: {error}") from error

    def run(
        self, feeds: Mapping[str, np.ndarray], outputs: Collection[str] | None = None, *, resident: Collection[str] = ()
    ) -> dict[str, Any]:
        """Runs it; ``outputs`` chooses by name (all by default). Raises InputError, EngineError."""
        check_feeds(self.name, self.stage, self.dims, feeds)
        names = [o.name for o in self._session.get_outputs() if outputs is None or o.name in outputs]
        try:
            return dict(zip(names, self._session.run(names, dict(feeds)), strict=True))
        except Exception as error:
            raise EngineError(f"{self.name}: onnxruntime cannot run the lowered graph: {error}") from error
