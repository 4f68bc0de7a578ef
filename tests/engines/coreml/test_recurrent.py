"""Recurrent layers of the Core ML target, with onnxruntime as the judge."""

from __future__ import annotations

import numpy as np
import pytest
from coreml_models import packaged
from coreml_nodes import check_node, floats, one_node

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
S, B, I, H = 5, 3, 4, 6  # noqa: E741


def _inputs(op: str, directions: int, lengths: bool = False, states: bool = True, known: bool = True) -> list:
    weights = [
        floats(directions, GATES[op] * H, I),
        floats(directions, GATES[op] * H, H),
        floats(directions, 2 * GATES[op] * H),
    ]
    held = [(w,) for w in weights] if known else weights
    count = (2 if op == "LSTM" else 1) if states else 0
    ends = np.array([5, 2, 4], np.int32) if lengths else None
    return [floats(S, B, I), *held, ends, *(floats(directions, B, H) for _ in range(count))]


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("how", ["weights", "inputs", "lengths", "no states"])
def test_directions(op, direction, how):
    inputs = _inputs(
        op, 2 if direction == "bidirectional" else 1, how == "lengths", how != "no states", how != "inputs"
    )
    check_node(op, inputs, outputs=3 if op == "LSTM" else 2, hidden_size=H, direction=direction, rtol=3e-5)


@pytest.mark.parametrize("after", [0, 1])
def test_where_a_gru_resets(after):
    check_node("GRU", _inputs("GRU", 1), outputs=2, hidden_size=H, linear_before_reset=after, rtol=3e-5)


def test_peepholes_and_activations():
    inputs = [*_inputs("LSTM", 1), (floats(1, 3 * H),)]
    check_node("LSTM", inputs, outputs=3, hidden_size=H, rtol=3e-5)
    how = {"activations": ["HardSigmoid", "Relu", "Tanh"], "activation_alpha": [0.3], "activation_beta": [0.4]}
    check_node("LSTM", _inputs("LSTM", 1), outputs=3, hidden_size=H, rtol=3e-5, **how)
    check_node("RNN", _inputs("RNN", 1), outputs=2, hidden_size=H, activations=["Relu"], rtol=3e-5)


def test_a_plain_lstm_is_one_op():
    model, _ = one_node("LSTM", _inputs("LSTM", 2), outputs=3, hidden_size=H, direction="bidirectional")
    assert "lstm" in [op.op_type for op in packaged(model).program.functions["main"].operations]
