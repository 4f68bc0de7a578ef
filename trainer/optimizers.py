"""Optimizers by name, their parameter groups, and their state by parameter names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import nn
from torch.distributed.tensor import DTensor

from intaglio.errors import CheckpointError, ConfigError, RuntimeMissingError
from intaglio.trainer.sharding import like

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
OptimizerKind = Literal["sgd", "adamw", "muon", "lion", "shampoo"]
# Muon is for the weights of the repeated blocks; what comes before and after them is AdamW's.
_BLOCK = re.compile(r"\.\d+\.")
# Keys of a group that say how this process computes, which another that goes on from its state may do otherwise.
_OF_THE_DEVICE = ("fused", "foreach", "capturable")


class GroupSettings(BaseModel):
    """``[[optimizer.groups]]``: what is different for the parameters whose names match ``match`` (``*`` and ``?``)."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    match: list[str] = Field(min_length=1)
    lr_factor: float = Field(default=1.0, ge=0.0)
    weight_decay: float | None = Field(default=None, ge=0.0)
    kind: OptimizerKind | None = None


class OptimizerSettings(BaseModel):
    """``[optimizer]`` of a recipe. Weight decay is for tensors of two axes or more unless a group says otherwise."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kind: OptimizerKind = "adamw"
    lr: float = Field(default=1e-3, gt=0.0)
    weight_decay: float = Field(default=0.01, ge=0.0)
    betas: tuple[Beta, Beta] | None = None
    momentum: float | None = Field(default=None, ge=0.0, lt=1.0)
    nesterov: bool = False
    eps: float | None = Field(default=None, gt=0.0)
    preconditioning_every: int = Field(default=1, ge=1)
    groups: list[GroupSettings] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check(self) -> OptimizerSettings:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov is set without a momentum; give one, such as 0.9, or leave nesterov out")
        return self


class Optimizers:
    """One or several of torch's optimizers, each with its parameter groups, stepped as one."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], names: Mapping[torch.Tensor, str]) -> None:
        self.all = list(optimizers)
        self._names = dict(names)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The tensors of the state, named ``parameter/key``, and the rest of it as plain values."""
        tensors: dict[str, torch.Tensor] = {}
        values: dict[str, Any] = {}
        for optimizer in self.all:
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    name = f"{self._names[parameter]}/{key}"
                    (tensors if isinstance(value, torch.Tensor) else values)[name] = value
        groups = [{k: v for k, v in g.items() if k != "params"} for o in self.all for g in o.param_groups]
        return tensors, {"values": values, "groups": groups}

    def load_state(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        """Puts back what :meth:`state` gave. Raises CheckpointError where it is of other parameters."""
        groups = [group for optimizer in self.all for group in optimizer.param_groups]
        if len(groups) != len(state["groups"]):
            raise CheckpointError(
                f"the saved optimizer has {len(state['groups'])} parameter groups, this one {len(groups)}; resume with "
                "the recipe that the checkpoint was written with"
            )
        for group, saved in zip(groups, state["groups"], strict=True):
            for key, value in saved.items():
                if key in _OF_THE_DEVICE:
                    continue
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
        owner = {self._names[p]: (o, g, p) for o in self.all for g in o.param_groups for p in g["params"]}
        for name, value in [*tensors.items(), *state["values"].items()]:
            parameter_name, _, key = name.rpartition("/")
            if parameter_name not in owner:
                raise CheckpointError(
                    f"the saved optimizer has a state of {parameter_name}, which is not trained here; resume with the "
                    "recipe that the checkpoint was written with"
                )
            optimizer, group, parameter = owner[parameter_name]
            if isinstance(value, torch.Tensor):
                value = _placed(key, value, parameter, group)
            optimizer.state[parameter][key] = value


def _placed(key: str, value: torch.Tensor, parameter: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """A tensor of a saved state where the state of ``parameter`` lies, as torch's ``load_state_dict`` has it."""
    if key != "step":
        return like(value, parameter)
    if group.get("fused") or group.get("capturable"):
        return value.to(parameter.device, torch.float32)
    return value


