"""The operators on a CPU, against torch's own attention and the format's reference, with their gradients."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from intaglio.errors import InputError
from intaglio.kernels.grouped_quant import GroupedQuantFormat, GroupedQuantRows, dequantize, pack_codes
from intaglio.trainer.ops import attention
from intaglio.trainer.ops import ternary as ternary_ops
from intaglio.trainer.ops.attention import flash_attention
from intaglio.trainer.ops.ternary import dequantize_ternary, ternary_matmul

SDPA = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(int(np.random.SeedSequence().generate_state(1)[0]))


def heads(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("kind", ["", "causal", "bool", "numbers"])
def test_attention_is_that_of_torch(generator: torch.Generator, kind: str) -> None:
    q, k, v = heads(generator, 2, 4, 9, 24), heads(generator, 2, 2, 13, 24), heads(generator, 2, 2, 13, 24)
    mask = None
    if kind == "bool":
        mask = torch.rand(2, 1, 9, 13, generator=generator) > 0.3
        mask[..., 0] = True
    elif kind == "numbers":
        mask = torch.randn(4, 9, 13, generator=generator, dtype=torch.float64)
    ours = flash_attention(q, k, v, mask, is_causal=kind == "causal")
    theirs = SDPA(q, k, v, mask, is_causal=kind == "causal", enable_gqa=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    weights = torch.randn_like(ours)
    expected = torch.autograd.grad((theirs * weights).sum(), (q, k, v))
    # The sums of exponentials are kept in float32.
    for found, gradient in zip(torch.autograd.grad((ours * weights).sum(), (q, k, v)), expected, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-5, atol=1e-6)


def test_softcap_and_offset(generator: torch.Generator) -> None:
    q, k, v = (heads(generator, 1, 2, 6, 8), heads(generator, 1, 2, 9, 8), heads(generator, 1, 2, 9, 8))
    scores = 0.5 * torch.tanh(q @ k.mT * 0.3 / 0.5)
    seen = torch.ones(6, 9, dtype=torch.bool).tril(3)
    theirs = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1) @ v
    ours = flash_attention(q, k, v, is_causal=True, scale=0.3, softcap=0.5, causal_offset=3)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    expected = torch.autograd.grad(theirs.square().sum(), (q, k, v))
    for found, gradient in zip(torch.autograd.grad(ours.square().sum(), (q, k, v)), expected, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-5, atol=1e-6)


def ternary(generator: torch.Generator, outputs: int, inputs: int, group_size: int) -> tuple[Any, Any, torch.Tensor]:
    values = torch.randint(0, 3, (outputs, inputs), generator=generator, dtype=torch.uint8).numpy()
    scales = torch.rand(outputs, inputs // group_size, generator=generator)
    rows = GroupedQuantRows(pack_codes(values, 2), scales.numpy(), np.zeros([], np.float32))
    dense = torch.from_numpy(dequantize(rows, GroupedQuantFormat(2, group_size, 1)))
    return torch.from_numpy(rows.codes), scales, dense


def test_ternary_product_and_its_gradient(generator: torch.Generator) -> None:
    codes, scales, dense = ternary(generator, 20, 96, 24)
    x = torch.randn(2, 5, 96, generator=generator, requires_grad=True)
    y = ternary_matmul(x, codes, scales)
    torch.testing.assert_close(y, x @ dense.T)
    (found,) = torch.autograd.grad(y.square().sum(), x)
    torch.testing.assert_close(found, 2 * (x @ dense.T) @ dense, rtol=1e-4, atol=1e-4)
    assert torch.equal(dequantize_ternary(codes, scales, torch.float32), dense)


def test_int8_activations_are_near(generator: torch.Generator) -> None:
    codes, scales, dense = ternary(generator, 30, 256, 64)
    x = torch.randn(7, 256, generator=generator)
    y, exact = ternary_matmul(x, codes, scales, int8=True), x @ dense.T
    assert 1e-4 < (y - exact).norm() / exact.norm() <= 1.2e-2


def test_operators_are_known_to_the_compiler(generator: torch.Generator) -> None:
    """Shapes and dtypes without computing, and the rules of autograd, by torch's own checks."""
    codes, scales, _ = ternary(generator, 20, 64, 32)
    x = torch.randn(3, 64, generator=generator, requires_grad=True)
    torch.library.opcheck(torch.ops.intaglio.ternary_matmul.default, (x, codes, scales, False))
    torch.library.opcheck(torch.ops.intaglio.dequantize_ternary.default, (codes, scales, torch.float16))
    q, k, v = (torch.randn(1, 2, 5, 8, generator=generator, requires_grad=True) for _ in range(3))
    mask = torch.rand(1, 2, 5, 5, generator=generator) > 0.1
    torch.library.opcheck(torch.ops.intaglio.flash_attention.default, (q, k, v, mask, True, 0.3, 0.5, 0))


