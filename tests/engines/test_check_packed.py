"""Packed products that are not what the format says."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from intaglio.engines.lowering.check_packed import check_packed
from intaglio.errors import CompileError
from intaglio.kernels.grouped_quant import DOMAIN

_IN, _OUT, _GROUP = 64, 32, 32


def _model(**changed: Any) -> ir.Model:
    """A product ``[8, 64]`` with a weight ``[32, 64]`` of 4 bits in groups of 32, with what is ``changed``."""
    formed = {"bits": 4, "group_size": _GROUP, "zero_point": 8}
    formed |= {name: value for name, value in changed.items() if name in formed}
    held = {
        "codes": np.zeros((_OUT, _IN // 2), np.uint8),
        "scales": np.ones((_OUT, _IN // _GROUP), np.float32),
        "offsets": np.zeros((), np.float32),
    }
    held |= {name: value for name, value in changed.items() if name in held}
    x = ir.val("x", changed.get("dtype", ir.DataType.FLOAT), changed.get("x", (8, _IN)))
    weights = {name: ir.val(name, const_value=ir.tensor(value, name=name)) for name, value in held.items()}
    values = {"x": x, **weights, "": None}
    node = ir.node(
        changed.get("op", "GroupedQuantMatMul"),
        [values[name] for name in changed.get("inputs", ["x", *held])],
        {name: value for name, value in formed.items() if value is not None},
        domain=DOMAIN,
    )
    node.outputs[0].name = "y"
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=list(weights.values()), opset_imports={"": 21})
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"offsets": np.zeros((_OUT, 2), np.float32)},
        {"scales": np.ones((_OUT, 2), np.float16)},
        {"op": "GroupedQuantGather", "dtype": ir.DataType.INT64, "x": (8,)},
    ],
)
def test_what_the_format_says(changed: dict[str, Any]) -> None:
    check_packed(_model(**changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bits": None}, "has no attribute bits"),
        ({"zero_point": None}, "has no attribute zero_point"),
        ({"bits": 3}, r"bits is 3, expected one of \(2, 4, 8\)"),
        ({"group_size": 0}, "group_size 0 with 4 bits"),
        ({"zero_point": 16}, "zero_point 16 is not a 4-bit code"),
        ({"group_size": 48}, "input width 64 is not a multiple of the group size 48"),
        ({"inputs": ["x", "codes", "scales"]}, "has 3 inputs, expected 4"),
        ({"inputs": ["x", "codes", "scales", ""]}, "has 3 inputs, expected 4"),
        ({"inputs": ["x", "x", "scales", "offsets"]}, "of a weight that is computed"),
        ({"codes": np.zeros((_OUT, 32), np.int8)}, r"its codes are int8 of the shape \[32, 32\], expected uint8"),
        ({"codes": np.zeros(_OUT * 32, np.uint8)}, r"its codes are uint8 of the shape \[1024\], expected"),
        ({"codes": np.zeros((0, 32), np.uint8)}, r"its codes are uint8 of the shape \[0, 32\], expected"),
        ({"scales": np.ones((), np.float32)}, r"its scales are float32 of the shape \[\], expected .* \[32, 2\]"),
        ({"scales": np.ones((_OUT, 3), np.float32)}, r"its scales are float32 of the shape \[32, 3\], expected"),
        ({"scales": np.ones((_OUT, 2), np.float64)}, "its scales are float64 of"),
        ({"offsets": np.zeros(_OUT, np.float32)}, r"its offsets are float32 of the shape \[32\], expected"),
        ({"x": (8, 48)}, "its input has rows of 48, and its weight takes 64"),
        ({"dtype": ir.DataType.INT64}, "its input is int64, expected floats"),
        ({"op": "GroupedQuantGather"}, "its input is float32, expected integers"),
    ],
)
def test_what_it_does_not(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(CompileError, match=f": GroupedQuant.*{message}"):
        check_packed(_model(**changed))
