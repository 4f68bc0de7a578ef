"""If, Loop and Scan. Loops are written out, so how often they run must be known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from intaglio.engines.coreml.mil import axis_of
from intaglio.engines.coreml.node import Node
from intaglio.engines.coreml.registry import converter

MAX_ROUNDS = 1024
# What loops, and loops in loops, come to when they are written out.
MAX_NODES = 1 << 16


@converter
def If(node: Node) -> Sequence[Var]:
    """Only the branch that is taken where the condition is known, else both in a conditional of MIL."""
    if node.is_constant(0):
        return node.inline(node.graph("then_branch" if bool(node.constant(0).item()) else "else_branch"))
    condition = node.input(0)
    if condition.rank:
        condition = mb.squeeze(x=condition)

    def branch(name: str) -> tuple[Var, ...]:
        with node.nested():
            # A block gives only what it makes.
            return tuple(mb.identity(x=var) for var in node.inline(node.graph(name)))

    try:
        made = mb.cond(
            pred=condition,
            _true_fn=lambda: branch("then_branch"),
            _false_fn=lambda: branch("else_branch"),
            name=node.name,
        )
    except ValueError:
        # Branches of different shapes: which is taken must be known.
        node.constant(0)
        raise
    return made if isinstance(made, (list, tuple)) else [made]


@converter
def Loop(node: Node) -> Sequence[Var]:
    body = node.graph("body")
    limit = int(node.constant(0).item()) if node.has_input(0) else None
    goes_on = node.optional(1)
    if goes_on is not None:
        node.constant(1)
    carried = [node.input(i) for i in range(2, node.input_count())]
    columns: list[list[Var]] = [[] for _ in range(len(body.outputs) - 1 - len(carried))]
    if limit is not None and limit > MAX_ROUNDS and _never_stops(body):
        node.fail(f"runs {limit} times; up to {MAX_ROUNDS} are written out for Core ML")
    number = 0
    while (limit is None or number < limit) and (goes_on is None or _known(node, goes_on)):
        if number == MAX_ROUNDS:
            node.fail(f"runs more than {MAX_ROUNDS} times, and each time is written out for Core ML")
        first = goes_on if goes_on is not None else mb.const(val=True)
        made = node.inline(body, [mb.const(val=np.int32(number)), first, *carried])
        _check_length(node)
        goes_on, carried = made[0], made[1 : 1 + len(carried)]
        for column, var in zip(columns, made[1 + len(carried) :], strict=True):
            column.append(var)
        number += 1
    if columns and not number:
        node.fail("never runs, and Core ML holds no empty tensors")
    return [*carried, *(mb.stack(values=column, axis=0) for column in columns)]


def _never_stops(body: ir.Graph) -> bool:
    """Whether the condition that a body gives is plainly the one it was given, or always true."""
    value = body.outputs[0]
    while (producer := value.producer()) is not None and producer.op_type == "Identity" and producer.inputs[0]:
        value = producer.inputs[0]
    known = value.const_value
    return value is body.inputs[1] or (known is not None and bool(known.numpy().all()))


def _check_length(node: Node) -> None:
    if node.nodes_so_far() > MAX_NODES:
        node.fail(f"is written out for Core ML round by round, which makes more than {MAX_NODES} nodes of the graph")


def _known(node: Node, condition: Var) -> bool:
    if condition.val is None:
        node.fail("runs as long as something holds that is known only when the model runs")
    return bool(np.asarray(condition.val).item())


@converter
def Scan(node: Node) -> Sequence[Var]:
    """Since opset 9: states first, then the inputs that are gone through."""
    if node.opset < 9:
        node.fail("is of an opset before 9, whose Scan has a batch")
    body, count = node.graph("body"), node.int("num_scan_inputs")
    given = [node.input(i) for i in range(len(node.inputs))]
    states, scanned = given[: len(given) - count], given[len(given) - count :]
    outputs = len(body.outputs) - len(states)
    axes = [axis_of(a, v.rank) for a, v in zip(node.ints("scan_input_axes", [0] * count), scanned, strict=True)]
    backwards = node.ints("scan_input_directions", [0] * count)
    rounds = scanned[0].shape[axes[0]]
    if not isinstance(rounds, (int, np.integer)) or rounds > MAX_ROUNDS:
        node.fail(f"goes through {rounds} steps; written out for Core ML they must be known and at most {MAX_ROUNDS}")
    rows: list[list[Var]] = [[] for _ in range(outputs)]
    for number in range(int(rounds)):
        places = [rounds - 1 - number if back else number for back in backwards]
        taken = [
            mb.gather(x=var, indices=np.int32(place), axis=axis)
            for var, place, axis in zip(scanned, places, axes, strict=True)
        ]
        made = node.inline(body, [*states, *taken])
        _check_length(node)
        states = made[: len(states)]
        for row, var in zip(rows, made[len(states) :], strict=True):
            row.append(var)
    out_axes, out_back = (
        node.ints("scan_output_axes", [0] * outputs),
        node.ints("scan_output_directions", [0] * outputs),
    )
    stacked = [
        mb.stack(values=row[::-1] if back else row, axis=axis_of(axis, row[0].rank + 1))
        for row, axis, back in zip(rows, out_axes, out_back, strict=True)
    ]
    return [*states, *stacked]
