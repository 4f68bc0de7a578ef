"""TensorRT's own Python bindings without TensorRT: a plugin goes through what its parser and builder would ask of it.

The bindings (package tensorrt-cu13-bindings) need nine C symbols of TensorRT's libraries. Here these come from a stub,
whose registry keeps the plugins that Python gives it and finds them by name, version and namespace as the parser does.
Sizes and their expressions are Python's own. A child process does it all: the bindings of TensorRT for RTX, which other
tests import, are of the same C++ types.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_LIBRARIES = ("libnvinfer", "libnvinfer_plugin", "libnvonnxparser")
# Slots are those of the virtual tables: of the registry, and of a creator of plugins.
_STUB = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SLOTS = 32, REGISTER_CREATOR = 12, GET_CREATOR = 14, NAME = 6, VERSION = 7, NAMESPACE = 8, MOST = 64 };
static void* creators[MOST];
static int count;

static int is(void* creator, int slot, char const* expected)
{
    typedef char const* (*Text)(void*);
    return !strcmp((*(Text**) creator)[slot](creator), expected);
}

static long register_creator(void* self, void* creator, char const* space)
{
    if (count == MOST)
        return 0;
    creators[count++] = creator;
    return 1;
}

static void* get_creator(void* self, char const* name, char const* version, char const* space)
{
    for (int i = 0; i < count; ++i)
        if (is(creators[i], NAME, name) && is(creators[i], VERSION, version) && is(creators[i], NAMESPACE, space))
            return creators[i];
    return 0;
}

static void refuse(void* self)
{
    fprintf(stderr, "the stub of TensorRT was asked for what it does not have\n");
    abort();
}

static void* table[SLOTS];
static void** registry[] = {table};

__attribute__((constructor)) static void fill(void)
{
    for (int i = 0; i < SLOTS; ++i)
        table[i] = refuse;
    table[REGISTER_CREATOR] = register_creator;
    table[GET_CREATOR] = get_creator;
}

void* getPluginRegistry(void) { return registry; }
void* getBuilderPluginRegistry(int capability) { return registry; }
void* createInferBuilder_INTERNAL(void* logger, int version) { return 0; }
void* createInferRefitter_INTERNAL(void* engine, void* logger, int version) { return 0; }
void* createInferRuntime_INTERNAL(void* logger, int version) { return 0; }
void* createNvOnnxParserRefitter_INTERNAL(void* refitter, void* logger, int version) { return 0; }
void* createNvOnnxParser_INTERNAL(void* network, void* logger, int version) { return 0; }
int getNvOnnxParserVersion(void) { return 0; }
int initLibNvInferPlugins(void* logger, char const* space) { return 1; }
"""


@dataclass(frozen=True)
class Launched:
    """One tactic: ``grids`` and ``numbers`` are for each of the sets of sizes that were asked about."""

    tactic: int
    kernel: str
    ptx: str
    threads: int
    shared_bytes: int
    grids: list[list[int]]
    numbers: list[list[int]]


@dataclass(frozen=True)
class Deployed:
    """What TensorRT would learn of a plugin; ``types`` are of inputs and output, a list for each combination."""

    dtype: str
    shapes: list[list[int]]
    types: list[list[str]]
    launched: list[Launched]


def has_bindings() -> bool:
    """Whether the bindings of TensorRT are installed."""
    return importlib.util.find_spec("tensorrt_bindings") is not None


def deploy(
    folder: Path,
    plugin: str,
    tensors: list[tuple[list[Any], str]],
    attributes: dict[str, Any],
    sizes: list[dict[str, int]],
) -> Deployed:
    """Takes a plugin from its look-up to the PTX and the launch of each tactic.

    ``tensors`` are shapes, where a name is an open dim, and TensorRT's names of dtypes. Raises RuntimeError with what
    the child process said.
    """
    result = _child(folder, {"plugin": plugin, "tensors": tensors, "attributes": attributes, "sizes": sizes})
    return Deployed(**{**result, "launched": [Launched(**each) for each in result["launched"]]})


