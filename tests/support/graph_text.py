"""A graph as text, one line a node, so that a refactor with no intended change shows an empty diff."""

from __future__ import annotations

import onnx_ir as ir


def graph_text(model: ir.Model) -> str:
    """Inputs, initializers, nodes, outputs and the bodies of functions, in order."""
    lines = [f"input {_value(v)}" for v in model.graph.inputs]
    lines += [f"initializer {_value(v)}" for v in model.graph.initializers.values()]
    lines += _nodes(model.graph)
    lines += [f"output {_value(v)}" for v in model.graph.outputs]
    for function in model.functions.values():
        names = ", ".join(str(v.name) for v in function.inputs)
        lines += [f"function {function.domain}.{function.name}({names})", *_nodes(function.graph)]
    return "\n".join(lines) + "\n"


def _nodes(graph: ir.Graph) -> list[str]:
    lines = []
    for node in graph:
        attributes = ", ".join(f"{n}={_attribute(a)}" for n, a in sorted(node.attributes.items()))
        outputs = ", ".join(str(v.name) for v in node.outputs)
        inputs = ", ".join(str(v.name) if v is not None else "-" for v in node.inputs)
        domain = f"{node.domain}." if node.domain else ""
        lines.append(f"{outputs} = {domain}{node.op_type}({inputs}){f' {{{attributes}}}' if attributes else ''}")
    return lines


def _value(value: ir.Value) -> str:
    shape = [d if isinstance(d, int) else d.value for d in value.shape] if value.shape is not None else "?"
    return f"{value.name} {value.dtype.name if value.dtype else '?'} {shape}"


def _attribute(attribute: ir.Attr) -> str:
    if attribute.is_ref():
        return f"@{attribute.ref_attr_name}"
    value = attribute.value
    if attribute.type == ir.AttributeType.TENSOR:
        return f"{value.dtype.name} {value.numpy().tolist()}"
    return f"{value:.9g}" if isinstance(value, float) else str(value)
