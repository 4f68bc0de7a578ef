"""Arithmetic and functions of one element."""

from __future__ import annotations

from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from intaglio.engines.coreml.node import Node
from intaglio.engines.coreml.registry import converter


@converter
def Add(node: Node) -> Var:
    return mb.add(x=node.input(0), y=node.input(1), name=node.name)


@converter
def Identity(node: Node) -> Var:
    return node.input(0)
