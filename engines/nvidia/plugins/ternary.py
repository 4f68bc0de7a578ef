"""The ternary matmul as two plugins, one for many rows and one for few: what is fast for the one is slow for the other.

Their inputs are ``x`` ``[..., in]`` float16 or bfloat16, ``codes`` int32 ``[out, in / 16]``, which are the bytes of the
format four by four, and ``scales`` ``[out, in / group_size]``; the output is ``[..., out]`` in the dtype of ``x``. The
zero point of a code is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from intaglio.engines.nvidia.plugins.plugin import Attributes, Launch, Plugin
from intaglio.kernels.cuda.ptx import plugin_kernel
from intaglio.kernels.cuda.tiles import (
    CODES_IN_WORD,
    PLUGIN_GROUP,
    PLUGIN_TILES_FEW_ROWS,
    PLUGIN_TILES_MANY_ROWS,
    MatmulTile,
)


class _Ternary(Plugin):
    INPUTS = ("x", "codes", "scales")
    ATTRIBUTES: ClassVar[dict[str, type[np.generic]]] = {"group_size": np.int32}
    TILES: ClassVar[tuple[MatmulTile, ...]]

    def output(self, inputs: Sequence[Any], attributes: Attributes) -> Any:
        x, codes, *_ = inputs
        result = x.like()
        result.shape_expr[-1] = codes.shape_expr[0]
        return result

    def types(self, inputs: Sequence[Any], attributes: Attributes) -> str:
        x, codes, scales = inputs
        names = [self._name(x), "INT32", self._name(scales), self._name(x)]
        inside, group = codes.shape[1] * CODES_IN_WORD, attributes["group_size"]
        if names[0] == "FP32" or codes.dtype != self.trt.int32:
            raise ValueError(f"{self.NAME}: x is {x.dtype} and codes {codes.dtype}; expected half precision and INT32")
        if group < PLUGIN_GROUP or group % PLUGIN_GROUP or inside != scales.shape[1] * group:
            raise ValueError(
                f"{self.NAME}: {inside} inputs in {scales.shape[1]} groups of {group}; expected groups of a multiple "
                f"of {PLUGIN_GROUP} that fill them"
            )
        return ", ".join(names)

    def tactics(self, inputs: Sequence[Any], attributes: Attributes) -> Sequence[int]:
        return range(1, len(self.TILES) + 1)

    def launch(self, inputs: Sequence[Any], output: Any, attributes: Attributes, tactic: int) -> Launch:
        from intaglio.kernels.cuda.variants import ternary_plugin_variant

        x, codes, scales = inputs
        columns, inside = codes.shape[0], codes.shape[1] * CODES_IN_WORD
        dtype, scale_dtype = self._name(x).lower(), self._name(scales).lower()
        tile = self.TILES[tactic - 1]
        variant = ternary_plugin_variant(tile, columns, inside, attributes["group_size"], dtype, scale_dtype)
        rows = self.trt.plugin.ShapeExpr(1)
        for size in list(x.shape_expr)[:-1]:
            rows *= size
        tiles = self.trt.plugin.cdiv(rows, tile.rows) * -(-columns // tile.columns)
        return Launch(plugin_kernel(variant), (tiles, 1, 1), (rows, columns, inside))

    def _name(self, tensor: Any) -> str:
        trt = self.trt
        names = {trt.float16: "FP16", trt.bfloat16: "BF16", trt.float32: "FP32"}
        if tensor.dtype not in names:
            raise ValueError(f"{self.NAME}: an input is {tensor.dtype}, expected one of {', '.join(names.values())}")
        return names[tensor.dtype]


class ManyRows(_Ternary):
    """``GroupedQuantMatMul``, under the name that it has in a bundle."""

    NAME = "GroupedQuantMatMul"
    TILES = PLUGIN_TILES_MANY_ROWS


class FewRows(_Ternary):
    """``GroupedQuantMatMulFewRows``: any number of rows, and fast up to 16."""

    NAME = "GroupedQuantMatMulFewRows"
    TILES = PLUGIN_TILES_FEW_ROWS
