"""Joins convolutions with the norm, activation and upsampling before them and the sum after them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from onnx_ir import convenience

from intaglio.engines.lowering.fuse_nodes import (
    constant_of,
    is_standard,
    only_consumer,
    producer,
    remove_unread,
    same_shape,
)
from intaglio.kernels.grouped_quant import DOMAIN

# Height times width of a kernel, as in kernels/cpu/conv.h.
_MAX_TAPS = 64


class FuseConvPass(ir.passes.InPlacePass):
    """Replaces float32 ``Conv`` of stride 1 by ``FusedConv`` of our own kernels, with what stands around it.

    1. Before it: ``GroupNormalization``, or a norm by statistics that come from elsewhere, with SiLU; a mask of rows;
       nearest upsampling to twice the size. After it: the sum with a value of the same shape.
    2. Statistics of groups, for those norms or written out in the graph, become ``GroupStatistics``.

    A value that is an output of the graph or that something else reads stays as it is, and what makes it is not
    joined. ``fast`` allows the kernels to round pixels and weights to bfloat16 or to use Winograd's transforms;
    without it only convolutions after upsampling are replaced, in which products are saved: onnxruntime's own are as
    good at the others.
    """

    def __init__(self, *, fast: bool) -> None:
        super().__init__()
        self._fast = fast

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        modified = False
        for node in list(graph):
            if node.op_type == "Div" and (statistics := _written_statistics(node)) is not None:
                _replace_statistics(graph, *statistics)
                modified = True
        for node in list(graph):
            if (
                is_standard(node, "Conv")
                and (fused := _Fusion.of(node)) is not None
                and (self._fast or fused.upsample == 2)
            ):
                fused.replace(graph, self._fast)
                modified = True
        if modified:
            graph.opset_imports.setdefault(DOMAIN, 1)
        return ir.passes.PassResult(model, modified=modified)


@dataclass
class _Norm:
    x: ir.Value
    # Either of them: a group norm's number of groups, or given statistics.
    groups: int | None
    mean: ir.Value | None
    variance: ir.Value | None
    weight: ir.Value
    bias: ir.Value
    epsilon: float


@dataclass
class _Fusion:
    """A convolution and the nodes that it takes in."""

    conv: ir.Node
    nodes: list[ir.Node]
    x: ir.Value
    pads: list[int]  # top, left, bottom, right
    upsample: int = 1
    row_mask: ir.Value | None = None
    norm: _Norm | None = None
    residual: ir.Value | None = None

    @classmethod
    def of(cls, conv: ir.Node) -> _Fusion | None:
        x, weight = conv.inputs[0], conv.inputs[1]
        if x is None or weight is None or x.dtype != ir.DataType.FLOAT or weight.const_value is None:
            return None
        if weight.is_graph_input() or weight.const_value.shape.rank() != 4:
            return None
        kernel = weight.const_value.shape.numpy()[2:]
        if math.prod(kernel) > _MAX_TAPS:
            return None
        attributes = conv.attributes
        plain = {"group": 1, "strides": (1, 1), "dilations": (1, 1), "auto_pad": "NOTSET"}
        if any(n in attributes and _plain(attributes[n].value) != value for n, value in plain.items()):
            return None
        pads = list(attributes["pads"].as_ints()) if "pads" in attributes else [0, 0, 0, 0]
        fusion = cls(conv, [conv], x, pads)
        if tuple(kernel) == (3, 3):
            fusion._take_upsampling()
        fusion._take_row_mask()
        fusion._take_norm()
        fusion._take_sum()
        return fusion

    def _take_upsampling(self) -> None:
        pads, nodes, value = list(self.pads), [], self.x
        cut = _only_use(value, "Slice")
        if cut is not None:
            ranges = [constant_of(v) for v in cut.inputs[1:4]]
            if any(r is None or r.size != 1 for r in ranges) or len(cut.inputs) != 4:
                return
            start, end, axis = (int(r.item()) for r in ranges if r is not None)
            if axis not in (2, 3) or start < 0 or end >= 0 or cut.inputs[0] is None:
                return
            # What is cut off is not what a pad puts there: a side has one of them.
            if (start and pads[axis - 2]) or pads[axis]:
                return
            pads[axis - 2] -= start
            pads[axis] += end
            nodes, value = [cut], cut.inputs[0]
        resize = _only_use(value, "Resize")
        if resize is None or resize.inputs[0] is None or not _doubles(resize):
            return
        self.nodes += [*nodes, resize]
        self.x, self.pads, self.upsample = resize.inputs[0], pads, 2

    def _take_row_mask(self) -> None:
        product = _only_use(self.x, "Mul")
        if product is None:
            return
        for value, column in (tuple(product.inputs), tuple(product.inputs)[::-1]):
            maker = None if column is None else column.producer()
            if value is None or maker is None or not is_standard(maker, "Unsqueeze"):
                continue
            mask, axes = maker.inputs[0], constant_of(maker.inputs[1])
            if mask is None or mask.shape is None or mask.shape.rank() != 1 or axes is None or axes.tolist() != [1]:
                continue
            if value.shape is None or value.shape.rank() != 4 or mask.dtype != ir.DataType.FLOAT:
                continue
            self.nodes += [product, maker]
            self.x, self.row_mask = value, mask
            return

    def _take_norm(self) -> None:
        product = _only_use(self.x, "Mul")
        if product is None:
            return
        for normed, gate in (tuple(product.inputs), tuple(product.inputs)[::-1]):
            sigmoid = None if gate is None else _only_use(gate, "Sigmoid")
            if normed is None or sigmoid is None or sigmoid.inputs[0] is not normed:
                continue
            if normed.is_graph_output() or {use.node for use in normed.uses()} != {product, sigmoid}:
                return
            found = _group_norm(normed) or _norm_by_statistics(normed)
            if found is not None:
                self.norm, norm_nodes = found
                self.nodes += [product, sigmoid, *norm_nodes]
                self.x = self.norm.x
            return

    def _take_sum(self) -> None:
        y = self.conv.outputs[0]
        uses = list(y.uses())
        if y.is_graph_output() or len(uses) != 1 or not is_standard(uses[0].node, "Add"):
            return
        total = uses[0].node
        other = total.inputs[1 - uses[0].idx]
        if (
            other is None
            or other.dtype not in (None, ir.DataType.FLOAT)
            or not _is_sum_of_one_shape(total.outputs[0], y, other)
        ):
            return
        self.nodes.append(total)
        self.residual = other

    def replace(self, graph: ir.Graph, fast: bool) -> None:
        """Puts ``FusedConv`` where the last of the nodes stands, and removes what nothing reads any more."""
        last = self.nodes[-1] if self.residual is not None else self.conv
        inputs: list[ir.Value | None] = [self.x, *self.conv.inputs[1:3]]
        inputs += [None] * (9 - len(inputs))
        attributes: dict[str, Any] = dict(
            zip(("pad_top", "pad_left", "pad_bottom", "pad_right"), self.pads, strict=True), upsample=self.upsample
        )
        added = []
        if self.norm is not None:
            mean, variance = self.norm.mean, self.norm.variance
            if mean is None or variance is None:
                assert self.norm.groups is not None
                statistics = _group_statistics(self.x, self.norm.groups, last.outputs[0].name or "")
                added.append(statistics)
                mean, variance = statistics.outputs
            inputs[3:7] = [mean, variance, self.norm.weight, self.norm.bias]
            attributes["epsilon"] = self.norm.epsilon
        inputs[7:9] = [self.row_mask, self.residual]
        attributes["fast"] = int(fast)
        node = ir.node("FusedConv", inputs, attributes, domain=DOMAIN, name=self.conv.name)
        old, new = last.outputs[0], node.outputs[0]
        new.dtype, new.shape = ir.DataType.FLOAT, old.shape
        convenience.replace_nodes_and_values(graph, last, [last], [*added, node], [old], [new])
        remove_unread(graph, [value for node in self.nodes for value in node.outputs])


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else value


def _only_use(value: ir.Value, op_type: str) -> ir.Node | None:
    """What makes the value, if it is of that type and one node alone reads the value."""
    return producer(value, op_type) if only_consumer(value) is not None else None


def _is_sum_of_one_shape(total: ir.Value, y: ir.Value, other: ir.Value) -> bool:
    """Whether neither is repeated. Inference does not name the rows of a convolution of a band: then the sum has the
    other's shape, and what of ``y`` is known agrees with it."""
    if same_shape(y, other):
        return True
    if y.shape is None or other.shape is None or y.shape.rank() != other.shape.rank() or not same_shape(total, other):
        return False
    known = [(m, n) for m, n in zip(y.shape, other.shape, strict=True) if isinstance(m, int) or m.value is not None]
    return all(m == n for m, n in known)


