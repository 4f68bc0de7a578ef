"""LoRA (https://arxiv.org/abs/2106.09685): low-rank adapters that are trained while the model is frozen.

The layers are peft's (``peft.tuners.lora``), put into a model in place. Ours is what peft leaves open: the settings of
a recipe, files in the other published spellings, strengths of several adapters, and refusing to merge where the result
would not be the sum.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
import peft
import torch
from peft.tuners.lora import LoraLayer
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import save_file
from torch import nn

from intaglio.errors import ConfigError, InputError, WeightsError
from intaglio.exporters.checkpoints.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, LoraModule, open_adapter

_PREFIX = "base_model.model."
_TARGETS = "ends of module names such as q_proj, a regular expression of whole names, or all-linear"


class LoraSettings(BaseModel):
    """The section ``[lora]`` of a recipe.

    ``target_modules`` are the ends of module names (``q_proj``), or one regular expression of whole names, or
    ``all-linear``: every linear layer but a language model's head. What is added is ``alpha / rank * B @ A``, with
    ``use_rslora`` ``alpha / sqrt(rank)`` (https://arxiv.org/abs/2312.03732). ``dropout`` is that of A's input.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(ge=1)
    alpha: float = Field(gt=0)
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] | str
    dropout: float = Field(default=0.0, ge=0, lt=1)
    use_rslora: bool = False


def add_lora(model: nn.Module, settings: LoraSettings, name: str = "default") -> list[str]:
    """Puts an adapter into ``model``, in place, and freezes all the rest; gives the names of the adapted modules.

    A is drawn as a linear layer's weight is (Kaiming), from torch's generator, and B is zero, so that the model says
    what it said. Raises InputError where nothing matches ``target_modules``, or the name is taken; ConfigError where
    the rank is larger than a side of a layer's weight: the adapter is then in place all the same.
    """
    patterns = settings.target_modules
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # peft divides it only
        target_modules=patterns if isinstance(patterns, str) else list(patterns),
        lora_dropout=settings.dropout,
        use_rslora=settings.use_rslora,
    )
    names = _inject(model, config, name)
    for path in names:
        layer = model.get_submodule(path)
        assert isinstance(layer, LoraLayer), f"{path} was adapted"
        base = layer.get_base_layer()
        if isinstance(base, nn.Linear) and settings.rank > min(base.out_features, base.in_features):
            raise ConfigError(
                f"lora.rank is {settings.rank}, and the weight of {path} is {[base.out_features, base.in_features]}; "
                f"expected at most its smaller side, {min(base.out_features, base.in_features)}. Lower the rank, or "
                "leave the layer out of target_modules"
            )
    return names


def lora_parameters(model: nn.Module, name: str | None = None) -> dict[str, nn.Parameter]:
    """The parameters of all adapters, or of one: what an optimizer is to be given."""
    pattern = re.compile(rf".*\.lora_[AB]\.{re.escape(name) if name else '[^.]+'}\.weight")
    return {key: parameter for key, parameter in model.named_parameters() if pattern.fullmatch(key)}


def set_strengths(model: nn.Module, strengths: Mapping[str, float]) -> None:
    """Adds each named adapter times its strength, and none of the others.

    Raises InputError for an adapter that the model does not have, or while they are merged.
    """
    layers = list(_lora_layers(model))
    known = {adapter for _, layer in layers for adapter in layer.lora_A}
    if unknown := sorted(strengths.keys() - known):
        raise InputError(f"the model has no adapter {unknown[0]!r}; it has {', '.join(sorted(known)) or 'none'}")
    _refuse_merged(layers)
    for _, layer in layers:
        layer.set_adapter(list(strengths))
        for adapter, strength in strengths.items():
            layer.set_scale(adapter, strength)


def merge_lora(model: nn.Module) -> None:
    """Adds the adapters to the weights, at their strengths; :func:`unmerge_lora` takes them out again, to rounding.

    Raises InputError, before anything is merged, for a layer that rounds its weight: codes cannot hold the sum.
    """
    layers = list(_lora_layers(model))
    for path, layer in layers:
        base = layer.get_base_layer()
        if type(base).forward is not nn.Linear.forward:
            raise InputError(
                f"{path}: is a {type(base).__name__}, which an adapter cannot be merged into exactly; keep it beside: "
                "`intaglio export --lora` does"
            )
    for _, layer in layers:
        if not layer.merged:
            layer.merge(safe_merge=True)


def unmerge_lora(model: nn.Module) -> None:
    """Takes merged adapters out of the weights again."""
    for _, layer in _lora_layers(model):
        if layer.merged:
            layer.unmerge()


def merge_and_unload(model: nn.Module) -> None:
    """Merges, and puts the plain layers back: the model is then saved as if it had been trained whole."""
    merge_lora(model)
    for path, layer in list(_lora_layers(model)):
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.get_base_layer())
    del model.peft_config


