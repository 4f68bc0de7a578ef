"""Flash attention for what TensorRT's own fused attention lacks: a softcap, float32, odd head dims.

Two plugins, with a mask and without; ``q`` is ``[B, H, L, D]``, ``k`` and ``v`` ``[B, S, T, D]``, all of one float
type, and H a multiple of S. A mask is ``[B or 1, H or 1, L or 1, T]``: booleans (true: seen), or numbers of that
type to add.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from intaglio.engines.nvidia.plugins.plugin import Attributes, Launch, Plugin
from intaglio.kernels.cuda.ptx import plugin_kernel
from intaglio.kernels.cuda.tiles import PLUGIN_LARGEST_HEAD


class FlashAttention(Plugin):
    """``FlashAttention(q, k, v)``; attributes scale, softcap (0 for none) and is_causal (query i sees keys 0
    to i)."""

    NAME = "FlashAttention"
    INPUTS: ClassVar[tuple[str, ...]] = ("q", "k", "v")
    ATTRIBUTES: ClassVar[dict[str, type[np.generic]]] = {
        "scale": np.float32,
        "softcap": np.float32,
        "is_causal": np.int32,
    }

    def output(self, inputs: Sequence[Any], attributes: Attributes) -> Any:
        return inputs[0].like()

    def types(self, inputs: Sequence[Any], attributes: Attributes) -> str:
        trt = self.trt
        q, k, v, *mask = inputs
        names = {trt.float16: "FP16", trt.bfloat16: "BF16", trt.float32: "FP32"}
        dtypes = {each.dtype for each in (q, k, v)}
        if len(dtypes) > 1 or q.dtype not in names:
            raise ValueError(f"{self.NAME}: q, k and v are {sorted(map(str, dtypes))}; expected one float type")
        if not 1 <= q.shape[3] <= PLUGIN_LARGEST_HEAD[4 if q.dtype == trt.float32 else 2]:
            raise ValueError(f"{self.NAME}: has heads of {q.shape[3]} in {names[q.dtype]}, which no kernel takes")
        if mask and mask[0].dtype not in (trt.bool, q.dtype):
            raise ValueError(f"{self.NAME}: the mask is {mask[0].dtype}, expected booleans or {q.dtype}")
        of_mask = ["BOOL" if each.dtype == trt.bool else names[each.dtype] for each in mask]
        return ", ".join([*[names[q.dtype]] * 3, *of_mask, names[q.dtype]])

    def tactics(self, inputs: Sequence[Any], attributes: Attributes) -> Sequence[int]:
        return (1,)

    def launch(self, inputs: Sequence[Any], output: Any, attributes: Attributes, tactic: int) -> Launch:
        from intaglio.kernels.cuda.variants import attention_plugin_variant

        trt = self.trt
        q, k, _, *mask = inputs
        batch, heads, length, _ = q.shape_expr
        shared, keys = k.shape_expr[1], k.shape_expr[2]
        numbers = [heads, shared, length, keys]
        for each in mask:
            own_heads, own_rows = each.shape_expr[1], each.shape_expr[2]
            # An axis of 1 is read again for all.
            strides = own_heads * own_rows * keys, own_rows * keys, keys
            numbers += [0 if each.shape[axis] == 1 else stride for axis, stride in enumerate(strides)]
        variant = attention_plugin_variant(
            q.shape[3],
            {trt.float16: "fp16", trt.bfloat16: "bf16", trt.float32: "fp32"}[q.dtype],
            attributes["scale"],
            attributes["softcap"],
            causal=bool(attributes["is_causal"]),
            mask=0 if not mask else 1 if mask[0].dtype == trt.bool else 2,
        )
        blocks = trt.plugin.cdiv(length, variant.constants["BLOCK_L"])
        return Launch(plugin_kernel(variant), (blocks, heads, batch), tuple(numbers))


class MaskedFlashAttention(FlashAttention):
    """``FlashAttentionMasked(q, k, v, mask)``."""

    NAME = "FlashAttentionMasked"
    INPUTS = ("q", "k", "v", "mask")