def _doubles(resize: ir.Node) -> bool:
    wanted = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    if any(n not in resize.attributes or resize.attributes[n].as_string() != value for n, value in wanted.items()):
        return False
    if len(resize.attributes) != len(wanted) or len(resize.inputs) != 3 or resize.inputs[1] is not None:
        return False
    scales = constant_of(resize.inputs[2])
    return scales is not None and scales.tolist() == [1, 1, 2, 2]


def _group_norm(normed: ir.Value) -> tuple[_Norm, list[ir.Node]] | None:
    node = normed.producer()
    if node is None or not is_standard(node, "GroupNormalization"):
        return None
    x, weight, bias = node.inputs
    if x is None or weight is None or bias is None or {v.dtype for v in (x, weight, bias)} != {ir.DataType.FLOAT}:
        return None
    epsilon = node.attributes["epsilon"].as_float() if "epsilon" in node.attributes else 1e-5
    return _Norm(x, node.attributes["num_groups"].as_int(), None, None, weight, bias, epsilon), [node]


def _chain(value: ir.Value | None, *op_types: str) -> list[ir.Node] | None:
    """The nodes that lead to ``value`` through their first inputs, the last first, if they are of these types."""
    nodes = []
    for op_type in op_types:
        node = None if value is None else value.producer()
        if node is None or not is_standard(node, op_type):
            return None
        nodes.append(node)
        value = node.inputs[0]
    return nodes


