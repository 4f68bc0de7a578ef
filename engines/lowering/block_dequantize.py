"""Products and look-ups of grouped-quantized weights as DequantizeLinear of blocks, for targets without our kernels.

Shape suffixes: K inputs, N outputs, G groups of inputs, V rows of a table.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnx_ir import convenience

from intaglio.engines.lowering.fuse_nodes import called, is_standard
from intaglio.engines.lowering.graph_builder import GraphBuilder
from intaglio.engines.lowering.packed_blocks import SMALLEST_BLOCK, PackedBlocks
from intaglio.errors import CompileError
from intaglio.kernels.grouped_quant import DOMAIN, GroupedQuantFormat

_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_FLOAT_BITS = 32
_PARTS = 3  # codes, scales and offsets
# Relative error of a scale beyond that of rounding to the dtype: it lies near or below the smallest number.
_LOST = {ir.DataType.FLOAT16: 2.0**-10, ir.DataType.BFLOAT16: 2.0**-7}


class BlockDequantizePass(ir.passes.InPlacePass):
    """Replaces ``GroupedQuantMatMul`` and ``GroupedQuantGather`` of constant weights by standard operators.

    1. A weight becomes INT4 or INT8 and one scale a block in the dtype of the activations, which targets keep as they
       are; a product is ``MatMul(x, Transpose(DequantizeLinear(values, scales)))`` in that dtype.
    2. A group's offset, or what its zero point is off the middle, is added as the sum of x over the group times it: a
       second product, in float32, of one column a group.
    3. A weight becomes dense where that takes no more bits, the offsets of its groups counted in, or where its groups
       are too odd for blocks. A group's sum costs one multiplication for each of its weights' values, in float32: with
       many rows that is felt in small groups, and with few rows, which wait for weights, it is not.

    Weights are read when the graph is written. After the call ``notes`` say what the report should: which forms with
    sums of groups there are and what they take, weights that are dense, scales that their dtype does not hold. Raises
    CompileError for a weight that is not constant.
    """

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []
        self._blocks: dict[ir.Value, PackedBlocks] = {}
        self._told: set[str] = set()
        self._with_rests: list[tuple[PackedBlocks, ir.DataType]] = []

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        lower = {"GroupedQuantMatMul": self._product, "GroupedQuantGather": self._gather}
        # Without a format it is a plugin's node of the same name.
        nodes = [n for n in graph if n.domain == DOMAIN and n.op_type in lower and "bits" in n.attributes]
        for node in nodes:
            lower[node.op_type](graph, node)
        self.notes += self._forms()
        for op_type in lower:
            model.functions.pop((DOMAIN, op_type, ""), None)
        for name, value in list(graph.initializers.items()):
            if not value.uses() and not value.is_graph_output():
                del graph.initializers[name]
        return ir.passes.PassResult(model, modified=bool(nodes))

    def _packed(self, node: ir.Node) -> PackedBlocks:
        values = [value for value in node.inputs[1:] if value is not None]
        tensors = [
            value.const_value for value in values if value.const_value is not None and not value.is_graph_input()
        ]
        if len(tensors) != _PARTS:
            raise CompileError(f"{called(node)}: {node.op_type} of a weight that is computed; expected a constant one")
        codes = values[0]
        if codes not in self._blocks:
            stated = {name: node.attributes[name].as_int() for name in ("bits", "group_size", "zero_point")}
            name = str(codes.name).removesuffix(".codes")
            self._blocks[codes] = PackedBlocks(name, tensors[0], tensors[1], tensors[2], GroupedQuantFormat(**stated))
        return self._blocks[codes]

    def _is_dense(self, packed: PackedBlocks, dtype: ir.DataType) -> bool:
        in_blocks = packed.bits_per_weight(dtype.bitwidth, _FLOAT_BITS)
        is_dense = (packed.block < SMALLEST_BLOCK and not packed.is_per_row) or in_blocks >= dtype.bitwidth
        group = packed.format.group_size
        if is_dense:
            fits = packed.block >= SMALLEST_BLOCK or packed.is_per_row
            why = (
                f"{in_blocks:g} bits a weight in blocks are no fewer"
                if fits
                else f"its groups of {group} fit no blocks"
            )
            self._tell(packed, f"{packed.name}: dense {dtype.numpy().name}, as {why}")
        elif packed.has_rest:
            self._with_rests.append((packed, dtype))
        if not is_dense and dtype in _HALVES and (error := packed.rounding_of_scales(dtype)) > _LOST[dtype]:
            self._tell(
                packed,
                f"{packed.name}: {dtype.numpy().name} holds its scales with an error of up to {100 * error:.2g} %; "
                "compile in another dtype if that is too much",
            )
        return is_dense

    def _forms(self) -> list[str]:
        """What is said of weights whose groups have something added."""
        kinds: dict[tuple[str, int, int, float], set[str]] = {}
        for packed, dtype in self._with_rests:
            bits = packed.bits_per_weight(dtype.bitwidth, _FLOAT_BITS)
            kind = (packed.dtype.name, packed.format.bits, packed.format.group_size, bits)
            kinds.setdefault(kind, set()).add(packed.name)
        return [
            f"weights of {code} bits in groups of {group} as {name} and a sum a group, {bits:g} bits each: {len(names)}"
            for (name, code, group, bits), names in kinds.items()
        ]

    def _tell(self, packed: PackedBlocks, note: str) -> None:
        if packed.name not in self._told:
            self._told.add(packed.name)
            self.notes.append(note)

    def _product(self, graph: ir.Graph, node: ir.Node) -> None:
        x, output = node.inputs[0], node.outputs[0]
        if x is None or x.dtype is None:
            raise CompileError(f"{called(node)}: {node.op_type} of an input whose dtype is not known")
        packed, build = self._packed(node), GraphBuilder(graph, str(output.name))
        dtype = x.dtype
        is_dense = self._is_dense(packed, dtype)
        y = dense_product(build, packed, x, dtype) if is_dense else self._packed_product(build, packed, x, dtype)
        if packed.has_rest and not is_dense:
            wide = ir.DataType.FLOAT
            y = build.cast(build("Add", [build.cast(y, wide), _rest_term(build, packed, x)], wide), dtype)
        y.shape = output.shape
        build.replace(node, y)

    def _gather(self, graph: ir.Graph, node: ir.Node) -> None:
        indices, output = node.inputs[0], node.outputs[0]
        if indices is None or indices.shape is None:
            raise CompileError(f"{called(node)}: {node.op_type} of indices whose rank is not known")
        packed, build = self._packed(node), GraphBuilder(graph, str(output.name))
        dtype, replaced = _dtype_of_rows(node)
        is_dense = self._is_dense(packed, dtype)
        if is_dense:
            rows = build("Gather", [build.initializer(packed.dense(dtype)), indices], dtype, axis=0)
        else:
            rows = self._packed_rows(build, packed, indices, dtype)
        if packed.has_rest and not is_dense:
            zeros = [0] * indices.shape.rank()
            rests = build("Gather", [build.initializer(packed.rests(dtype)), indices], dtype, axis=0)
            in_groups = build("Reshape", [rows, build.int64([*zeros, packed.groups, packed.format.group_size])], dtype)
            added = build("Add", [in_groups, build("Unsqueeze", [rests, build.int64([-1])], dtype)], dtype)
            rows = build("Reshape", [added, build.int64([*zeros, packed.shape[1]])], dtype)
        rows.shape = ir.Shape([*indices.shape, packed.shape[1]])
        for cast in replaced:
            convenience.replace_all_uses_with(cast.outputs[0], output)
            graph.remove(cast, safe=True)
        output.dtype = dtype
        build.replace(node, rows)

    def _packed_product(self, build: GraphBuilder, packed: PackedBlocks, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        """``x`` times the weight's values and scales, without its rests."""
        return _product(build, packed, x, _dequantized(build, packed, dtype), dtype)

    def _packed_rows(
        self, build: GraphBuilder, packed: PackedBlocks, indices: ir.Value, dtype: ir.DataType
    ) -> ir.Value:
        """Rows of the table, likewise."""
        return build("Gather", [_dequantized(build, packed, dtype), indices], dtype, axis=0)


