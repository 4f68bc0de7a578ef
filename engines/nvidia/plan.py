"""A built engine on the GPU, by TensorRT's runtime. All of that runtime that sessions call goes through here."""

from __future__ import annotations

import logging
import mmap
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from intaglio.engines.nvidia.device import Device, Memory, mib
from intaglio.engines.nvidia.logger import make_logger
from intaglio.engines.nvidia.refit import EngineWeights
from intaglio.errors import EngineError, OutputError
from intaglio.output import replaced_file

_log = logging.getLogger(__name__)

Shape = tuple[int, ...]
# The last that TensorRT said, for an error.
_MOST_SAID = 3
_DTYPES: dict[str, Any] = {
    "FLOAT": np.float32,
    "HALF": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "INT8": np.int8,
    "UINT8": np.uint8,
    "INT32": np.int32,
    "INT64": np.int64,
    "BOOL": np.bool_,
}
# What TensorRT's verdict of an engine means to whoever has it.
_DIAGNOSTICS = {
    "VERSION_MISMATCH": "it was built by another version of TensorRT",
    "UNSUPPORTED_CC": "it was not built for this GPU's compute capability",
    "OLD_CUDA_DRIVER": "the driver is too old for it: update NVIDIA's driver",
    "OLD_CUDA_RUNTIME": "the CUDA runtime is too old for it",
    "INSUFFICIENT_GPU_MEMORY": "the GPU has not enough memory for it",
    "MALFORMED_ENGINE": "it is no engine of this TensorRT",
    "CUDA_ERROR": "the driver or the CUDA runtime does not work",
}


@dataclass(frozen=True)
class PlanTensor:
    """An input or output as the engine has it. -1 in ``shape`` varies; ``on_host`` it lies in the machine's memory.

    An output with an ``alias`` is that input, changed in place.
    """

    name: str
    is_input: bool
    dtype: np.dtype
    shape: Shape
    on_host: bool
    alias: str | None


