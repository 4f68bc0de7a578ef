"""Readers of LoRA adapters (https://arxiv.org/abs/2106.09685): pairs of matrices that add ``scale * up @ down``.

Three spellings are read, each told by its keys:

- peft: ``adapter_config.json`` and ``adapter_model.safetensors``, keys ``base_model.model.X.lora_A.weight``
- diffusers: one file, ``transformer.X.lora_A.weight`` (older: ``lora.down``, ``lora_down``), alpha in ``X.alpha`` or in
  the header's ``lora_adapter_metadata``; Black Forest Labs' names under ``diffusion_model.`` are spelled so too
- kohya: one file, ``lora_unet_X.lora_down.weight`` with the dots of ``X`` as underscores, and ``lora_unet_X.alpha``

Sources: https://huggingface.co/docs/peft/developer_guides/checkpoint, ``loaders/`` of
https://github.com/huggingface/diffusers, ``networks/lora.py`` of https://github.com/kohya-ss/sd-scripts
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from intaglio.errors import CheckpointError
from intaglio.exporters.checkpoints import open_checkpoint
from intaglio.exporters.checkpoints.json_file import read_json
from intaglio.exporters.checkpoints.tensors import Checkpoint, CheckpointTensor

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_PEFT_PREFIX = "base_model.model."
# What diffusers puts before the configurations and the modules of a pipeline's parts.
_PARTS = ("transformer", "unet", "text_encoder", "text_encoder_2", "text_encoder_3")
_PAIR = re.compile(
    r"(?P<module>.+?)\.(?:lora_(?P<side>A|B|down|up)(?:\.[^.]+)?|lora(?:_linear_layer)?\.(?P<old>down|up))\.weight"
)
_DOWN = ("A", "down")
# peft copies an adapted head's own weight into the file. It was frozen, so the model has it already.
_BASE = re.compile(r".+\.base_layer\.(?:weight|bias)")
# Keys of other methods, and what to say of them.
_REFUSED = {
    r"lora_magnitude_vector|dora_scale": "is of DoRA, which scales the rows of the merged weight; merge it with the "
    "tool that trained it",
    r"lora_embedding_[AB]": "is an adapter of an embedding; read are those of linear layers",
    r"lora_mid|hada_|lokr_|oft_|boft_|vera_": "is of another method than LoRA (LoCon, LoHa, LoKr, OFT or the like)",
    r"lora_[AB](?:\.[^.]+)?\.bias|\.lora_(?:up|down)\.bias": "is a bias of an adapter; read are adapters without",
}
# Keys of a peft configuration that change what its matrices mean.
_UNREAD_KEYS = (
    "use_dora", "use_qalora", "use_bdlora", "layer_replication", "lora_bias", "target_parameters", "fan_in_fan_out",
    "alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config", "velora_config", "megatron_config",
)  # fmt: skip
# Initializations that leave the base as it is. The others (PiSSA, OLoRA, …) train against a changed base.
_PLAIN_INIT = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class LoraModule:
    """What an adapter adds to one weight ``[out, in]``: ``scale * up @ down``.

    ``down`` is ``[rank, in]``, ``up`` ``[out, rank]``, ``scale`` alpha / rank (rsLoRA: alpha / sqrt(rank)). ``name`` is
    the module's as the file spells it, without what peft puts before all.
    """

    name: str
    down: CheckpointTensor
    up: CheckpointTensor
    scale: float

    @property
    def rank(self) -> int:
        """The width between the two matrices."""
        return self.down.shape[0]

    @property
    def is_flat(self) -> bool:
        """Whether the dots of the name are underscores, as kohya writes them."""
        return _is_flat(self.name)


@dataclass(frozen=True)
class Adapter:
    """An open adapter; ``spelling`` is ``peft``, ``diffusers`` or ``kohya``. ``modules`` are by name."""

    path: Path
    spelling: str
    modules: Mapping[str, LoraModule]
    files: tuple[Path, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that occur, rising."""
        return tuple(sorted({module.rank for module in self.modules.values()}))


