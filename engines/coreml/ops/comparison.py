"""Comparisons, logic and the choice between two tensors."""

from __future__ import annotations

from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from intaglio.engines.coreml.mil import is_bool
from intaglio.engines.coreml.node import Node
from intaglio.engines.coreml.registry import converter


@converter
def Equal(node: Node) -> Var:
    x, y = node.input(0), node.input(1)
    if is_bool(x):
        return mb.logical_not(x=mb.logical_xor(x=x, y=y), name=node.name)
    return mb.equal(x=x, y=y, name=node.name)


@converter
def Greater(node: Node) -> Var:
    return mb.greater(x=node.input(0), y=node.input(1), name=node.name)


@converter
def GreaterOrEqual(node: Node) -> Var:
    return mb.greater_equal(x=node.input(0), y=node.input(1), name=node.name)


@converter
def Less(node: Node) -> Var:
    return mb.less(x=node.input(0), y=node.input(1), name=node.name)


@converter
def LessOrEqual(node: Node) -> Var:
    return mb.less_equal(x=node.input(0), y=node.input(1), name=node.name)


@converter
def And(node: Node) -> Var:
    return mb.logical_and(x=node.input(0), y=node.input(1), name=node.name)


@converter
def Or(node: Node) -> Var:
    return mb.logical_or(x=node.input(0), y=node.input(1), name=node.name)


@converter
def Xor(node: Node) -> Var:
    return mb.logical_xor(x=node.input(0), y=node.input(1), name=node.name)


@converter
def Not(node: Node) -> Var:
    return mb.logical_not(x=node.input(0), name=node.name)


@converter
def Where(node: Node) -> Var:
    return mb.select(cond=node.input(0), a=node.input(1), b=node.input(2), name=node.name)