class Plan:
    """A deserialized engine. ``again`` is the command that builds it, for messages.

    ``runtime_cache`` is where TensorRT for RTX keeps what it compiled for this GPU; it is read now and written by
    :meth:`save_cache`. Raises EngineError for an engine that this GPU or this TensorRT does not take, InputError beyond
    the memory ``budget``.
    """

    def __init__(
        self,
        trt: Any,
        device: Device,
        artifact: Path,
        *,
        again: str,
        runtime_cache: Path | None = None,
        budget: int | None = None,
    ) -> None:
        self._trt, self.device, self.name, self._budget = trt, device, artifact.stem, budget
        self._said: list[str] = []
        self._runtime = trt.Runtime(make_logger(trt, self._said.append, lambda message: _log.debug("%s", message)))
        size = artifact.stat().st_size
        # What an engine takes on the GPU is its weights, which are all but all of the file.
        device.make_current()
        device.check_budget(size, f"the engine of {self.name}", budget)
        self._engine = self._deserialize(artifact, again)
        device.count(size)
        self._counted = weakref.finalize(self, device.count, -size)
        self.tensors = {tensor.name: tensor for tensor in self._tensors()}
        self.profiles = [self._profile(i) for i in range(self._engine.num_optimization_profiles)]
        # TensorRT for RTX compiles on the GPU, and records its work itself.
        self.records_itself = hasattr(trt, "IRuntimeCache")
        self._cache_file, self._cache_bytes, self._config = runtime_cache, 0, None
        if self.records_itself:
            self._config = self._runtime_config()

    def _deserialize(self, artifact: Path, again: str) -> Any:
        with artifact.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if hasattr(self._runtime, "get_engine_validity"):
                head = content[: self._runtime.engine_header_size]
                verdict, found = self._runtime.get_engine_validity(head)
                if verdict == self._trt.EngineValidity.INVALID:
                    raise EngineError(
                        f"{artifact}: cannot run on this machine: {self._why(int(found))}; build again with {again}"
                    )
            engine = self._runtime.deserialize_cuda_engine(content)
        if engine is None:
            raise EngineError(
                f"{artifact}: TensorRT {self._trt.__version__} cannot load it on {self.device.name}: "
                f"{self.last_said()}{self._short_of(artifact.stat().st_size)}; build again with {again}"
            )
        return engine

    def _short_of(self, nbytes: int) -> str:
        """What is said besides, where the GPU may be too full for ``nbytes``."""
        free, total = self.device.free_bytes()
        if nbytes <= free:
            return ""
        return (
            f". It needs at least {mib(nbytes)} MiB, and {mib(free)} of {mib(total)} MiB are free: close other "
            "programs, or give a memory budget so that other stages leave first"
        )

    def _why(self, found: int) -> str:
        members = self._trt.EngineInvalidityDiagnostics.__members__
        reasons = [_DIAGNOSTICS.get(name, name) for name, value in members.items() if found & int(value)]
        return "; ".join(reasons) or self.last_said()

    def last_said(self) -> str:
        """The last that TensorRT said of errors."""
        return "; ".join(self._said[-_MOST_SAID:]) or "it does not say why"

    def _tensors(self) -> list[PlanTensor]:
        engine, found = self._engine, []
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        for name in names:
            kind = engine.get_tensor_dtype(name).name
            if kind not in _DTYPES:
                raise EngineError(f"{self.name}: {name} is {kind}, which NumPy does not hold; give it another type")
            is_input = engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT
            alias = (
                None
                if is_input or not hasattr(engine, "get_aliased_input_tensor")
                else (engine.get_aliased_input_tensor(name) or None)
            )
            on_host = engine.get_tensor_location(name) == self._trt.TensorLocation.HOST
            shape = tuple(engine.get_tensor_shape(name))
            found.append(PlanTensor(name, is_input, np.dtype(_DTYPES[kind]), shape, on_host, alias))
        return found

    def _profile(self, index: int) -> dict[str, tuple[Shape, Shape]]:
        """The least and the greatest shape of each input."""
        result = {}
        for tensor in self.tensors.values():
            if tensor.is_input:
                least, _, most = self._engine.get_tensor_profile_shape(tensor.name, index)
                result[tensor.name] = tuple(least), tuple(most)
        return result

    # --- TensorRT for RTX ------------------------------------------------------------------------------------

    def _runtime_config(self) -> Any:
        trt, config = self._trt, self._engine.create_runtime_config()
        config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        cache = config.create_runtime_cache()
        with suppress(OSError):
            if self._cache_file is not None and self._cache_file.is_file():
                content = self._cache_file.read_bytes()
                # It looks whether they are of this GPU, driver and version, and takes no others.
                if cache.deserialize(content):
                    self._cache_bytes = len(content)
                else:
                    _log.info("%s: is of another GPU, driver or version; kernels are compiled anew", self._cache_file)
        config.set_runtime_cache(cache)
        return config

    def save_cache(self) -> None:
        """Writes what was compiled for this GPU, where there is more of it than before. It only saves time."""
        if self._config is None or self._cache_file is None:
            return
        try:
            self.device.make_current()
        except EngineError as error:  # at the end of the process the driver may have gone first
            _log.debug("%s", error)
            return
        made = self._config.get_runtime_cache().serialize()
        content = bytes(memoryview(made)) if made is not None else b""
        if not content or len(content) == self._cache_bytes:
            return
        try:
            with replaced_file(self._cache_file) as file:
                file.write(content)
            self._cache_bytes = len(content)
        except OutputError as error:
            _log.info("the runtime cache cannot be written: %s", error)

    def close(self) -> None:
        """Lets the engine go, though somebody, as a traceback does, may hold the plan."""
        self._engine = self._config = self._runtime = None
        self._counted()

    def weights(self) -> EngineWeights:
        """What of the engine can be exchanged. Raises EngineError where it was built without."""
        self.device.make_current()
        if not self._engine.refittable:
            raise EngineError(f"{self.name}: was compiled without --refit, so that no weight of it can be exchanged")
        return EngineWeights(self._trt, self._engine, self._runtime.logger)

    def new_context(self) -> Context:
        """A context, without memory to work in. Raises EngineError."""
        self.device.make_current()
        if self._config is not None:
            made = self._engine.create_execution_context(self._config)
        else:
            made = self._engine.create_execution_context(self._trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if made is None:
            raise EngineError(f"{self.name}: TensorRT makes no context: {self.last_said()}")
        return Context(self, made)


class Context:
    """What runs an engine with one set of shapes at a time."""

    def __init__(self, plan: Plan, context: Any) -> None:
        self._plan, self._context = plan, context

    def close(self) -> None:
        """Lets go of TensorRT's, which holds its engine."""
        self._context = None

    def set_shapes(self, profile: int, shapes: Mapping[str, Shape]) -> int:
        """The shapes of all inputs; returns the bytes that it needs to work in."""
        stream = self._plan.device.stream
        if self._context.active_optimization_profile != profile:
            self._check(self._context.set_optimization_profile_async(profile, stream), f"profile {profile}")
            self._plan.device.wait()
        for name, shape in shapes.items():
            self._check(self._context.set_input_shape(name, shape), f"the shape {list(shape)} of {name}")
        return int(self._context.update_device_memory_size_for_shapes())

    def set_scratch(self, memory: Memory) -> None:
        """What it works in. Not kept: contexts share it."""
        self._context.set_device_memory(memory.address, memory.nbytes)

    def set_address(self, name: str, address: int) -> None:
        """Where an input or output lies: on the GPU, or in the machine's memory where the engine says so."""
        self._check(self._context.set_tensor_address(name, address), f"the address of {name}")

    def missing(self) -> Sequence[str]:
        """Inputs that say too little for the shapes of the outputs."""
        return list(self._context.infer_shapes())

    def shape(self, name: str) -> Shape:
        """The shape of an output for these inputs."""
        return tuple(self._context.get_tensor_shape(name))

    def put(self) -> None:
        """Puts the run on the stream. Raises EngineError."""
        self._check(self._context.execute_async_v3(self._plan.device.stream), "the run")

    def _check(self, succeeded: bool, what: str) -> None:
        if not succeeded:
            raise EngineError(f"{self._plan.name}: TensorRT refuses {what}: {self._plan.last_said()}")
