"""Stands in for a GPU: TensorRT's runtime over onnxruntime, and CUDA's driver of ``cuda_stand_in``.

An "engine" is the lowered graph with its profiles, which the build writes where TensorRT would write a plan. The names
are those of the real bindings: ``test_real_bindings`` compares them, and what is called.
"""

from __future__ import annotations

import enum
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from cuda_stand_in import POISON, Driver, host_bytes

from intaglio.engines.lowering.widen_dtype import WidenDtypePass
from intaglio.engines.nvidia.profiles import Range

# --- TensorRT ----------------------------------------------------------------------------------------------------


class ILogger:
    """As TensorRT's."""

    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    def log(self, severity: int, msg: str) -> None:
        """Overridden."""


class TensorIOMode(enum.Enum):
    INPUT, OUTPUT = 1, 2


class TensorLocation(enum.Enum):
    DEVICE, HOST = 0, 1


class EngineValidity(enum.Enum):
    VALID, SUBOPTIMAL, INVALID = 0, 1, 2


class EngineInvalidityDiagnostics(enum.IntEnum):
    VERSION_MISMATCH, UNSUPPORTED_CC, OLD_CUDA_DRIVER, MALFORMED_ENGINE = 1, 2, 4, 32


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC, ON_PROFILE_CHANGE, USER_MANAGED = 0, 1, 2


class CudaGraphStrategy(enum.Enum):
    DISABLED, WHOLE_GRAPH_CAPTURE = 0, 1


class DataType(enum.Enum):
    FLOAT, HALF, BF16, INT8, INT32, INT64, BOOL, UINT8 = range(8)


_TYPES = {
    np.dtype(np.float32): DataType.FLOAT,
    np.dtype(np.float16): DataType.HALF,
    np.dtype(ml_dtypes.bfloat16): DataType.BF16,
    np.dtype(np.int8): DataType.INT8,
    np.dtype(np.int32): DataType.INT32,
    np.dtype(np.int64): DataType.INT64,
    np.dtype(np.bool_): DataType.BOOL,
    np.dtype(np.uint8): DataType.UINT8,
}


class IRuntimeCache:
    """Holds a word for each set of shapes that ran."""

    def __init__(self, gpu: str) -> None:
        self.gpu, self.words = gpu, set[str]()

    def deserialize(self, blob: bytes) -> bool:
        content = json.loads(blob)
        if content["gpu"] != self.gpu:
            return False
        self.words = set(content["words"])
        return True

    def serialize(self) -> memoryview:
        return memoryview(json.dumps({"gpu": self.gpu, "words": sorted(self.words)}).encode())


class IRuntimeConfig:
    """As TensorRT's for RTX."""

    def __init__(self, gpu: str) -> None:
        self.cuda_graph_strategy = CudaGraphStrategy.DISABLED
        self._strategy, self._gpu = ExecutionContextAllocationStrategy.STATIC, gpu
        self._cache: IRuntimeCache | None = None

    def set_execution_context_allocation_strategy(self, strategy: ExecutionContextAllocationStrategy) -> None:
        self._strategy = strategy

    def create_runtime_cache(self) -> IRuntimeCache:
        return IRuntimeCache(self._gpu)

    def set_runtime_cache(self, cache: IRuntimeCache) -> bool:
        self._cache = cache
        return True

    def get_runtime_cache(self) -> IRuntimeCache | None:
        return self._cache


class Runtime:
    """Reads engines that the stand-in built."""

    def __init__(self, trt: TensorRT, logger: ILogger) -> None:
        self._trt, self.logger = trt, logger

    def deserialize_cuda_engine(self, serialized_engine: Any) -> ICudaEngine | None:
        if self._trt.refuses:
            self.logger.log(ILogger.ERROR, "the stand-in refuses it")
            return None
        return ICudaEngine(self._trt, bytes(serialized_engine))


class RtxRuntime(Runtime):
    """Likewise, of TensorRT for RTX."""

    engine_header_size = 16

    def get_engine_validity(self, buffer: Any) -> tuple[EngineValidity, int]:
        is_ours = bytes(buffer[:8]) == b"STANDIN\n"
        found = 0 if is_ours else int(EngineInvalidityDiagnostics.MALFORMED_ENGINE)
        found |= self._trt.invalid
        return (EngineValidity.INVALID if found else EngineValidity.VALID), found