def is_adapter(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint holds an adapter rather than a model."""
    return checkpoint.format == "safetensors" and any(_PAIR.fullmatch(key) for key in checkpoint.tensors)


def open_adapter(path: str | Path) -> Adapter:
    """Opens an adapter: a safetensors file or the folder that peft saves. Only headers and alphas are read.

    Raises CheckpointError naming file and key: for what is no LoRA of linear layers, for a matrix without the other, a
    rank that disagrees, an alpha that is missing.
    """
    path = Path(path)
    file, config = _find(path)
    checkpoint = open_checkpoint(file)
    if not is_adapter(checkpoint):
        raise CheckpointError(
            f"{path}: holds no keys of an adapter ({_few(checkpoint.tensors)}); expected pairs such as "
            "X.lora_A.weight and X.lora_B.weight"
        )
    sides, alphas = _sort_keys(file, checkpoint.tensors)
    configs = _configs(path, config, checkpoint)
    modules = {name: _module(file, name, pair, alphas, configs) for name, pair in sides.items()}
    if stray := sorted(alphas.keys() - sides.keys()):
        raise CheckpointError(f"{file}: {stray[0]}.alpha belongs to no pair of matrices of the file")
    spelling = "diffusers"
    if any(module.is_flat for module in modules.values()):
        spelling = "kohya"
    elif any(key.startswith(_PEFT_PREFIX) for key in checkpoint.tensors):
        spelling = "peft"
    files = (file,) if config is None else (file, file.parent / ADAPTER_CONFIG)
    return Adapter(path, spelling, modules, files)


def check_finite(adapter: Adapter) -> None:
    """Reads all matrices of an adapter. Raises CheckpointError for one that holds NaN or infinity."""
    for module in adapter.modules.values():
        for tensor in (module.down, module.up):
            bad = sum(int(np.count_nonzero(~np.isfinite(_dense(rows)))) for _, rows in tensor.chunks(16 << 20))
            if bad:
                raise CheckpointError(
                    f"{adapter.path}: {tensor.name} holds {bad} values that are not finite; its training went wrong, "
                    "take an earlier checkpoint"
                )


def _dense(rows: Any) -> np.ndarray:
    assert isinstance(rows, np.ndarray), "an adapter's matrices are dense"
    return rows.astype(np.float32, copy=False)


def _find(path: Path) -> tuple[Path, dict[str, Any] | None]:
    """The file of the matrices, and peft's configuration where there is one."""
    if path.is_dir():
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            if not (path / name).is_file():
                raise CheckpointError(
                    f"{path}: has no {name}; expected a folder as peft saves it, with {ADAPTER_CONFIG} and "
                    f"{ADAPTER_WEIGHTS}, or name a safetensors file"
                )
        path = path / ADAPTER_WEIGHTS
    config = path.parent / ADAPTER_CONFIG
    return path, read_json(config) if path.name == ADAPTER_WEIGHTS and config.is_file() else None


def _sort_keys(
    file: Path, tensors: Mapping[str, CheckpointTensor]
) -> tuple[dict[str, dict[str, CheckpointTensor]], dict[str, CheckpointTensor]]:
    """The two matrices of each module (``down`` and ``up``), and the alphas."""
    sides: dict[str, dict[str, CheckpointTensor]] = {}
    alphas: dict[str, CheckpointTensor] = {}
    for key, tensor in tensors.items():
        found = _PAIR.fullmatch(key)
        if found is None:
            if _BASE.fullmatch(key):
                continue
            if not key.endswith(".alpha"):
                raise CheckpointError(f"{file}: {key} {_why_refused(key)}")
            alphas[key.removesuffix(".alpha").removeprefix(_PEFT_PREFIX)] = tensor
            continue
        side = "down" if (found["side"] or found["old"]) in _DOWN else "up"
        pair = sides.setdefault(found["module"].removeprefix(_PEFT_PREFIX), {})
        if side in pair:
            raise CheckpointError(f"{file}: {key} and {pair[side].name} are the same matrix of one module; keep one")
        pair[side] = tensor
    return sides, alphas


def _why_refused(key: str) -> str:
    for pattern, why in _REFUSED.items():
        if re.search(pattern, key):
            return why
    return "is no part of an adapter; expected lora_A and lora_B (or lora_down and lora_up) and alpha only"


def _module(
    file: Path,
    name: str,
    pair: Mapping[str, CheckpointTensor],
    alphas: Mapping[str, CheckpointTensor],
    configs: Mapping[str, Mapping[str, Any]],
) -> LoraModule:
    if len(pair) < 2:
        present = next(iter(pair.values()))
        other = "lora_A (lora_down)" if "up" in pair else "lora_B (lora_up)"
        raise CheckpointError(f"{file}: {present.name} has no {other} beside it; the file is incomplete")
    down, up = pair["down"], pair["up"]
    for tensor in (down, up):
        if len(tensor.shape) != 2:
            what = "a convolution's adapter" if len(tensor.shape) > 2 else "no matrix"
            raise CheckpointError(
                f"{file}: {tensor.name} is {list(tensor.shape)}, {what}; read are those of linear layers"
            )
        if tensor.dtype is None or tensor.dtype.kind in "iubc":
            raise CheckpointError(f"{file}: {tensor.name} is stored as {tensor.storage}, expected a float type")
    if down.shape[0] != up.shape[1] or not down.shape[0]:
        raise CheckpointError(
            f"{file}: {down.name} is {list(down.shape)} and {up.name} {list(up.shape)}; expected [rank, in] and "
            "[out, rank] of one rank"
        )
    part, _, inner = name.partition(".")
    config = configs.get(part if part in configs else "")
    scale = _scale(file, name, down, alphas, config, inner if part in configs else name)
    return LoraModule(name, down, up, scale)


def _scale(
    file: Path,
    name: str,
    down: CheckpointTensor,
    alphas: Mapping[str, CheckpointTensor],
    config: Mapping[str, Any] | None,
    inner: str,
) -> float:
    rank = down.shape[0]
    if name in alphas:
        return _number(file, alphas[name]) / rank
    if alphas or _is_flat(name):
        raise CheckpointError(
            f"{file}: has no {name}.alpha, which says by what {down.name} is scaled; add it (the alpha of the training)"
        )
    if config is None:
        if down.name.startswith(_PEFT_PREFIX):
            raise CheckpointError(
                f"{file}: {down.name} is in peft's spelling, whose lora_alpha is in {ADAPTER_CONFIG}; name the folder "
                "that holds both"
            )
        return 1.0  # so diffusers reads a file that says nothing: alpha is the rank
    expected = _by_pattern(file, config, "rank_pattern", inner, "r")
    if expected != rank:
        raise CheckpointError(f"{file}: {down.name} has the rank {rank}, and the configuration says {expected:g}")
    alpha = _by_pattern(file, config, "alpha_pattern", inner, "lora_alpha")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(file: Path, config: Mapping[str, Any], patterns: str, module: str, key: str) -> float:
    value = config.get(key)
    table = config.get(patterns) or {}
    if not isinstance(table, dict):
        raise CheckpointError(f"{file}: {patterns} is {table!r:.80}, expected an object")
    for pattern, other in table.items():
        # As peft matches: the pattern is the end of the module's name.
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                value = other
                break
        except re.error as error:
            raise CheckpointError(f"{file}: {patterns} has {pattern!r}, which is no pattern ({error})") from error
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise CheckpointError(f"{file}: the configuration's {key} is {value!r:.80}, expected a number")
    return value


def _number(file: Path, tensor: CheckpointTensor) -> float:
    if math.prod(tensor.shape) != 1:
        raise CheckpointError(f"{file}: {tensor.name} is {list(tensor.shape)}, expected one number")
    value = float(_dense(tensor.read()).reshape(()))
    if not math.isfinite(value):
        raise CheckpointError(f"{file}: {tensor.name} is {value}, expected a finite number")
    return value


def _configs(path: Path, config: dict[str, Any] | None, checkpoint: Checkpoint) -> dict[str, Mapping[str, Any]]:
    """peft configurations by the part of a pipeline that they are of; the empty name is all of a file."""
    if config is not None:
        _check_config(f"{path}: {ADAPTER_CONFIG}", config)
        return {"": config}
    text = checkpoint.metadata.get("lora_adapter_metadata")
    if text is None:
        return {}
    where = f"{path}: lora_adapter_metadata"
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{where} is {content!r:.80}, expected an object")
    configs: dict[str, dict[str, Any]] = {}
    for key, value in content.items():
        part, dot, name = key.partition(".")
        inside = bool(dot) and part in _PARTS
        configs.setdefault(part if inside else "", {})[name if inside else key] = value
    for part, found in configs.items():
        _check_config(f"{where} {part}".rstrip(), found)
    return dict(configs)


def _check_config(where: str, config: Mapping[str, Any]) -> None:
    kind = str(config.get("peft_type", "LORA")).rpartition(".")[2]
    if kind.upper() != "LORA":
        raise CheckpointError(f"{where}: peft_type is {kind}; read is LORA")
    if asked := [key for key in _UNREAD_KEYS if config.get(key)]:
        raise CheckpointError(
            f"{where}: has {asked[0]} {config[asked[0]]!r:.80}, which is not read; merge it with peft"
        )
    init = config.get("init_lora_weights")
    if init not in _PLAIN_INIT:
        raise CheckpointError(
            f"{where}: init_lora_weights is {init!r:.80}, which changes the base model too; convert it to plain LoRA "
            "(peft: save_pretrained with path_initial_model_for_weight_conversion)"
        )


def _is_flat(name: str) -> bool:
    return name.startswith("lora_") and "." not in name


def _few(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:3]) + (", …" if len(listed) > 3 else "")
