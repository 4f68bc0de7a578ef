"""Whether two values of a graph are sure to hold the same, as a compiler that joins equal nodes would find."""

from __future__ import annotations

import onnx_ir as ir

from intaglio.engines.lowering.fuse_nodes import constant_of, same_shape

# What may leave a value as it is: so it is taken, where its shape stays and all else that it reads is constant.
_KEEPING = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Cast", "Dropout", "Identity"),
        *("Concat", "Split", "Slice", "Expand", "Reshape", "Flatten", "Squeeze", "Unsqueeze"),
    }
)
# Of larger constants only the same one counts: that two hold the same is nothing to read weights for.
_SMALL = 64
_DEEPEST = 32


def same_value(a: ir.Value | None, b: ir.Value | None, depth: int = 0) -> bool:
    """Whether ``a`` and ``b`` are one value, or made of one in the same way. In doubt, as of a product, they are.

    ``depth`` is how many nodes lie between these and the values in question.
    """
    a, b = _source(a), _source(b)
    if a is b:
        return True
    if a is None or b is None or depth > _DEEPEST:
        return False
    first, second = a.producer(), b.producer()
    if first is None or second is None:
        return _is_same_constant(a, b)
    if a.index() != b.index() or len(first.inputs) != len(second.inputs):
        return False
    if first.op_identifier() != second.op_identifier() or _attributes(first) != _attributes(second):
        return False
    return all(same_value(x, y, depth + 1) for x, y in zip(first.inputs, second.inputs, strict=True))


def _source(value: ir.Value | None) -> ir.Value | None:
    """What a value is another name of."""
    while value is not None and (node := value.producer()) is not None:
        if node.domain or node.op_type not in _KEEPING:
            break
        read = [each for each in node.inputs if each is not None and each.const_value is None]
        keeps = node.op_type in ("Identity", "Cast", "Dropout") or (len(read) == 1 and same_shape(read[0], value))
        if len(read) != 1 or not keeps or value.index():
            break
        value = read[0]
    return value


def _is_same_constant(a: ir.Value, b: ir.Value) -> bool:
    one, other = a.const_value, b.const_value
    if one is None or other is None or max(one.size, other.size) > _SMALL or one.dtype != other.dtype:
        return False
    x, y = constant_of(a), constant_of(b)
    return x is not None and y is not None and x.shape == y.shape and x.tobytes() == y.tobytes()


def _attributes(node: ir.Node) -> dict[str, str]:
    return {name: str(attribute.value) for name, attribute in node.attributes.items()}
