"""The graph that TensorRT is given, run by onnxruntime: what can be compared where no GPU is."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from intaglio.engines.kv_cache import PAST, PRESENT, TOKENS
from intaglio.engines.nvidia.cache_buffers import buffer, buffered_feeds
from intaglio.engines.onnxruntime_ import import_onnxruntime
from intaglio.engines.shapes import Interface, check_feeds, check_outputs, largest_sizes
from intaglio.errors import EngineError
from intaglio.exporters.bundle import Dim

if TYPE_CHECKING:
    import onnx_ir as ir

    from intaglio.engines.nvidia.activation_ranges import LargeActivation

_DTYPES = {"tensor(float16)": np.float16, "tensor(float)": np.float32}


class LoweredGraph:
    """The face of a session over the lowered graph of a stage, whose cache is in buffers of ``context`` tokens.

    It takes and gives what the portable stage does, whatever the dtypes of the lowered one. bfloat16, of which
    onnxruntime's CPU has no product, is computed in float32 and each result rounded, as a GPU does; plugins are run as
    what they are defined to compute. Raises EngineError, CompileError, RuntimeMissingError.
    """

    def __init__(
        self,
        name: str,
        graph: Path,
        stage: Interface,
        dims: Mapping[str, Dim],
        options: Mapping[str, str],
        context: int = 0,
        flavour: str = "tensorrt-rtx",
    ) -> None:
        from intaglio.engines.nvidia.options import FullOptions, RtxOptions

        self.name, self.stage, self.dims = name, stage, dict(dims)
        self._graph, self._context = graph, context
        kind = FullOptions if flavour == "tensorrt" else RtxOptions
        self._options = kind.model_validate(dict(options))

    def run(
        self, feeds: Mapping[str, np.ndarray], outputs: Collection[str] | None = None, *, resident: Collection[str] = ()
    ) -> dict[str, Any]:
        """Runs it; ``outputs`` chooses by name (all by default). Raises InputError, EngineError."""
        check_feeds(self.name, self.stage, self.dims, feeds)
        check_outputs(self.name, self.stage, outputs)
        session = self._session
        names = [o.name for o in session.get_outputs() if outputs is None or o.name in outputs]
        taken = {value.name: _DTYPES.get(value.type) for value in session.get_inputs()}
        given = {name: _cast(feed, taken.get(name)) for name, feed in self._lowered_feeds(feeds).items()}
        try:
            found = dict(zip(names, session.run(names, given), strict=True))
        except Exception as error:
            raise EngineError(f"{self.name}: onnxruntime cannot run the lowered graph: {error}") from error
        if length := _length(feeds) if self._context else 0:
            found = {n: value[:, :, :length] if n.startswith(PRESENT) else value for n, value in found.items()}
        dtypes = {tensor.name: tensor.dtype for tensor in self.stage.outputs}
        return {n: value.astype(dtypes[n], copy=False) if n in dtypes else value for n, value in found.items()}

    def large_activations(self, feeds: Mapping[str, np.ndarray]) -> tuple[LargeActivation, ...]:
        """What of it comes near the end of its dtype: see :mod:`intaglio.engines.nvidia.activation_ranges`.

        Raises InputError, EngineError.
        """
        from intaglio.engines.nvidia.activation_ranges import large_activations

        check_feeds(self.name, self.stage, self.dims, feeds)
        return tuple(large_activations(self._lowered(), self._lowered_feeds(feeds)))

    def _lowered(self) -> ir.Model:
        from intaglio.engines.nvidia.building import lowered_model
        from intaglio.engines.nvidia.plugin_bodies import add_plugin_bodies

        model, _ = lowered_model(self._graph, self._options, self._context, [largest_sizes(self.dims)])
        add_plugin_bodies(model)
        return model

    @cached_property
    def _session(self) -> Any:
        import onnx_ir as ir

        from intaglio.engines.lowering.external_weights import write_graph
        from intaglio.engines.lowering.round_values import RoundValuesPass
        from intaglio.kernels.grouped_quant import DOMAIN

        model = self._lowered()
        RoundValuesPass(ir.DataType.BFLOAT16, frozenset({DOMAIN}))(model)
        with tempfile.TemporaryDirectory(prefix="intaglio-lowered-") as folder:
            path = Path(folder) / f"{self.name}.onnx"
            write_graph(model, path)
            return open_lowered(path, str(self._graph))

    def _lowered_feeds(self, feeds: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """With the cache in buffers, where the lowered graph has it there."""
        if not self._context:
            return dict(feeds)
        pasts = {name: feed for name, feed in feeds.items() if name.startswith(PAST)}
        others = {name: feed for name, feed in feeds.items() if name not in pasts}
        given = buffered_feeds(self.name, others, next(iter(pasts.values())).shape[2], self._context)
        return {**given, **{name: buffer(past, self._context) for name, past in pasts.items()}}


def open_lowered(graph: Path | bytes, named: str, folder: Path | None = None) -> Any:
    """A session of onnxruntime's over a lowered graph; the weights of one in bytes lie in ``folder``.

    ``named`` is what an error calls it. Raises EngineError, RuntimeMissingError.
    """
    ort = import_onnxruntime()
    settings = ort.SessionOptions()
    # Otherwise products would have activations of 8 bits, which TensorRT's have not.
    settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    settings.log_severity_level = 4
    if folder is not None:
        settings.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.resolve()))
    try:
        given = graph if isinstance(graph, bytes) else str(graph)
        return ort.InferenceSession(given, settings, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no common base of their own
        raise EngineError(f"{named}: onnxruntime cannot load the lowered graph: {error}") from error


def _cast(feed: np.ndarray, dtype: Any) -> np.ndarray:
    is_other_float = dtype is not None and feed.dtype != dtype
    with np.errstate(over="ignore"):  # what does not fit a half comes out as not finite, which is looked for
        return feed.astype(dtype) if is_other_float else feed


def _length(feeds: Mapping[str, np.ndarray]) -> int:
    """Of the cache after a run."""
    return next(feed.shape[2] for name, feed in feeds.items() if name.startswith(PAST)) + feeds[TOKENS].shape[1]
