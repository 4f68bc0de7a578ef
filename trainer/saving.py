"""Writes quantization-aware models as they are published: ``config.json`` and packed safetensors in MLX's spelling.

Names and files are those of ``save_pretrained``. The weight of a quantized layer becomes MLX's three tensors, with the
very codes and scales that its forward pass computes with, so that ``intaglio export`` takes them as they are.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import nn

from intaglio.errors import WeightsError
from intaglio.exporters.checkpoints import open_checkpoint
from intaglio.exporters.checkpoints.safetensors_writer import mlx_setting, write_shards
from intaglio.exporters.checkpoints.tensors import ArrayTensor, CheckpointTensor, QuantizedLayout
from intaglio.kernels.grouped_quant import GroupedQuantFormat, GroupedQuantRows, dequantize
from intaglio.kernels.quantize import GROUP_SIZES, SCALE_DTYPE, quantize
from intaglio.output import replaced_file
from intaglio.trainer.loading import FROZEN_PARTS, FrozenQuantizedLinear
from intaglio.trainer.quantization import QuantizedLinear, check_finite, quantized_weight

_DTYPES: dict[torch.dtype, tuple[str, np.dtype[Any]]] = {
    torch.float32: ("F32", np.dtype(np.float32)),
    torch.float16: ("F16", np.dtype(np.float16)),
    torch.bfloat16: ("BF16", np.dtype(ml_dtypes.bfloat16)),
}
# As transformers names them.
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "vocab.json", "merges.txt",
    "added_tokens.json", "chat_template.jinja",
)  # fmt: skip


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copies the files of the tokenizer in ``source`` into ``folder``."""
    for name in _TOKENIZER_FILES:
        if (file := source / name).is_file():
            shutil.copyfile(file, folder / name)


def save_quantized(model: Any, folder: Path, dtype: torch.dtype | None = None) -> list[Path]:
    """Writes a model of transformers or diffusers into ``folder``, its quantized layers packed; returns the files.

    Dense parameters are written as ``dtype``, float32, float16 or bfloat16, or in the type they have; buffers in the
    type they have: they are few, and a batch norm divides by its statistics. ``config.json`` says in ``quantization``
    what is packed how, as mlx-lm writes it: a common setting, and those of layers that have another. Raises
    WeightsError on a packed weight that is not finite, or a dense one that ``dtype`` does not hold.
    """
    packed = _packed(model)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        # Which tensors a model has in a file, and under which names, is known to its own library.
        with _without_progress_bars():
            model.save_pretrained(temporary)
        written = open_checkpoint(temporary)
        stem = re.sub(r"-\d+-of-\d+$", "", written.files[0].stem)
        buffers = dict(model.named_buffers())
        dense = _without(written.tensors, packed)
        tensors: dict[str, CheckpointTensor] = {**packed}
        tensors |= {name: tensor if name in buffers else _dense(tensor, dtype) for name, tensor in dense.items()}
        files = write_shards(folder, tensors, {"format": "mlx" if packed else "pt"}, stem=stem)
        config = dict(written.config)
        if dtype is not None and "dtype" in config:
            config["dtype"] = str(dtype).removeprefix("torch.")
        if packed:
            config["quantization"] = _settings(packed)
        _write_config(folder / "config.json", config)
        for file in Path(temporary).iterdir():
            if file.name != "config.json" and ".safetensors" not in file.name:
                shutil.copyfile(file, folder / file.name)
    return files


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Inside, transformers draws none: the loop reports its own progress."""
    from transformers.utils import logging

    wanted = logging.is_progress_bar_enabled()
    if wanted:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if wanted:
            logging.enable_progress_bar()


def _packed(model: nn.Module) -> dict[str, ArrayTensor]:
    """The weights of the quantized layers, trained and frozen ones."""
    packed = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            packed[f"{name}.weight"] = packed_weight(name, module)
        elif isinstance(module, FrozenQuantizedLinear):
            shape = (module.out_features, module.in_features)
            packed[f"{name}.weight"] = ArrayTensor(f"{name}.weight", shape, "frozen", module.rows(), module.layout)
    return packed


def packed_weight(name: str, layer: QuantizedLinear) -> ArrayTensor:
    """The weight of the layer ``name`` as it is stored: the codes, scales and offsets of its forward pass.

    Raises WeightsError where the weight is not finite, or where the device computes with other values than the
    quantizer's reference.
    """
    check_finite(name, layer.weight)
    weight = layer.weight.detach().float().cpu().numpy()
    rows, layout = quantize(weight, layer.quantization), layer.quantization.layout(weight.shape[1])
    used = quantized_weight(layer.weight.detach(), layer.quantization).cpu().numpy()
    if not np.array_equal(dequantize(rows, layout), used):
        raise WeightsError(f"{name}.weight: {layer.weight.device} quantizes it unlike the reference; train on another")
    if layout.group_size not in GROUP_SIZES:
        # A whole row is several groups of one scale.
        size = next(size for size in sorted(GROUP_SIZES, reverse=True) if layout.group_size % size == 0)
        rows = GroupedQuantRows(rows.codes, np.repeat(rows.scales, layout.group_size // size, axis=1), rows.offsets)
        layout = GroupedQuantFormat(layout.bits, size, layout.zero_point)
    quantized = QuantizedLayout(layout, SCALE_DTYPE, layer.quantization.has_offsets)
    return ArrayTensor(f"{name}.weight", weight.shape, layer.quantization.format, rows, quantized)


def _without(
    tensors: Mapping[str, CheckpointTensor], packed: Mapping[str, CheckpointTensor]
) -> dict[str, CheckpointTensor]:
    """What is left of the ``tensors`` that a library writes when those that stand for ``packed`` ones are gone."""
    left = dict(tensors)
    for name in packed:
        # A frozen layer has parts in place of a weight.
        found = [part for part in (name, *(name[: -len("weight")] + part for part in FROZEN_PARTS)) if part in left]
        if not found:
            raise WeightsError(f"{name}: is not among what the model's own library writes")
        for part in found:
            del left[part]
    return left


def _dense(tensor: CheckpointTensor, dtype: torch.dtype | None) -> CheckpointTensor:
    if dtype is None or tensor.dtype is None or tensor.dtype.kind in "iub":
        return tensor
    storage, wanted = _DTYPES[dtype]
    values = tensor.read()
    assert isinstance(values, np.ndarray)
    with np.errstate(over="ignore"):
        converted = values.astype(wanted)
    if np.isinf(converted.astype(np.float32)).sum() > np.isinf(values.astype(np.float32)).sum():
        raise WeightsError(f"{tensor.name}: has a value that {wanted.name} does not hold; save it in a wider type")
    return ArrayTensor(tensor.name, tensor.shape, storage, converted)


def _settings(packed: Mapping[str, ArrayTensor]) -> dict[str, Any]:
    settings = {name.removesuffix(".weight"): mlx_setting(tensor) for name, tensor in packed.items()}
    # The setting of most layers; other readers take it for all that name none.
    common = dict(Counter(tuple(setting.items()) for setting in settings.values()).most_common(1)[0][0])
    return {**common, **{name: setting for name, setting in settings.items() if setting != common}}


def _write_config(path: Path, config: Mapping[str, Any]) -> None:
    with replaced_file(path) as file:
        file.write((json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode())
