"""Weights that stay packed in the package: look-up tables of 2 bits, integers of 4 and 8 with a scale a block.

What the forms of a ternary weight hold for each group of values, beside 2 bits a value:

- ``lut``: a table of int8 that its scale makes floats, then the look-up. The order that is safe before iOS 26.
- ``lut-compact``: the look-up in one table of int8 for the whole weight, then the scale. The smallest.
- ``lut-fp16``: a table of floats.
- ``int4``: the scale alone, over 4 bits a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from intaglio.engines.coreml.deferred import deferred
from intaglio.engines.coreml.mil import cast, dtype_of
from intaglio.engines.coreml.node import Node
from intaglio.engines.coreml.registry import converter
from intaglio.kernels.grouped_quant import DOMAIN, GroupedQuantFormat, unpack_codes

ORDERS = ("lut", "lut-compact", "lut-fp16", "int4")


_SIGNED = {4: types.np_int4_dtype, 8: np.dtype(np.int8)}
_UNSIGNED = {4: types.np_uint4_dtype, 8: np.dtype(np.uint8)}
_ORDER = ContextVar("order", default=ORDERS[0])


@contextmanager
def packed_as(order: str) -> Iterator[None]:
    """Conversions inside write ternary weights in this order, one of ``ORDERS``.

    Values are float16 where the product is, or where that holds them exactly. Raises ValueError for another order.
    """
    if order not in ORDERS:
        raise ValueError(f"packed weights are written as one of {', '.join(ORDERS)}; found {order!r}")
    token = _ORDER.set(order)
    try:
        yield
    finally:
        _ORDER.reset(token)


@dataclass(frozen=True)
class PackedWeight:
    """A weight ``[out, in]``: ``read`` gives its codes as bytes, row by row, the first in the lowest bits.

    Scales and offsets are float32 ``[out, groups]``. ``w = scale * (code - zero_point) + offset``; no offsets are None.
    """

    read: Callable[[], np.ndarray]
    width: int
    bits: int
    zero_point: int
    scales: np.ndarray
    offsets: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """``[out, in]``."""
        return self.scales.shape[0], self.width


@converter("GroupedQuantMatMul", domain=DOMAIN)
def GroupedQuantMatMul(node: Node) -> Var:
    x = node.input(0)
    return packed_product(x, _shared_weight(node, 1, dtype_of(x)), node.name)


@converter("GroupedQuantGather", domain=DOMAIN)
def GroupedQuantGather(node: Node) -> Var:
    return cast(mb.gather(x=_shared_weight(node, 1, "fp32"), indices=node.input(0), axis=0), "fp32")


@converter("GroupedQuantDequantize", domain=DOMAIN)
def GroupedQuantDequantize(node: Node) -> Var:
    if node.is_constant(0):
        return cast(_shared_weight(node, 0, "fp32"), "fp32")
    return _dequantize_at_run_time(node)


def packed_product(x: Var, weight: Var, name: str) -> Var:
    """``x`` times the transposed weight ``[out, in]``."""
    if x.rank <= 3:
        return mb.linear(x=x, weight=weight, name=name)
    return cast(mb.matmul(x=x, y=cast(weight, dtype_of(x)), transpose_y=True, name=name), dtype_of(x))


def packed_weight(node: Node, weight: PackedWeight, dtype: str) -> Var:
    """The weight as a constant that Core ML unpacks; ``dtype`` is that of the product it is for."""
    order, narrow = _ORDER.get(), dtype == "fp16"
    has_table = weight.bits == 2 and order != "int4"
    if weight.offsets is not None:
        return _affine_table(node, weight, narrow) if has_table else _affine(node, weight, narrow)
    return _table(node, weight, order, narrow) if has_table else _scaled(node, weight, narrow)


def _shared_weight(node: Node, first: int, dtype: str) -> Var:
    """The weight whose codes, scales and offsets are the inputs from ``first`` on; one for all that read it."""
    key = (_ORDER.get(), dtype, *(node.int(name) for name in ("bits", "group_size", "zero_point")))
    return node.shared(range(first, first + 3), key, lambda: packed_weight(node, _read(node, first), dtype))


def _read(node: Node, first: int) -> PackedWeight:
    layout = GroupedQuantFormat(node.int("bits"), node.int("group_size"), node.int("zero_point"))
    scales, offsets = node.constant(first + 1), node.constant(first + 2)
    return PackedWeight(
        read=_codes(node, first),
        width=scales.shape[1] * layout.group_size,
        bits=layout.bits,
        zero_point=layout.zero_point,
        scales=scales.astype(np.float32),
        offsets=offsets.astype(np.float32) if offsets.ndim else None,
    )


def _codes(node: Node, i: int) -> Callable[[], np.ndarray]:
    """What reads the bytes of an input."""
    stored = node.stored(i)
    if stored is not None and stored.dtype == ir.DataType.UINT8:
        return stored.read
    codes = np.asarray(node.constant(i), np.uint8).ravel()
    return lambda: codes


def _table(node: Node, weight: PackedWeight, order: str, narrow: bool) -> Var:
    """2 bits a value, looked up."""
    entries = (np.arange(4) - weight.zero_point).astype(np.int8)
    values = entries.astype(np.float32) * weight.scales[..., None]
    dtype = np.float16 if narrow or _is_exact(values) else np.float32
    scales = _held(node, weight.scales, dtype)
    indices = deferred(weight.shape, types.np_uint2_dtype, 2, weight.read)
    if order == "lut-fp16":
        return mb.constexpr_lut_to_dense(indices=indices, lut=_held(node, values, dtype)[..., None])
    if order == "lut-compact":
        dense = mb.constexpr_lut_to_dense(indices=indices, lut=entries.reshape(1, 1, 4, 1))
        return mb.constexpr_blockwise_shift_scale(data=dense, scale=scales)
    tables = np.broadcast_to(entries[:, None], (*scales.shape, 4, 1))
    lut = mb.constexpr_blockwise_shift_scale(data=np.ascontiguousarray(tables), scale=scales[..., None, None])
    return mb.constexpr_lut_to_dense(indices=indices, lut=lut)


def _scaled(node: Node, weight: PackedWeight, narrow: bool) -> Var:
    """4 or 8 bits a value, times a scale."""
    entries = np.arange(1 << weight.bits) - weight.zero_point
    # Every product of a code and a float16 would have to be a float16 as well.
    values = entries.astype(np.float32) * weight.scales[..., None] if weight.bits == 2 else None
    dtype = np.float16 if narrow or (values is not None and _is_exact(values)) else np.float32
    scales = _held(node, weight.scales, dtype)
    bits = max(weight.bits, 4)
    if -(1 << bits - 1) <= entries.min() and entries.max() < 1 << bits - 1:
        data = deferred(weight.shape, _SIGNED[bits], bits, _less_zero_point(weight))
        return mb.constexpr_blockwise_shift_scale(data=data, scale=scales)
    data = deferred(weight.shape, _UNSIGNED[bits], bits, weight.read)
    held = {"offset": np.full(scales.shape, weight.zero_point, _UNSIGNED[bits])} if weight.zero_point else {}
    return mb.constexpr_blockwise_shift_scale(data=data, scale=scales, **held)


def _less_zero_point(weight: PackedWeight) -> Callable[[], np.ndarray]:
    """Reads codes less the zero point, in two's complement: of 4 bits those of 2 bits, the others of their own."""
    if weight.bits == 2:
        return lambda: _widened(weight.read(), weight.zero_point)
    # The zero point is half of the range: subtracting it turns the highest bit over.
    highest = np.uint8(0x88 if weight.bits == 4 else 0x80)
    return lambda: weight.read() ^ highest


