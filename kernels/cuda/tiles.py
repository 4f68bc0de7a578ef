"""Which tiles the kernels compute in, by shape and architecture (``sm``: 80, 86, 89, 90, 100, 120).

A tile must fit the registers of its warps and the shared memory of a block: 163 KiB on 80, 99 KiB on 86, 89 and 120,
227 KiB on 90 and 100; ``portable`` tiles, those of plugins, within 48 KiB. `tests/gpu` times others beside these.
"""

from __future__ import annotations

from dataclasses import dataclass

from intaglio.errors import InputError

# The rows that count as few: their product is bound by reading the codes.
FEW_ROWS = 16


@dataclass(frozen=True)
class MatmulTile:
    """A block computes ``rows`` x ``columns`` outputs, ``depth`` inputs at a time, in ``warps`` warps, with loads
    ``stages`` steps ahead.

    ``swapped``: the weights are the first operand. ``splits``: the blocks among which the inputs are divided. ``band``:
    the tiles of rows whose blocks run one after the other.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    swapped: bool = False
    splits: int = 1
    band: int = 8


@dataclass(frozen=True)
class AttentionTile:
    """A block computes ``queries`` (or ``keys``) of one head, and reads the others in steps of that many."""

    queries: int
    keys: int
    warps: int
    stages: int


def largest_depth(group_size: int, most: int, least: int = 16) -> int:
    """The largest power of two up to ``most`` that divides a group. Raises InputError if it is under ``least``, what a
    matrix instruction takes.
    """
    depth = min(group_size & -group_size, most)
    if depth < least:
        raise InputError(
            f"groups of {group_size} inputs do not suit the CUDA kernels, which take multiples of {least}; quantize "
            "with another group size, or use the CPU"
        )
    return depth


# The largest head that the attention plugins take, by the bytes of an element: more leave too few registers.
PLUGIN_LARGEST_HEAD = {2: 256, 4: 128}
# The inputs of a group that the ternary plugins take are a multiple of this; an int32 holds so many codes.
PLUGIN_GROUP, CODES_IN_WORD = 32, 16
# The tiles of the ternary plugins, of which TensorRT keeps the fastest. They fit 48 KiB, and none splits the inputs: a
# plugin has no memory to add up in.
PLUGIN_TILES_MANY_ROWS = (
    MatmulTile(128, 128, 64, 8, 2, swapped=True),
    MatmulTile(64, 128, 64, 4, 3, swapped=True),
    MatmulTile(128, 128, 32, 8, 3, swapped=True),
    MatmulTile(64, 64, 64, 4, 3),
)
PLUGIN_TILES_FEW_ROWS = (
    MatmulTile(16, 32, 128, 4, 4, swapped=True, band=1),
    MatmulTile(16, 64, 128, 4, 4, swapped=True, band=1),
    MatmulTile(16, 128, 64, 4, 4, swapped=True, band=1),
)


def ternary_tile(
    rows: int, outputs: int, inputs: int, group_size: int, scale_in_tile: bool, sm: int, multiprocessors: int = 64
) -> MatmulTile:
    """The tile of ``ternary_matmul_kernel`` for ``x`` ``[rows, inputs]`` and ``outputs`` outputs.

    ``scale_in_tile`` is the kernel's. Raises InputError where the groups do not suit.
    """
    step = largest_depth(group_size, 64)
    if rows > FEW_ROWS:
        return _tile_of_many_rows(rows, outputs, step, scale_in_tile, sm, multiprocessors)
    power_of_two = group_size & (group_size - 1) == 0
    # More than one group at a time reads longer runs of each row of codes.
    depth = 256 if scale_in_tile and power_of_two else largest_depth(group_size, 128)
    columns = 32
    blocks = -(-outputs // columns)
    # Two blocks for each multiprocessor: adding up the parts is another launch, which takes as long as a small product.
    wanted = -(-2 * multiprocessors // blocks)
    splits = max(1, min(wanted, inputs // (2 * depth), 16))
    return MatmulTile(16, columns, depth, 4, 4, swapped=True, splits=splits, band=1)


def _tile_of_many_rows(
    rows: int, outputs: int, step: int, scale_in_tile: bool, sm: int, multiprocessors: int
) -> MatmulTile:
    height = 32 if rows <= 32 else 64 if rows <= 64 else 128
    if height < 128:
        return MatmulTile(height, 64, step, 4, 4)
    if -(-rows // 128) * -(-outputs // 128) < multiprocessors:
        return MatmulTile(64, 64, step, 4, 4)
    if not scale_in_tile:
        # Each step has a product of its own beside the sum.
        return MatmulTile(128, 64, step, 8, 3)
    if sm in (90, 100):
        return MatmulTile(128, 128, step, 8, 4)
    return MatmulTile(128, 128, step, 8, 3)


def ternary_int8_tile(rows: int, group_size: int) -> MatmulTile:
    """The tile of ``ternary_int8_matmul_kernel``. Raises InputError where the groups do not suit."""
    depth = largest_depth(group_size, 128, least=32)
    if rows <= FEW_ROWS:
        return MatmulTile(16, 64, depth, 4, 4, band=1)
    return MatmulTile(64 if rows <= 64 else 128, 64, min(depth, 64), 8 if rows > 64 else 4, 3)


def width_of(head_dim: int) -> int:
    """The power of two, 16 or more, that holds a head. Raises InputError over 256."""
    if not 1 <= head_dim <= 256:
        raise InputError(f"the head dim is {head_dim}; flash attention takes 1 to 256")
    return max(16, 1 << (head_dim - 1).bit_length())


def attention_tile(head_dim: int, itemsize: int, sm: int, portable: bool = False) -> AttentionTile:
    """The tile of ``flash_attention_kernel`` for elements of ``itemsize`` bytes (2 or 4)."""
    width = width_of(head_dim)
    if itemsize == 4:
        # Products in three parts want registers: anything larger spills.
        return AttentionTile(32 if width <= 64 else 16, 16, 4 if width <= 128 else 8, 1)
    if width <= 64:
        # On 100 a third stage would spill.
        return AttentionTile(64, 64, 4, 2 if sm == 100 else 3)
    if width == 128:
        if portable:
            return AttentionTile(64, 32, 4, 2)
        # The matrix instructions of 90 and 100 read keys from shared memory; elsewhere 64 of them would spill.
        return AttentionTile(128, 64, 8, 2) if sm in (90, 100) else AttentionTile(128, 32, 8, 3)
    return AttentionTile(64, 16, 8, 1) if portable else AttentionTile(64, 32, 8, 2)


def key_gradient_tile(head_dim: int, itemsize: int, sm: int) -> AttentionTile:
    """The tile of ``attention_key_gradient_kernel``."""
    width = width_of(head_dim)
    if itemsize == 4:
        return AttentionTile(16, 16, 8 if width > 64 else 4, 1)
    if width <= 64:
        return AttentionTile(32, 64, 4, 2)
    # On 100 the addresses of loads ahead would spill.
    return AttentionTile(32, 64, 8, 1 if sm == 100 else 2) if width == 128 else AttentionTile(32, 32, 8, 1)


def query_gradient_tile(head_dim: int, itemsize: int) -> AttentionTile:
    """The tile of ``attention_query_gradient_kernel``."""
    width = width_of(head_dim)
    if itemsize == 4:
        return AttentionTile(16, 16, 8 if width > 64 else 4, 1)
    if width <= 64:
        return AttentionTile(64, 32, 4, 2)
    return AttentionTile(64, 32, 8, 2) if width == 128 else AttentionTile(32, 32, 8, 1)
