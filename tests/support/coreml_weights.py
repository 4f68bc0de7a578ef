"""A small model of packed weights, stored beside it, and its Core ML packages in every form.

``python coreml_weights.py MODEL FOLDER`` writes them: in a process of its own, for a test of what differs from process
to process.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir

from intaglio.engines.coreml.conversion import convert
from intaglio.engines.coreml.package import write_package
from intaglio.kernels.grouped_quant import DOMAIN, GroupedQuantFormat, GroupedQuantRows, dequantize, pack_codes

TERNARY = GroupedQuantFormat(2, 128, 1)
AFFINE = GroupedQuantFormat(4, 64, 0)
VOCABULARY, WIDTH = 96, 256


def random_rows(rows: int, width: int, layout: GroupedQuantFormat, *, offsets: bool = False) -> GroupedQuantRows:
    """A random weight, of float16 scales; three codes where it is ternary."""
    rng = np.random.default_rng()
    top = 3 if layout == TERNARY else 1 << layout.bits
    groups = layout.groups_shape((rows, width))
    return GroupedQuantRows(
        pack_codes(rng.integers(0, top, (rows, width), np.uint8), layout.bits),
        rng.uniform(0.01, 0.05, groups).astype(np.float16),
        rng.normal(0, 0.1, groups).astype(np.float16) if offsets else np.zeros([], np.float16),
    )


def attributes(layout: GroupedQuantFormat) -> dict[str, int]:
    """Those of the nodes that read a weight."""
    return {"bits": layout.bits, "group_size": layout.group_size, "zero_point": layout.zero_point}


def initializer(name: str, array: np.ndarray) -> ir.Value:
    """A weight of a graph."""
    tensor = ir.tensor(array, name=name)
    return ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)


def parts(name: str, rows: GroupedQuantRows) -> list[ir.Value]:
    """Codes, scales and offsets as a graph holds them."""
    arrays = {"codes": rows.codes, "scales": rows.scales, "offsets": rows.offsets}
    return [initializer(f"{name}.{part}", array) for part, array in arrays.items()]


def write_tied_model(path: Path) -> np.ndarray:
    """Writes a model of ids ``[tokens]``: looks up 4-bit rows, two ternary layers, and the rows again as the head.

    Returns its table, ``[96, 96]``: the outputs for each id.
    """
    table = random_rows(VOCABULARY, WIDTH, AFFINE, offsets=True)
    layers = [random_rows(WIDTH, WIDTH, TERNARY) for _ in range(2)]
    embedding = parts("embedding", table)
    ids = ir.Value(name="ids", shape=ir.Shape(["tokens"]), type=ir.TensorType(ir.DataType.INT64))
    gathers = [ir.node("Gather", [value, ids]) for value in embedding]
    for node, value in zip(gathers, embedding, strict=True):
        node.outputs[0].type = ir.TensorType(value.dtype or ir.DataType.FLOAT)
    nodes = [
        *gathers,
        ir.node("GroupedQuantDequantize", [n.outputs[0] for n in gathers], attributes(AFFINE), domain=DOMAIN),
    ]
    weights = [*embedding]
    for i, rows in enumerate(layers):
        held = parts(f"layer{i}", rows)
        weights += held
        nodes.append(ir.node("GroupedQuantMatMul", [nodes[-1].outputs[0], *held], attributes(TERNARY), domain=DOMAIN))
    nodes.append(ir.node("GroupedQuantMatMul", [nodes[-1].outputs[0], *embedding], attributes(AFFINE), domain=DOMAIN))
    for node in nodes[len(gathers) :]:
        node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    nodes[-1].outputs[0].name = "logits"
    graph = ir.Graph(
        [ids], nodes[-1].outputs, nodes=nodes, initializers=weights, opset_imports={"": 23, DOMAIN: 1}, name="tied"
    )
    ir.save(ir.Model(graph, ir_version=11), path, external_data="weights.data", size_threshold_bytes=0)
    x = dequantize(table, AFFINE).astype(np.float64)
    for rows in layers:
        x = x @ dequantize(rows, TERNARY).T.astype(np.float64)
    return x @ dequantize(table, AFFINE).T.astype(np.float64)


def write_packages(model: Path, folder: Path) -> None:
    """The packages of a model in the four forms of weights."""
    from intaglio.engines.coreml.ops.packed_weights import ORDERS, packed_as

    for order in ORDERS:
        with packed_as(order):
            converted = convert(ir.load(model), model.name, dims={"tokens": VOCABULARY})
        write_package(converted, folder / f"{order}.mlpackage")


if __name__ == "__main__":
    write_packages(Path(sys.argv[1]), Path(sys.argv[2]))
