"""All that running calls of CUDA's driver and of TensorRT exists in the real bindings, with as many arguments.

Nothing can be run here: what the sources call is compared with the signatures that the bindings say of themselves, and
the driver's functions, which look for a driver last, are given what the stand-in was given.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import gpu_stand_in
import numpy as np
import pytest
import tensorrt_stub
from cuda_stand_in import Driver

from intaglio.engines import nvidia
from intaglio.engines.nvidia.device import Device

SOURCES = Path(nvidia.__file__).parent
MODULE = ""
# What the names in the sources are.
RECEIVERS = {
    "plan.py": {
        "trt": MODULE, "self._trt": MODULE, "self._runtime": "Runtime", "self._engine": "ICudaEngine",
        "engine": "ICudaEngine", "self._context": "IExecutionContext", "config": "IRuntimeConfig",
        "self._config": "IRuntimeConfig", "cache": "IRuntimeCache", "self._config.get_runtime_cache()": "IRuntimeCache",
    },
    "logger.py": {"trt": MODULE},
    "refit.py": {"trt": MODULE, "self._trt": MODULE, "self._refitter": "Refitter", "prototype": "Weights"},
}  # fmt: skip
# Behind a look whether they are there.
RTX_ONLY = {
    "EngineValidity", "EngineInvalidityDiagnostics", "CudaGraphStrategy", "get_engine_validity", "engine_header_size",
    "create_runtime_cache", "set_runtime_cache", "get_runtime_cache", "cuda_graph_strategy", "serialize", "deserialize",
}  # fmt: skip
# Signatures by class and name; members of enumerations have none.
Bindings = dict[str, dict[str, str]]
_DUMP = """
import ctypes, importlib, json, sys
for library in sys.argv[2:]:
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
module = importlib.import_module(sys.argv[1])
classes = {name: value for name, value in vars(module).items() if isinstance(value, type)}
found = {name: {each: getattr(cls, each).__doc__ or "" for each in dir(cls)} for name, cls in classes.items()}
print(json.dumps({"": dict.fromkeys(dir(module), ""), **found}))
"""


@dataclass(frozen=True)
class Use:
    """An attribute that is used, and how many arguments it is called with; None: it is no call."""

    owner: str
    name: str
    arguments: int | None
    where: str


def bindings(module: str, libraries: list[str]) -> Bindings:
    command = [sys.executable, "-c", _DUMP, module, *libraries]
    found: Bindings = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def imported(name: str) -> ModuleType:
    """The module; skips where it is not installed and may be missing."""
    if os.environ.get("INTAGLIO_REQUIRE_MODELS"):
        return importlib.import_module(name)
    return pytest.importorskip(name, exc_type=ImportError)


@pytest.fixture(scope="module", params=["tensorrt_rtx_bindings", "tensorrt_bindings"])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Bindings]:
    if request.param == "tensorrt_rtx_bindings":
        imported(request.param)
        return request.param, bindings(request.param, [])
    if not tensorrt_stub.has_bindings():
        assert not os.environ.get("INTAGLIO_REQUIRE_MODELS")
        pytest.skip("the bindings of TensorRT are not installed")
    folder = tmp_path_factory.mktemp("libraries")
    (folder / "stub.c").write_text(tensorrt_stub._STUB)
    libraries = [str(folder / f"{name}.so.10") for name in tensorrt_stub._LIBRARIES]
    for library in libraries:
        soname = f"-Wl,-soname,{Path(library).name}"
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, soname, str(folder / "stub.c")], check=True)
    return request.param, bindings(request.param, libraries)


def uses() -> Iterator[Use]:
    for file, receivers in RECEIVERS.items():
        tree = ast.parse((SOURCES / file).read_text("utf-8"))
        calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute):
                continue
            receiver = ast.unparse(node.value)
            owner = receivers.get(receiver)
            if owner is None and isinstance(node.value, ast.Attribute):  # a member of an enumeration of the module
                outer = receivers.get(ast.unparse(node.value.value))
                owner = node.value.attr if outer == MODULE else None
            if owner is None or node.attr.startswith("__"):
                continue
            call = calls.get(id(node))
            count = None if call is None else len(call.args) + len(call.keywords)
            yield Use(owner, node.attr, count, f"{file}:{node.lineno}")


def arities(name: str, doc: str) -> list[range]:
    """How many arguments each overload takes, beside ``self``."""
    found = []
    for line in re.findall(rf"^(?:\d+\. )?{name}\((self: .*)\) ->", doc, re.MULTILINE):
        parameters = len(re.findall(r"(?:^|, )\w+: ", line)) - 1
        found.append(range(parameters - line.count(" = "), parameters + 1))
    return found


def test_what_is_called_of_tensorrt(real: tuple[str, Bindings]) -> None:
    module, found = real
    used = list(uses())
    assert len({use.name for use in used}) > 50, "the sources are read"
    for use in used:
        if module == "tensorrt_bindings" and {use.name, use.owner} & RTX_ONLY:
            continue
        assert use.name in found[use.owner], f"{use.where}: {module} has no {use.owner}.{use.name}"
        if use.arguments is None:
            continue
        doc, name = found[use.owner][use.name], use.name
        if use.owner == MODULE:  # a class is made
            doc, name = found[use.name]["__init__"], "__init__"
        allowed = arities(name, doc)
        assert any(use.arguments in each for each in allowed), f"{use.where}: {use.arguments} arguments, and {doc}"


def test_what_the_stand_in_has_of_tensorrt(real: tuple[str, Bindings]) -> None:
    module, found = real
    is_rtx = module == "tensorrt_rtx_bindings"
    runtime = gpu_stand_in.RtxRuntime if is_rtx else gpu_stand_in.Runtime
    classes = [gpu_stand_in.ICudaEngine, gpu_stand_in.IExecutionContext, gpu_stand_in.Refitter]
    classes += [gpu_stand_in.IRuntimeConfig, gpu_stand_in.IRuntimeCache] if is_rtx else []
    ours = {"trt", "prepare"}
    for name, cls in {"Runtime": runtime, **{each.__name__: each for each in classes}}.items():
        for own, value in vars(cls).items():
            if own.startswith("_") or own in ours or (own in RTX_ONLY and not is_rtx):
                continue
            assert own in found[name], f"{name}.{own}"
            if callable(value):
                # Named as the real ones, one after the other.
                names = value.__code__.co_varnames[1 : value.__code__.co_argcount]
                said = re.search(rf"^(?:1\. )?{own}\((self: .*)\) ->", found[name][own], re.MULTILINE)
                assert said is not None
                real_names = re.findall(r"(?:^|, )(\w+): ", said[1])[1:]
                assert len(names) <= len(real_names), f"{name}.{own}{names}, and {said[0]}"
    enumerations = ("TensorIOMode", "TensorLocation", "ExecutionContextAllocationStrategy", "DataType")
    for name in (
        *enumerations,
        *(("EngineValidity", "EngineInvalidityDiagnostics", "CudaGraphStrategy") if is_rtx else ()),
    ):
        assert set(getattr(gpu_stand_in, name).__members__) <= set(found[name]), name


def driver_calls(tree: ast.AST) -> Iterator[tuple[str, int | None]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("driver", "self._driver"):
            yield node.attr, None
        if not isinstance(node, ast.Call) or not node.args:
            continue
        called, first, count = ast.unparse(node.func), node.args[0], len(node.args) - 1
        if called == "call" and len(node.args) > 1:
            first, count = node.args[1], count - 1
        if called == "after.callback" and ast.unparse(first) == "self._call":
            called, first, count = "self._call", node.args[1], count - 1
        if called in ("call", "self._call") and isinstance(first, ast.Constant):
            yield str(first.value), count


def test_what_is_called_of_the_driver() -> None:
    driver = imported("cuda.bindings.driver")
    used = [
        each for file in ("device.py", "driver.py") for each in driver_calls(ast.parse((SOURCES / file).read_text()))
    ]
    assert len({name for name, _ in used}) > 20
    for name, count in used:
        assert hasattr(driver, name), name
        if count is not None:
            signature = getattr(driver, name).__doc__.strip().splitlines()[0]
            inside = signature.partition("(")[2].rpartition(")")[0]
            assert count == len([each for each in inside.split(",") if each.strip()]), f"{count}: {signature}"


class Recorder:
    """A stand-in's driver that writes down what it is given."""

    def __init__(self, real: ModuleType) -> None:
        self._driver, self._real, self.calls = Driver(), real, list[tuple[str, tuple[Any, ...]]]()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._driver, name)
        if not name.startswith("cu"):
            return getattr(self._real, name) if name.startswith("CU") else found

        def called(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            return found(*arguments)

        return called


def test_the_driver_takes_what_it_is_given() -> None:
    real = imported("cuda.bindings.driver")
    recorder = Recorder(real)
    device = Device(recorder)
    array = np.arange(5, dtype=np.float32)
    memory, other = device.allocate(array.nbytes, "x"), device.allocate(array.nbytes, "y")
    device.write(memory.address, array)
    device.clear(other.address, array.nbytes)
    recording = device.record(lambda: device.copy(memory.address, other.address, array.nbytes))
    recording.run()
    device.read(other.address, found := np.empty_like(array))
    np.testing.assert_array_equal(found, array)
    device.free_bytes()
    memory.free()
    recording._end()
    assert len({name for name, _ in recorder.calls}) >= 17
    handles = {"context": real.CUcontext(1), 7: real.CUstream(7)}
    for name, arguments in recorder.calls:
        # Handles are objects of their own; the stream is kept as a number.
        given = [handles["context"] if each == "context" else each for each in arguments]
        if name in ("cuGraphInstantiate", "cuGraphDestroy"):
            given[0] = real.CUgraph(1)
        if name in ("cuGraphLaunch", "cuGraphExecDestroy"):
            given[0] = real.CUgraphExec(1)
        try:
            real.cuDriverGetVersion()
        except Exception as error:
            with pytest.raises(type(error)):  # and no TypeError before it
                getattr(real, name)(*given)
        else:
            pytest.skip("there is a driver, which would do it")
