"""How a stage of either TensorRT target is opened on the GPU, and what is said where it cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intaglio.engines import engine, model_engine
from intaglio.engines.identity import compile_command
from intaglio.engines.nvidia.device import Device
from intaglio.engines.nvidia.options import RTX_CAPABILITIES
from intaglio.engines.nvidia.plan import Plan
from intaglio.engines.nvidia.session import GpuSession
from intaglio.engines.stage_interface import runs_as
from intaglio.errors import EngineError
from intaglio.exporters.bundle import StageInfo

if TYPE_CHECKING:
    from intaglio.engines.identity import Identity
    from intaglio.engines.shapes import Interface

# What TensorRT for RTX compiled on the GPU lies beside the engine, under this suffix.
RUNTIME_CACHE = ".runtime-cache"
# The first of those that an engine without a list of capabilities runs on.
_PORTABLE_SINCE = 80


def open_session(
    trt: Any,
    device: Device,
    name: str,
    artifact: Path,
    weights: Path,
    stage: Interface,
    identity: Identity,
    *,
    budget: int | None = None,
) -> GpuSession:
    """A session of the engine ``artifact`` on ``device``; ``budget`` bounds what this process holds there, in bytes.

    Raises EngineError, InputError beyond the budget.
    """
    again = rebuild_command(weights, identity)
    plan = Plan(trt, device, artifact, again=again, runtime_cache=artifact.with_suffix(RUNTIME_CACHE), budget=budget)
    interface = runs_as(stage) if isinstance(stage, StageInfo) else stage
    graph = weights / stage.file if isinstance(stage, StageInfo) else None
    return GpuSession(name, plan, interface, identity.shapes, again=again, budget=budget, graph=graph)


def rebuild_command(weights: Path, identity: Identity) -> str:
    """The command that builds the engine again, of the bundle or of the model in the folder ``weights``."""
    try:
        if model_engine.is_model_engine(weights.parent):
            return model_engine.rebuild_command(weights.parent, model_engine.read_model_engine(weights.parent))
        return engine.rebuild_command(weights, identity.target, engine.read_engine(weights, identity.target))
    except EngineError:
        return f"`{compile_command(weights, identity.target, identity)}`"


def check_built_here(identity: Identity, device: str, version: str, again: str) -> None:
    """Raises EngineError for an engine of full TensorRT that another kind of GPU or another version has built."""
    if identity.device != device:
        raise EngineError(
            f"the engine was built on {identity.device}, and this is {device}: TensorRT's engines run on the kind of "
            f"GPU that built them; build again with {again}"
        )
    built = identity.compiler.split()[-1]
    if built.split(".")[:3] != version.split(".")[:3]:
        raise EngineError(
            f"the engine was built by TensorRT {built}, and TensorRT {version} is what Python imports: engines run "
            f"with the version that built them; build again with {again}, or install TensorRT {built}"
        )


def check_rtx_capability(device: Device, sm: Sequence[int], again: str) -> None:
    """Raises EngineError where an engine for the compute capabilities ``sm`` (none: the portable set) does not run."""
    has = device.capability
    if has not in RTX_CAPABILITIES:
        known = ", ".join(str(each / 10) for each in RTX_CAPABILITIES)
        raise EngineError(
            f"{device.name} has compute capability {has / 10}, and TensorRT for RTX runs on {known}: compile for the "
            "target tensorrt, or for cuda"
        )
    if sm and has not in sm:
        raise EngineError(
            f"the engine was compiled for compute capability {', '.join(str(each / 10) for each in sm)}, and "
            f"{device.name} has {has / 10}; build again with --sm {','.join(map(str, sorted({*sm, has})))}: {again}"
        )
    if not sm and has < _PORTABLE_SINCE:
        raise EngineError(
            f"the engine is portable from compute capability {_PORTABLE_SINCE / 10} on, and {device.name} has "
            f"{has / 10}; build again with --sm {has}: {again}"
        )
