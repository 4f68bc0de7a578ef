"""Linear layers that keep the packed codes of a quantized checkpoint, for training adapters beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from intaglio.errors import WeightsError
from intaglio.exporters.checkpoints.tensors import CheckpointTensor
from intaglio.kernels.grouped_quant import GroupedQuantFormat, GroupedQuantRows, dequantize


class FrozenQuantizedLinear(nn.Linear):
    """``y = x @ weight.T + bias`` with a grouped-quantized weight that is not trained.

    ``codes``, ``scales`` and ``offsets`` are buffers, laid out as ``kernels.grouped_quant`` says; a layer takes their
    memory and no more. ``weight`` unpacks them to float32 ``[out, in]`` at each use, in the reference's arithmetic, so
    that the values are those of the exported engine.
    """

    def __init__(self, rows: GroupedQuantRows, form: GroupedQuantFormat, bias: torch.Tensor | None = None) -> None:
        nn.Module.__init__(self)  # without the weight that a linear layer makes
        self.form = form
        self.out_features, self.in_features = len(rows.codes), rows.codes.shape[1] * 8 // form.bits
        for name in ("codes", "scales", "offsets"):
            self.register_buffer(name, _to_torch(getattr(rows, name)))
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The unpacked weight: a copy, to which nothing can be added."""
        codes, bits = self.get_buffer("codes"), self.form.bits
        shifts = torch.arange(0, 8, bits, device=codes.device, dtype=torch.uint8)
        values = (codes[..., None] >> shifts & ((1 << bits) - 1)).flatten(1).unflatten(1, (-1, self.form.group_size))
        offsets = self.get_buffer("offsets").float()
        weight = (values.to(torch.int32) - self.form.zero_point).float() * self.get_buffer("scales").float()[..., None]
        return (weight + (offsets[..., None] if offsets.ndim else offsets)).flatten(1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name in torch's own layer
        """``[..., in]`` to ``[..., out]``, in the dtype of ``input``."""
        y = _Product.apply(input, self)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _Product(torch.autograd.Function):
    """Unpacks the weight anew on the way back, where autograd would keep all of them at once."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: FrozenQuantizedLinear) -> torch.Tensor:
        ctx.layer = layer
        return x @ layer.weight.to(x.dtype).T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad @ ctx.layer.weight.to(grad.dtype), None


def load_frozen(model: nn.Module, tensors: Mapping[str, CheckpointTensor]) -> None:
    """Fills ``model`` with ``tensors`` (by its parameters' names), none of them to be trained.

    A linear layer whose weight is quantized becomes a :class:`FrozenQuantizedLinear`; what else is quantized, such as
    an embedding, is unpacked. A parameter that another one is tied to may be missing. Raises WeightsError for missing,
    unknown and misshapen tensors.
    """
    parameters = dict(model.named_parameters())
    tied = dict(model.named_parameters(remove_duplicate=False))
    if missing := sorted(parameters.keys() - tensors.keys()):
        raise WeightsError(f"{len(missing)} tensors are missing: {', '.join(missing[:5])}")
    if unknown := sorted(tensors.keys() - tied.keys()):
        raise WeightsError(f"{len(unknown)} tensors are unknown to the model: {', '.join(unknown[:5])}")
    for name, parameter in parameters.items():
        tensor = tensors[name]
        if tuple(parameter.shape) != tensor.shape:
            raise WeightsError(f"{name} is {list(tensor.shape)}, expected {list(parameter.shape)}")
        path, _, kind = name.rpartition(".")
        layer, rows = model.get_submodule(path), tensor.read()
        if isinstance(rows, np.ndarray):
            parameter.data.copy_(_to_torch(rows))
            continue
        assert tensor.layout is not None, "quantized rows have a layout"
        if isinstance(layer, nn.Linear) and kind == "weight":
            frozen = FrozenQuantizedLinear(rows, tensor.layout.format, None if layer.bias is None else layer.bias.data)
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, frozen)
        else:
            parameter.data.copy_(torch.from_numpy(dequantize(rows, tensor.layout.format)))
    model.requires_grad_(False)


def _to_torch(array: np.ndarray) -> torch.Tensor:
    if array.dtype.name == "bfloat16":  # which torch does not take from NumPy
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))