def dense_product(build: GraphBuilder, packed: PackedBlocks, x: ir.Value, dtype: ir.DataType) -> ir.Value:
    """``x`` times the whole weight, which is unpacked when the graph is written."""
    return _product(build, packed, x, build.initializer(packed.dense(dtype)), dtype)


def _product(
    build: GraphBuilder, packed: PackedBlocks, x: ir.Value, weight_NK: ir.Value, dtype: ir.DataType
) -> ir.Value:
    return build("MatMul", [x, build("Transpose", [weight_NK], dtype, packed.shape[::-1], perm=[1, 0])], dtype)


def _dequantized(build: GraphBuilder, packed: PackedBlocks, dtype: ir.DataType) -> ir.Value:
    values, scales = build.initializer(packed.values()), build.initializer(packed.block_scales(dtype))
    layout: dict[str, Any] = {"axis": 0} if packed.is_per_row else {"axis": 1, "block_size": packed.block}
    return build("DequantizeLinear", [values, scales], dtype, packed.shape, **layout)


def _rest_term(build: GraphBuilder, packed: PackedBlocks, x: ir.Value) -> ir.Value:
    """``[..., N]`` float32: the sums of x over each group times the rest of the group."""
    assert x.shape is not None, f"{x.name}: an activation has a rank"
    wide = ir.DataType.FLOAT
    shape = [0] * (x.shape.rank() - 1) + [packed.groups, packed.format.group_size]
    x_KG = build("Reshape", [build.cast(x, wide), build.int64(shape)], wide)
    sums = build("ReduceSum", [x_KG, build.int64([-1])], wide, keepdims=0)
    rests_NG = build.initializer(packed.rests(wide))
    rests_GN = build("Transpose", [rests_NG], wide, (packed.groups, packed.shape[0]), perm=[1, 0])
    return build("MatMul", [sums, rests_GN], wide)


def _dtype_of_rows(node: ir.Node) -> tuple[ir.DataType, list[ir.Node]]:
    """What gathered rows are used in, and the casts to that, where nothing reads them otherwise."""
    output = node.outputs[0]
    users = [user for user, _ in output.uses()]
    dtypes = {user.outputs[0].dtype for user in users if is_standard(user, "Cast")}
    if output.is_graph_output() or not all(is_standard(user, "Cast") for user in users) or len(dtypes) != 1:
        return ir.DataType.FLOAT, []
    dtype = dtypes.pop()
    is_narrow = dtype in _HALVES and not any(user.outputs[0].is_graph_output() for user in users)
    return (dtype, users) if is_narrow and dtype is not None else (ir.DataType.FLOAT, [])