class ICudaEngine:
    """An engine: a graph and its profiles."""

    def __init__(self, trt: TensorRT, content: bytes) -> None:
        self.trt = trt
        mark, header, graph = content.split(b"\n", 2)
        assert mark == b"STANDIN"
        self.profiles: list[dict[str, list[list[int]]]] = json.loads(header)["profiles"]
        self.exchangeable: list[str] = json.loads(header)["exchangeable"]
        self.refittable = bool(self.exchangeable)
        self.num_optimization_profiles = len(self.profiles)
        model = ir.serde.deserialize_model(onnx.load_from_string(graph))
        self.tensors: dict[str, tuple[bool, np.dtype, tuple[int | str, ...]]] = {}
        for is_input, values in ((True, model.graph.inputs), (False, model.graph.outputs)):
            for value in values:
                dims = tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape or ())
                assert value.name is not None and value.dtype is not None
                self.tensors[value.name] = is_input, value.dtype.numpy(), dims
        self.num_io_tensors = len(self.tensors)
        self.aliases = {
            node.outputs[0].name: node.inputs[0].name
            for node in model.graph
            if node.op_type == "TensorScatter" and node.outputs[0].is_graph_output() and node.inputs[0].is_graph_input()
        }
        WidenDtypePass(ir.DataType.BFLOAT16, [])(model)
        self.model = model
        self.prepare()

    def prepare(self) -> None:
        """Gets the graph ready, with the weights it has."""
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        data = ir.serde.serialize_model(self.model).SerializeToString()
        self.session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if self.tensors[name][0] else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return _TYPES[self.tensors[name][1]]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(dim if isinstance(dim, int) else -1 for dim in self.tensors[name][2])

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.HOST if name in self.trt.on_host else TensorLocation.DEVICE

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.aliases.get(name) if self.trt.writes_in_place else None

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        return [tuple(shape) for shape in self.profiles[profile_index][name]]

    def create_runtime_config(self) -> IRuntimeConfig:
        return IRuntimeConfig(self.trt.gpu)

    def create_execution_context(self, config: Any) -> IExecutionContext:
        if self.trt.is_rtx:
            assert config._strategy == ExecutionContextAllocationStrategy.USER_MANAGED
        else:
            assert config == ExecutionContextAllocationStrategy.USER_MANAGED
        self.trt.contexts += 1
        return IExecutionContext(self, config if self.trt.is_rtx else None)


