"""Loads packed checkpoints into models of transformers and diffusers, as linear layers that stay packed.

Requantizing what was unpacked would not give the same scales (a ternary group's mean counts its zeros), so that such a
layer holds the codes and scales themselves and does not train. To go on with quantization-aware training, take a
checkpoint of the training, which has the dense weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from intaglio.errors import WeightsError
from intaglio.exporters.checkpoints import open_checkpoint
from intaglio.exporters.checkpoints.mlx import with_width
from intaglio.exporters.checkpoints.tensors import CheckpointTensor, QuantizedLayout
from intaglio.exporters.checkpoints.ternary import without_offsets
from intaglio.kernels.grouped_quant import GroupedQuantRows, dequantize

# What a frozen layer has in a state dict in place of its weight.
FROZEN_PARTS = ("codes", "scale_bits", "offset_bits")
# A floating-point dtype, and the integers that hold its bits.
_SCALE_DTYPES = {
    "float16": (torch.float16, torch.int16),
    "bfloat16": (torch.bfloat16, torch.int16),
    "float32": (torch.float32, torch.int32),
}


class _PackedWeight(torch.Tensor):
    # What is computed from it is an ordinary tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        raise WeightsError(
            "the weight of a packed layer cannot be changed; to merge an adapter, load the model with dense weights"
        )


class FrozenQuantizedLinear(nn.Linear):
    """A linear layer whose weight is grouped-quantized and stays so; its bias, if any, is an ordinary parameter.

    It unpacks the weight at every use, in the backward pass again, so that between uses only codes and scales are in
    memory. ``layout`` is as readers give it.
    """

    codes: torch.Tensor
    scale_bits: torch.Tensor
    offset_bits: torch.Tensor | None

    def __init__(self, rows: GroupedQuantRows, layout: QuantizedLayout, bias: nn.Parameter | None = None) -> None:
        nn.Module.__init__(self)
        self.layout = layout
        self.out_features, width = rows.codes.shape
        self.in_features = width * 8 // layout.format.bits
        self.register_parameter("bias", bias)
        self.register_buffer("codes", torch.from_numpy(np.array(rows.codes)))
        # As integers, since a cast of the model would round them.
        self.register_buffer("scale_bits", self._bits(rows.scales))
        self.register_buffer("offset_bits", self._bits(rows.offsets) if rows.has_offsets else None)

    def _bits(self, values: np.ndarray) -> torch.Tensor:
        _, integer = _SCALE_DTYPES[self.layout.scale_dtype.name]
        return torch.from_numpy(np.array(values.view(f"i{values.dtype.itemsize}"))).view(integer)

    def _values(self, bits: torch.Tensor) -> torch.Tensor:
        dtype, _ = _SCALE_DTYPES[self.layout.scale_dtype.name]
        return bits.view(dtype).float()[..., None]

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The unpacked weight, float32 ``[out, in]``, to look at. Its ``data`` raises WeightsError.

        What is written there, as by merging an adapter, would be lost.
        """
        return self.unpacked().as_subclass(_PackedWeight)

    @torch.no_grad()
    def unpacked(self) -> torch.Tensor:
        """The weight, float32 ``[out, in]``, in the order of operations of the kernels' reference."""
        form = self.layout.format
        shifts = torch.arange(0, 8, form.bits, dtype=torch.uint8, device=self.codes.device)
        codes = (self.codes[..., None] >> shifts) & ((1 << form.bits) - 1)
        steps = codes.view(self.out_features, -1, form.group_size).float() - form.zero_point
        weight = steps * self._values(self.scale_bits)
        if self.offset_bits is not None:
            weight += self._values(self.offset_bits)
        return weight.view(self.out_features, self.in_features)

    def rows(self) -> GroupedQuantRows:
        """Codes, scales and offsets as they were given."""
        dtype = self.layout.scale_dtype
        scales = self.scale_bits.cpu().numpy().view(dtype)
        offsets = self.offset_bits.cpu().numpy().view(dtype) if self.offset_bits is not None else np.zeros((), dtype)
        return GroupedQuantRows(self.codes.cpu().numpy(), scales, offsets)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` ``[..., in]`` times the transposed weight, ``[..., out]``."""
        result: torch.Tensor = _FrozenProduct.apply(x, self.bias, self)
        return result


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, layer: FrozenQuantizedLinear) -> torch.Tensor:
        ctx.layer, ctx.dtype, ctx.bias_dtype = layer, x.dtype, None if bias is None else bias.dtype
        return nn.functional.linear(x, layer.unpacked().to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        (gradient,) = gradients
        of_x = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = (gradient @ ctx.layer.unpacked().to(gradient.dtype)).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            of_bias = gradient.flatten(0, -2).sum(0).to(ctx.bias_dtype)
        return of_x, of_bias, None


def load_quantized(model: nn.Module, path: str | Path) -> list[str]:
    """Loads the checkpoint at ``path`` into ``model``, and returns the layers that are packed there, by name.

    ``model`` is an instance of the class that was saved, made from its ``config.json``. Raises CheckpointError on a
    file that is not read, WeightsError where its tensors are not those of the model.
    """
    checkpoint = open_checkpoint(path)
    return load_tensors(model, checkpoint.tensors, str(checkpoint.path))


def load_tensors(model: nn.Module, tensors: Mapping[str, CheckpointTensor], source: str) -> list[str]:
    """As :func:`load_quantized`, of tensors under the model's own names; ``source`` is what errors name.

    A packed weight of a linear layer makes it a :class:`FrozenQuantizedLinear`; others, as of embeddings, are unpacked.
    """
    stated = model.state_dict(keep_vars=True)
    if unknown := sorted(tensors.keys() - stated.keys()):
        raise WeightsError(f"{source}: {unknown[0]} is no tensor of {type(model).__name__}; load another model's class")
    loaded = {id(stated[name]) for name in tensors}
    # A tied weight has several names, of which files keep one.
    if missing := [name for name, value in stated.items() if id(value) not in loaded]:
        raise WeightsError(f"{source}: has no {missing[0]}, which {type(model).__name__} needs")
    packed = []
    for name, tensor in tensors.items():
        target = stated[name]
        tensor = with_width(tensor, tuple(target.shape))
        if tensor.shape != tuple(target.shape):
            raise WeightsError(f"{source}: {name} is {list(tensor.shape)}, expected {list(target.shape)}")
        parent, _, child = name.removesuffix(".weight").rpartition(".")
        module = model.get_submodule(parent)
        if tensor.layout is not None and isinstance(getattr(module, child, None), nn.Linear):
            setattr(module, child, _frozen(tensor, getattr(module, child)))
            packed.append(name.removesuffix(".weight"))
        else:
            with torch.no_grad():
                target.copy_(torch.from_numpy(_unpacked(tensor)))
    return packed


def _frozen(tensor: CheckpointTensor, linear: nn.Linear) -> FrozenQuantizedLinear:
    # Ternary rows are around a zero point here, as the exporter makes them.
    tensor = without_offsets(tensor)
    rows = tensor.read()
    assert isinstance(rows, GroupedQuantRows)
    assert tensor.layout is not None
    layer = FrozenQuantizedLinear(rows, tensor.layout, linear.bias)
    return layer.to(linear.weight.device).train(linear.training)


def _unpacked(tensor: CheckpointTensor) -> np.ndarray:
    rows = tensor.read()
    if isinstance(rows, GroupedQuantRows):
        assert tensor.layout is not None
        return dequantize(rows, tensor.layout.format)
    # torch has no ml_dtypes; float32 holds what they hold.
    return rows if rows.dtype.kind in "iub" else rows.astype(np.float32)