def interpret(
    folder: Path, plugin: str, inputs: list[np.ndarray], attributes: dict[str, Any], tactics: list[int]
) -> list[np.ndarray]:
    """The outputs of a plugin on ``inputs``, whose leading dims are open, with its kernels in Triton's interpreter.

    The kernel gets just what TensorRT passes: inputs, numbers, outputs, over the grid that the plugin asks for. Of
    bfloat16, inputs and outputs are float32. The output is full of NaN before.
    """
    np.savez(folder / "inputs.npz", *inputs)
    request = {"plugin": plugin, "attributes": attributes, "tactics": tactics, "folder": str(folder)}
    _child(folder, request, TRITON_INTERPRET="1")
    with np.load(folder / "outputs.npz") as made:
        return [made[f"arr_{i}"] for i in range(len(tactics))]


def _child(folder: Path, request: dict[str, Any], **environment: str) -> dict[str, Any]:
    for library in _LIBRARIES:
        file = folder / f"{library}.so.10"
        if not file.exists():
            (folder / "stub.c").write_text(_STUB)
            command = ["gcc", "-shared", "-fPIC", "-o", str(file), f"-Wl,-soname,{file.name}", str(folder / "stub.c")]
            subprocess.run(command, check=True)
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps({**request, "libraries": str(folder)}),
        capture_output=True,
        text=True,
        # The tests' own process interprets Triton's kernels; a child that compiles them must not.
        env={
            **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
            "TRITON_CACHE_DIR": str(folder / "triton"),
            **environment,
        },
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _import_bindings(libraries: str) -> Any:
    for library in _LIBRARIES:
        ctypes.CDLL(f"{libraries}/{library}.so.10", mode=ctypes.RTLD_GLOBAL)
    trt = importlib.import_module("tensorrt_bindings")
    # The package tensorrt is these two under their public names.
    sys.modules["tensorrt"] = trt
    sys.modules["tensorrt.plugin"] = trt.plugin = importlib.import_module("tensorrt_bindings.plugin")
    return trt


