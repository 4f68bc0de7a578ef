"""``TernaryPluginPass`` and ``AttentionPluginPass``: the nodes that the plugins of full TensorRT answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from fused_graphs import Graph

from intaglio.engines.lowering.attention_plugin import AttentionPluginPass
from intaglio.engines.lowering.ternary_plugin import TernaryPluginPass
from intaglio.engines.nvidia.lower import lower
from intaglio.kernels.grouped_quant import DOMAIN, GroupedQuantFormat, unpack_codes

F32, F16, BOOL = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BOOL
TERNARY = GroupedQuantFormat(2, 128, 1)


def product(dtype: ir.DataType = F16, form: GroupedQuantFormat = TERNARY, *, has_offsets: bool = False) -> ir.Model:
    graph = Graph({"x": ["rows", 256]}, {"x": dtype})
    codes, scales, offsets = graph.table(24, 256, "weight", form)
    if not has_offsets:
        offsets = graph.constant(np.zeros((), np.float16), "none")
    y = graph.op.GroupedQuantMatMul(graph["x"], codes, scales, offsets, **vars(form), _domain=DOMAIN)
    y.dtype, y.shape = dtype, ir.Shape(["rows", 24])
    return graph.model(y=y)


@pytest.mark.parametrize(("few_rows", "op_type"), [(False, "GroupedQuantMatMul"), (True, "GroupedQuantMatMulFewRows")])
def test_ternary_weights_keep_their_bits(few_rows: bool, op_type: str) -> None:
    model = product()
    codes, scales = (model.graph.initializers[f"weight.{name}"].const_value.numpy() for name in ("codes", "scales"))
    notes = lower(model, "tensorrt", few_rows=few_rows)
    assert notes == ["1 ternary products as a plugin"]
    (node,) = model.graph
    assert (node.domain, node.op_type, node.outputs[0].name) == (DOMAIN, op_type, "y")
    assert {name: a.value for name, a in node.attributes.items()} == {"group_size": 128}
    x, words, kept = node.inputs
    assert (x.name, words.dtype, list(words.shape)) == ("x", ir.DataType.INT32, [24, 16])
    # The sixteen codes of a word, the first in its lowest bits.
    shifts = np.arange(0, 32, 2)
    found = words.const_value.numpy()[:, :, None] >> shifts & 3
    np.testing.assert_array_equal(found.reshape(24, 256), unpack_codes(codes, 2))
    np.testing.assert_array_equal(kept.const_value.numpy(), scales)
    assert set(model.graph.initializers) == {words.name, kept.name}
    assert model.opset_imports[DOMAIN] == 1


@pytest.mark.parametrize(
    "model",
    [
        product(F32),
        product(has_offsets=True),
        product(form=GroupedQuantFormat(2, 16, 1)),
        product(form=GroupedQuantFormat(2, 128, 2)),
        product(form=GroupedQuantFormat(4, 128, 1)),
    ],
    ids=["float32", "offsets", "groups of 16", "zero point", "4 bits"],
)
def test_other_products_are_left(model: ir.Model) -> None:
    assert not TernaryPluginPass()(model).modified
    lower(model, "tensorrt")
    assert any(node.op_type == "DequantizeLinear" for node in model.graph)
    assert {node.domain for node in model.graph} == {""}


def attention(
    dtype: ir.DataType, head: int, mask: tuple[Any, ...] | None = None, *, is_flat: bool = False, **attributes: Any
) -> ir.Model:
    heads = {"q": 4, "k": 2, "v": 2}
    shapes: dict[str, list[Any]] = {
        n: ["B", "S", count * head] if is_flat else ["B", count, "S", head] for n, count in heads.items()
    }
    dtypes = dict.fromkeys(shapes, dtype)
    if mask is not None:
        shapes["mask"], dtypes["mask"] = list(mask[1:]), mask[0]
    graph = Graph(shapes, dtypes)
    attributes = {**attributes, **({"q_num_heads": 4, "kv_num_heads": 2} if is_flat else {})}
    y = graph.op.Attention(*(graph[name] for name in shapes), **attributes)
    y.dtype, y.shape = dtype, graph["q"].shape
    return graph.model(y=y)


@pytest.mark.parametrize("is_flat", [False, True])
def test_attention_with_a_softcap(is_flat: bool) -> None:
    model = attention(F16, 40, softcap=3.0, scale=0.25, is_flat=is_flat)
    assert lower(model, "tensorrt") == ["1 of Attention as a plugin: softcap has no fused kernel"]
    (node,) = (node for node in model.graph if node.domain)
    assert (node.domain, node.op_type) == (DOMAIN, "FlashAttention")
    assert {name: a.value for name, a in node.attributes.items()} == {"scale": 0.25, "softcap": 3.0, "is_causal": 0}
    moved = ["Reshape", "Transpose"] * 3 if is_flat else []
    back = ["Transpose", "Reshape"] if is_flat else []
    assert [n.op_type for n in model.graph if n.op_type != "Constant"] == [*moved, "FlashAttention", *back]


@pytest.mark.parametrize("dtype", [BOOL, F32])
def test_attention_in_float32_under_a_mask(dtype: ir.DataType) -> None:
    model = attention(F32, 64, (dtype, "S", "S"), is_causal=1)
    lower(model, "tensorrt")
    (node,) = (node for node in model.graph if node.domain)
    assert node.op_type == "FlashAttentionMasked"
    mask = node.inputs[3]
    assert mask is not None and mask.shape is not None
    assert (mask.dtype, list(mask.shape)[:2]) == (dtype, [1, 1])
    assert node.attributes["is_causal"].as_int() == 1
    assert node.attributes["scale"].as_float() == pytest.approx(64**-0.5)


def test_a_float32_mask_of_halves_hides_with_finite_numbers() -> None:
    """A row that is hidden as a whole is a mean in the graph, and would be zeros in the kernel."""
    model = attention(F16, 40, (F32, 1, 1, "S", "S"), softcap=3.0)
    lower(model, "tensorrt")
    (node,) = (node for node in model.graph if node.domain)
    mask = node.inputs[3]
    assert mask is not None and mask.dtype == F16
    cast = mask.producer()
    assert cast is not None and cast.op_type == "Cast" and cast.inputs[0] is not None
    bounded = cast.inputs[0].producer()
    assert bounded is not None and bounded.op_type == "Max" and bounded.inputs[1] is not None
    assert bounded.inputs[1].const_value.numpy() == -65504 / 2


def test_what_neither_has_a_kernel_for_becomes_products() -> None:
    for dtype, head in ((F32, 160), (F16, 512)):
        model = attention(dtype, head)
        assert not AttentionPluginPass(lambda node: "asked for")(model).modified
        lower(model, "tensorrt")
        assert "Softmax" in {node.op_type for node in model.graph}


def test_what_tensorrt_fuses_is_left_to_it() -> None:
    model = attention(F16, 64)
    assert lower(model, "tensorrt") == []
    assert [node.op_type for node in model.graph] == ["Attention"]


def test_rtx_has_no_plugins() -> None:
    for model in (product(), attention(F16, 40, softcap=3.0)):
        lower(model, "tensorrt-rtx")
        assert {node.domain for node in model.graph} == {""}
