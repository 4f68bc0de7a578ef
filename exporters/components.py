"""One model of a bundle: found, checked and placed in the weights file before a weight is read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnxscript import nn

from intaglio.errors import ConfigError, InputError, WeightsError
from intaglio.exporters.architecture import (
    Architecture,
    Stage,
    find_architecture,
    match_weights,
    model_tensors,
    read_config,
)
from intaglio.exporters.bundle import ComponentInfo, QuantizationInfo, SourceFile, SourceInfo
from intaglio.exporters.checkpoints import Checkpoint, CheckpointTensor
from intaglio.exporters.checkpoints.ternary import pack_blocks, without_offsets
from intaglio.exporters.graph import add_low_rank_branches, build_graph, quantize_modules, stage_parameters
from intaglio.exporters.layers.dtype import DTYPES, set_dtype
from intaglio.exporters.lora import Claims, Lora, apply_terms, claim_modules, source_tensors
from intaglio.exporters.weights import Part, plan_weights
from intaglio.progress import Progress

_log = logging.getLogger(__name__)
# Layers that a file may lack and still have all missing tensors listed.
_SLACK = 16


@dataclass(frozen=True)
class Options:
    """What an export asks of every component; ``config`` are the overrides of one of them."""

    dtype: str
    hidden_states: tuple[int, ...] = ()
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    allow_unused: bool = False
    pack_ternary: bool = False
    loras: tuple[Lora, ...] = ()


@dataclass(frozen=True)
class Component:
    """All that is known of a model before a weight is read. Parts of the weights file are by tensor name.

    ``claims`` is what of the adapters belongs to it, ``low_rank`` the ranks of the branches that came of that.
    """

    role: str
    checkpoint: Checkpoint
    architecture: Architecture
    config: Any
    assumed: tuple[str, ...]
    dtype: str
    stages: dict[str, Stage]
    weights: dict[str, CheckpointTensor]
    unused: list[str]
    parts: dict[str, tuple[Part, ...]]
    end: int
    claims: Claims
    low_rank: dict[str, int]

    def graphs(self, *, with_taps: bool) -> dict[str, ir.Model]:
        """A graph for each stage."""
        graphs = {}
        for name, stage in self.stages.items():
            model = _build(self.architecture, self.config, self.dtype)
            quantize_modules(model, self.weights)
            add_low_rank_branches(model, self.low_rank)
            graphs[name] = build_graph(name, model, stage, with_taps=with_taps)
        return graphs

    def describe(self, files: tuple[SourceFile, ...]) -> ComponentInfo:
        """What ``bundle.json`` says of it."""
        return ComponentInfo(
            architecture=self.architecture.name,
            config=json.loads(json.dumps(dataclasses.asdict(self.config))),
            assumed=self.assumed,
            quantization=_quantization(source_tensors(self.weights.values())),
            source=SourceInfo(format=self.checkpoint.format, files=files),
            unused_tensors=tuple(self.unused),
        )


def find_component(checkpoint: Checkpoint, role: str, options: Options) -> tuple[Architecture, Any, tuple[str, ...]]:
    """The architecture and configuration of a checkpoint that is to play ``role``, and the keys that no file says.

    Raises ConfigError.
    """
    architecture, keys = find_architecture(checkpoint)
    _log.info("%s: %s, read as %s", checkpoint.path, checkpoint.format, architecture.name)
    if role not in architecture.roles:
        is_a = " or ".join(name.replace("_", " ") for name in architecture.roles)
        raise ConfigError(
            f"{checkpoint.path}: is {architecture.name}, a {is_a}; expected a {role.replace('_', ' ')}. "
            "Check which file goes with which option"
        )
    config, assumed = read_config(architecture, keys, options.config, None if role == "language_model" else role)
    return architecture, config, assumed


def plan_component(
    role: str,
    checkpoint: Checkpoint,
    architecture: Architecture,
    config: Any,
    assumed: tuple[str, ...],
    stages: Sequence[str] | None,
    options: Options,
    start: int = 0,
) -> Component:
    """Chooses stages, matches their weights and places them in the weights file from the byte ``start`` on.

    Without ``stages``, those that the architecture exports by default, but for one whose own weights are all missing:
    a decoder is published without its encoder. Raises ConfigError, InputError, WeightsError.
    """
    _check_layers(checkpoint, config)
    _check_hidden_states(config, options.hidden_states)
    available = architecture.stages(config, options.hidden_states, DTYPES[options.dtype])
    model = _build(architecture, config, options.dtype)
    tensors = model_tensors(checkpoint, architecture, config)
    selected = _select(available, stages, architecture.name)
    needed = {
        name: stage_parameters(_build(architecture, config, options.dtype), stage) for name, stage in selected.items()
    }
    if stages is None:
        absent = [name for name in needed if _is_absent(name, needed, tensors)]
        for name in absent:
            _log.info("%s: has no weights of the stage %s, which is left out", checkpoint.path, name)
            del needed[name], selected[name]
    weights, unused = match_weights(
        model,
        set().union(*needed.values()),
        tensors,
        lambda name: architecture.unneeded(name, config),
        str(checkpoint.path),
        allow_unused=options.allow_unused,
    )
    weights = {name: without_offsets(tensor) for name, tensor in weights.items()}
    if options.pack_ternary:
        weights = pack_blocks(weights, str(checkpoint.path))
    claims = claim_modules(options.loras, role, architecture, config, model)
    weights, low_rank = apply_terms(weights, claims.terms)
    parts, end = plan_weights(weights, DTYPES[options.dtype], start)
    return Component(
        role,
        checkpoint,
        architecture,
        config,
        assumed,
        options.dtype,
        selected,
        weights,
        unused,
        parts,
        end,
        claims,
        low_rank,
    )


def hash_files(files: Sequence[Path], total: Progress) -> tuple[SourceFile, ...]:
    """Name, size and hash of the files of a checkpoint."""
    result = []
    for path in files:
        digest, size = hashlib.sha256(), 0
        with path.open("rb") as file:
            while chunk := file.read(4 << 20):
                digest.update(chunk)
                size += len(chunk)
                total.advance(len(chunk))
        result.append(
            SourceFile(name=os.fsencode(path.name).decode("utf-8", "replace"), bytes=size, sha256=digest.hexdigest())
        )
    return tuple(result)


def _build(architecture: Architecture, config: Any, dtype: str) -> nn.Module:
    model = architecture.build(config)
    set_dtype(model, DTYPES[dtype])
    return model


def _check_layers(checkpoint: Checkpoint, config: Any) -> None:
    # Before the model is built: a lie here would have us build it for hours.
    counts = [getattr(config, key, 0) for key in ("num_hidden_layers", "num_layers", "num_single_layers")]
    found = max((int(m[1]) + 1 for name in checkpoint.tensors if (m := re.search(r"\.(\d{1,9})\.", name))), default=0)
    if max(counts) > found + _SLACK:
        raise WeightsError(f"{checkpoint.path}: the config says {max(counts)} layers, the checkpoint has {found}")


def _check_hidden_states(config: Any, hidden_states: tuple[int, ...]) -> None:
    layers = getattr(config, "num_hidden_layers", None)
    for layer in hidden_states:
        if layers is not None and not 0 <= layer <= layers:
            raise InputError(
                f"hidden states of layer {layer} are asked for; the model has 0 to {layers}. Name others with "
                "--hidden-states"
            )


def _select(available: Mapping[str, Stage], stages: Sequence[str] | None, model: str) -> dict[str, Stage]:
    chosen = [name for name, stage in available.items() if stage.by_default] if stages is None else stages
    for name in chosen:
        if name in ("encode", "text_encoder") and name not in available:
            raise InputError(f"the stage {name} gives hidden states; name their layers with --hidden-states")
        if name not in available:
            raise InputError(f"the stage {name!r} is unknown; {model} has {', '.join(available)}")
    if not chosen:
        raise InputError(f"no stage is chosen; {model} has {', '.join(available)}")
    return {name: available[name] for name in chosen}


def _is_absent(stage: str, needed: Mapping[str, set[str]], tensors: Mapping[str, CheckpointTensor]) -> bool:
    others = set().union(*(names for name, names in needed.items() if name != stage))
    own = needed[stage] - others
    return bool(own) and not own & tensors.keys()


def _quantization(tensors: Iterable[CheckpointTensor]) -> tuple[QuantizationInfo, ...]:
    counts: dict[QuantizationInfo, int] = {}
    for tensor in tensors:
        if tensor.layout is None:
            assert tensor.dtype is not None
            info = QuantizationInfo(storage=tensor.storage, tensors=0, bits=tensor.dtype.itemsize * 8)
        else:
            quantization = tensor.layout.format
            info = QuantizationInfo(
                storage=tensor.storage,
                tensors=0,
                bits=quantization.bits,
                group_size=quantization.group_size,
                zero_point=quantization.zero_point,
                has_offsets=tensor.layout.has_offsets,
            )
        counts[info] = counts.get(info, 0) + 1
    return tuple(info.model_copy(update={"tensors": n}) for info, n in counts.items())
