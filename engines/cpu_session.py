"""A loaded stage of the target ``cpu``. Kept apart from building, so that running imports no graph library."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from intaglio.engines.cpu_cache import CACHE_IN_PLACE, KeyValueCache
from intaglio.engines.interruptible import call_interruptibly
from intaglio.engines.kv_cache import PAST, PRESENT, FilledPast
from intaglio.engines.onnxruntime_ import import_onnxruntime
from intaglio.engines.shapes import Interface, check_feeds, check_finite, check_outputs, smallest_feeds
from intaglio.errors import EngineError, InputError
from intaglio.exporters.bundle import Dim, StageInfo
from intaglio.kernels.cpu.library import library_path

# More threads than that wait for each other by turning round and round.
_MAX_THREADS = max(16, 4 * (os.cpu_count() or 1))
# What onnxruntime and C++ say.
_OUT_OF_MEMORY = ("Failed to allocate memory", "bad_alloc")


def open_session(graph: bytes, weights_folder: Path, *, threads: int = 0, profile: Path | None = None) -> Any:
    """onnxruntime's session of a lowered graph, with our kernels; raises onnxruntime's errors as they are.

    ``weights_folder`` holds the external data, ``threads`` 0 takes one a core, ``profile`` begins the name of the file
    that its profiler writes.
    """
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # its errors come back as exceptions, which we word
    # The lowered graph is in the engine's folder, the weights stay where the bundle has them.
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(weights_folder.resolve())
    )
    # Otherwise onnxruntime may turn a dequantized MatMul into one with 8-bit activations.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    # A pattern is one more block of a run's whole size, made on the second run of each shape. Measured on the VAE's
    # decoder at 512 by 512: 1.6 GiB after one run, 2.8 after two. Weights then lie outside the arena, which grows
    # by doubling.
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    options.register_custom_ops_library(str(library_path()))
    return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"], enable_fallback=0)


class CpuSession:
    """A loaded stage. ``run`` takes and gives NumPy arrays; outputs named ``resident`` stay as the runtime's own
    values, which the next run takes as they are (a key-value cache is not copied out and in)."""

    def __init__(
        self,
        name: str,
        graph: Path,
        weights_folder: Path,
        stage: Interface,
        dims: Mapping[str, Dim],
        *,
        threads: int = 0,
        profile: Path | None = None,
    ) -> None:
        self.name, self.stage, self.dims = name, stage, dict(dims)
        self._outputs = [tensor.name for tensor in stage.outputs]
        self._ort = import_onnxruntime()
        if type(threads) is not int or not 0 <= threads <= _MAX_THREADS:
            raise InputError(f"threads is {threads!r}, expected 0 (one a core) to {_MAX_THREADS}")
        try:
            self._session = open_session(graph.read_bytes(), weights_folder, threads=threads, profile=profile)
        except Exception as error:  # onnxruntime's errors have no common base of their own
            raise EngineError(f"{graph}: onnxruntime cannot load it: {error}") from error
        self._appends = CACHE_IN_PLACE in self._session.get_modelmeta().custom_metadata_map

    def new_cache(self, batch: int) -> KeyValueCache | None:
        """An empty key-value cache for :meth:`run_with_cache`; None if this stage takes and gives its cache whole."""
        pasts = [tensor for tensor in self.stage.inputs if tensor.name.startswith(PAST)]
        if not self._appends or not pasts:
            return None
        return KeyValueCache(self._ort, pasts, batch, self.dims["total_sequence"].max)

    def run_with_cache(
        self, feeds: Mapping[str, np.ndarray], outputs: Collection[str], cache: KeyValueCache
    ) -> dict[str, np.ndarray]:
        """Runs the stage with a cache in place of past and present, and appends to it.

        ``feeds`` are the other inputs. Errors as of :meth:`run`; the cache then holds what it held before.
        """
        first, *others = (tensor for tensor in self.stage.inputs if tensor.name.startswith(PAST))
        filled = {first.name: FilledPast(first, cache)}
        check_feeds(self.name, self.stage, self.dims, {**feeds, **filled}, unchecked={t.name for t in others})
        check_outputs(self.name, self.stage, outputs)
        tokens = feeds["input_ids"].shape[1]
        try:
            if cache.reserve(tokens):
                binding = self._session.io_binding()
                for name, value in cache.values.items():
                    binding.bind_ortvalue_input(name, value)
                    binding.bind_ortvalue_output(name.replace(PAST, PRESENT, 1), value)
                cache.binding = binding
            binding = cache.binding
            # A binding does not keep what it is given.
            values = {name: self._ort.OrtValue.ortvalue_from_numpy(feed) for name, feed in feeds.items()}
            for name, value in values.items():
                binding.bind_ortvalue_input(name, value)
            for name in outputs:
                binding.bind_output(name)
            self._call(lambda options: self._session.run_with_iobinding(binding, options))
        except Exception as error:
            raise self._failed(error) from error
        cache.length += tokens
        # Outputs come in the order in which they were bound: the cache's first.
        results = binding.get_outputs()[len(cache.values) :]
        return {name: value.numpy() for name, value in zip(outputs, results, strict=True)}

    def run(
        self,
        feeds: Mapping[str, Any],
        outputs: Collection[str] | None = None,
        *,
        resident: Collection[str] = (),
    ) -> dict[str, Any]:
        """Runs the stage. ``outputs`` chooses by name (all by default).

        Raises InputError on wrong inputs and names that are no outputs, EngineError if the run fails. KeyboardInterrupt
        stops it between two nodes of the graph.
        """
        check_feeds(self.name, self.stage, self.dims, feeds)
        check_outputs(self.name, self.stage, outputs)
        chosen = None if outputs is None else frozenset(outputs)
        names = [name for name in self._outputs if chosen is None or name in chosen]
        try:
            values = {
                name: self._ort.OrtValue.ortvalue_from_numpy(value) if isinstance(value, np.ndarray) else value
                for name, value in feeds.items()
            }
            results = self._run(names, values)
        except Exception as error:
            raise self._failed(error) from error
        return {name: value if name in resident else value.numpy() for name, value in zip(names, results, strict=True)}

    def _failed(self, error: Exception) -> EngineError:
        if isinstance(error, MemoryError) or any(sign in str(error) for sign in _OUT_OF_MEMORY):
            return EngineError(
                f"{self.name}: there is not enough memory for these sizes; make them smaller, or give a memory "
                "budget, which says what is needed"
            )
        return EngineError(f"{self.name}: the run failed: {error}")

    def _run(self, names: list[str], values: dict[str, Any]) -> Any:
        return self._call(lambda options: self._session.run_with_ort_values(names, values, options))

    def _call(self, call: Callable[[Any], Any]) -> Any:
        options = self._ort.RunOptions()
        options.log_severity_level = 4
        return call_interruptibly(lambda: call(options), stop=lambda: setattr(options, "terminate", True))

    def end_profiling(self) -> Path:
        """Stops profiling and returns the file that onnxruntime wrote."""
        return Path(self._session.end_profiling())


def run_once(graph: Path, weights_folder: Path, stage: StageInfo, dims: Mapping[str, Dim]) -> dict[str, int]:
    """Counts the operators of one run at the smallest shapes. Raises EngineError on outputs that are not finite."""
    # Beside the graph: what a killed build leaves is cleared away with it.
    with tempfile.TemporaryDirectory(prefix=".profile-", dir=graph.parent) as folder:
        session = CpuSession(graph.stem, graph, weights_folder, stage, dims, profile=Path(folder) / "profile")
        outputs = session.run(smallest_feeds(stage, dims))
        events = json.loads(session.end_profiling().read_text("utf-8"))
    check_finite(graph.stem, outputs)
    return dict(
        Counter(e["args"]["op_name"] for e in events if e.get("cat") == "Node" and "op_name" in e.get("args", {}))
    )
