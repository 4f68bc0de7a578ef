"""Recurrent layers: MIL's own LSTM where it says what the node does, else step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from intaglio.engines.coreml.mil import cast, constant, dtype_of, static_sizes
from intaglio.engines.coreml.node import Node
from intaglio.engines.coreml.registry import converter

# So many steps are a program of reasonable size.
_MOST_STEPS = 512

_FUNCTIONS: dict[str, Callable[[Var, np.ndarray, np.ndarray], Var]] = {
    "sigmoid": lambda x, a, b: mb.sigmoid(x=x),
    "tanh": lambda x, a, b: mb.tanh(x=x),
    "relu": lambda x, a, b: mb.relu(x=x),
    "softsign": lambda x, a, b: mb.softsign(x=x),
    "softplus": lambda x, a, b: mb.softplus(x=x),
    "affine": lambda x, a, b: mb.linear_activation(x=x, alpha=a, beta=b),
    "leakyrelu": lambda x, a, b: mb.leaky_relu(x=x, alpha=a),
    "elu": lambda x, a, b: mb.elu(x=x, alpha=a),
    "hardsigmoid": lambda x, a, b: mb.sigmoid_hard(x=x, alpha=a, beta=b),
    "scaledtanh": lambda x, a, b: mb.scaled_tanh(x=x, alpha=a, beta=b),
    "thresholdedrelu": lambda x, a, b: mb.thresholded_relu(x=x, alpha=a),
}
# What alpha and beta are where the node does not say; other functions have none.
_ALPHA_BETA = {
    "affine": (1.0, 0.0),
    "leakyrelu": (0.01, 0.0),
    "elu": (1.0, 0.0),
    "hardsigmoid": (0.2, 0.5),
    "scaledtanh": (1.0, 1.0),
    "thresholdedrelu": (1.0, 0.0),
}


@dataclass(frozen=True)
class _Direction:
    """One direction of a layer: the weights of all its gates, the states before the first step."""

    reverse: bool
    weight: Var  # [gates * H, I]
    recurrence: Var  # [gates * H, H]
    bias: Var | None  # [2 * gates * H], of the input and of the recurrence
    states: list[Var]  # [B, H] each
    functions: list[Callable[[Var], Var]]
    peepholes: Var | None = None  # [3 * H]


# From the input's part of all gates, the states and the direction: the states after.
_Step = Callable[[Var, list[Var], _Direction], list[Var]]


@converter
def RNN(node: Node) -> Sequence[Var]:
    def step(gates: Var, states: list[Var], d: _Direction) -> list[Var]:
        total = mb.add(x=gates, y=_recurrent(states[0], d.recurrence, _bias(d, 1, 1)))
        return [d.functions[0](total)]

    return _layer(node, 1, ["Tanh"], ["initial_h"], step)


@converter
def GRU(node: Node) -> Sequence[Var]:
    after = node.int("linear_before_reset", 0) != 0

    def step(gates: Var, states: list[Var], d: _Direction) -> list[Var]:
        (h,) = states
        gate, candidate = d.functions
        x_z, x_r, x_h = mb.split(x=gates, num_splits=3, axis=-1)
        w_z, w_r, w_h = mb.split(x=d.recurrence, num_splits=3, axis=0)
        b_z, b_r, b_h = _thirds(_bias(d, 1, 3))
        z = gate(mb.add(x=x_z, y=_recurrent(h, w_z, b_z)))
        r = gate(mb.add(x=x_r, y=_recurrent(h, w_r, b_r)))
        inner = mb.mul(x=r, y=_recurrent(h, w_h, b_h)) if after else _recurrent(mb.mul(x=r, y=h), w_h, b_h)
        new = candidate(mb.add(x=x_h, y=inner))
        return [mb.add(x=new, y=mb.mul(x=z, y=mb.sub(x=h, y=new)))]

    return _layer(node, 3, ["Sigmoid", "Tanh"], ["initial_h"], step)


@converter
def LSTM(node: Node) -> Sequence[Var]:
    fused = _fused_lstm(node)
    if fused is not None:
        return fused
    couples = node.int("input_forget", 0) != 0

    def step(gates: Var, states: list[Var], d: _Direction) -> list[Var]:
        h, c = states
        gate, candidate, output = d.functions
        total = mb.add(x=gates, y=_recurrent(h, d.recurrence, _bias(d, 1, 4)))
        i, o, f, new = mb.split(x=total, num_splits=4, axis=-1)
        p_i = p_o = p_f = None
        if d.peepholes is not None:
            p_i, p_o, p_f = mb.split(x=d.peepholes, num_splits=3, axis=-1)
        i = gate(_peeped(i, c, p_i))
        f = mb.sub(x=constant(np.array(1.0), i), y=i) if couples else gate(_peeped(f, c, p_f))
        c = mb.add(x=mb.mul(x=f, y=c), y=mb.mul(x=i, y=candidate(new)))
        return [mb.mul(x=gate(_peeped(o, c, p_o)), y=output(c)), c]

    return _layer(node, 4, ["Sigmoid", "Tanh", "Tanh"], ["initial_h", "initial_c"], step)


def _peeped(gate: Var, c: Var, weight: Var | None) -> Var:
    return gate if weight is None else mb.add(x=gate, y=mb.mul(x=c, y=weight))


def _recurrent(h: Var, weight: Var, bias: Var | None) -> Var:
    y = mb.matmul(x=h, y=weight, transpose_y=True)
    return y if bias is None else mb.add(x=y, y=bias)


def _bias(d: _Direction, which: int, gates: int) -> Var | None:
    """The bias of the input (0) or of the recurrence (1), all gates in one."""
    if d.bias is None:
        return None
    width = int(d.bias.shape[0]) // 2
    return mb.slice_by_size(x=d.bias, begin=[which * width], size=[width])


def _thirds(bias: Var | None) -> Sequence[Var | None]:
    return [None] * 3 if bias is None else mb.split(x=bias, num_splits=3, axis=0)


def _layer(node: Node, gates: int, defaults: list[str], names: list[str], step: _Step) -> Sequence[Var]:
    """All steps of all directions: the outputs of each step, then the states after the last."""
    x, batch_first = _sequence(node)
    length, batch = static_sizes(node, x, [0, 1], "a recurrent layer is laid out step by step")
    if length > _MOST_STEPS:
        node.fail(f"has {length} steps; laid out one by one, up to {_MOST_STEPS} are converted")
    directions = _directions(node, x, gates, defaults, names, batch, batch_first)
    lengths = node.optional(4)
    outputs, finals = [], []
    for d in directions:
        gates_x = mb.matmul(x=x, y=d.weight, transpose_y=True)
        bias = _bias(d, 0, gates)
        if bias is not None:
            gates_x = mb.add(x=gates_x, y=bias)
        rows, states = _run(gates_x, d, step, length, lengths)
        outputs.append(mb.stack(values=rows, axis=0))
        finals.append(states)
    y = mb.stack(values=outputs, axis=1)
    last = [mb.stack(values=[states[i] for states in finals], axis=0) for i in range(len(names))]
    return _laid_out(y, last, batch_first)


def _run(gates_x: Var, d: _Direction, step: _Step, length: int, lengths: Var | None) -> tuple[list[Var], list[Var]]:
    states = d.states
    rows: list[Var] = [None] * length
    parts = mb.split(x=gates_x, num_splits=length, axis=0) if length > 1 else [gates_x]
    for t in reversed(range(length)) if d.reverse else range(length):
        new = step(mb.squeeze(x=parts[t], axes=[0]), states, d)
        rows[t] = new[0]
        if lengths is not None:
            # Beyond its end a sequence keeps its state and gives zeros.
            is_inside = mb.expand_dims(x=mb.greater(x=lengths, y=np.int32(t)), axes=[1])
            rows[t] = mb.select(cond=is_inside, a=new[0], b=constant(np.array(0.0), new[0]))
            new = [mb.select(cond=is_inside, a=n, b=s) for n, s in zip(new, states, strict=True)]
        states = new
    return rows, states


def _sequence(node: Node) -> tuple[Var, bool]:
    """The input as ``[S, B, I]``, and whether the node has the batch first."""
    batch_first = node.int("layout", 0) != 0
    x = node.input(0)
    return (mb.transpose(x=x, perm=[1, 0, 2]) if batch_first else x), batch_first


def _laid_out(y: Var, last: list[Var], batch_first: bool) -> Sequence[Var]:
    """``y`` ``[S, D, B, H]`` and states ``[D, B, H]``, with the batch first where the node wants it."""
    if not batch_first:
        return [y, *last]
    return [mb.transpose(x=y, perm=[2, 0, 1, 3]), *(mb.transpose(x=s, perm=[1, 0, 2]) for s in last)]


def _directions(
    node: Node, x: Var, gates: int, defaults: list[str], names: list[str], batch: int, batch_first: bool
) -> list[_Direction]:
    kind = node.string("direction", "forward")
    if kind not in ("forward", "reverse", "bidirectional"):
        node.fail(f"has the direction {kind!r}; expected forward, reverse or bidirectional")
    count = 2 if kind == "bidirectional" else 1
    (hidden,) = static_sizes(node, node.input(2), [2], "a recurrent layer needs its hidden size")
    functions = _functions(node, defaults, count)
    made = []
    for i in range(count):
        made.append(
            _Direction(
                reverse=kind == "reverse" or i == 1,
                weight=_part(node.input(1), i),
                recurrence=_part(node.input(2), i),
                bias=None if node.optional(3) is None else _part(node.input(3), i),
                states=[_state(node, 5 + j, i, x, batch, hidden, batch_first) for j in range(len(names))],
                functions=functions[i * len(defaults) : (i + 1) * len(defaults)],
                peepholes=_part(node.input(7), i) if gates == 4 and node.optional(7) is not None else None,
            )
        )
    return made


def _part(x: Var, i: int) -> Var:
    """What a tensor holds for one direction."""
    if x.val is not None:
        return mb.const(val=np.ascontiguousarray(x.val[i]))
    sizes = [1, *(int(size) for size in x.shape[1:])]
    return mb.squeeze(x=mb.slice_by_size(x=x, begin=[i] + [0] * (x.rank - 1), size=sizes), axes=[0])


def _state(node: Node, i: int, direction: int, x: Var, batch: int, hidden: int, batch_first: bool) -> Var:
    state = node.optional(i)
    if state is None:
        return mb.const(val=constant(np.zeros((batch, hidden)), x))
    return _part(mb.transpose(x=state, perm=[1, 0, 2]) if batch_first else state, direction)


def _functions(node: Node, defaults: list[str], count: int) -> list[Callable[[Var], Var]]:
    names = node.strings("activations", defaults * count)
    alphas, betas = iter(node.floats("activation_alpha", [])), iter(node.floats("activation_beta", []))
    clip = node.float("clip", 0.0)
    return [_function(node, name.lower(), alphas, betas, clip) for name in names]


def _function(node: Node, name: str, alphas: object, betas: object, clip: float) -> Callable[[Var], Var]:
    if name not in _FUNCTIONS:
        node.fail(f"has the activation {name!r}; expected one of {', '.join(sorted(_FUNCTIONS))}")
    alpha, beta = _ALPHA_BETA.get(name, (0.0, 0.0))
    # Only functions that have them take of the lists.
    if name in _ALPHA_BETA:
        alpha = next(alphas, alpha)  # type: ignore[call-overload]
    if name in ("affine", "hardsigmoid", "scaledtanh"):
        beta = next(betas, beta)  # type: ignore[call-overload]

    def apply(x: Var) -> Var:
        if clip:
            x = mb.clip(x=x, alpha=constant(np.array(-clip), x), beta=constant(np.array(clip), x))
        a, b = constant(np.array(alpha), x), constant(np.array(beta), x)
        return _FUNCTIONS[name](x, a, b)

    return apply


def _fused_lstm(node: Node) -> Sequence[Var] | None:
    """By MIL's op, which wants constant weights; None where it does not say what the node does."""
    plain = not any(node.has(name) for name in ("clip", "activation_alpha", "activation_beta"))
    names = [name.lower() for name in node.strings("activations", ["Sigmoid", "Tanh", "Tanh"])]
    usual = names in (["sigmoid", "tanh", "tanh"], ["sigmoid", "tanh", "tanh"] * 2)
    known = all(node.optional(i) is None or node.is_constant(i) for i in (1, 2, 3))
    if not plain or not usual or not known or node.int("input_forget", 0):
        return None
    if node.optional(4) is not None or node.optional(7) is not None or node.input(1).val is None:
        return None
    x, batch_first = _sequence(node)
    kind = node.string("direction", "forward")
    count = 2 if kind == "bidirectional" else 1
    hidden = int(node.input(2).shape[2])
    states = [_flat_state(node, i, x, count, hidden, batch_first) for i in (5, 6)]
    weights: dict[str, np.ndarray] = {}
    for i, suffix in enumerate(("", "_back")[:count]):
        weights[f"weight_ih{suffix}"] = _mil_gates(node.input(1).val[i])
        weights[f"weight_hh{suffix}"] = _mil_gates(node.input(2).val[i])
        if node.optional(3) is not None:
            input_bias, recurrent_bias = np.split(node.input(3).val[i], 2)
            weights[f"bias{suffix}"] = _mil_gates(input_bias + recurrent_bias)
    # In which order MIL gives the outputs of its own reverse direction is not written down.
    is_reversed = kind == "reverse"
    x = mb.reverse(x=x, axes=[0]) if is_reversed else x
    y, h, c = mb.lstm(
        x=x,
        initial_h=states[0],
        initial_c=states[1],
        direction="forward" if is_reversed else kind,
        output_sequence=True,
        **weights,
    )
    y = mb.reverse(x=y, axes=[0]) if is_reversed else y
    y = mb.stack(values=mb.split(x=y, num_splits=2, axis=-1), axis=1) if count == 2 else mb.expand_dims(x=y, axes=[1])
    last = [
        mb.stack(values=mb.split(x=s, num_splits=2, axis=-1), axis=0) if count == 2 else mb.expand_dims(x=s, axes=[0])
        for s in (h, c)
    ]
    return _laid_out(y, last, batch_first)


def _mil_gates(rows: np.ndarray) -> np.ndarray:
    """ONNX's order of gates, input, output, forget, cell, as MIL's: input, forget, output, cell."""
    i, o, f, c = np.split(rows, 4)
    return np.concatenate([i, f, o, c])


def _flat_state(node: Node, i: int, x: Var, count: int, hidden: int, batch_first: bool) -> Var:
    """A state before the first step, ``[B, D * H]``."""
    state = node.optional(i)
    if state is None:
        (batch,) = static_sizes(node, x, [1], "a state of zeros needs that of the batch")
        return mb.const(val=constant(np.zeros((batch, count * hidden)), x))
    if not batch_first:
        state = mb.transpose(x=state, perm=[1, 0, 2])
    return cast(mb.reshape(x=state, shape=[-1, count * hidden]), dtype_of(x))
