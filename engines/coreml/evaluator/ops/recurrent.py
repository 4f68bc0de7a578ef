"""Recurrent layers. Shapes: ``x`` ``[steps, batch, in]``, states ``[batch, H]``.

``reverse`` walks from the last step to the first and gives its results in the order in which it computes them;
a bidirectional LSTM gives both directions in the order of the input.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from intaglio.engines.coreml.evaluator.ops.activations import sigmoid
from intaglio.engines.coreml.evaluator.registry import Tensor, op

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": sigmoid,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "linear": lambda x: x,
    "hard_sigmoid": lambda x: np.clip(0.2 * x + 0.5, 0, 1),
    "sigmoid_hard": lambda x: np.clip(0.2 * x + 0.5, 0, 1),
}


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    if name not in _ACTIVATIONS:
        raise ValueError(f"has the activation {name!r}; known are {sorted(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _steps(x: Tensor, direction: str) -> Tensor:
    if direction not in ("forward", "reverse"):
        raise ValueError(f"has the direction {direction!r}, expected forward or reverse")
    return x[::-1] if direction == "reverse" else x


def _sequence(steps: list[Tensor], output_sequence: bool) -> Tensor:
    return np.stack(steps if output_sequence else steps[-1:])


@op
def rnn(
    x: Tensor,
    initial_h: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    direction: str = "forward",
    output_sequence: bool = False,
    activation: str = "tanh",
) -> tuple[Tensor, Tensor]:
    function = _activation(activation)
    h, steps = initial_h, []
    for step in _steps(x, direction):
        total = step @ weight_ih.T + h @ weight_hh.T
        h = function(total if bias is None else total + bias)
        steps.append(h)
    return _sequence(steps, output_sequence), h


@op
def gru(
    x: Tensor,
    initial_h: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    direction: str = "forward",
    output_sequence: bool = False,
    recurrent_activation: str = "sigmoid",
    activation: str = "tanh",
    reset_after: bool = False,
    input_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gates in the order reset, output, update. With ``reset_after`` the reset gate scales the state's product."""
    gate, function = _activation(recurrent_activation), _activation(activation)
    zeros = np.zeros(weight_ih.shape[0], x.dtype)
    hr, ho, hz = np.split(weight_hh, 3)
    br, bo, bz = np.split(zeros if bias is None else bias, 3)
    h, steps = initial_h, []
    for step in _steps(x, direction):
        ir, io, iz = np.split(step @ weight_ih.T + (zeros if input_bias is None else input_bias), 3, axis=-1)
        r = gate(ir + h @ hr.T + br)
        z = gate(iz + h @ hz.T + bz)
        o = function(io + r * (h @ ho.T + bo) if reset_after else io + (r * h) @ ho.T + bo)
        h = (1 - z) * o + z * h
        steps.append(h)
    return _sequence(steps, output_sequence), h


@op
def lstm(
    x: Tensor,
    initial_h: Tensor,
    initial_c: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    peephole: Tensor | None = None,
    weight_ih_back: Tensor | None = None,
    weight_hh_back: Tensor | None = None,
    bias_back: Tensor | None = None,
    peephole_back: Tensor | None = None,
    direction: str = "forward",
    output_sequence: bool = False,
    recurrent_activation: str = "sigmoid",
    cell_activation: str = "tanh",
    activation: str = "tanh",
    clip: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gates in the order input, forget, output, cell. Both directions' states lie beside each other, forward first."""
    functions = _activation(recurrent_activation), _activation(cell_activation), _activation(activation)
    if direction != "bidirectional":
        steps, h, c = _lstm(
            _steps(x, direction), initial_h, initial_c, weight_ih, weight_hh, bias, peephole, functions, clip
        )
        return _sequence(steps, output_sequence), h, c
    if weight_ih_back is None or weight_hh_back is None:
        raise ValueError("is bidirectional but has no weights for the way back")
    h0, h1 = np.split(initial_h, 2, axis=-1)
    c0, c1 = np.split(initial_c, 2, axis=-1)
    ahead, h0, c0 = _lstm(x, h0, c0, weight_ih, weight_hh, bias, peephole, functions, clip)
    back, h1, c1 = _lstm(x[::-1], h1, c1, weight_ih_back, weight_hh_back, bias_back, peephole_back, functions, clip)
    h, c = np.concatenate([h0, h1], -1), np.concatenate([c0, c1], -1)
    if not output_sequence:
        return h[None], h, c
    return np.concatenate([np.stack(ahead), np.stack(back[::-1])], -1), h, c


def _lstm(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None,
    peephole: Tensor | None,
    functions: tuple[Callable[[Tensor], Tensor], ...],
    clip: float | None,
) -> tuple[list[Tensor], Tensor, Tensor]:
    gate, cell, function = functions
    zeros = np.zeros(3 * h.shape[-1], x.dtype)
    pi, pf, po = np.split(zeros if peephole is None else peephole, 3)
    steps = []
    for step in x:
        total = step @ weight_ih.T + h @ weight_hh.T
        i, f, o, z = np.split(total if bias is None else total + bias, 4, axis=-1)
        c = gate(f + pf * c) * c + gate(i + pi * c) * cell(z)
        if clip is not None:
            c = np.clip(c, -clip, clip)
        h = gate(o + po * c) * function(c)
        steps.append(h)
    return steps, h, c