class _Expressions:
    """TensorRT's builder of expressions, over Python functions of the sizes."""

    def __init__(self, trt: Any) -> None:
        class Expression(trt.IDimensionExpr):  # type: ignore[misc, name-defined]
            def is_constant(self) -> bool:
                return self.name is None

            def get_constant_value(self) -> int:
                return int(self.value({}))

        self._new, self._base = Expression.__new__, Expression
        self._operations = {
            "SUM": lambda a, b: a + b,
            "PROD": lambda a, b: a * b,
            "MAX": max,
            "MIN": min,
            "SUB": lambda a, b: a - b,
            "FLOOR_DIV": lambda a, b: a // b,
            "CEIL_DIV": lambda a, b: -(-a // b),
        }

    def _made(self, name: Any, value: Any) -> Any:
        made = self._new(self._base)  # TensorRT's own have no constructor
        made.name, made.value = name, value
        return made

    def dim(self, size: Any) -> Any:
        return self._made(size, lambda sizes: sizes[size]) if isinstance(size, str) else self.constant(size)

    def constant(self, value: int) -> Any:
        return self._made(None, lambda sizes: value)

    def operation(self, operation: Any, first: Any, second: Any) -> Any:
        compute = self._operations[operation.name]
        name = None if first.name is None and second.name is None else operation.name
        return self._made(name, lambda sizes: compute(first.value(sizes), second.value(sizes)))


class _Symbol:
    """In the place of what hands an expression to C++."""

    def __init__(self, symbol: Any) -> None:
        self.value = symbol._expr.value


class _DimsExprs(list[Any]):
    def __init__(self, length: int) -> None:
        super().__init__([None] * length)


class _Numbers(dict[int, Any]):
    nbSymExprs = 0  # noqa: N815 (TensorRT's)


class _Build:
    """What the parser and the builder do with a plugin, up to the launch of a tactic."""

    def __init__(self, trt: Any, plugin: str, tensors: list[Any], attributes: dict[str, Any]) -> None:
        sys.modules["tensorrt_bindings.plugin._plugin_class"].SymExprImpl = _Symbol  # type: ignore[attr-defined]
        importlib.import_module("tensorrt_bindings.plugin._tensor").SymExprImpl = _Symbol  # type: ignore[attr-defined]
        trt.DimsExprs = _DimsExprs
        self.trt, self.expressions = trt, _Expressions(trt)
        creator = trt.get_plugin_registry().get_creator(plugin, "1", "intaglio")
        assert creator is not None, f"the registry has no {plugin}"
        # The parser goes through the fields that the creator names, and hands over 32-bit arrays of the node's.
        kinds = {int: (np.int32, trt.PluginFieldType.INT32), float: (np.float32, trt.PluginFieldType.FLOAT32)}
        self.kept = {name: np.array([value], kinds[type(value)][0]) for name, value in attributes.items()}
        fields = [
            trt.PluginField(each.name, self.kept[each.name], kinds[type(attributes[each.name])][1])
            for each in creator.field_names
        ]
        request = trt.QuickPluginCreationRequest.UNKNOWN
        self.plugin = creator.create_plugin(
            plugin, "intaglio", trt.PluginFieldCollection(fields), trt.TensorRTPhase.BUILD, request
        )
        dtypes = [getattr(trt.DataType, dtype) for _, dtype in tensors]
        shapes = [shape for shape, _ in tensors]
        self.dtype = self.plugin.get_output_data_types(dtypes, [len(shape) for shape in shapes])[0]
        exprs = [[self.expressions.dim(size) for size in shape] for shape in shapes]
        self.output = self.plugin.get_output_shapes(exprs, [], self.expressions)[0]
        opens = [[-1 if isinstance(size, str) else size for size in shape] for shape in shapes]
        opens.append([-1 if each.name is not None else each.get_constant_value() for each in self.output])
        self.described = [self._described(*each) for each in zip(opens, [*dtypes, self.dtype], strict=True)]
        found = self.plugin.get_supported_format_combinations(self.described, len(tensors))
        count = len(tensors) + 1
        self.types = [[each.type.name for each in found[i : i + count]] for i in range(0, len(found), count)]
        self.plugin.configure_plugin(self.described[:-1], self.described[-1:])

    def _described(self, shape: list[int], dtype: Any) -> Any:
        whole, own = self.trt.DynamicPluginTensorDesc(), self.trt.PluginTensorDesc()
        own.dims, own.type, own.format, own.scale = self.trt.Dims(shape), dtype, self.trt.TensorFormat.LINEAR, 1.0
        whole.desc = own
        whole.min = whole.opt = whole.max = own.dims
        return whole

    def launch(self, tactic: int, sizes: list[dict[str, int]]) -> dict[str, Any]:
        self.plugin.set_tactic(tactic)
        how, numbers = type("LaunchParams", (), {})(), _Numbers()
        self.plugin.get_launch_params([], self.described, len(self.described) - 1, how, numbers, self.expressions)
        inputs, outputs = ([each.desc for each in part] for part in (self.described[:-1], self.described[-1:]))
        kernel, ptx = self.plugin.get_kernel(inputs, outputs)
        assert numbers.nbSymExprs == len(numbers) and how.block_y.value({}) == how.block_z.value({}) == 1
        grid = (how.grid_x, how.grid_y, how.grid_z)
        return {
            "tactic": tactic,
            "kernel": kernel,
            "ptx": ptx.decode(),
            "threads": how.block_x.value({}),
            "shared_bytes": how.shared_mem.value({}),
            "grids": [[each.value(own) for each in grid] for own in sizes],
            "numbers": [[numbers[i].value(own) for i in range(len(numbers))] for own in sizes],
        }


def _deploy(trt: Any, request: dict[str, Any]) -> dict[str, Any]:
    build = _Build(trt, request["plugin"], request["tensors"], request["attributes"])
    return {
        "dtype": build.dtype.name,
        "shapes": [[each.value(sizes) for each in build.output] for sizes in request["sizes"]],
        "types": build.types,
        "launched": [build.launch(tactic, request["sizes"]) for tactic in build.plugin.get_valid_tactics()],
    }


def _interpret(trt: Any, request: dict[str, Any]) -> dict[str, Any]:
    import pytest
    import torch
    from triton_bfloat16 import interpret_bfloat16

    from intaglio.engines.nvidia.plugins import attention, ternary
    from intaglio.kernels.cuda.ptx import PluginKernel

    interpret_bfloat16(pytest.MonkeyPatch())
    ran: list[Any] = []

    def keep(variant: Any) -> Any:
        ran.append(variant)
        return PluginKernel("interpreted", "", variant.warps * 32, 0)

    for module in (ternary, attention):
        module.plugin_kernel = keep  # type: ignore[attr-defined]
    folder = Path(request["folder"])
    with np.load(folder / "inputs.npz") as given:
        inputs = [torch.from_numpy(given[f"arr_{i}"]) for i in range(len(given))]
    half = torch.bfloat16 if request["attributes"].pop("is_bfloat16", 0) else torch.float16
    wide = request["attributes"].pop("is_float32", 0)
    inputs[0] = inputs[0].to(torch.float32 if wide else half)
    for i, tensor in enumerate(inputs[1:], 1):
        if tensor.dtype == torch.float32 and not wide and request["plugin"].startswith("FlashAttention"):
            inputs[i] = tensor.to(half)
    names = {torch.float16: "HALF", torch.bfloat16: "BF16", torch.float32: "FLOAT", torch.int32: "INT32"}
    names[torch.bool] = "BOOL"
    open_dims = request["attributes"].pop("open_dims", [[0], *[[]] * (len(inputs) - 1)])
    sizes = {f"d{i}_{axis}": inputs[i].shape[axis] for i, axes in enumerate(open_dims) for axis in axes}
    tensors = [
        (
            [f"d{i}_{axis}" if axis in open_dims[i] else size for axis, size in enumerate(tensor.shape)],
            names[tensor.dtype],
        )
        for i, tensor in enumerate(inputs)
    ]
    build = _Build(trt, request["plugin"], tensors, request["attributes"])
    outputs = []
    for tactic in request["tactics"]:
        launched = build.launch(tactic, [sizes])
        variant = ran[-1]
        shape = [each.value(sizes) for each in build.output]
        dtype = {"HALF": torch.float16, "BF16": torch.bfloat16, "FLOAT": torch.float32}[build.dtype.name]
        output = torch.full(shape, float("nan"), dtype=dtype)
        passed = [tensor.contiguous() for tensor in inputs]
        # The kernel reads what its own signature says, whatever TensorRT calls the type.
        for i, name in enumerate(variant.kernel.arg_names[: len(passed)]):
            read_as = {"*u8": torch.uint8, "*i8": torch.int8}.get(variant.types[name])
            passed[i] = passed[i] if read_as is None else passed[i].view(read_as)
        grid = tuple(launched["grids"][0])
        variant.kernel[grid](*passed, *launched["numbers"][0], output, **variant.constants)
        outputs.append(output.float().numpy())
    np.savez(folder / "outputs.npz", *outputs)
    return {}


def _main() -> None:
    request = json.load(sys.stdin)
    trt = _import_bindings(request["libraries"])
    from intaglio.engines.nvidia.plugins import register_plugins

    register_plugins(trt)
    result = _deploy(trt, request) if "tensors" in request else _interpret(trt, request)
    sys.stdout.write("\n" + json.dumps(result) + "\n")


if __name__ == "__main__":
    _main()
