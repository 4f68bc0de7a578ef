"""What an architecture declares, and how the one for a checkpoint is found.

Each file in ``architectures/`` ends with ``ARCHITECTURE = Architecture(...)``. Lookup scans the files, so
that a new family needs no registry.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import OpBuilder, nn

from intaglio.errors import ConfigError, WeightsError
from intaglio.exporters.bundle import Dim
from intaglio.exporters.checkpoints.gguf_decoder import CONFIG_TENSORS
from intaglio.exporters.checkpoints.lora import is_adapter
from intaglio.exporters.checkpoints.mlx import UnresolvedMlxTensor, is_mlx_quantization, with_width
from intaglio.exporters.checkpoints.tensors import Checkpoint, CheckpointTensor, reorder_rows
from intaglio.exporters.config import ConfigKeys


@dataclass(frozen=True)
class Input:
    """An input of a stage; names in ``shape`` are dims of the bundle."""

    name: str
    dtype: ir.DataType
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Stage:
    """One graph of a model: its inputs, and the function from model and inputs to named outputs.

    ``by_default`` says whether it is exported when no stages are chosen.
    """

    inputs: tuple[Input, ...]
    forward: Callable[[nn.Module, OpBuilder, Mapping[str, ir.Value]], dict[str, ir.Value]]
    by_default: bool = True


@dataclass(frozen=True)
class Architecture:
    """A model family.

    ``roles`` are the components of a bundle that it can be. ``read_config`` makes its config dataclass; ``build`` a
    fresh model of that; ``stages`` maps stage names to their definitions, given the chosen hidden-state layers and the
    graph's dtype; ``dims`` is the bundle's dims table. ``unneeded`` matches tensors that are known and never needed.

    ``gguf_config``, ``gguf_name`` and ``gguf_row_order`` say how a GGUF file spells the same model (the row order of a
    tensor, by its published name). ``recognize`` gives the configuration of a safetensors file that comes without one,
    told by its tensors, or None; ``respell`` maps the tensors of any published spelling to the architecture's own, and
    ``spellings`` lists the names of modules in others, which adapters may spell without their dots.
    """

    roles: tuple[str, ...]
    model_types: tuple[str, ...]
    class_names: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    read_config: Callable[[ConfigKeys], Any]
    build: Callable[[Any], nn.Module]
    stages: Callable[[Any, tuple[int, ...], ir.DataType], Mapping[str, Stage]]
    dims: Callable[[Any], dict[str, Dim]]
    gguf_config: Callable[[Checkpoint], ConfigKeys]
    unneeded: Callable[[str, Any], bool]
    gguf_name: Callable[[str], str | None] = lambda name: None
    gguf_row_order: Callable[[str, int, Any], np.ndarray | None] = lambda name, rows, config: None
    recognize: Callable[[Checkpoint], ConfigKeys | None] = lambda checkpoint: None
    respell: Callable[[Mapping[str, CheckpointTensor], Any], Mapping[str, CheckpointTensor]] = lambda tensors, config: (
        tensors
    )
    spellings: Callable[[Any], Iterable[str]] = lambda config: ()

    @property
    def name(self) -> str:
        """The family's first model type."""
        return self.model_types[0]


def all_architectures() -> Iterator[Architecture]:
    """Every architecture that a file in ``architectures/`` declares."""
    package = importlib.import_module("intaglio.exporters.architectures")
    for module in pkgutil.iter_modules(package.__path__):
        yield importlib.import_module(f"{package.__name__}.{module.name}").ARCHITECTURE


def find_architecture(checkpoint: Checkpoint) -> tuple[Architecture, ConfigKeys]:
    """The architecture that answers to a checkpoint, and its configuration. Raises ConfigError."""
    known = list(all_architectures())
    if checkpoint.format == "gguf":
        found = checkpoint.metadata.get("general.architecture")
        for architecture in known:
            if found in architecture.gguf_architectures:
                return architecture, architecture.gguf_config(checkpoint)
        names = sorted(name for a in known for name in a.gguf_architectures)
        raise ConfigError(f"{checkpoint.path}: general.architecture is {found!r}; built are {', '.join(names)}")
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    source = str(folder / "config.json")
    if not {"_class_name", "architectures", "model_type"} & checkpoint.config.keys():
        for architecture in known:
            if (keys := architecture.recognize(checkpoint)) is not None:
                return architecture, keys
    if is_adapter(checkpoint):
        raise ConfigError(
            f"{checkpoint.path}: is an adapter, not a model; export the model with --lora FILE[:STRENGTH]"
        )
    if not checkpoint.config:
        raise ConfigError(f"{source}: is missing or empty; a safetensors checkpoint needs the model's config.json")
    for key in ("quantization_config", "quantization"):
        if checkpoint.config.get(key) and not is_mlx_quantization(checkpoint.config[key]):
            raise ConfigError(
                f"{source}: has {key} that is not MLX's (bits and group_size); other quantized safetensors are not "
                "read yet. Take the unquantized model, an MLX one or a GGUF."
            )
    # diffusers names one class, transformers a list of them.
    single = checkpoint.config.get("_class_name")
    classes = [single] if single is not None else checkpoint.config.get("architectures") or []
    model_type = checkpoint.config.get("model_type")
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise ConfigError(f"{source}: architectures is {classes!r}, expected a list of class names")
    for architecture in known:
        # A class says more than a type: LlamaForSequenceClassification has the type llama, and another head.
        if (set(classes) & set(architecture.class_names)) if classes else model_type in architecture.model_types:
            return architecture, ConfigKeys(checkpoint.config, source)
    names = sorted(name for a in known for name in a.class_names)
    raise ConfigError(
        f"{source}: architectures is {classes!r} and model_type {model_type!r}; built are {', '.join(names)}"
    )


