"""Other published spellings of a convolutional autoencoder's tensors, as diffusers spells them today.

- latent diffusion's (``encoder.down.0.block.1.conv1``), which Black Forest Labs use: blocks of the decoder are counted
  from the picture inwards, and projections of the attention are 1x1 convolutions. Their FLUX.2 file has ``quant_conv``
  and ``post_quant_conv`` inside encoder and decoder. Source: diffusers' ``scripts/convert_flux2_to_diffusers.py``.
- diffusers' own before 0.15 (``attentions.0.query``, ``proj_attn``), and ``to_out`` without its index
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from intaglio.errors import WeightsError
from intaglio.exporters.checkpoints.tensors import CheckpointTensor, Rows

_RULES = [
    (r"^encoder\.quant_conv\.", "quant_conv."),
    (r"^decoder\.post_quant_conv\.", "post_quant_conv."),
    (r"^(encoder|decoder)\.norm_out\.", r"\1.conv_norm_out."),
    (r"^encoder\.down\.(\d+)\.block\.", r"encoder.down_blocks.\1.resnets."),
    (r"^encoder\.down\.(\d+)\.downsample\.", r"encoder.down_blocks.\1.downsamplers.0."),
    (r"^decoder\.up\.(\d+)\.block\.", r"decoder.up_blocks.\1.resnets."),
    (r"^decoder\.up\.(\d+)\.upsample\.", r"decoder.up_blocks.\1.upsamplers.0."),
    (r"\.nin_shortcut\.", ".conv_shortcut."),
    (r"^(encoder|decoder)\.mid\.block_1\.", r"\1.mid_block.resnets.0."),
    (r"^(encoder|decoder)\.mid\.block_2\.", r"\1.mid_block.resnets.1."),
    (r"^(encoder|decoder)\.mid\.attn_1\.norm\.", r"\1.mid_block.attentions.0.group_norm."),
    (r"^(encoder|decoder)\.mid\.attn_1\.", r"\1.mid_block.attentions.0."),
    (r"\.attentions\.0\.(?:q|query)\.", ".attentions.0.to_q."),
    (r"\.attentions\.0\.(?:k|key)\.", ".attentions.0.to_k."),
    (r"\.attentions\.0\.(?:v|value)\.", ".attentions.0.to_v."),
    (r"\.attentions\.0\.(?:proj_out|proj_attn|to_out)\.(weight|bias)$", r".attentions.0.to_out.0.\1"),
]
_UP = re.compile(r"^decoder\.up\.(\d{1,4})\.")
_PROJECTION = re.compile(r"\.attentions\.0\.to_(?:q|k|v|out\.0)\.weight$")


@dataclass(frozen=True)
class ConvAsLinear(CheckpointTensor):
    """The weight of a 1x1 convolution, ``[out, in, 1, 1]`` or ``[out, in, 1]``, as the linear layer that it is."""

    source: CheckpointTensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", self.source.dtype)

    @property
    def row_bytes(self) -> int:
        return self.source.row_bytes

    def read_rows(self, start: int, stop: int) -> Rows:
        rows = self.source.read_rows(start, stop)
        assert isinstance(rows, np.ndarray), "a convolution is stored dense"
        return rows.reshape(stop - start, self.shape[1])


def diffusers_vae_tensors(tensors: Mapping[str, CheckpointTensor]) -> dict[str, CheckpointTensor]:
    """``tensors`` under diffusers' names; one that no rule knows keeps its own. Raises WeightsError."""
    blocks = max((int(m[1]) + 1 for name in tensors if (m := _UP.match(name))), default=0)
    result: dict[str, CheckpointTensor] = {}
    for name, tensor in tensors.items():
        # Counted from the picture there, from the latents here.
        renamed = _UP.sub(lambda m: f"decoder.up.{blocks - 1 - int(m[1])}.", name)
        for pattern, replacement in _RULES:
            renamed = re.sub(pattern, replacement, renamed)
        if renamed in result or (renamed != name and renamed in tensors):
            raise WeightsError(f"{name}: another tensor of the file is {renamed} as well; keep one spelling")
        one_by_one = len(tensor.shape) in (3, 4) and set(tensor.shape[2:]) == {1}
        if _PROJECTION.search(renamed) and one_by_one and tensor.layout is None:
            tensor = ConvAsLinear(renamed, tensor.shape[:2], tensor.storage, tensor)
        result[renamed] = tensor
    return result
