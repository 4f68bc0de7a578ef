"""What full TensorRT has beyond TensorRT for RTX: plugins, weights that can be exchanged, measured kernels."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from intaglio.engines.lowering.ternary_plugin import MANY_ROWS
from intaglio.engines.nvidia.refit import checkpoint_name
from intaglio.errors import CompileError
from intaglio.kernels.cuda.tiles import FEW_ROWS
from intaglio.kernels.grouped_quant import DOMAIN

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def has_few_rows(model: ir.Model, largest: Sequence[Mapping[str, int]]) -> bool:
    """Whether no ternary product has more than 16 rows at the ``largest`` sizes of the dims of any profile.

    Not where there are no sizes, of which nothing is known.
    """
    products = [node for node in model.graph if (node.domain, node.op_type) == (DOMAIN, MANY_ROWS)]
    ternary = [node for node in products if "bits" in node.attributes and node.attributes["bits"].as_int() == 2]
    return (
        bool(ternary)
        and bool(largest)
        and all(_rows(node.inputs[0], sizes) <= FEW_ROWS for node in ternary for sizes in largest)
    )


def _rows(x: ir.Value | None, sizes: Mapping[str, int]) -> float:
    if x is None or x.shape is None:
        return math.inf
    return math.prod(dim if isinstance(dim, int) else sizes.get(str(dim.value), math.inf) for dim in x.shape[:-1])


def refittable(model: ir.Model, weights: Collection[str]) -> list[str]:
    """The names of the weights of products, which LoRA changes: those of floats, as they are or transposed.

    ``weights`` are the checkpoint's. What lowering made of packed ones has a name that no adapter has, and nobody could
    say what it holds where TensorRT joins it with others.
    """
    names: dict[str, None] = {}
    for node in model.graph.all_nodes():
        if node.domain or node.op_type != "MatMul":
            continue
        weight = node.inputs[1]
        made = weight.producer() if weight is not None else None
        if made is not None and (made.domain, made.op_type) == ("", "Transpose"):
            weight = made.inputs[0]
        if weight is None or not weight.is_initializer() or weight.dtype not in _FLOATS or not weight.name:
            continue
        if checkpoint_name(weight.name) in weights:
            names[weight.name] = None
    return list(names)


def mark_refittable(trt: Any, network: Any, config: Any, names: Sequence[str]) -> None:
    """Makes these weights exchangeable and no others: what cannot change is built in. Raises CompileError."""
    config.set_flag(trt.BuilderFlag.REFIT_INDIVIDUAL)
    for name in names:
        if not network.mark_weights_refittable(name):
            raise CompileError(
                f"TensorRT does not know the weight {name!r} of the graph it was given; compile without --refit"
            )
