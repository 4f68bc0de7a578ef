"""A loaded stage of the target ``cuda``: onnxruntime's session with a provider on the GPU."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from intaglio.engines.interruptible import call_interruptibly
from intaglio.engines.nvidia.driver import check_gpu
from intaglio.engines.onnxruntime_ import import_onnxruntime
from intaglio.engines.shapes import Interface, check_feeds, check_outputs
from intaglio.errors import EngineError, RuntimeMissingError
from intaglio.exporters.bundle import Dim

CUDA, TENSORRT, CPU = "CUDAExecutionProvider", "TensorrtExecutionProvider", "CPUExecutionProvider"
# Of an option of the target.
PROVIDERS = {"cuda": CUDA, "tensorrt": TENSORRT}


def check_provider(provider: str) -> None:
    """Raises EngineError where there is no GPU, or an onnxruntime without the provider; RuntimeMissingError."""
    ort = import_onnxruntime()
    wanted = PROVIDERS[provider]
    if wanted not in ort.get_available_providers():
        raise RuntimeMissingError(
            f"this onnxruntime {ort.__version__} has no {wanted}, only {', '.join(ort.get_available_providers())}. "
            "It is in the package onnxruntime-gpu, which takes the place of onnxruntime: pip uninstall onnxruntime, "
            "then install intaglio with its extra `cuda`, from a checkout: pip install '.[cuda]'"
        )
    check_gpu()


def gpu_providers(provider: str, cache: Path, budget: int | None) -> list[tuple[str, dict[str, Any]]]:
    """The providers and their options, the first one first. ``cache`` is where TensorRT keeps the engines it builds."""
    # Otherwise memory grows by doubling.
    arena: dict[str, Any] = {"device_id": 0, "arena_extend_strategy": "kSameAsRequested"}
    if budget is not None:
        arena["gpu_mem_limit"] = budget
    chosen: list[tuple[str, dict[str, Any]]] = [(CUDA, arena)]
    if provider == "tensorrt":
        kept: dict[str, Any] = {"device_id": 0, "trt_engine_cache_enable": True, "trt_engine_cache_path": str(cache)}
        if budget is not None:
            kept["trt_max_workspace_size"] = budget
        chosen.insert(0, (TENSORRT, kept))
    return chosen


class CudaSession:
    """A stage in onnxruntime with ``providers``, before the CPU's. Outputs that are ``resident`` stay on the GPU.

    Raises EngineError where it cannot be loaded, and where onnxruntime left the first provider out.
    """

    def __init__(
        self,
        name: str,
        graph: Path,
        stage: Interface,
        dims: Mapping[str, Dim],
        providers: Sequence[tuple[str, dict[str, Any]]],
        *,
        device: str = "cuda",
    ) -> None:
        self.name, self.stage, self.dims = name, stage, dict(dims)
        self._ort, self._device = import_onnxruntime(), device
        options = self._ort.SessionOptions()
        options.log_severity_level = 4
        # Otherwise onnxruntime may turn a dequantized MatMul into one with 8-bit activations.
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        try:
            self._session: Any = self._ort.InferenceSession(
                str(graph), options, providers=[*providers, (CPU, {})], enable_fallback=0
            )
        except Exception as error:  # onnxruntime's errors have no common base of their own
            raise EngineError(f"{graph}: onnxruntime cannot load it: {error}") from error
        first = providers[0][0] if providers else CPU
        if first not in self._session.get_providers():
            raise EngineError(
                f"{graph}: onnxruntime left out {first} and would run on the CPU: a library of CUDA, cuDNN or TensorRT "
                "is missing or of another version than it was built for. Install onnxruntime-gpu with its extras: "
                "pip install 'onnxruntime-gpu[cuda,cudnn]'"
            )
        self._outputs = [tensor.name for tensor in stage.outputs]

    def close(self) -> None:
        """Lets go of what it holds on the GPU, whoever holds the session; a run after that raises EngineError."""
        self._session = None

    def new_cache(self, batch: int) -> None:
        """None: a cache stays on the GPU as ``resident`` outputs, which the next run takes."""

    def run(
        self, feeds: Mapping[str, Any], outputs: Collection[str] | None = None, *, resident: Collection[str] = ()
    ) -> dict[str, Any]:
        """Runs the stage. ``outputs`` chooses by name (all by default).

        Raises InputError on wrong inputs, EngineError if the run fails. KeyboardInterrupt stops it between two nodes.
        """
        check_feeds(self.name, self.stage, self.dims, feeds)
        check_outputs(self.name, self.stage, outputs)
        names = [name for name in self._outputs if outputs is None or name in outputs]
        session = self._session
        if session is None:
            raise EngineError(f"{self.name}: its session was closed; load the stage again")
        try:
            binding = session.io_binding()
            for name, feed in feeds.items():
                if isinstance(feed, np.ndarray):
                    binding.bind_cpu_input(name, np.ascontiguousarray(feed))
                else:
                    binding.bind_ortvalue_input(name, feed)
            for name in names:
                binding.bind_output(name, self._device if name in resident else "cpu", 0)
            self._call(session, binding)
        except Exception as error:
            raise EngineError(f"{self.name}: the run failed: {error}") from error
        found = dict(zip(names, binding.get_outputs(), strict=True))
        return {name: value if name in resident else value.numpy() for name, value in found.items()}

    def _call(self, session: Any, binding: Any) -> None:
        options = self._ort.RunOptions()
        options.log_severity_level = 4
        call_interruptibly(
            lambda: session.run_with_iobinding(binding, options),
            stop=lambda: setattr(options, "terminate", True),
        )