def _widened(codes: np.ndarray, zero_point: int) -> np.ndarray:
    """Bytes of 2-bit codes to twice as many bytes of 4-bit ones, less the zero point."""
    fields = (np.arange(256)[:, None] >> np.arange(0, 8, 2) & 3) - zero_point & 15
    pairs = (fields[:, ::2] | fields[:, 1::2] << 4).astype(np.uint8)
    return pairs[codes].reshape(-1)


def _affine(node: Node, weight: PackedWeight, narrow: bool) -> Var:
    """4 or 8 bits a value, times a scale, with an offset of each group.

    MIL takes an offset from the code: ``scale * (code - (zero_point - offset / scale))``.
    """
    assert weight.offsets is not None
    # A group of equal values has no scale: its offset is one, of codes that are all 1.
    flat = weight.scales == 0
    scales = np.where(flat, weight.offsets, weight.scales)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        offsets = np.where(flat, 0.0, weight.zero_point - weight.offsets.astype(np.float64) / weight.scales)
    fits = np.abs(offsets).max() <= np.finfo(np.float16).max
    dtype = np.float16 if narrow and fits else np.float32
    read = _with_ones(weight, flat) if flat.any() else weight.read
    bits = max(weight.bits, 4)
    data = deferred(
        weight.shape, _UNSIGNED[bits], bits, read if weight.bits > 2 else lambda: _widened(read(), zero_point=0)
    )
    return mb.constexpr_blockwise_shift_scale(
        data=data, scale=_held(node, scales, dtype), offset=_held(node, offsets, dtype)
    )