def _norm_by_statistics(normed: ir.Value) -> tuple[_Norm, list[ir.Node]] | None:
    """``(x - mean) * (weight / sqrt(variance + epsilon)) + bias`` with statistics per group, as exporters write it."""
    core = _chain(normed, "Add", "Mul", "Sub")
    if core is None:
        return None
    add, product, centered = core
    mean = _chain(centered.inputs[1], "Reshape", "Expand", "Unsqueeze")
    scale = _chain(product.inputs[1], "Div", "Unsqueeze")
    bias = _chain(add.inputs[1], "Unsqueeze")
    if mean is None or scale is None or bias is None:
        return None
    deviation = _chain(scale[0].inputs[1], "Reshape", "Expand", "Unsqueeze", "Sqrt", "Add")
    if deviation is None:
        return None
    epsilon = constant_of(deviation[-1].inputs[1])
    values = (centered.inputs[0], mean[-1].inputs[0], deviation[-1].inputs[0], scale[1].inputs[0], bias[0].inputs[0])
    x, mean_BG, variance_BG, weight_C, bias_C = values
    if epsilon is None or epsilon.size != 1 or any(v is None or v.dtype != ir.DataType.FLOAT for v in values):
        return None
    assert x is not None and weight_C is not None and bias_C is not None  # for mypy
    ranks = [None if v is None or v.shape is None else v.shape.rank() for v in values]
    if ranks != [4, 2, 2, 1, 1]:
        return None
    found = _Norm(x, None, mean_BG, variance_BG, weight_C, bias_C, float(epsilon.item()))
    return found, [*core, *mean, *scale, *bias, *deviation]


