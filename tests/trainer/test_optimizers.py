"""Optimizers against their published update written out in float64, their groups, and their saved state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from training_parts import Regression

from intaglio.errors import CheckpointError, ConfigError
from intaglio.trainer.checkpoint import trained_parameters
from intaglio.trainer.optimizers import OptimizerSettings, build_optimizers

Update = Callable[[torch.Tensor, torch.Tensor, dict[str, Any]], torch.Tensor]


def adamw(weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    n = state["n"] = state.get("n", 0) + 1
    m = state["m"] = 0.9 * state.get("m", 0) + 0.1 * gradient
    v = state["v"] = 0.999 * state.get("v", 0) + 0.001 * gradient**2
    step = (m / (1 - 0.9**n)) / ((v / (1 - 0.999**n)).sqrt() + 1e-8)
    return weight - 0.01 * 0.1 * weight - 0.01 * step


def sgd(weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    gradient = gradient + 0.1 * weight
    m = state["m"] = 0.9 * state["m"] + gradient if "m" in state else gradient
    return weight - 0.01 * m


def lion(weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    m = state.get("m", torch.zeros_like(weight))
    update = torch.sign(0.9 * m + 0.1 * gradient)
    state["m"] = 0.99 * m + 0.01 * gradient
    return weight - 0.01 * 0.1 * weight - 0.01 * update


def muon_update(weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    m = state["m"] = 0.95 * state.get("m", 0) + 0.05 * gradient
    update = 0.05 * gradient + 0.95 * m
    update = update / update.norm()
    for _ in range(5):
        gram = update @ update.T
        update = 3.4445 * update + (-4.7750 * gram + 2.0315 * gram @ gram) @ update
    return weight - 0.01 * 0.1 * weight - 0.01 * 0.2 * max(weight.shape) ** 0.5 * update


def shampoo(weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    """Gupta et al. 2018 (arXiv:1802.09568): L^(-1/4) G R^(-1/4)."""
    rows, columns = gradient.shape
    left = state["l"] = state.get("l", 1e-6 * torch.eye(rows).double()) + gradient @ gradient.T
    right = state["r"] = state.get("r", 1e-6 * torch.eye(columns).double()) + gradient.T @ gradient

    def root(matrix: torch.Tensor) -> torch.Tensor:
        values, vectors = torch.linalg.eigh(matrix)
        return vectors @ torch.diag(values**-0.25) @ vectors.T

    return weight - 0.01 * 0.1 * weight - 0.01 * root(left) @ gradient @ root(right)


@pytest.mark.parametrize(
    ("kind", "oracle", "bound"),
    [
        ("sgd", sgd, 1e-6),
        ("adamw", adamw, 1e-5),
        ("lion", lion, 1e-6),
        # Muon orthogonalizes in bfloat16: what is compared is the weight after ten steps, of which 0.1 is the update.
        ("muon", muon_update, 1e-2),
        ("shampoo", shampoo, 1e-3),
    ],
)
def test_ten_updates_equal_the_published_rule(kind: Any, oracle: Update, bound: float) -> None:
    generator = torch.Generator().manual_seed(1)
    parameter = nn.Parameter(torch.randn(6, 6, generator=generator))
    settings = OptimizerSettings(kind=kind, lr=0.01, weight_decay=0.1, momentum=0.9 if kind == "sgd" else None)
    optimizers = build_optimizers({"blocks.0.weight": parameter}, settings)
    expected, state = parameter.detach().double(), dict[str, Any]()
    for _ in range(10):
        gradient = torch.randn(6, 6, generator=generator)
        parameter.grad = gradient.clone()
        for optimizer in optimizers.all:
            optimizer.step()
        expected = oracle(expected, gradient.double(), state)
    assert (parameter.double() - expected).norm() <= bound * expected.norm()


def kinds(settings: OptimizerSettings) -> dict[str, tuple[str, float, float]]:
    """The optimizer, rate and weight decay of each parameter."""
    parameters = trained_parameters(Regression())
    optimizers = build_optimizers(parameters, settings)
    names = {parameter: name for name, parameter in parameters.items()}
    return {
        names[p]: (type(optimizer).__name__, group["lr"], group["weight_decay"])
        for optimizer in optimizers.all
        for group in optimizer.param_groups
        for p in group["params"]
    }


def test_muon_takes_the_matrices_of_blocks_and_adamw_the_rest() -> None:
    got = kinds(OptimizerSettings(kind="muon", lr=0.5, weight_decay=0.1))
    assert got["blocks.0.linear.weight"] == ("Muon", 0.5, 0.1)
    assert got["blocks.1.linear.bias"] == got["blocks.1.norm.weight"] == ("AdamW", 0.5, 0.0)
    assert got["embed.weight"] == got["head.weight"] == ("AdamW", 0.5, 0.1)
    assert len(got) == len(trained_parameters(Regression()))


def test_groups_change_rate_decay_and_kind_and_the_last_counts() -> None:
    groups = [
        {"match": ["blocks.*"], "lr_factor": 0.5},
        {"match": ["*.norm.*", "head.bias"], "weight_decay": 0.3},
        {"match": ["blocks.1.linear.weight"], "kind": "sgd"},
    ]
    got = kinds(OptimizerSettings.model_validate({"lr": 1.0, "weight_decay": 0.1, "groups": groups}))
    assert got["embed.weight"] == ("AdamW", 1.0, 0.1)
    assert got["blocks.0.linear.weight"] == ("AdamW", 0.5, 0.1)
    assert got["blocks.0.linear.bias"] == ("AdamW", 0.5, 0.0)
    assert got["blocks.0.norm.weight"] == got["head.bias"] == ("AdamW", 1.0, 0.3)
    assert got["blocks.1.linear.weight"] == ("SGD", 1.0, 0.1)


def test_bad_groups_are_refused() -> None:
    def build(**group: Any) -> None:
        kinds(OptimizerSettings.model_validate({"groups": [group]}))

    with pytest.raises(ConfigError, match=r"'blok\.\*' matches no trained parameter; there are embed\.weight"):
        build(match=["blok.*"])
    with pytest.raises(ConfigError, match=r"blocks\.0\.linear\.bias has shape \(8,\)"):
        build(match=["blocks.*"], kind="muon")


@pytest.mark.parametrize("key", ["fused", "capturable"])
def test_a_loaded_count_of_steps_lies_where_the_update_is_computed(key: str) -> None:
    """As torch's own ``load_state_dict`` puts it: beside the parameter, or else in ordinary memory."""
    settings = OptimizerSettings()
    parameters = {"blocks.0.weight": nn.Parameter(torch.ones(2, 2)), "scale": nn.Parameter(torch.ones(()))}
    saved = build_optimizers(parameters, settings)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    saved.all[0].step()
    tensors, values = saved.state()
    elsewhere = {name: nn.Parameter(torch.empty_like(p, device="meta")) for name, p in parameters.items()}
    for wanted in (True, False):
        loaded = build_optimizers(elsewhere, settings)
        for group in loaded.all[0].param_groups:
            group |= {"fused": False, "capturable": False, "foreach": False, key: wanted}
        loaded.load_state(tensors, values)
        oracle = torch.optim.AdamW(elsewhere.values(), lr=0.1)
        oracle.load_state_dict(
            {
                "state": dict(enumerate(saved.all[0].state.values())),
                "param_groups": [{**oracle.state_dict()["param_groups"][0], key: wanted}],
            }
        )
        for parameter in elsewhere.values():
            ours, theirs = loaded.all[0].state[parameter], oracle.state[parameter]
            assert {k: (v.device, v.dtype) for k, v in ours.items()} == {
                k: (v.device, v.dtype) for k, v in theirs.items()
            }
        assert all(group[key] is wanted for group in loaded.all[0].param_groups)


def test_state_of_other_parameters_is_refused() -> None:
    parameters = trained_parameters(Regression())
    optimizers = build_optimizers(parameters, OptimizerSettings())
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizers.all[0].step()
    tensors, values = optimizers.state()
    fewer = {name: parameter for name, parameter in parameters.items() if name != "head.weight"}
    with pytest.raises(CheckpointError, match=r"head\.weight, which is not trained here"):
        build_optimizers(fewer, OptimizerSettings()).load_state(tensors, values)
    muon = build_optimizers(parameters, OptimizerSettings(kind="muon"))
    with pytest.raises(CheckpointError, match="2 parameter groups, this one 3"):
        muon.load_state(tensors, values)