class IExecutionContext:
    """Runs an engine on the stand-in's memory."""

    def __init__(self, engine: ICudaEngine, config: IRuntimeConfig | None) -> None:
        self._engine, self._config, self._driver = engine, config, engine.trt.driver
        self.active_optimization_profile = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._scratch = (0, 0)
        self._outputs: dict[str, tuple[int, ...]] = {}
        self._runs_of_shapes = 0

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self.active_optimization_profile, self._shapes = profile_index, {}
        return True

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        least, _, most = self._engine.profiles[self.active_optimization_profile][name]
        fits = len(shape) == len(least) and all(a <= n <= b for a, n, b in zip(least, shape, most, strict=True))
        if fits:
            self._shapes[name], self._outputs, self._runs_of_shapes = tuple(shape), {}, 0
        return fits

    def update_device_memory_size_for_shapes(self) -> int:
        assert not self.infer_shapes()
        return 64 * sum(int(np.prod(shape)) for shape in self._shapes.values())

    def set_device_memory(self, memory: int, size: int) -> None:
        assert size >= self.update_device_memory_size_for_shapes()
        self._scratch = memory, size

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._addresses[name] = memory
        return True

    def infer_shapes(self) -> list[str]:
        return [name for name, (is_input, *_) in self._engine.tensors.items() if is_input and name not in self._shapes]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if not self._outputs:
            sizes = {
                dim: size
                for tensor, shape in self._shapes.items()
                for dim, size in zip(self._engine.tensors[tensor][2], shape, strict=True)
            }
            found = {n: [sizes.get(d, d) for d in dims] for n, (i, _, dims) in self._engine.tensors.items() if not i}
            if any(isinstance(dim, str) for shape in found.values() for dim in shape):
                zeros = {n: np.zeros(shape, self._fed(n)) for n, shape in self._shapes.items()}
                arrays = self._engine.session.run(list(found), zeros)
                found = {n: list(array.shape) for n, array in zip(found, arrays, strict=True)}
            self._outputs = {n: tuple(int(size) for size in shape) for n, shape in found.items()}
        return self._outputs[name]

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert stream_handle == 7
        self._runs_of_shapes += 1
        assert self._driver.recorded is None or self._runs_of_shapes > 1, "TensorRT sets things up in the first run"
        if self._config is not None:
            assert self._driver.recorded is None, "TensorRT for RTX records its work itself"
            cache = self._config.get_runtime_cache()
            assert cache is not None
            cache.words.add(json.dumps([self._engine.get_tensor_name(0), *self._shapes.values()]))
        shapes, addresses, scratch = dict(self._shapes), dict(self._addresses), self._scratch
        outputs = {n: self.get_tensor_shape(n) for n, (is_input, *_) in self._engine.tensors.items() if not is_input}
        # What lies in the machine's memory is read now, not when the work is done.
        host = {
            name: self._at(name, shape, addresses).copy()
            for name, shape in shapes.items()
            if name in self._engine.trt.on_host
        }
        for present, past in self._engine.aliases.items():
            if self._engine.trt.writes_in_place:
                assert addresses[present] == addresses[past], f"{present} is written in place"
        self._driver.put(lambda: self._run(shapes, outputs, addresses, scratch, host))
        return True

    def _run(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        outputs: Mapping[str, tuple[int, ...]],
        addresses: Mapping[str, int],
        scratch: tuple[int, int],
        host: Mapping[str, np.ndarray],
    ) -> None:
        self._engine.trt.runs += 1
        # What is worked in is nobody else's.
        self._driver.at(*scratch).fill(POISON)
        given = {name: host[name] if name in host else self._at(name, s, addresses) for name, s in shapes.items()}
        feeds = {name: array.astype(self._fed(name)) for name, array in given.items()}
        for name, array in zip(outputs, self._engine.session.run(list(outputs), feeds), strict=True):
            assert array.shape == outputs[name]
            self._at(name, array.shape, addresses)[...] = array

    def _at(self, name: str, shape: tuple[int, ...], addresses: Mapping[str, int]) -> np.ndarray:
        dtype = self._engine.tensors[name][1]
        nbytes = int(np.prod(shape)) * dtype.itemsize
        is_on_host = name in self._engine.trt.on_host
        content = host_bytes(addresses[name], nbytes) if is_on_host else self._driver.at(addresses[name], nbytes)
        return content.view(dtype).reshape(shape)

    def _fed(self, name: str) -> Any:
        dtype = self._engine.tensors[name][1]
        return np.float32 if dtype == np.dtype(ml_dtypes.bfloat16) else dtype


class Weights:
    """Numbers somewhere, or with the address 0 none."""

    def __init__(self, type: DataType, ptr: int, count: int) -> None:  # noqa: A002 - TensorRT's name
        self.dtype, self.address, self.size = type, ptr, count

    def array(self) -> np.ndarray:
        dtype = next(dtype for dtype, kind in _TYPES.items() if kind is self.dtype)
        return host_bytes(self.address, self.size * dtype.itemsize).view(dtype).copy()


class Refitter:
    """Exchanges weights of an engine. Those that are joined are exchanged together."""

    def __init__(self, engine: ICudaEngine, logger: ILogger) -> None:
        self._engine, self._set = engine, dict[str, Weights]()

    def get_all_weights(self) -> list[str]:
        return list(self._engine.exchangeable)

    def get_weights_prototype(self, name: str) -> Weights:
        tensor = self._engine.model.graph.initializers[name].const_value
        assert tensor is not None
        return Weights(_TYPES[np.dtype(tensor.numpy().dtype)], 0, tensor.size)

    def set_named_weights(self, name: str, weights: Weights) -> bool:
        self._set[name] = weights
        return name in self._engine.exchangeable

    def unset_named_weights(self, weights_name: str) -> bool:
        return self._set.pop(weights_name, None) is not None

    def get_missing_weights(self) -> list[str]:
        joined = [group for group in self._engine.trt.joined if self._set.keys() & group]
        return sorted(set().union(*joined) - self._set.keys())

    def refit_cuda_engine(self) -> bool:
        assert not self._engine.trt.driver.queue, "nothing is under way"
        if self.get_missing_weights():
            return False
        values = self._engine.model.graph.initializers
        for name, weights in self._set.items():
            old = values[name].const_value
            assert old is not None and weights.size == old.size
            values[name].const_value = ir.tensor(weights.array().reshape(old.numpy().shape), name=name)
        self._engine.prepare()
        self._engine.trt.exchanged.append(sorted(self._set))
        return True