def _group_statistics(x: ir.Value, groups: int, prefix: str) -> ir.Node:
    node = ir.node("GroupStatistics", [x], {"num_groups": groups}, domain=DOMAIN, num_outputs=2)
    batch = None if x.shape is None else x.shape[0]
    for output, name in zip(node.outputs, ("mean", "variance"), strict=True):
        output.name, output.dtype = f"{prefix}.{name}", ir.DataType.FLOAT
        output.shape = ir.Shape([batch, groups])
    return node


def _written_statistics(div: ir.Node) -> tuple[ir.Value, int, ir.Node, ir.Node, list[ir.Node]] | None:
    """The activation, the number of groups, the two nodes that give mean and variance, and all nodes in between."""
    squares = _chain(div.inputs[0], "ReduceMean", "Reshape", "ReduceSumSquare", "Reshape", "Sub", "Reshape")
    width = _chain(div.inputs[1], "Cast", "Shape")
    if squares is None or width is None:
        return None
    distance = squares[4]
    means = _chain(distance.inputs[1], "ReduceMean", "Reshape", "ReduceMean")
    x, shape = squares[5].inputs[0], _chain(squares[3].inputs[1], "Shape")
    if means is None or shape is None or x is None or x.shape is None or x.shape.rank() != 4:
        return None
    if any(node.inputs[0] is not x for node in (means[2], width[1], shape[0])) or x.dtype != ir.DataType.FLOAT:
        return None
    ends = (width[1].attributes.get("start"), width[1].attributes.get("end"))
    if any(a is None or a.as_int() != n for a, n in zip(ends, (3, 4), strict=True)) or len(shape[0].attributes):
        return None
    by_group = [constant_of(node.inputs[1]) for node in (squares[1], squares[5], means[1])]
    if any(b is None or b.tolist() != [0, by_group[0][1], -1] for b in by_group):  # type: ignore[index]
        return None
    for node, axis, keepdims in ((squares[0], 2, 1), (squares[2], 3, 0), (means[0], 2, 1), (means[2], 3, 0)):
        axes = constant_of(node.inputs[1])
        if axes is None or axes.tolist() != [axis] or node.attributes["keepdims"].as_int() != keepdims:
            return None
    last = [_squeezed(means[0].outputs[0], {distance}), _squeezed(div.outputs[0], set())]
    mean, variance = last
    if mean is None or variance is None:
        return None
    assert by_group[0] is not None
    return x, int(by_group[0][1]), mean, variance, [mean, variance, div, *squares, *width, *means, *shape]


def _squeezed(value: ir.Value, readers: set[ir.Node]) -> ir.Node | None:
    """The ``Squeeze`` of the last axis that alone reads the value, besides ``readers``."""
    others = [use.node for use in value.uses() if use.node not in readers]
    if value.is_graph_output() or len(others) != 1 or not is_standard(others[0], "Squeeze"):
        return None
    axes = constant_of(others[0].inputs[1])
    return others[0] if axes is not None and axes.tolist() == [2] else None


def _replace_statistics(
    graph: ir.Graph, x: ir.Value, groups: int, mean: ir.Node, variance: ir.Node, nodes: list[ir.Node]
) -> None:
    first = min((mean, variance), key=list(graph).index)
    old = [mean.outputs[0], variance.outputs[0]]
    statistics = _group_statistics(x, groups, x.name or "")
    shapes = [value.shape for value in old]
    convenience.replace_nodes_and_values(graph, first, [mean, variance], [statistics], old, statistics.outputs)
    for value, shape in zip(statistics.outputs, shapes, strict=True):
        value.shape = shape if shape is not None else value.shape
    remove_unread(graph, [value for node in nodes for value in node.outputs])