def read_config(
    architecture: Architecture, keys: ConfigKeys, overrides: Mapping[str, Any], component: str | None = None
) -> tuple[Any, tuple[str, ...]]:
    """The configuration with ``overrides`` of its keys, and the keys that it needs and no file says.

    ``component`` is what it configures in a bundle of several. Raises ConfigError, also for an override that the
    architecture does not read.
    """
    keys = keys.overridden(overrides, component)
    config = architecture.read_config(keys)
    if unknown := sorted(set(overrides) - keys.asked):
        read = ", ".join(sorted(keys.asked))
        raise ConfigError(f"--config {', '.join(unknown)}: {architecture.name} does not read it; read are {read}")
    return config, tuple(key for key in keys.assumed if key in keys.asked)


def model_tensors(checkpoint: Checkpoint, architecture: Architecture, config: Any) -> dict[str, CheckpointTensor]:
    """The checkpoint's tensors under the architecture's names and in its row order."""
    if checkpoint.format != "gguf":
        return dict(architecture.respell(checkpoint.tensors, config))
    tensors: dict[str, CheckpointTensor] = {}
    for name, tensor in checkpoint.tensors.items():
        if name in CONFIG_TENSORS:
            continue
        renamed = architecture.gguf_name(name) or name
        rows = tensor.shape[0] if tensor.shape else 0
        order = architecture.gguf_row_order(renamed, rows, config)
        tensors[renamed] = tensor if order is None else reorder_rows(tensor, order)
    return dict(architecture.respell(tensors, config))


def match_weights(
    model: nn.Module,
    needed: Collection[str],
    tensors: Mapping[str, CheckpointTensor],
    unneeded: Callable[[str], bool],
    source: str,
    *,
    allow_unused: bool = False,
    advice: str = "--allow-unused goes on without them",
) -> tuple[dict[str, CheckpointTensor], list[str]]:
    """Pairs the ``needed`` parameters of ``model`` with their tensors, and lists the tensors that none needs.

    Raises WeightsError that lists all missing tensors, wrong shapes, unreadable types and unknown tensors at once.
    """
    known = {name: _shape(parameter) for name, parameter in model.named_parameters()}
    declared = {name: shape for name, shape in known.items() if name in needed}
    # Some quantized tensors take their layout from the width that is declared here.
    tensors = {name: with_width(tensor, known.get(name)) for name, tensor in tensors.items()}
    undecided = [tensors[name] for name in declared if isinstance(tensors.get(name), UnresolvedMlxTensor)]
    if undecided:
        undecided[0].read_rows(0, 0)  # raises
    problems = []
    missing = [f"{name} {list(shape)}" for name, shape in declared.items() if name not in tensors]
    if missing:
        problems.append(_listing(f"{len(missing)} of {len(declared)} tensors are missing", missing))
    wrong = [
        f"{name} is {list(tensors[name].shape)}, expected {list(shape)}"
        for name, shape in declared.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if wrong:
        problems.append(_listing(f"{len(wrong)} tensors have a shape that disagrees with the config", wrong))
    unreadable = [
        f"{name} is {tensors[name].storage}" for name in declared if name in tensors and not _is_weight(tensors[name])
    ]
    if unreadable:
        problems.append(_listing(f"{len(unreadable)} tensors are stored in a type that is not read", unreadable))
    others = [name for name in tensors if name not in declared]
    unknown = [name for name in others if name not in known and not unneeded(name)]
    if unknown and not allow_unused:
        text = f"{len(unknown)} tensors are unknown to the architecture ({advice})"
        problems.append(_listing(text, unknown))
    if problems:
        raise WeightsError(f"{source}: " + "\n".join(problems))
    return {name: tensors[name] for name in declared}, others


def _is_weight(tensor: CheckpointTensor) -> bool:
    # Integers are codes of some quantization that nobody put together, not weights.
    return tensor.layout is not None or (tensor.dtype is not None and tensor.dtype.kind not in "iubc")


def _shape(value: ir.Value) -> tuple[int, ...]:
    assert value.shape is not None, f"{value.name}: a parameter has a shape"
    return value.shape.numpy()


def _listing(title: str, lines: list[str]) -> str:
    # Layers repeat: name each kind of tensor once, with its layers, so that the list of all fits a screen.
    kinds: dict[str, list[int]] = {}
    for line in lines:
        numbers = kinds.setdefault(re.sub(r"\.\d+\.", ".N.", line, count=1), [])
        numbers.extend(int(match[1]) for match in [re.search(r"\.(\d+)\.", line)] if match)
    shown = [
        kind.replace(".N.", f".{numbers[0]}.", 1) if len(numbers) == 1 else f"{kind}{_layers(numbers)}"
        for kind, numbers in kinds.items()
    ]
    return "\n  ".join([f"{title}:", *shown])


def _layers(numbers: list[int]) -> str:
    """`` (N = 0-3, 7)``; empty for none."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f" (N = {text})" if text else ""
