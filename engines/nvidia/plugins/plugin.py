"""What a plugin is, and its registration with TensorRT."""

from __future__ import annotations

import inspect
import types
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from intaglio.kernels.cuda.ahead_of_time import require_triton
from intaglio.kernels.cuda.ptx import PluginKernel
from intaglio.kernels.grouped_quant import DOMAIN

Attributes = Mapping[str, Any]


@dataclass(frozen=True)
class Launch:
    """A kernel, its ``grid`` and the int32 ``numbers`` between inputs and outputs: integers or symbols of sizes."""

    kernel: PluginKernel
    grid: tuple[Any, Any, Any]
    numbers: tuple[Any, ...]


class Plugin(ABC):
    """An op of our domain, of TensorRT's tensor descriptions: ``dtype``, ``shape`` (-1 where open), ``shape_expr``.

    ``ATTRIBUTES`` gives the NumPy type of each: int32 or float32, as the parser hands them over.
    """

    NAME: ClassVar[str]
    INPUTS: ClassVar[tuple[str, ...]]
    ATTRIBUTES: ClassVar[dict[str, type[np.generic]]]
    id: ClassVar[str]

    def __init_subclass__(cls) -> None:
        if "NAME" in cls.__dict__:
            cls.id = f"{DOMAIN}::{cls.NAME}"

    def __init__(self, trt: Any) -> None:
        self.trt = trt

    @abstractmethod
    def output(self, inputs: Sequence[Any], attributes: Attributes) -> Any:
        """The description of the output."""

    @abstractmethod
    def types(self, inputs: Sequence[Any], attributes: Attributes) -> str:
        """The types of inputs and output as TensorRT spells them; ValueError for inputs that no kernel takes."""

    @abstractmethod
    def tactics(self, inputs: Sequence[Any], attributes: Attributes) -> Sequence[int]:
        """Numbers from 1 on, one for each kernel that TensorRT is to time."""

    @abstractmethod
    def launch(self, inputs: Sequence[Any], output: Any, attributes: Attributes, tactic: int) -> Launch:
        """How a tactic is launched."""


def register(trt: Any, plugin: Plugin) -> None:
    """Gives TensorRT's registry a plugin."""
    trtp: Any = trt.plugin
    count = len(plugin.INPUTS)

    def describe(*tensors: Any, **attributes: Any) -> Any:
        return plugin.output(tensors, _plain(plugin, attributes))

    def autotune(*arguments: Any) -> list[Any]:
        attributes = _plain(plugin, dict(zip(plugin.ATTRIBUTES, arguments[count:], strict=False)))
        inputs = arguments[:count]
        return [
            trtp.AutoTuneCombination(plugin.types(inputs, attributes), "LINEAR", plugin.tactics(inputs, attributes))
        ]

    def compile_ahead(*arguments: Any) -> tuple[str, str, Any, Any]:
        require_triton()
        *values, outputs, tactic = arguments[count:]
        attributes = _plain(plugin, dict(zip(plugin.ATTRIBUTES, values, strict=True)))
        launch = plugin.launch(arguments[:count], outputs[0], attributes, tactic)
        how = trtp.KernelLaunchParams()
        how.grid_x, how.grid_y, how.grid_z = launch.grid
        how.block_x, how.shared_mem = launch.kernel.threads, launch.kernel.shared_bytes
        numbers = trtp.SymIntExprs(len(launch.numbers))
        for i, number in enumerate(launch.numbers):
            numbers[i] = trtp.SymInt32(number)
        return launch.kernel.name, launch.kernel.ptx, how, numbers

    # TensorRT reads names and types off the functions.
    tensor = trtp.TensorDesc
    given = dict.fromkeys(plugin.INPUTS, tensor)
    # One number is an array of one: a plain int or float meets an array that NumPy 2.4 does not convert.
    given |= {name: npt.NDArray[dtype] for name, dtype in plugin.ATTRIBUTES.items()}  # type: ignore[valid-type]
    outputs = {"outputs": types.GenericAlias(tuple, (tensor,))}
    ahead = types.GenericAlias(tuple, (str, str, trtp.KernelLaunchParams, trtp.SymIntExprs))
    combinations = types.GenericAlias(list, (trtp.AutoTuneCombination,))
    trtp.register(plugin.id)(_signed(describe, given, tensor))
    trtp.autotune(plugin.id)(_signed(autotune, given | outputs, combinations))
    trtp.aot_impl(plugin.id)(_signed(compile_ahead, given | outputs | {"tactic": int}, ahead))


def _plain(plugin: Plugin, attributes: Attributes) -> dict[str, Any]:
    return {name: np.asarray(attributes[name]).reshape(-1)[0].item() for name in plugin.ATTRIBUTES}


def _signed(function: Any, parameters: Mapping[str, Any], returns: Any) -> Any:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    listed = [inspect.Parameter(name, kind, annotation=annotation) for name, annotation in parameters.items()]
    function.__signature__ = inspect.Signature(listed, return_annotation=returns)
    return function