def _with_ones(weight: PackedWeight, groups: np.ndarray) -> Callable[[], np.ndarray]:
    """Reads codes, those of some groups as 1."""
    ones = {2: 0b01010101, 4: 0b00010001, 8: 1}[weight.bits]
    return lambda: np.where(groups[..., None], np.uint8(ones), weight.read().reshape(*groups.shape, -1)).reshape(-1)


def _affine_table(node: Node, weight: PackedWeight, narrow: bool) -> Var:
    """2 bits a value, looked up in a table of floats, which holds an offset as well."""
    assert weight.offsets is not None
    entries = (np.arange(4) - weight.zero_point).astype(np.float32)
    values = entries * weight.scales[..., None] + weight.offsets[..., None]
    lut = _held(node, values, np.float16 if narrow or _is_exact(values) else np.float32)
    indices = deferred(weight.shape, types.np_uint2_dtype, 2, weight.read)
    return mb.constexpr_lut_to_dense(indices=indices, lut=lut[..., None])


def _is_exact(values: np.ndarray) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.array_equal(values.astype(np.float16).astype(np.float32), values))


def _held(node: Node, values: np.ndarray, dtype: type[np.floating]) -> np.ndarray:
    """The values in a dtype that must hold them. Raises CompileError."""
    with np.errstate(over="ignore"):
        held = values.astype(dtype)
    lost = np.isinf(held) & np.isfinite(values)
    if lost.any():
        node.fail(
            f"has a packed weight with the scale or offset {values[lost].flat[0]:g}, which float16 does not hold",
            "export the bundle in float32, and compile it without --dtype",
        )
    return held


def _dequantize_at_run_time(node: Node) -> Var:
    """Codes that are no constants: unpacked by dividing, since MIL shifts no bits."""
    bits, group_size, zero_point = node.int("bits"), node.int("group_size"), node.int("zero_point")
    codes, scales, offsets = (node.input(i) for i in range(3))
    fields = [
        mb.mod(x=mb.floor_div(x=codes, y=np.int32(1 << shift)), y=np.int32(1 << bits)) for shift in range(0, 8, bits)
    ]
    rows, width = (
        int(codes.shape[0]) if isinstance(codes.shape[0], (int, np.integer)) else -1,
        int(codes.shape[1]) * 8 // bits,
    )
    groups = mb.reshape(x=mb.stack(values=fields, axis=2), shape=[rows, width // group_size, group_size])
    values = mb.cast(x=mb.sub(x=groups, y=np.int32(zero_point)), dtype="fp32")
    weight = mb.mul(x=values, y=mb.expand_dims(x=cast(scales, "fp32"), axes=[2]))
    if offsets.rank:
        weight = mb.add(x=weight, y=mb.expand_dims(x=cast(offsets, "fp32"), axes=[2]))
    return mb.reshape(x=weight, shape=[rows, width], name=node.name)


@converter("MatMulNBits", domain="com.microsoft")
def MatMulNBits(node: Node) -> Var:
    width, rows, bits, block = node.int("K"), node.int("N"), node.int("bits", 4), node.int("block_size")
    if bits not in (2, 4, 8) or width % block:
        node.fail(
            f"has codes of {bits} bits in blocks of {block} for {width} inputs; expected 2, 4 or 8 that fill them"
        )
    if node.optional(4) is not None:
        node.fail("has groups in an order of their own (g_idx), which are not converted")
    scales = node.constant(2).astype(np.float32).reshape(rows, -1)
    zero_points, offsets = _zero_points(node, scales, bits), None
    if isinstance(zero_points, np.ndarray):
        offsets, zero_points = -zero_points * scales, 0
    weight = PackedWeight(_codes(node, 1), width, bits, zero_points, scales, offsets)
    x, bias = node.input(0), node.optional(5)
    y = packed_product(x, packed_weight(node, weight, dtype_of(x)), node.name)
    return y if bias is None else mb.add(x=y, y=bias)


def _zero_points(node: Node, scales: np.ndarray, bits: int) -> int | np.ndarray:
    """One zero point for all groups, or one for each, float32 in the shape of the scales."""
    if node.optional(3) is None:
        return 1 << bits - 1
    given = node.constant(3)
    if given.dtype != np.uint8:
        return given.astype(np.float32).reshape(scales.shape)
    found = unpack_codes(given.reshape(scales.shape[0], -1), bits)[:, : scales.shape[1]]
    return int(found.flat[0]) if (found == found.flat[0]).all() else found.astype(np.float32)
