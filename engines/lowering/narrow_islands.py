"""Which nodes of a float32 graph stay float32 when all else of it is narrowed to float16 or bfloat16, and why.

What a value is follows from how it was made (``Kind``): positions and statistics do not fit these, an activation
does. Nodes are looked at in the order of computation, once.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Mapping
from functools import cache

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir

from intaglio.engines.lowering.fold_constants import MOVES, evaluate
from intaglio.engines.lowering.fuse_nodes import attribute, constant_of
from intaglio.kernels.grouped_quant import DOMAIN

# Constants that are computed of others are looked at up to a size, 256 MiB of float32.
_MOST_ELEMENTS = 2**26
_HALF = ir.DataType.FLOAT16


class Kind(enum.Enum):
    """What a float32 value is."""

    CONSTANT = "follows from constants alone"
    INDEX = "follows from integers, such as positions, alone"
    SMALL = "an index brought into a small range, such as a cosine"
    STATISTIC = "a sum or mean of activations, or computed of such"
    ROOT = "the root of a statistic, which activations are divided by"
    CENTRED = "an activation on the way to or from a statistic"
    BEYOND = "may hold what is too large for the dtype, since a constant did"
    TINY = "may hold what is too small for the dtype, since a constant did"
    PLAIN = "an activation"


_INDICES = {Kind.INDEX, Kind.SMALL}
_PRODUCTS = {
    "MatMul", "Gemm", "Conv", "ConvTranspose", "DeformConv", "Einsum", "Attention", "FusedMatMul", "MatMulNBits",
    "GroupedQuantMatMul",
}  # fmt: skip
_REDUCTIONS = {
    "ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp",
    "ReduceProd", "CumSum", "GlobalAveragePool",
}  # fmt: skip
# Their statistics are float32 inside.
_NORMS = {
    "LayerNormalization", "RMSNormalization", "GroupNormalization", "SimplifiedLayerNormalization",
    "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "BatchNormalization",
}  # fmt: skip
# Softmax; norms whose statistics have the dtype of the values; sums over steps; coordinates; roundings to integers.
_ISLANDS = {
    "Softmax", "LogSoftmax", "InstanceNormalization", "LpNormalization", "MeanVarianceNormalization", "LRN", "LpPool",
    "GlobalLpPool", "LSTM", "GRU", "RNN", "GridSample", "AffineGrid", "RoiAlign", "QuantizeLinear", "CastLike",
}  # fmt: skip
_BOUNDED = {"Sigmoid", "HardSigmoid", "Tanh", "Cos", "Sin", "Erf", "Sign", "Softsign", "Atan", "Log"}
# Beside a reduction, these are part of it: a square or an exponential overflows where their mean does not.
_INTO_REDUCTIONS = {"Pow", "Abs", "Exp"}
# Computed in float32 where integers are made of what they give.
_INTO_INTEGERS = {
    "Abs", "Add", "Ceil", "Clip", "Div", "Floor", "Identity", "Max", "Min", "Mul", "Neg", "Relu", "Reshape", "Round",
    "Sub", "Transpose",
}  # fmt: skip
_GUARDED = {"Sqrt", "Rsqrt", "Reciprocal", "Pow", "Log"}
_SUMS = {"Add", "Sub", "Where", "Concat"}
_UNHELD = {Kind.BEYOND, Kind.TINY}
# Why a node stays float32 that does so because of another.
FOLLOWS = "reads what such a node gives"
_BEYOND = "beyond "
_BIAS, _MASK = 2, 3  # among the inputs of Conv and Gemm, and of Attention
_ROOTS = {"Sqrt", "Pow", "Rsqrt"}
_CONTRIB = {
    "FusedMatMul", "MatMulNBits", "Gelu", "FastGelu", "BiasGelu", "QuickGelu", "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization", "SimplifiedLayerNormalization",
}  # fmt: skip


class Islands:
    """The nodes of a graph that stay float32, ``wide``, and what each float32 value is.

    ``kept`` has for nodes that could be of the narrow ``dtype`` but for a constant, an attribute or their op the reason
    why they are not, by name.
    """

    def __init__(self, graph: ir.Graph, opsets: Mapping[str, int], dtype: ir.DataType = _HALF) -> None:
        self.wide: set[ir.Node] = set()
        self.kept: dict[str, str] = {}
        self._opsets, self._kinds, self._dtype = opsets, dict[ir.Value, Kind](), dtype
        self._name = dtype.numpy().name
        self._lost: dict[ir.Value, str | None] = {}
        self._in_reductions = {node for each in graph if each.op_type in _REDUCTIONS for node in _squares(each)}
        self._into_integers = {node for each in graph if _makes_integers(each) for node in _before(each)}
        for value in graph.inputs:
            rank = value.shape.rank() if value.shape is not None else None
            self._kinds[value] = Kind.INDEX if rank is not None and rank <= 1 else Kind.PLAIN
        for node in graph:
            wide, kind = self._judge(node)
            if wide:
                self.wide.add(node)
            self._kinds.update(dict.fromkeys(node.outputs, kind))

    def kind(self, value: ir.Value) -> Kind:
        """What a float32 value is."""
        return self._kinds.get(value, Kind.CONSTANT)

    def signature(self, node: ir.Node) -> tuple[list[bool], list[bool]]:
        """Which inputs and outputs of a node may be narrow in place of float32."""
        inputs, outputs = self._signature(node)
        mask = _float_mask(node)
        if mask is not None and self.kind(mask) is Kind.BEYOND:
            inputs[_MASK] = False  # it may have a dtype of its own
        return inputs, outputs

    def _signature(self, node: ir.Node) -> tuple[list[bool], list[bool]]:
        opset = self._opsets.get("" if node.domain == "ai.onnx" else node.domain, 1)
        return _signature(node, opset, self._dtype)

    def _judge(self, node: ir.Node) -> tuple[bool, Kind]:
        """Whether a node stays float32, and what it gives."""
        floats = [v for v in node.inputs if v is not None and v.dtype == ir.DataType.FLOAT]
        kinds = {self.kind(value) for value in floats if value is not _float_mask(node)} - {Kind.CONSTANT}
        if _has_graphs(node):
            return True, Kind.PLAIN
        if not floats:
            return _from_integers(node, self)
        lost = self._unheld(node, floats)
        if not kinds and not lost:
            return self._of_constants(node, floats)
        takes = any(self.signature(node)[0])
        if not takes and node.op_type not in _ISLANDS and node.domain != DOMAIN:
            self._keep(node, f"its op takes no {self._name}")
        if kinds and kinds <= _INDICES and not (lost or _is_weighted(node)):
            bounded = node.op_type in _BOUNDED or Kind.INDEX not in kinds
            return True, Kind.SMALL if bounded else Kind.INDEX
        if not takes or node.op_type in _ISLANDS or _is_head(node) or node in self._into_integers:
            return True, Kind.PLAIN
        if node.op_type in _REDUCTIONS:
            if kinds & _UNHELD:
                return True, Kind.BEYOND if Kind.BEYOND in kinds else Kind.TINY
            return True, Kind.ROOT if node.op_type == "ReduceL2" else Kind.STATISTIC
        if lost or kinds & _UNHELD:
            return self._beyond(node, kinds, lost)
        if node.op_type in _PRODUCTS or node.op_type in _NORMS:
            return False, Kind.PLAIN
        if node.op_type in _BOUNDED:
            return bool(kinds - {Kind.PLAIN, *_INDICES}), Kind.PLAIN
        return _elementwise(node, kinds, node in self._in_reductions)

    def _of_constants(self, node: ir.Node, floats: list[ir.Value]) -> tuple[bool, Kind]:
        if node.op_type == "Gather" and node.inputs[0] in floats and constant_of(node.inputs[1]) is None:
            if all(use.node.domain == DOMAIN for use in node.outputs[0].uses()):
                return True, Kind.PLAIN  # scales of packed rows
            rank = floats[0].shape.rank() if floats[0].shape is not None else 0
            return (False, Kind.PLAIN) if rank > 1 else (True, Kind.INDEX)
        if node.op_type == "DequantizeLinear":
            return False, Kind.PLAIN
        if (node.domain, node.op_type) in ((DOMAIN, "GroupedQuantDequantize"), (DOMAIN, "GroupedQuantGather")):
            return True, Kind.PLAIN
        return True, Kind.CONSTANT

    def _beyond(self, node: ir.Node, kinds: set[Kind], lost: str | None) -> tuple[bool, Kind]:
        self._keep(node, lost or FOLLOWS)
        if node.op_type in _NORMS or node.op_type in _BOUNDED:
            return True, Kind.PLAIN
        if lost and Kind.BEYOND not in kinds and kinds & {Kind.STATISTIC, Kind.ROOT, Kind.CENTRED}:
            return _elementwise(node, kinds, in_reduction=False)  # the epsilon of a norm
        if lost and not kinds & _UNHELD and _goes_into_roots(node):
            return True, Kind.STATISTIC  # the same of a norm whose variance the graph is given
        if Kind.BEYOND in kinds or (lost and _BEYOND in lost):
            return True, Kind.BEYOND
        # Beside activations, what is tiny adds little to them.
        ends = node.op_type in _SUMS and kinds - {Kind.TINY} and not lost
        return True, Kind.PLAIN if ends else Kind.TINY

    def _unheld(self, node: ir.Node, floats: list[ir.Value]) -> str | None:
        """What the dtype would lose of the constants and attributes that a node reads."""
        if node.op_type == "BatchNormalization":
            epsilon = attribute(node, "epsilon", 1e-5)
            if np.float32(epsilon).astype(self._dtype.numpy()) < epsilon / 2:
                return f"has the epsilon {epsilon:g}, which {self._name} does not hold"
        lost = self._unheld_attribute(node)
        if lost:
            return lost
        for value in floats if node.domain != DOMAIN else []:
            lost = self._lost_of(value)
            if lost and not _is_harmless(node, value, lost):
                return f"reads {value.name!r}, which holds {lost}"
        if node.op_type == "GroupedQuantMatMul":
            return self._unheld_scales(node)
        if node.op_type == "Div" and (divisor := constant_of(node.inputs[1])) is not None:
            # Compilers multiply by the reciprocal.
            with np.errstate(divide="ignore"):
                lost = lost_in(1 / divisor.astype(np.float32), self._dtype)
            return f"divides by a constant whose reciprocal is {lost}" if lost else None
        return None

    def _unheld_scales(self, node: ir.Node) -> str | None:
        for value in node.inputs[2:4]:
            lost = None if value is None else self._lost_of(value)
            if value is not None and lost:
                return f"reads {value.name!r}, which holds {lost}"
        return None

    def _lost_of(self, value: ir.Value) -> str | None:
        if value not in self._lost:
            array = constant_of(value)
            node = value.producer()
            if array is not None:
                self._lost[value] = lost_in(array, self._dtype)
            elif node is not None and self.kind(value) is Kind.CONSTANT:
                self._lost[value] = self._lost_of_computed(value, node)
            else:
                self._lost[value] = None
            del array
            forget(value.const_value)
        return self._lost[value]

    def _lost_of_computed(self, value: ir.Value, node: ir.Node) -> str | None:
        if node.op_type in MOVES:
            lost = (self._lost_of(v) for v in node.inputs if v is not None and v.dtype == ir.DataType.FLOAT)
            return next((each for each in lost if each), None)
        array = self._computed(value)
        if array is None:
            return f"what is computed of constants when the model runs, and may be {_BEYOND}{_largest(self._dtype):g}"
        return lost_in(array, self._dtype)

    def _computed(self, value: ir.Value) -> np.ndarray | None:
        """The array of a value that follows from constants alone; None if it is too large or of another kind of op."""
        if (array := constant_of(value)) is not None:
            return array
        node = value.producer()
        if node is None:
            return None
        inputs = [None if v is None else self._computed(v) for v in node.inputs]
        if any(array is None for v, array in zip(node.inputs, inputs, strict=True) if v is not None):
            return None
        made = evaluate(node, inputs, self._opsets.get("", 1), _MOST_ELEMENTS)
        return None if made is None else made[node.outputs.index(value)]

    def _unheld_attribute(self, node: ir.Node) -> str | None:
        """What the dtype would lose of the numbers that an op takes as attributes."""
        if node.domain == DOMAIN or node.op_type in _NORMS or node.op_type == "Clip":
            return None  # float32 inside; a bound that no half reaches is none
        for name, each in node.attributes.items():
            lost = lost_in(np.array(each.value), self._dtype) if each.type == ir.AttributeType.FLOAT else None
            if lost:
                return f"has {name} {lost}"
        return None

    def of_filled(self, node: ir.Node) -> tuple[bool, Kind]:
        """Whether a node that makes one number stays float32, and what it gives."""
        value = attribute(node, "value", None)
        is_float = value is not None and value.dtype == ir.DataType.FLOAT
        lost = lost_in(value.numpy(), self._dtype) if is_float else None
        if lost:
            self._keep(node, f"makes {lost}")
            return True, Kind.BEYOND if _BEYOND in lost else Kind.TINY
        return True, Kind.SMALL

    def _keep(self, node: ir.Node, why: str) -> None:
        name = node.name or str(node.outputs[0].name)
        self.kept.setdefault(name, f"{node.op_type} {why}")


def _goes_into_roots(node: ir.Node) -> bool:
    """Whether a sum is there for its root alone."""
    users = [use.node for use in node.outputs[0].uses()]
    return node.op_type == "Add" and bool(users) and all(user.op_type in ("Sqrt", "Rsqrt") for user in users)


def _makes_integers(node: ir.Node) -> bool:
    """Whether a node makes integers or booleans of a float32."""
    value = node.inputs[0] if node.op_type == "Cast" and not node.domain else None
    made = node.outputs[0].dtype
    return value is not None and value.dtype == ir.DataType.FLOAT and made is not None and not made.is_floating_point()


def _before(node: ir.Node) -> list[ir.Node]:
    """A node and those before it that compute one by one what it reads."""
    found = [node]
    for each in found:
        for value in each.inputs:
            producer = value.producer() if value is not None else None
            if producer is not None and producer.op_type in _INTO_INTEGERS and producer not in found:
                found.append(producer)
    return found


def _is_harmless(node: ir.Node, constant: ir.Value, lost: str) -> bool:
    """Whether a constant that the dtype does not hold makes no difference to a node."""
    if _BEYOND in lost:
        # A bound that no half reaches is none, in halves as well.
        return node.op_type in ("Clip", "Max", "Min")
    if node.op_type in ("Conv", "ConvTranspose", "Gemm"):
        return len(node.inputs) > _BIAS and constant is node.inputs[_BIAS]
    if node.op_type not in _SUMS:
        return False
    # Little is added, unless it is what keeps a divisor, a root or a logarithm from zero.
    users = [use for output in node.outputs for use in output.uses()]
    return not any(u.node.op_type in _GUARDED or (u.node.op_type == "Div" and u.idx == 1) for u in users)


def lost_in(array: np.ndarray, dtype: ir.DataType) -> str | None:
    """What float16 or bfloat16 does not hold of a float32 constant, in words; None if it holds it.

    That is any number beyond the largest (65504 in float16), and one or all of so small numbers that nothing, or less
    than half of the digits, is left of them. Zeros, infinities and NaN are held, and so are small weights among larger
    ones.
    """
    if not array.size:
        return None
    limits, name = ml_dtypes.finfo(dtype.numpy()), dtype.numpy().name
    magnitude = np.abs(array.astype(np.float32, copy=False))
    finite = magnitude[np.isfinite(magnitude)]
    largest, normal = float(finite.max(initial=0.0)), float(limits.smallest_normal)
    if largest > float(limits.max):
        worst = array.flat[int(np.argmax(np.where(np.isfinite(magnitude), magnitude, 0)))]
        return f"{worst:g}, {_BEYOND}{float(limits.max):g}"
    if 0 < largest < normal:
        held = finite.astype(dtype.numpy()).astype(np.float32)
        # Twice what rounding does to numbers that are not subnormal.
        if np.any(np.abs(held - finite) > float(limits.eps) * finite):
            least = float(limits.smallest_subnormal)
            return f"{largest:g}, below {normal:.2g}, where {name} has few digits and below {least:.1g} none"
    return None


def _largest(dtype: ir.DataType) -> float:
    return float(ml_dtypes.finfo(dtype.numpy()).max)


def _elementwise(node: ir.Node, kinds: set[Kind], in_reduction: bool) -> tuple[bool, Kind]:
    """An op that moves values or computes them one by one."""
    if in_reduction:
        return True, Kind.CENTRED
    of_activations = kinds - {Kind.STATISTIC, Kind.ROOT, *_INDICES}
    if kinds & {Kind.STATISTIC, Kind.ROOT}:
        if not of_activations:
            is_root = Kind.ROOT in kinds or node.op_type in _ROOTS
            return True, Kind.ROOT if is_root else Kind.STATISTIC
        is_centred = Kind.ROOT not in kinds and node.op_type in ("Sub", "Add")
        return True, Kind.CENTRED if is_centred else Kind.PLAIN
    if Kind.CENTRED in kinds:
        return True, Kind.CENTRED
    return Kind.INDEX in kinds, Kind.PLAIN


def _from_integers(node: ir.Node, islands: Islands) -> tuple[bool, Kind]:
    """A node that reads no float32: what it gives, if that is float32, follows from integers or another float."""
    if node.op_type == "Cast" and node.inputs[0] is not None:
        source = node.inputs[0].dtype
        if source == ir.DataType.BOOL:
            return True, Kind.SMALL
        if source is not None and source.is_floating_point():
            return True, Kind.PLAIN
    if node.op_type in ("ConstantOfShape", "Constant"):
        return islands.of_filled(node)
    if node.domain == DOMAIN or node.op_type.startswith("Random"):
        return True, Kind.PLAIN
    return True, Kind.INDEX


def _is_weighted(node: ir.Node) -> bool:
    """Whether a product has a weight, and is not the outer one of positions and frequencies."""
    if node.op_type == "GroupedQuantMatMul" or node.op_type in ("Conv", "ConvTranspose", "MatMulNBits"):
        return True
    shapes = [v.shape for v in node.inputs if v is not None and node.op_type in _PRODUCTS and _is_constant(v)]
    return any(shape is None or (shape.rank() > 1 and 1 not in (shape[-1], shape[-2])) for shape in shapes)


def _is_constant(value: ir.Value) -> bool:
    producer = value.producer()
    if producer is None:
        return value.is_initializer() and not value.is_graph_input()
    floats = [v for v in producer.inputs if v is not None and v.dtype == ir.DataType.FLOAT]
    return bool(floats) and all(_is_constant(v) for v in floats)


def _float_mask(node: ir.Node) -> ir.Value | None:
    """What an attention adds to its scores."""
    is_masked = node.op_type == "Attention" and not node.domain and len(node.inputs) > _MASK
    mask = node.inputs[_MASK] if is_masked else None
    return mask if mask is not None and mask.dtype == ir.DataType.FLOAT else None


def _is_head(node: ir.Node) -> bool:
    """Whether a quantized product, which is float32 inside, makes an output: that of logits is not rounded."""
    return node.op_type == "GroupedQuantMatMul" and node.outputs[0].is_graph_output() and not node.outputs[0].uses()


def _squares(reduction: ir.Node) -> list[ir.Node]:
    """The nodes before a reduction that are part of it."""
    value = reduction.inputs[0]
    node = value.producer() if value is not None else None
    if node is None or node.domain:
        return []
    is_square = node.op_type == "Mul" and node.inputs[0] is node.inputs[1]
    return [node] if is_square or node.op_type in _INTO_REDUCTIONS else []


def _has_graphs(node: ir.Node) -> bool:
    return any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values())


def _signature(node: ir.Node, opset: int, dtype: ir.DataType) -> tuple[list[bool], list[bool]]:
    inputs, outputs = len(node.inputs), len(node.outputs)
    if node.domain == DOMAIN:
        narrow = node.op_type == "GroupedQuantMatMul"
        return [narrow, *[False] * (inputs - 1)], [narrow] * outputs
    if node.op_type == "DequantizeLinear" and node.inputs[0] is not None and _is_stored(node.inputs[0]):
        # Core ML's own op takes any float scale, whatever opset the graph is of.
        return [False, True, False][:inputs], [True]
    if node.domain == "com.microsoft" or node.op_type == "SimplifiedLayerNormalization":
        narrow = node.op_type in _CONTRIB and dtype == _HALF
        return [narrow] * inputs, [narrow] * outputs
    if node.domain not in ("", "ai.onnx"):
        return [False] * inputs, [False] * outputs
    formal = _formal(node.op_type, opset, dtype)
    if formal is None:
        return [False] * inputs, [False] * outputs
    return [_at(formal[0], i) for i in range(inputs)], [_at(formal[1], i) for i in range(outputs)]


def _is_stored(value: ir.Value) -> bool:
    return value.is_initializer() and not value.is_graph_input()


def _at(formal: tuple[bool, ...], i: int) -> bool:
    # The last one of an op may stand for any number.
    return formal[min(i, len(formal) - 1)] if formal else False


@cache
def _formal(op_type: str, opset: int, dtype: ir.DataType) -> tuple[tuple[bool, ...], tuple[bool, ...]] | None:
    """Which inputs and outputs of an op of ONNX's take the dtype, as its schema says."""
    try:
        schema = onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return None
    spelled = f"tensor({dtype.numpy().name})"
    takes = {c.type_param_str: spelled in c.allowed_type_strs for c in schema.type_constraints}
    read = {parameter.type_str for parameter in schema.inputs}
    inputs = tuple(takes.get(parameter.type_str, False) for parameter in schema.inputs)
    # What no input says, such as the dtype of a norm's statistics, does not change with the inputs.
    outputs = tuple(p.type_str in read and takes.get(p.type_str, False) for p in schema.outputs)
    return inputs, outputs


def forget(tensor: ir.TensorProtocol | None) -> None:
    """Lets go of the pages of a weight's file."""
    if isinstance(tensor, ir.ExternalTensor):
        with contextlib.suppress(BufferError):  # somebody reads it still
            tensor.release()
