"""Einstein sums as transposes, reshapes and matrix products."""

from __future__ import annotations

import string
from collections.abc import Sequence

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from intaglio.engines.coreml.mil import Size, product, reshape, sizes
from intaglio.engines.coreml.node import Node


def einsum(node: Node, operands: Sequence[Var], equation: str) -> Var:
    """The sum that the equation says. Operands are multiplied from left to right, two at a time."""
    inputs, output = _labels(node, operands, equation)
    dims: dict[str, Size] = {}
    terms = []
    for x, labels in zip(operands, inputs, strict=True):
        x, labels = _diagonals(node, x, labels)
        for label, size in zip(labels, sizes(x), strict=True):
            # A 1 of an ellipsis broadcasts.
            if label not in dims or dims[label] == 1:
                dims[label] = size
        terms.append((x, labels))
    x, labels = terms[0]
    for i, (y, others) in enumerate(terms[1:], start=2):
        wanted = set(output).union(*(names for _, names in terms[i:]))
        x, labels = _pair(x, labels, y, others, wanted, dims)
    x, labels = _sum_out(x, labels, set(output))
    return _order(x, labels, output)


def _labels(node: Node, operands: Sequence[Var], equation: str) -> tuple[list[str], str]:
    left, arrow, right = equation.replace(" ", "").partition("->")
    inputs = left.split(",")
    if len(inputs) != len(operands):
        node.fail(f"has the equation {equation!r} for {len(operands)} inputs")
    free = [c for c in string.ascii_letters if c not in equation]
    spans = [x.rank - len(t.replace("...", "")) for x, t in zip(operands, inputs, strict=True) if "..." in t]
    names = "".join(free[: max(spans, default=0)])
    full = []
    for x, term in zip(operands, inputs, strict=True):
        count = x.rank - len(term.replace("...", ""))
        full.append(term.replace("...", names[len(names) - count :]))
    if arrow:
        return full, right.replace("...", names)
    # Without an arrow: the dims of the ellipsis, then what occurs once, in the order of the alphabet.
    once = sorted(c for c in set("".join(full)) if "".join(full).count(c) == 1 and c not in names)
    return full, names + "".join(once)


def _diagonals(node: Node, x: Var, labels: str) -> tuple[Var, str]:
    """A label that an operand has twice takes the diagonal of the two dims."""
    while len(set(labels)) < len(labels):
        label = next(c for c in labels if labels.count(c) > 1)
        first, second = labels.index(label), labels.index(label, labels.index(label) + 1)
        size = x.shape[first]
        if not isinstance(size, (int, np.integer)):
            node.fail("takes the diagonal of dims that vary")
        rest = [i for i in range(x.rank) if i not in (first, second)]
        x = mb.transpose(x=x, perm=[*rest, first, second]) if x.rank > 2 else x
        dims = [sizes(x)[i] for i in range(len(rest))]
        flat = reshape(x, [*dims, int(size) ** 2])
        begin, count = [0] * flat.rank, len(rest)
        stride = [1] * count + [int(size) + 1]
        x = mb.slice_by_index(
            x=flat, begin=begin, end=begin, stride=stride, begin_mask=[True] * flat.rank, end_mask=[True] * flat.rank
        )
        labels = "".join(labels[i] for i in rest) + label
    return x, labels


def _sum_out(x: Var, labels: str, wanted: set[str]) -> tuple[Var, str]:
    axes = [i for i, label in enumerate(labels) if label not in wanted]
    if axes:
        x = mb.reduce_sum(x=x, axes=axes, keep_dims=False)
    return x, "".join(label for label in labels if label in wanted)


def _order(x: Var, labels: str, wanted: str) -> Var:
    return x if labels == wanted else mb.transpose(x=x, perm=[labels.index(label) for label in wanted])


def _pair(x: Var, xs: str, y: Var, ys: str, wanted: set[str], dims: dict[str, Size]) -> tuple[Var, str]:
    """The product of two operands, summed over the labels that nothing needs any more."""
    x, xs = _sum_out(x, xs, wanted | set(ys))
    y, ys = _sum_out(y, ys, wanted | set(xs))
    batch = "".join(c for c in xs if c in ys and c in wanted)
    inner = "".join(c for c in xs if c in ys and c not in wanted)
    rows, columns = "".join(c for c in xs if c not in ys), "".join(c for c in ys if c not in xs)
    if not inner:
        return _outer(x, xs, y, ys, batch + rows + columns), batch + rows + columns
    own = [[dict(zip(t, sizes(v), strict=True))[c] for c in batch] for v, t in ((x, xs), (y, ys))]
    left = _group(_order(x, xs, batch + rows + inner), own[0], rows, inner, dims)
    right = _group(_order(y, ys, batch + inner + columns), own[1], inner, columns, dims)
    result = mb.matmul(x=left, y=right)
    made = [dims[c] for c in batch + rows + columns]
    if len(rows) == 1 and len(columns) == 1:
        return result, batch + rows + columns
    return reshape(result, made), batch + rows + columns


def _group(x: Var, batch: list[Size], first: str, second: str, dims: dict[str, Size]) -> Var:
    if len(first) == 1 and len(second) == 1:
        return x
    return reshape(x, [*batch, product([dims[c] for c in first]), product([dims[c] for c in second])])


def _outer(x: Var, xs: str, y: Var, ys: str, wanted: str) -> Var:
    def spread(v: Var, labels: str) -> Var:
        v = _order(v, labels, "".join(c for c in wanted if c in labels))
        missing = [i for i, c in enumerate(wanted) if c not in labels]
        if v.rank == 0:
            return v
        return mb.expand_dims(x=v, axes=missing) if missing else v

    return mb.mul(x=spread(x, xs), y=spread(y, ys))