def save_lora(model: nn.Module, folder: str | Path, name: str = "default") -> None:
    """Writes ``adapter_config.json`` and ``adapter_model.safetensors`` as peft reads them. Raises InputError."""
    parameters = lora_parameters(model, name)
    if not parameters:
        raise InputError(f"the model has no adapter {name!r} to save")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{_PREFIX}{key.replace(f'.{name}.weight', '.weight')}": parameter.detach().cpu().contiguous()
        for key, parameter in parameters.items()
    }
    save_file(tensors, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    config: peft.LoraConfig = model.peft_config[name]  # type: ignore[index, assignment]
    config.save_pretrained(str(folder))
    assert (folder / ADAPTER_CONFIG).is_file(), "peft writes it"


def load_lora(model: nn.Module, path: str | Path, name: str = "default", strength: float = 1.0) -> list[str]:
    """Puts an adapter of a file into ``model``: peft's folder, or a file in diffusers' or kohya's spelling.

    Gives the names of the adapted modules. The adapter can be trained on. Raises CheckpointError, and WeightsError for
    a module that the model does not have or that has another shape.
    """
    adapter = open_adapter(path)
    found = _find_modules(model, adapter.modules, str(path))
    alphas = {key: module.scale * module.rank for key, module in found.items()}
    first = next(iter(found))
    config = peft.LoraConfig(
        r=found[first].rank,
        lora_alpha=alphas[first],  # type: ignore[arg-type]
        # Whole names: an end alone might be that of other modules too.
        rank_pattern={_whole(key): module.rank for key, module in found.items() if module.rank != found[first].rank},
        alpha_pattern={_whole(key): alpha for key, alpha in alphas.items() if alpha != alphas[first]},
        target_modules="|".join(map(re.escape, found)),
    )
    _inject(model, config, name)
    with torch.no_grad():
        for key, module in found.items():
            layer = model.get_submodule(key)
            assert isinstance(layer, LoraLayer), f"{key} was adapted"
            for matrices, tensor in ((layer.lora_A, module.down), (layer.lora_B, module.up)):
                values = tensor.read()
                assert isinstance(values, np.ndarray), "an adapter's matrices are dense"
                matrices.get_parameter(f"{name}.weight").copy_(torch.from_numpy(values.astype(np.float32)))
            layer.set_scale(name, strength)
    return list(found)


def _inject(model: nn.Module, config: peft.LoraConfig, name: str) -> list[str]:
    layers = list(_lora_layers(model))
    _refuse_merged(layers)
    if any(name in layer.lora_A for _, layer in layers):
        raise InputError(f"the model has an adapter {name!r} already; give another name")
    others = list(dict.fromkeys(adapter for _, layer in layers for adapter in layer.active_adapters))
    try:
        with warnings.catch_warnings():
            # A second adapter is what is wanted.
            warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
            peft.inject_adapter_in_model(config, model, adapter_name=name)
    except (ValueError, re.error) as error:  # peft's, for patterns that match nothing and for layers it cannot adapt
        raise InputError(f"target_modules: {error}; expected {_TARGETS}") from error
    for _, layer in _lora_layers(model):
        layer.set_adapter([*others, name])
    trained = lora_parameters(model, name)
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(key in trained)
    return [path for path, layer in _lora_layers(model) if name in layer.lora_A]


def _lora_layers(model: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    for path, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield path, module


def _refuse_merged(layers: list[tuple[str, LoraLayer]]) -> None:
    if any(layer.merged for _, layer in layers):
        raise InputError("adapters are merged into the weights; take them out first with unmerge_lora")


def _find_modules(model: nn.Module, modules: Mapping[str, LoraModule], path: str) -> dict[str, LoraModule]:
    linears = {
        key.replace(".base_layer", ""): module
        for key, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".lora_" not in key
    }
    flat = {key.replace(".", "_"): key for key in linears}
    found: dict[str, LoraModule] = {}
    for name, module in modules.items():
        stripped = re.sub(r"^(lora_(unet|transformer|te1?)_|(transformer|unet|text_encoder)\.)", "", name)
        key = next((k for k in (name, stripped, flat.get(stripped, "")) if k in linears), None)
        if key is None or key in found:
            what = "is unknown to the model" if key is None else f"is {key}, as another one is"
            raise WeightsError(f"{path}: {module.down.name} {what}, which has {', '.join(list(linears)[:4])}, …")
        shape = (module.up.shape[0], module.down.shape[1])
        if shape != (linears[key].out_features, linears[key].in_features):
            expected = [linears[key].out_features, linears[key].in_features]
            raise WeightsError(f"{path}: {module.down.name} adds {list(shape)} to {key}, which is {expected}")
        found[key] = module
    return found


def _whole(name: str) -> str:
    return f"^{re.escape(name)}"