def build_optimizers(parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings) -> Optimizers:
    """The optimizers of ``settings`` for ``parameters``, the trained ones by name.

    Raises ConfigError where a group's pattern matches no parameter, or gives a parameter to Muon that is no matrix.
    """
    members: dict[str, dict[tuple[float, float], list[nn.Parameter]]] = {}
    for name, parameter in parameters.items():
        group = _group_of(name, settings.groups)
        decay = settings.weight_decay if parameter.ndim >= 2 else 0.0
        if group is not None and group.weight_decay is not None:
            decay = group.weight_decay
        factor = 1.0 if group is None else group.lr_factor
        kind = _kind(name, parameter, settings, group)
        members.setdefault(kind, {}).setdefault((factor, decay), []).append(parameter)
    for group in settings.groups:
        for pattern in group.match:
            if not any(fnmatchcase(name, pattern) for name in parameters):
                raise ConfigError(
                    f"optimizer.groups: {pattern!r} matches no trained parameter; there are "
                    f"{', '.join(list(parameters)[:3])}, …"
                )
    optimizers = []
    for kind, groups in members.items():
        param_groups = [
            {"params": params, "lr": settings.lr * factor, "weight_decay": decay}
            for (factor, decay), params in groups.items()
        ]
        optimizers.append(_BUILDERS[kind](param_groups, settings))
    return Optimizers(optimizers, {parameter: name for name, parameter in parameters.items()})


def _group_of(name: str, groups: Sequence[GroupSettings]) -> GroupSettings | None:
    """The last group of the recipe that matches."""
    matching = (group for group in reversed(groups) if any(fnmatchcase(name, pattern) for pattern in group.match))
    return next(matching, None)


def _kind(name: str, parameter: nn.Parameter, settings: OptimizerSettings, group: GroupSettings | None) -> str:
    if group is not None and group.kind is not None:
        if group.kind == "muon" and parameter.ndim != 2:
            raise ConfigError(
                f"optimizer.groups: Muon takes matrices, {name} has shape {tuple(parameter.shape)}; give it to adamw"
            )
        return group.kind
    if settings.kind == "muon" and not (parameter.ndim == 2 and _BLOCK.search(name)):
        return "adamw"
    return settings.kind


def _given(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _sgd(groups: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    # Its fused form is not there for sharded tensors.
    fused = _fused(groups) and not any(isinstance(parameter, DTensor) for parameter in _parameters(groups))
    momentum = settings.momentum or 0.0
    return torch.optim.SGD(groups, lr=settings.lr, momentum=momentum, nesterov=settings.nesterov, fused=fused)


def _adamw(groups: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    given = _given(betas=settings.betas, eps=settings.eps)
    return torch.optim.AdamW(groups, lr=settings.lr, fused=_fused(groups), **given)


def _muon(groups: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    # The adjustment lets Muon and the AdamW beside it share one learning rate.
    given = _given(momentum=settings.momentum)
    return torch.optim.Muon(groups, lr=settings.lr, adjust_lr_fn="match_rms_adamw", **given)


def _lion(groups: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    return _package().Lion(groups, lr=settings.lr, **_given(betas=settings.betas))


def _shampoo(groups: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    every = settings.preconditioning_every
    given = _given(momentum=settings.momentum, matrix_eps=settings.eps)
    return _package().Shampoo(
        groups, lr=settings.lr, weight_decouple=True, preconditioning_compute_steps=every, **given
    )


_BUILDERS: dict[str, Callable[[list[dict[str, Any]], OptimizerSettings], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "adamw": _adamw,
    "muon": _muon,
    "lion": _lion,
    "shampoo": _shampoo,
}


def _package() -> Any:
    try:
        import pytorch_optimizer
    except ImportError as error:
        raise RuntimeMissingError(
            "Lion and Shampoo come from the package pytorch-optimizer, which is not installed: pip install "
            "'intaglio[train]'"
        ) from error
    return pytorch_optimizer


def _parameters(groups: Sequence[Mapping[str, Any]]) -> Iterator[torch.Tensor]:
    for group in groups:
        yield from group["params"]


def _fused(groups: Sequence[Mapping[str, Any]]) -> bool:
    """One pass over memory for each update, where torch has it."""
    return all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in _parameters(groups))