def test_backward_operator_is_known_to_the_compiler(generator: torch.Generator) -> None:
    q, k, v = (torch.randn(1, 2, 5, 8, generator=generator) for _ in range(3))
    settings = (True, 0.3, 0.5, 0)
    o, logsumexp = torch.ops.intaglio.flash_attention(q, k, v, None, *settings)
    arguments = (torch.randn_like(o), q, k, v, None, o, logsumexp, *settings)
    torch.library.opcheck(torch.ops.intaglio.flash_attention_backward.default, arguments)


def test_operators_are_compiled_whole(generator: torch.Generator) -> None:
    """No break in torch.compile's graph, forward and backward, and the same numbers."""
    codes, scales, _ = ternary(generator, 24, 64, 32)
    x = torch.randn(1, 5, 64, generator=generator, requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        q, k, v = ternary_matmul(x, codes, scales).view(1, 5, 3, 1, 8).permute(2, 0, 3, 1, 4).unbind(0)
        return flash_attention(q, k, v, is_causal=True, softcap=2.0).square().sum()

    expected = torch.autograd.grad(block(x), x)[0]
    found = torch.autograd.grad(torch.compile(block, fullgraph=True, backend="aot_eager")(x), x)[0]
    torch.testing.assert_close(found, expected)


def test_without_triton() -> None:
    """Nothing imports it before a kernel is launched, and a launch says what to install."""
    code = """
import sys
sys.modules["triton"] = None
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find(name, *rest)
import torch
from intaglio.engines.nvidia import plugins
from intaglio.errors import RuntimeMissingError
from intaglio.kernels.cuda import ahead_of_time, ptx, tiles
from intaglio.trainer.ops.attention import flash_attention
from intaglio.trainer.ops.ternary import launch_matmul, ternary_matmul
x, codes, scales = torch.randn(3, 32), torch.zeros(8, 8, dtype=torch.uint8), torch.ones(8, 1)
assert ternary_matmul(x, codes, scales).shape == (3, 8)
assert flash_attention(*(torch.randn(1, 1, 4, 8) for _ in range(3))).shape == (1, 1, 4, 8)
for work in (lambda: launch_matmul(x.half(), codes, scales), lambda: ahead_of_time.compile_kernel(None, 80)):
    try:
        work()
    except RuntimeMissingError as error:
        assert "pip install 'intaglio[triton]'" in str(error)
    else:
        raise AssertionError("no error")
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_kernels_are_launched_on_the_gpu_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    class AskedError(Exception):
        pass

    def device_of(tensor: torch.Tensor) -> None:
        assert tensor is x
        raise AskedError

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    x = torch.zeros(2)
    for operator in (
        attention._attention, attention._attention_backward, ternary_ops._ternary_matmul, ternary_ops._dequantize
    ):  # fmt: skip
        with pytest.raises(AskedError):
            operator._backend_fns["cuda"](x)


def test_what_does_not_fit() -> None:
    x, codes, scales = torch.zeros(3, 64), torch.zeros(8, 16, dtype=torch.uint8), torch.ones(8, 2)
    with pytest.raises(InputError, match="x has 60 inputs, codes hold 64"):
        ternary_matmul(x[:, :60], codes, scales)
    with pytest.raises(InputError, match=r"expected uint8 \[out, in / 4\]"):
        ternary_matmul(x, codes.int(), scales)
    q = torch.zeros(1, 4, 5, 8)
    with pytest.raises(InputError, match="S dividing H"):
        flash_attention(q, q[:, :3], q[:, :3])
    with pytest.raises(InputError, match="head dim is 300"):
        flash_attention(*(torch.zeros(1, 1, 2, 300) for _ in range(3)))
    with pytest.raises(InputError, match="one dtype"):
        flash_attention(q, q.half(), q.half())
    for shape in ((4, 5), (5, 5, 5), (1, 1, 1, 5, 5)):
        with pytest.raises(InputError, match=r"expected what broadcasts to \[1, 4, 5, 5\]"):
            flash_attention(q, q, q, torch.zeros(shape))
    with pytest.raises(InputError, match="does not compute; detach it"):
        flash_attention(q, q, q, torch.zeros(5, 5, requires_grad=True))
