"""An engine bound to one set of shapes: where its inputs and outputs lie, and how it is run again."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from intaglio.engines.kv_cache import PAST, PRESENT
from intaglio.engines.nvidia.device import DeviceArray, Memory, Recording
from intaglio.engines.nvidia.plan import Context, Plan, PlanTensor, Shape
from intaglio.errors import EngineError

if TYPE_CHECKING:
    from intaglio.engines.nvidia.session import Scratch

_log = logging.getLogger(__name__)

# The run from which on the work is recorded: the first one may still set things up.
_RECORD_FROM = 2


class Bound:
    """Inputs and outputs of these ``shapes``, in memory that is taken once.

    Inputs that are ``cached`` are buffers that each run is given, and that it changes. Raises EngineError, InputError
    beyond the ``budget``.
    """

    def __init__(
        self,
        plan: Plan,
        context: Context,
        scratch: Scratch,
        profile: int,
        shapes: Mapping[str, Shape],
        cached: Sequence[str],
        budget: int | None,
    ) -> None:
        self._plan, self._device, self._context, self._scratch = plan, plan.device, context, scratch
        needed = context.set_shapes(profile, shapes)
        scratch.reserve(needed)
        self._needed, self._scratch_version = needed, -1
        if missing := context.missing():
            raise EngineError(f"{plan.name}: the shapes of the inputs {', '.join(missing)} are not enough for TensorRT")
        self._shapes = {
            name: shapes[name] if tensor.is_input else context.shape(name) for name, tensor in plan.tensors.items()
        }
        for name, shape in self._shapes.items():
            if any(size < 0 for size in shape):
                raise EngineError(
                    f"{plan.name}: the size of {name} depends on what is computed, which this runtime does not run"
                )
        self._memory: dict[str, Memory] = {}
        self._host: dict[str, np.ndarray] = {}
        self._addresses: dict[str, int] = {}
        self._runs, self._budget = 0, budget
        self._recording: Recording | None = None
        # What lies in the machine's memory is read and written when the run is put on the stream: not by a recording.
        on_host = any(tensor.on_host for tensor in plan.tensors.values())
        self._is_recorded_here = not (plan.records_itself or on_host)
        # The output that each buffer becomes: the same memory where the engine says so, else copied back after.
        outputs = {tensor.alias: tensor.name for tensor in plan.tensors.values() if tensor.alias is not None}
        self._in_place = {past: outputs[past] for past in cached if past in outputs}
        self._copied = {past: past.replace(PAST, PRESENT, 1) for past in cached if past not in outputs}
        buffers = {*cached, *self._in_place.values()}
        try:
            for tensor in plan.tensors.values():
                if tensor.name not in buffers:
                    self._place(tensor)
        except BaseException:
            # The traceback would hold it.
            self._memory.clear()
            raise

    def _place(self, tensor: PlanTensor) -> None:
        shape = self._shapes[tensor.name]
        if tensor.on_host:
            self._host[tensor.name] = np.zeros(shape, tensor.dtype)
            self._address(tensor.name, self._host[tensor.name].ctypes.data)
            return
        nbytes = math.prod(shape) * tensor.dtype.itemsize
        self._memory[tensor.name] = self._device.allocate(nbytes, f"{tensor.name} of {self._plan.name}", self._budget)
        self._address(tensor.name, self._memory[tensor.name].address)

    def _address(self, name: str, address: int) -> bool:
        """Whether it is another than before."""
        if self._addresses.get(name) == address:
            return False
        self._context.set_address(name, address)
        self._addresses[name] = address
        return True

    def feed(self, name: str, value: np.ndarray | DeviceArray) -> None:
        """Copies an input to where the engine reads it, in the engine's dtype."""
        tensor = self._plan.tensors[name]
        if isinstance(value, DeviceArray):
            if value.stored == tensor.dtype and not tensor.on_host:
                nbytes = math.prod(value.shape) * tensor.dtype.itemsize
                self._device.copy(value.memory.address, self._memory[name].address, nbytes)
                return
            value = value.numpy()
        with np.errstate(over="ignore"):  # what does not fit a half comes out as not finite, which is looked for
            array = np.ascontiguousarray(value, tensor.dtype)
        if tensor.on_host:
            self._host[name][...] = array.reshape(self._shapes[name])
        else:
            self._device.write(self._memory[name].address, array)

    def run(self, buffers: Mapping[str, Memory]) -> None:
        """Runs the engine once. ``buffers`` are those of a cache, by the names of the inputs. Raises EngineError."""
        moved = False
        for name, memory in buffers.items():
            moved |= self._address(name, memory.address)
            if name in self._in_place:
                moved |= self._address(self._in_place[name], memory.address)
        if self._scratch_version != self._scratch.version:
            self._context.set_scratch(self._scratch.reserve(self._needed))
            self._scratch_version, moved = self._scratch.version, True
        if moved:
            self.forget()
        self._runs += 1
        if self._is_recorded_here and self._recording is None and self._runs >= _RECORD_FROM:
            self._record()
        if self._recording is not None:
            self._recording.run()
        else:
            self._context.put()
        for name, present in self._copied.items():
            nbytes = math.prod(self._shapes[present]) * self._plan.tensors[present].dtype.itemsize
            self._device.copy(self._memory[present].address, buffers[name].address, nbytes)
        self._device.wait()

    def forget(self) -> None:
        """Drops what was recorded: what it reads is elsewhere now, or another."""
        self._recording, self._runs = None, 0

    def _record(self) -> None:
        try:
            self._recording = self._device.record(self._context.put)
        except EngineError as error:
            # It runs as well without, only with more calls.
            _log.info("%s: its work cannot be recorded: %s", self._plan.name, error)
            self._is_recorded_here = False

    def result(self, name: str, dtype: str) -> np.ndarray:
        """An output as NumPy has it. Raises EngineError."""
        tensor = self._plan.tensors[name]
        if tensor.on_host:
            return self._host[name].astype(dtype)
        array = np.empty(self._shapes[name], tensor.dtype)
        self._device.read(self._addresses[name], array)
        return array.astype(dtype, copy=False)

    def kept(self, name: str, dtype: str) -> DeviceArray:
        """An output in memory of its own on the GPU: the next run writes over the one here."""
        tensor, shape = self._plan.tensors[name], self._shapes[name]
        nbytes = math.prod(shape) * tensor.dtype.itemsize
        memory = self._device.allocate(nbytes, f"{name} of {self._plan.name}", self._budget)
        if tensor.on_host:
            self._device.write(memory.address, self._host[name])
        else:
            self._device.copy(self._addresses[name], memory.address, nbytes)
            self._device.wait()
        return DeviceArray(self._device, memory, shape, dtype, tensor.dtype)

    def release(self) -> Context:
        """Lets the memory go, and gives the context for other shapes."""
        self._recording = None
        self._memory.clear()
        return self._context
