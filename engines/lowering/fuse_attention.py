"""Leaves ``Attention`` and what stands around it to the CPU's own kernel.

Shape suffixes: B batch, H heads, S tokens, E numbers of a head.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from intaglio.engines.cpu_cache import CACHE_IN_PLACE
from intaglio.engines.kv_cache import PAST, PRESENT
from intaglio.engines.lowering.fuse_nodes import constant_of, is_standard, only_consumer, producer, remove_unread
from intaglio.kernels.grouped_quant import DOMAIN

OP_TYPE = "FusedAttention"
# Attributes of Attention that the kernel knows, and the values of others that mean nothing.
_KNOWN = {"q_num_heads", "kv_num_heads", "scale", "is_causal"}
_NEUTRAL = {"softcap": 0.0, "qk_matmul_output_mode": 0, "softmax_precision": ir.DataType.FLOAT}
_SWAP_HEADS = [0, 2, 1, 3]


class FuseAttentionPass(ir.passes.InPlacePass):
    """Replaces ``Attention`` in float32 by ``intaglio.FusedAttention`` (kernels/cpu/attention_op.h).

    1. Reshape and Transpose around queries, keys, values and the result are absorbed: the kernel reads and writes them
       in either layout. So are RotaryEmbedding of queries and keys, and Concat with the past of a cache.
    2. A past may then be longer than what is filled of it: how long it is, the graph takes from its other inputs. A
       graph whose pasts are read by nothing else, with masks over all keys, and whose presents are its outputs is
       marked with CACHE_IN_PLACE.
    3. A node with a dtype, an attribute or an output that the kernel lacks stays as it is.
    """

    def __init__(self, *, is_fast: bool = False) -> None:
        super().__init__()
        self._is_fast = is_fast

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        nodes = [node for node in graph if not node.domain and node.op_type == "Attention" and _is_supported(node)]
        for node in nodes:
            _fuse(graph, node, self._is_fast)
        if nodes:
            graph.opset_imports.setdefault(DOMAIN, 1)
            if _derive_past_length(graph):
                model.metadata_props[CACHE_IN_PLACE] = "1"
        return ir.passes.PassResult(model, modified=bool(nodes))


def _is_supported(node: ir.Node) -> bool:
    for name, attribute in node.attributes.items():
        if name not in _KNOWN and attribute.value != _NEUTRAL.get(name):
            return False
    inputs = list(node.inputs) + [None] * (6 - len(node.inputs))
    if any(value is not None for value in inputs[6:]):
        return False
    heads = inputs[:3]
    if any(value is None or value.dtype != ir.DataType.FLOAT or value.shape is None for value in heads):
        return False
    ranks = {value.shape.rank() for value in heads if value is not None and value.shape is not None}
    if ranks != {4} and (ranks != {3} or "q_num_heads" not in node.attributes):
        return False
    if ranks == {4} and any(_heads(value) is None for value in heads):
        return False
    mask = inputs[3]
    if mask is not None and mask.dtype not in (ir.DataType.FLOAT, ir.DataType.BOOL):
        return False
    # Its own cache is the kernel's too, where both of its outputs are there.
    has_past, has_present = inputs[4] is not None, [_is_used(value) for value in node.outputs[1:3]]
    if any(has_present) and not all(has_present):
        return False
    if has_past and not (inputs[5] is not None and has_present and all(has_present)):
        return False
    return not any(_is_used(value) for value in node.outputs[3:])


def _heads(value: ir.Value | None) -> int | None:
    """H of ``[B, H, S, E]``, where it is known."""
    if value is None or value.shape is None:
        return None
    heads = value.shape[1]
    return heads if isinstance(heads, int) else None


def _is_used(value: ir.Value) -> bool:
    return value.is_graph_output() or bool(value.uses())


def _fuse(graph: ir.Graph, node: ir.Node, is_fast: bool) -> None:
    query, key, value, mask, past_key, past_value = (list(node.inputs) + [None] * 6)[:6]
    assert query is not None and query.shape is not None
    is_flat = query.shape.rank() == 3
    attributes: dict[str, Any] = {
        "q_num_heads": node.attributes["q_num_heads"].as_int() if is_flat else _heads(query),
        "kv_num_heads": node.attributes["kv_num_heads"].as_int() if is_flat else _heads(key),
    }
    if "scale" in node.attributes:
        attributes["scale"] = node.attributes["scale"].as_float()
    if "is_causal" in node.attributes and node.attributes["is_causal"].as_int():
        attributes["is_causal"] = 1
    if is_fast:
        attributes["fast"] = 1
    presents = [output for output in node.outputs[1:3] if _is_used(output)]
    # Without a past of its own, Attention counts causality from the first key, which is the past's.
    if past_key is None and not presents and "is_causal" not in attributes:
        key, value, past_key, past_value, presents = _split_cache(node, key, value)
    cos = sin = None
    if not is_flat:
        query, key, cos, sin, interleaved = _split_rotary(query, key)
        if interleaved:
            attributes["interleaved"] = 1
    inputs = [query, key, value]
    for index, name in enumerate(("query", "key", "value")):
        inputs[index], heads_first = _in_rows(inputs[index])
        if heads_first and not is_flat:
            attributes[f"{name}_heads_first"] = 1
    output = node.outputs[0]
    if not is_flat:
        merged = _merged(output)
        if merged is None:
            attributes["output_heads_first"] = 1
        else:
            output = merged
    outputs = [output, *presents]
    fused = ir.node(
        OP_TYPE, [*inputs, mask, past_key, past_value, cos, sin], attributes, domain=DOMAIN, num_outputs=len(outputs)
    )
    graph.insert_before(node, fused)
    for new, replaced in zip(fused.outputs, outputs, strict=True):
        _take_over(new, replaced)
    remove_unread(graph, outputs)


def _split_cache(
    node: ir.Node, key: ir.Value | None, value: ir.Value | None
) -> tuple[ir.Value | None, ir.Value | None, ir.Value | None, ir.Value | None, list[ir.Value]]:
    """New keys and values, their pasts and the presents, where both are a Concat of past and new ones."""
    found = []
    for joined in (key, value):
        concat = producer(joined, "Concat")
        if joined is None or concat is None or len(concat.inputs) != 2:
            return key, value, None, None, []
        if concat.attributes["axis"].as_int() not in (2, -2):
            return key, value, None, None, []
        # Others would read it before this node makes it.
        if any(user is not node for user, _ in joined.uses()):
            return key, value, None, None, []
        found.append(concat)
    new_key, new_value = (concat.inputs[1] for concat in found)
    past_key, past_value = (concat.inputs[0] for concat in found)
    return new_key, new_value, past_key, past_value, [concat.outputs[0] for concat in found]


def _split_rotary(
    query: ir.Value | None, key: ir.Value | None
) -> tuple[ir.Value | None, ir.Value | None, ir.Value | None, ir.Value | None, int]:
    """Unrotated queries and keys, cos, sin and the attribute interleaved, where both are rotated alike."""
    nodes = [producer(value, "RotaryEmbedding") for value in (query, key)]
    said = []
    for rotary in nodes:
        if rotary is None or (len(rotary.inputs) > 3 and rotary.inputs[3] is not None):
            return query, key, None, None, 0
        numbers = {name: rotary.attributes[name].as_int() for name in rotary.attributes}
        if numbers.get("rotary_embedding_dim", 0):
            return query, key, None, None, 0
        said.append((rotary.inputs[1], rotary.inputs[2], numbers.get("interleaved", 0)))
    if said[0] != said[1]:
        return query, key, None, None, 0
    first, second = nodes
    assert first is not None and second is not None
    return first.inputs[0], second.inputs[0], *said[0]


def _in_rows(value: ir.Value | None) -> tuple[ir.Value | None, bool]:
    """What ``[B, H, S, E]`` was transposed from: ``[B, S, H, E]`` or ``[B, S, H * E]``; and whether it was not."""
    transpose = producer(value, "Transpose")
    if transpose is None or list(transpose.attributes["perm"].as_ints()) != _SWAP_HEADS:
        return value, True
    value_BSHE = transpose.inputs[0]
    reshape = producer(value_BSHE, "Reshape")
    if reshape is None or value_BSHE is None or value_BSHE.shape is None:
        return value_BSHE, False
    value_BSD, shape = reshape.inputs[0], _numbers(reshape.inputs[1])
    heads, size = value_BSHE.shape[2], value_BSHE.shape[3]
    keeps = shape is not None and len(shape) == 4 and shape[:2] == [0, 0]
    if not keeps or value_BSD is None or value_BSD.shape is None or not isinstance(heads, int):
        return value_BSHE, False
    is_rows = value_BSD.shape.rank() == 3 and isinstance(size, int) and value_BSD.shape[2] == heads * size
    return (value_BSD, False) if is_rows else (value_BSHE, False)


def _merged(output_BHSE: ir.Value) -> ir.Value | None:
    """``[B, S, H * E]`` that alone is made of it."""
    transpose = only_consumer(output_BHSE)
    if not is_standard(transpose, "Transpose") or list(transpose.attributes["perm"].as_ints()) != _SWAP_HEADS:
        return None
    reshape = only_consumer(transpose.outputs[0])
    if not is_standard(reshape, "Reshape"):
        return None
    shape = _numbers(reshape.inputs[1])
    if shape is None or len(shape) != 3 or shape[:2] != [0, 0]:
        return None
    heads, size = _heads(output_BHSE), output_BHSE.shape[3] if output_BHSE.shape is not None else None
    is_width = isinstance(heads, int) and isinstance(size, int) and shape[2] == heads * size
    return reshape.outputs[0] if shape[2] == -1 or is_width else None


def _derive_past_length(graph: ir.Graph) -> bool:
    """Takes the length of the past from inputs that count tokens; whether the cache can then be appended to in
    place."""
    pasts = [value for value in graph.inputs if str(value.name).startswith(PAST)]
    counted = {value.name: value for value in graph.inputs if value.name in ("attention_mask", "input_ids")}
    if not pasts or len(counted) != 2:
        return False
    lengths = [node for past in pasts for node, _ in past.uses() if _is_length(node)]
    if lengths:
        ends = []
        for value in (counted["attention_mask"], counted["input_ids"]):
            shape = ir.node("Shape", [value], {"start": 1, "end": 2})
            shape.outputs[0].name = f"{value.name}.length"
            ends.append(shape)
        length = ir.node("Sub", [node.outputs[0] for node in ends])
        length.outputs[0].name = "past.length"
        for node in (*ends, length):
            node.outputs[0].dtype, node.outputs[0].shape = ir.DataType.INT64, ir.Shape([1])
        graph.insert_before(graph.node(0), [*ends, length])
        for node in lengths:
            node.outputs[0].replace_all_uses_with(length.outputs[0])
            graph.remove(node, safe=True)
    return all(_is_appended_to(past) for past in pasts)


def _is_appended_to(past: ir.Value) -> bool:
    """Whether the kernel alone reads a past, gives its present to the graph, and learns from its mask how much of the
    past is filled: a mask that is repeated over the keys does not say."""
    node, index = only_consumer(past), [index for _, index in past.uses()]
    if node is None or (node.domain, node.op_type) != (DOMAIN, OP_TYPE) or index[0] not in (4, 5):
        return False
    mask, present = node.inputs[3], node.outputs[index[0] - 3]
    if mask is None or mask.shape is None or not mask.shape.rank() or mask.shape[-1] == 1:
        return False
    return present.is_graph_output() and present.name == str(past.name).replace(PAST, PRESENT, 1)


def _is_length(node: ir.Node) -> bool:
    ends = [node.attributes[name].as_int() for name in ("start", "end") if name in node.attributes]
    return node.op_type == "Shape" and ends == [2, 3] and not node.outputs[0].is_graph_output()


def _numbers(value: ir.Value | None) -> list[int] | None:
    array = constant_of(value)
    return None if array is None else [int(number) for number in array.ravel()]


def _take_over(new: ir.Value, replaced: ir.Value) -> None:
    """``new`` stands for ``replaced`` under its name, which may be that of an output of the graph."""
    new.shape = replaced.shape
    new.dtype = replaced.dtype or ir.DataType.FLOAT
    new.name, replaced.name = replaced.name, f"{replaced.name}.unfused"
    new.metadata_props.update(replaced.metadata_props)
    replaced.replace_all_uses_with(new, replace_graph_outputs=True)