@dataclass
class TensorRT:
    """The module ``tensorrt``, or ``tensorrt_rtx`` where ``is_rtx``."""

    driver: Driver
    is_rtx: bool = True
    gpu: str = "stand-in"
    refuses: bool = False
    invalid: int = 0
    writes_in_place: bool = True
    on_host: frozenset[str] = frozenset()
    contexts: int = 0
    runs: int = 0
    # Groups of weights that it made one of, and the weights of each exchange.
    joined: list[set[str]] = field(default_factory=list)
    exchanged: list[list[str]] = field(default_factory=list)
    __version__ = "10.16.1"

    float32, float16, bfloat16 = DataType.FLOAT, DataType.HALF, DataType.BF16
    Weights = Weights

    ILogger, TensorIOMode, TensorLocation, DataType = ILogger, TensorIOMode, TensorLocation, DataType
    EngineValidity, EngineInvalidityDiagnostics = EngineValidity, EngineInvalidityDiagnostics
    ExecutionContextAllocationStrategy, CudaGraphStrategy = ExecutionContextAllocationStrategy, CudaGraphStrategy

    def __post_init__(self) -> None:
        if self.is_rtx:
            self.IRuntimeCache = IRuntimeCache

    def Runtime(self, logger: ILogger) -> Runtime:
        return RtxRuntime(self, logger) if self.is_rtx else Runtime(self, logger)

    def Refitter(self, engine: ICudaEngine, logger: ILogger) -> Refitter:
        return Refitter(engine, logger)


# --- in the place of the real ones -------------------------------------------------------------------------------


def write_plan(graph: Path, profiles: Sequence[Mapping[str, Range]], exchangeable: Sequence[str] = ()) -> bytes:
    """What the stand-in's engine is, of a lowered graph."""
    ranges = [{name: [list(r.min), list(r.opt), list(r.max)] for name, r in each.items()} for each in profiles]
    header = json.dumps({"profiles": ranges, "exchangeable": list(exchangeable)}).encode()
    return b"\n".join([b"STANDIN", header, onnx.load(graph).SerializeToString()])


def stand_in(patch: pytest.MonkeyPatch, target: str = "tensorrt-rtx", **driver: Any) -> TensorRT:
    """A machine with a GPU, as far as this package is concerned, whose engines are built in this process.

    Of full TensorRT's plugins, which nothing here runs, TensorRT for RTX's INT4 blocks take the place.
    """
    import subprocess

    from intaglio.engines import child, tensorrt, tensorrt_rtx
    from intaglio.engines.nvidia import bindings, building, device, gpu

    gpus = Driver(**driver)
    trt = {name: TensorRT(gpus, is_rtx=name == "tensorrt-rtx") for name in ("tensorrt", "tensorrt-rtx")}
    run_child, lower = child.run_child, building.lower

    def run(module: str, request: Mapping[str, Any], progress: Any = None) -> Any:
        if module != "nvidia.building":
            return run_child(module, request, progress)
        said = io.StringIO()
        with pytest.MonkeyPatch.context() as streams:
            streams.setattr("sys.stdin", io.StringIO(json.dumps(request)))
            streams.setattr("sys.stdout", said)
            code = building.main()
        return subprocess.CompletedProcess([], code, said.getvalue(), "")

    def plan(
        trt: Any, name: str, graph: Path, profiles: Any, options: Any, weight_bytes: int, exchanged: Any, timing: Any
    ) -> Any:
        return write_plan(graph, profiles, exchanged)

    patch.setattr(child, "run_child", run)
    patch.setattr(building, "end_with_parent", lambda: None)
    patch.setattr(building, "lower", lambda model, flavour, context=0, **_: lower(model, context=context))
    patch.setattr(building, "_build_plan", plan)
    for module in (bindings, building):
        patch.setattr(module, "import_tensorrt_rtx", lambda: trt["tensorrt-rtx"])
        patch.setattr(module, "import_tensorrt", lambda: trt["tensorrt"])
    patch.setattr(tensorrt_rtx, "compiler", lambda: "stand-in for TensorRT")
    patch.setattr(tensorrt, "compiler", lambda: f"TensorRT {TensorRT.__version__}.11")
    patch.setattr(tensorrt, "find_gpu", lambda: gpu.Gpu("Stand-in GPU", 86, gpus.total, "13.0"))
    opened = device.Device(gpus)
    patch.setattr(device, "open_device", lambda: opened)
    patch.setattr(device, "_OPENED", [opened])
    return trt[target]
