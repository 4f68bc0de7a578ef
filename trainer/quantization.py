"""Quantization-aware training: linear layers that compute with the weights that will be exported.

The quantizer is that of :mod:`intaglio.kernels.quantize`, run on torch's tensors. The gradient goes straight through it
(https://arxiv.org/abs/1308.3432): that of the quantized weight is taken for that of the dense one, everywhere.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, model_validator
from torch import nn

from intaglio.errors import ConfigError, WeightsError
from intaglio.kernels.quantize import GROUP_SIZES, Arithmetic, Quantization, quantize_groups

TORCH = Arithmetic(torch, lambda values: values.bfloat16().float())
# Weights that are rounded at once on a CPU: few enough that they stay in its cache between operations.
_CHUNK = 1 << 17


def quantized_weight(weight: torch.Tensor, quantization: Quantization) -> torch.Tensor:
    """``weight`` ``[out, in]`` as it will be exported, float32; its gradient is passed on to ``weight`` as it is."""
    group_size = quantization.layout(weight.shape[1]).group_size
    result: torch.Tensor = _straight_through(weight, quantization.format, group_size)
    return result


# An operator of its own, which torch.compile calls as it is: compiled, roundings to bfloat16 and back are left out.
@torch.library.custom_op(
    "intaglio::quantized_weight", mutates_args=(), schema="(Tensor weight, str kind, int group_size) -> Tensor"
)
def _straight_through(weight: torch.Tensor, kind: str, group_size: int) -> torch.Tensor:
    groups = weight.float().reshape(-1, group_size)
    if groups.device.type != "cpu":
        return quantize_groups(groups, kind, TORCH).dequantized().view(weight.shape)
    result = torch.empty_like(groups)
    step = max(1, _CHUNK // group_size)
    for start in range(0, len(groups), step):
        result[start : start + step] = quantize_groups(groups[start : start + step], kind, TORCH).dequantized()
    return result.view(weight.shape)


@_straight_through.register_fake
def _(weight: torch.Tensor, kind: str, group_size: int) -> torch.Tensor:
    return torch.empty(weight.shape, dtype=torch.float32, device=weight.device)


def _remember_dtype(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.dtype = inputs[0].dtype


def _pass_on(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return gradient.to(ctx.dtype), None, None


_straight_through.register_autograd(_pass_on, setup_context=_remember_dtype)


class QuantizedLinear(nn.Linear):
    """``nn.Linear`` whose weight is quantized at every use, in training and in evaluation alike.

    ``weight`` and ``bias`` are dense, and named as ever; what is exported is their quantized form, which
    :func:`intaglio.trainer.saving.save_quantized` writes. The quantized weight is computed in float32, then cast to the
    type of ``weight``, and by autocast to the one that it asks for.
    """

    quantization: Quantization

    @classmethod
    def of(cls, linear: nn.Linear, quantization: Quantization) -> QuantizedLinear:
        """A layer with the parameters of ``linear``. Raises ValueError where the groups do not divide its rows."""
        quantization.layout(linear.in_features)
        layer = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.quantization = quantization
        return layer.train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` ``[..., in]`` times the transposed quantized weight, ``[..., out]``."""
        weight = quantized_weight(self.weight, self.quantization)
        return nn.functional.linear(x, weight.to(self.weight.dtype), self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.quantization}"


@dataclass(frozen=True)
class QuantizationRule:
    """``modules`` is a pattern (of :mod:`fnmatch`) of names of linear layers; None leaves them dense."""

    modules: str
    quantization: Quantization | None


class QuantizationSettings(BaseModel):
    """One ``[[quantization]]`` of a recipe: which linear layers get which format; ``none`` leaves them dense."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    modules: str
    format: Literal["ternary", "affine4", "int8", "none"]
    group_size: int | None = None

    @model_validator(mode="after")
    def _check(self) -> QuantizationSettings:
        if self.format == "none" and self.group_size is not None:
            raise ValueError(f"group_size is {self.group_size}, but the format is none; leave it out")
        assert self.rule
        return self

    @property
    def rule(self) -> QuantizationRule:
        """As :func:`quantize_linears` takes it."""
        wanted = None if self.format == "none" else Quantization(self.format, self.group_size)
        return QuantizationRule(self.modules, wanted)


def quantize_linears(model: nn.Module, rules: Sequence[QuantizationRule]) -> dict[str, Quantization]:
    """Makes linear layers of ``model`` :class:`QuantizedLinear`, and returns those by name.

    A layer follows the first rule that its name matches; one that matches none stays dense. Parameters stay the same
    objects under the same names. Raises ConfigError where a rule matches no layer, or a layer cannot be quantized as it
    says, and WeightsError where a weight is not finite, naming the layer; then the model is as it was.
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for rule in rules:
        if not any(fnmatch.fnmatchcase(name, rule.modules) for name in linears):
            some = ", ".join(list(linears)[:4]) or "none"
            raise ConfigError(
                f"quantization: modules = {rule.modules!r} matches no linear layer of {type(model).__name__}; its "
                f"linear layers are {some}{', …' if len(linears) > 4 else ''}"
            )
    owners = _owners(model)
    layers: dict[str, QuantizedLinear] = {}
    for name, module in linears.items():
        quantization = next((r.quantization for r in rules if fnmatch.fnmatchcase(name, r.modules)), None)
        if quantization is not None:
            layers[name] = _layer(name, module, quantization, owners)
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
    return {name: layer.quantization for name, layer in layers.items()}


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """The names that each parameter has."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    return owners


def _layer(name: str, module: nn.Linear, quantization: Quantization, owners: dict[int, list[str]]) -> QuantizedLinear:
    if type(module) is not nn.Linear:
        raise ConfigError(f"quantization: {name} is a {type(module).__name__}; quantized are plain linear layers")
    if others := [other for other in owners[id(module.weight)] if other != f"{name}.weight"]:
        raise ConfigError(
            f"quantization: {name} shares its weight with {others[0].removesuffix('.weight')}, which would not be "
            "quantized; untie them, or leave it dense"
        )
    check_finite(name, module.weight)
    try:
        if quantization.format == "int8" and module.in_features % min(GROUP_SIZES):
            # No published file has other groups.
            raise ValueError(f"its {module.in_features} inputs are no multiple of {min(GROUP_SIZES)}")
        return QuantizedLinear.of(module, quantization)
    except ValueError as error:
        raise ConfigError(f"quantization: {name}: {error}; choose another group size, or leave it dense") from error


def check_finite(name: str, weight: torch.Tensor) -> None:
    """Raises WeightsError, naming the layer, where its weight is not finite all over."""
    finite = torch.isfinite(weight.detach())
    if not finite.all():
        row, column = (int(i) for i in torch.argwhere(~finite)[0])
        raise WeightsError(
            f"{name}.weight: holds {weight[row, column].item()} in row {row}; expected finite numbers. Go on from a "
            "checkpoint from before that"
        )
