"""Quantized linear layers: equal to the quantizer's reference to the bit, gradients straight through."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from intaglio.errors import ConfigError, WeightsError
from intaglio.kernels.grouped_quant import dequantize
from intaglio.kernels.quantize import FORMATS, Arithmetic, Quantization, quantize, quantize_groups
from intaglio.trainer.quantization import (
    QuantizationRule,
    QuantizationSettings,
    QuantizedLinear,
    quantize_linears,
    quantized_weight,
)

EVERY = [Quantization("int8"), *(Quantization(f, g) for f in ("ternary", "affine4") for g in (32, 64, 128))]
TERNARY = Quantization("ternary", 128)


def random_weight(seed: int, rows: int, width: int) -> torch.Tensor:
    """Magnitudes from far below the smallest scale to above the largest."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn((rows, width // 32, 32), generator=generator)
    size = torch.exp2(torch.rand((rows, width // 32, 1), generator=generator) * 36 - 18)
    shift = torch.randn((rows, width // 32, 1), generator=generator)
    return ((normal + shift) * size).reshape(rows, width)


@pytest.mark.parametrize("quantization", EVERY, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_forward_weight_is_the_reference_to_the_bit(quantization: Quantization, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        # More than one chunk, the last one short; and groups that are zero.
        weight = random_weight(5, 700, 384)
        weight[3] = 0
        weight[4, :130] = 0
        found = quantized_weight(weight, quantization).numpy()
    finally:
        torch.set_num_threads(before)
    rows = quantize(weight.numpy(), quantization)
    assert np.array_equal(found, dequantize(rows, quantization.layout(384)))


@pytest.mark.parametrize("quantization", EVERY, ids=str)
def test_bfloat16_masters_are_quantized_in_float32(quantization: Quantization) -> None:
    weight = random_weight(6, 8, 384).bfloat16()
    found = quantized_weight(weight, quantization)
    assert found.dtype == torch.float32
    rows = quantize(weight.float().numpy(), quantization)
    assert np.array_equal(found.numpy(), dequantize(rows, quantization.layout(384)))


class DivisionOfAGpu(TorchDispatchMode):
    """Division by a number as torch's CUDA kernels do it: a product with the reciprocal, rounded to float32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.div.Tensor and not isinstance(args[1], torch.Tensor):
            return args[0] * float(np.float32(1) / np.float32(args[1]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", FORMATS)
def test_steps_are_the_same_where_division_by_numbers_is_not_exact(kind: str) -> None:
    """With scales that are not rounded to bfloat16, which would hide most of a last bit."""
    # Among them ranges in which zero is half a step away from a whole number of steps.
    ties = torch.zeros(700, 32)
    for i in range(700):
        ties[i, :2] = torch.tensor([17.0 + 2 * (i % 7), -13.0 + 2 * (i % 7)]) * (i + 1)
    groups = torch.cat([random_weight(11, 400, 384).reshape(-1, 32), ties])
    expected = quantize_groups(groups.numpy(), kind, Arithmetic(np, lambda values: values))
    with DivisionOfAGpu():
        found = quantize_groups(groups, kind, Arithmetic(torch, lambda values: values))
    for ours, wanted in zip(found, expected, strict=True):
        assert (ours is None and wanted is None) or np.array_equal(ours.numpy(), wanted)


def test_one_nan_makes_its_group_nan() -> None:
    """So that a loss is, and training stops."""
    for quantization in EVERY:
        weight = random_weight(7, 2, 384)
        weight[0, 3] = torch.nan
        found = quantized_weight(weight, quantization)
        size = quantization.group_size or 384
        assert found[0, :size].isnan().all()
        assert found.isnan().sum() == size


# --- gradients ------------------------------------------------------------------------------------------------


def layer(quantization: Quantization, outputs: int, inputs: int, seed: int, *, bias: bool = True) -> QuantizedLinear:
    torch.manual_seed(seed)
    linear = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(linear.weight, std=0.1)
    return QuantizedLinear.of(linear, quantization)


def double(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


@pytest.mark.parametrize("quantization", EVERY, ids=str)
def test_gradients_go_straight_through(quantization: Quantization) -> None:
    """Two layers with a tanh between them, differentiated by hand in float64 with the quantized weights in it.

    Bound: 1e-5 of each gradient's norm; measured: at most 5e-7.
    """
    first, second = layer(quantization, 128, 128, 1), layer(quantization, 6, 128, 2)
    torch.manual_seed(3)
    x, target = torch.randn(10, 128, requires_grad=True), torch.randn(10, 6)
    loss = ((second(torch.tanh(first(x))) - target) ** 2).sum() / 2
    loss.backward()

    w1, w2 = (
        dequantize(quantize(module.weight.detach().numpy(), quantization), quantization.layout(128)).astype(np.float64)
        for module in (first, second)
    )
    hidden = np.tanh(double(x) @ w1.T + double(first.bias))
    error = hidden @ w2.T + double(second.bias) - double(target)
    inner = (error @ w2) * (1 - hidden**2)
    expected = [
        (x, inner @ w1),
        (first.weight, inner.T @ double(x)),
        (first.bias, inner.sum(0)),
        (second.weight, error.T @ hidden),
        (second.bias, error.sum(0)),
    ]
    for tensor, wanted in expected:
        assert tensor.grad is not None
        assert np.linalg.norm(double(tensor.grad) - wanted) <= 1e-5 * np.linalg.norm(wanted)


def test_weights_beyond_the_steps_get_the_gradient_too() -> None:
    """It is not clipped: a weight of twenty scales is moved like any other."""
    weight = torch.zeros(1, 128)
    weight[0, 0] = 1.0
    weight.requires_grad_(True)
    wanted = torch.randn(1, 128)
    (quantized_weight(weight, TERNARY) * wanted).sum().backward()
    assert torch.equal(weight.grad, wanted)


def test_accumulation_and_gradient_checkpointing_change_nothing() -> None:
    module = layer(TERNARY, 64, 256, 4)
    x = torch.randn(8, 256)

    def gradient(use: list[tuple[slice, bool]]) -> torch.Tensor:
        module.zero_grad()
        for part, checkpointed in use:
            y = checkpoint(module, x[part], use_reentrant=False) if checkpointed else module(x[part])
            (y**2).sum().backward()
        assert module.weight.grad is not None
        return module.weight.grad.clone()

    whole = gradient([(slice(None), False)])
    assert torch.equal(gradient([(slice(None), True)]), whole)
    halves = gradient([(slice(4), False), (slice(4, 8), True)])
    torch.testing.assert_close(halves, whole, rtol=1e-5, atol=1e-4)
    # Twice in one pass.
    module.zero_grad()
    ((module(x) ** 2).sum() + (module(x) ** 2).sum()).backward()
    torch.testing.assert_close(module.weight.grad, 2 * whole)


def test_training_evaluation_and_no_grad_compute_the_same() -> None:
    module, x = layer(TERNARY, 64, 256, 5), torch.randn(8, 256)
    trained = module(x)
    with torch.no_grad():
        assert torch.equal(module(x), trained)
        assert torch.equal(module.eval()(x), trained)
        weight = dequantize(quantize(module.weight.numpy(), TERNARY), TERNARY.layout(256))
        assert torch.equal(nn.functional.linear(x, torch.from_numpy(weight), module.bias), trained)
        module.weight += 0.1
        assert not torch.equal(module(x), trained)


def test_autocast_computes_in_its_type_with_float32_masters() -> None:
    module, x = layer(TERNARY, 64, 256, 6), torch.randn(8, 256)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    assert y.dtype == torch.bfloat16
    weight = quantized_weight(module.weight, TERNARY)
    # Ternary weights are bfloat16 numbers, so that nothing is lost by the cast.
    assert torch.equal(weight.bfloat16().float(), weight)
    assert module.bias is not None
    assert torch.equal(y, nn.functional.linear(x.bfloat16(), weight.bfloat16(), module.bias.bfloat16()))
    y.float().sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.dtype == torch.float32
    half = copy.deepcopy(module).bfloat16()
    assert half(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("quantization", [TERNARY, Quantization("affine4", 64), Quantization("int8")], ids=str)
def test_compiled_layers_compute_the_same_to_the_bit(quantization: Quantization) -> None:
    """And pass the same gradients; in one graph."""
    module, x = layer(quantization, 64, 256, 11, bias=False), torch.eye(256)
    compiled = torch.compile(module, fullgraph=True)
    found = []
    for each in (module, compiled):
        module.zero_grad()
        y = each(x)
        (y**2).sum().backward()
        assert module.weight.grad is not None
        found.append((y.detach(), module.weight.grad.clone()))
    weight = dequantize(quantize(module.weight.detach().numpy(), quantization), quantization.layout(256))
    assert np.array_equal(found[1][0].T.numpy(), weight)
    assert torch.equal(found[1][0], found[0][0])
    torch.testing.assert_close(found[1][1], found[0][1])


def test_training_moves_codes() -> None:
    """Straight through, a ternary layer learns a ternary layer: 95 of 100 codes are right after 300 steps."""
    torch.manual_seed(8)
    wanted = quantized_weight(torch.randn(16, 128), TERNARY)
    module = layer(TERNARY, 16, 128, 9, bias=False)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    for _ in range(300):
        x = torch.randn(64, 128)
        loss = ((module(x) - x @ wanted.T) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = quantized_weight(module.weight, TERNARY).sign()
    assert (found == wanted.sign()).float().mean() >= 0.95


# --- which layers ---------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128, bias=False)
        self.norm = nn.LayerNorm(128)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 128)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.odd = nn.Linear(192, 8)
        self.head = nn.Linear(128, 10, bias=False)


def test_the_first_rule_that_matches_counts_and_parameters_stay() -> None:
    model = Model().eval()
    before = dict(model.named_parameters())
    found = quantize_linears(
        model,
        [
            QuantizationRule("blocks.1.up", None),
            QuantizationRule("*.down", Quantization("affine4", 64)),
            QuantizationRule("blocks.*", TERNARY),
        ],
    )
    affine = Quantization("affine4", 64)
    assert found == {"blocks.0.up": TERNARY, "blocks.0.down": affine, "blocks.1.down": affine}
    for name, module in model.named_modules():
        assert isinstance(module, QuantizedLinear) == (name in found)
        assert not module.training
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is parameter for name, parameter in before.items())
    assert "Quantization(format='ternary', group_size=128)" in repr(model.blocks[0].up)


def test_what_cannot_be_quantized_is_said_and_nothing_is_changed() -> None:
    def refused(model: nn.Module, error: type[Exception], words: str, *rules: QuantizationRule) -> None:
        with pytest.raises(error, match=words):
            quantize_linears(model, rules)
        assert not any(isinstance(module, QuantizedLinear) for module in model.modules())

    model = Model()
    refused(model, ConfigError, r"'block\.\*' matches no linear layer of Model", QuantizationRule("block.*", TERNARY))
    refused(model, ConfigError, r"'embed' matches no linear", QuantizationRule("embed", TERNARY))
    refused(model, ConfigError, "odd: its 192 inputs are no multiple of the group", QuantizationRule("*", TERNARY))
    tied = Model()
    tied.head.weight = tied.embed.weight
    refused(tied, ConfigError, "head shares its weight with embed", QuantizationRule("head", TERNARY))
    narrow = nn.Sequential(nn.Linear(48, 8))
    refused(narrow, ConfigError, "0: its 48 inputs are no multiple of 32", QuantizationRule("0", Quantization("int8")))
    for value in (torch.nan, torch.inf):
        broken = Model()
        with torch.no_grad():
            broken.blocks[1].down.weight[7, 5] = value
        words = rf"blocks\.1\.down\.weight: holds {value} in row 7"
        refused(broken, WeightsError, words, QuantizationRule("blocks.*", TERNARY))
    quantize_linears(model, [QuantizationRule("head", TERNARY)])
    with pytest.raises(ConfigError, match="head is a QuantizedLinear"):
        quantize_linears(model, [QuantizationRule("head", TERNARY)])


def test_settings_of_a_recipe() -> None:
    def read(**values: object) -> QuantizationRule:
        return QuantizationSettings.model_validate(values).rule

    assert read(modules="a.*", format="ternary", group_size=128) == QuantizationRule("a.*", TERNARY)
    assert read(modules="a.*", format="int8") == QuantizationRule("a.*", Quantization("int8"))
    assert read(modules="a.*", format="none") == QuantizationRule("a.*", None)
    for values, words in (
        ({"format": "ternary", "group_size": 0}, "group_size is 0, expected one of 32, 64, 128"),
        ({"format": "affine4"}, "group_size is None"),
        ({"format": "none", "group_size": 32}, "but the format is none"),
        ({"format": "int4"}, "'ternary', 'affine4', 'int8' or 'none'"),
        ({"format": "int8", "bits": 8}, "Extra inputs"),
    ):
        with pytest.raises(ValidationError, match=words):
            read(modules="a.*", **values)
