"""The graph that TensorRT is given, run by onnxruntime: what can be compared where no GPU is."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from intaglio.engines.kv_cache import PAST, PRESENT
from intaglio.engines.nvidia.cache_buffers import TOKENS, buffer, buffered_feeds
from intaglio.engines.onnxruntime_ import import_onnxruntime
from intaglio.engines.shapes import Interface, check_feeds
from intaglio.errors import EngineError
from intaglio.exporters.bundle import Dim


class LoweredGraph:
    """The face of a session over the lowered graph of a stage, whose cache is in buffers of ``context`` tokens.

    bfloat16, of which onnxruntime's CPU has no product, is widened to float32. Raises EngineError, CompileError,
    RuntimeMissingError.
    """

    def __init__(
        self,
        name: str,
        graph: Path,
        stage: Interface,
        dims: Mapping[str, Dim],
        options: Mapping[str, str],
        context: int = 0,
    ) -> None:
        import onnx_ir as ir

        from intaglio.engines.lowering.external_weights import write_graph
        from intaglio.engines.lowering.widen_dtype import WidenDtypePass
        from intaglio.engines.nvidia.building import lowered_model
        from intaglio.engines.nvidia.options import RtxOptions

        self.name, self.stage, self.dims = name, stage, dict(dims)
        self._context = context
        model, _ = lowered_model(graph, RtxOptions.model_validate(dict(options)), context)
        WidenDtypePass(ir.DataType.BFLOAT16, [])(model)
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
        given, length = (self._buffered(feeds), _length(feeds)) if self._context else (dict(feeds), 0)
        try:
            found = dict(zip(names, self._session.run(names, given), strict=True))
        except Exception as error:
            raise EngineError(f"{self.name}: onnxruntime cannot run the lowered graph: {error}") from error
        return {n: value[:, :, :length] if length and n.startswith(PRESENT) else value for n, value in found.items()}

    def _buffered(self, feeds: Mapping[str, np.ndarray]) -> dict[str, Any]:
        pasts = {name: feed for name, feed in feeds.items() if name.startswith(PAST)}
        others = {name: feed for name, feed in feeds.items() if name not in pasts}
        given = buffered_feeds(self.name, others, next(iter(pasts.values())).shape[2], self._context)
        return {**given, **{name: buffer(past, self._context) for name, past in pasts.items()}}


def _length(feeds: Mapping[str, np.ndarray]) -> int:
    """Of the cache after a run."""
    return next(feed.shape[2] for name, feed in feeds.items() if name.startswith(PAST)) + feeds[TOKENS].shape[1]
