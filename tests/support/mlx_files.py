"""Folders of MLX-quantized weights, as mlx-lm writes them, made with ``mlx`` from a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np


def quantized(
    values: np.ndarray, bits: int, group_size: int, dtype: mx.Dtype = mx.float32
) -> tuple[mx.array, mx.array, mx.array]:
    """Packed codes, scales and biases of float32 ``[out, in]``; ``dtype`` is that of scales and biases."""
    codes, scales, biases = mx.quantize(mx.array(values).astype(dtype), group_size=group_size, bits=bits)
    return codes, scales, biases


def dequantized(path: Path, module: str, bits: int, group_size: int) -> np.ndarray:
    """What mlx makes of a module of a file in float32."""
    arrays = mx.load(str(path))
    scales, biases = (arrays[f"{module}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
    return np.array(mx.dequantize(arrays[f"{module}.weight"], scales, biases, group_size=group_size, bits=bits))


def quantize_folder(
    source: Path,
    target: Path,
    bits: int,
    group_size: int,
    dtype: mx.Dtype = mx.float16,
    overrides: Mapping[str, Any] | None = None,
) -> Path:
    """``source`` with its matrices quantized, in mlx-lm's spelling; ``overrides`` are settings of single modules."""
    target.mkdir(parents=True)
    arrays = {}
    for name, array in mx.load(str(source / "model.safetensors")).items():
        module = name.removesuffix(".weight")
        setting = (overrides or {}).get(module, {"bits": bits, "group_size": group_size})
        if array.ndim < 2 or setting is False:
            arrays[name] = array
            continue
        parts = quantized(np.array(array.astype(mx.float32)), setting["bits"], setting["group_size"], dtype)
        arrays |= dict(zip((f"{module}.weight", f"{module}.scales", f"{module}.biases"), parts, strict=True))
    mx.save_safetensors(str(target / "model.safetensors"), arrays, {"format": "mlx"})
    config = json.loads((source / "config.json").read_text())
    config["quantization"] = {"group_size": group_size, "bits": bits, "mode": "affine", **(overrides or {})}
    config["quantization_config"] = config["quantization"]
    (target / "config.json").write_text(json.dumps(config))
    for file in source.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (target / file.name).write_bytes(file.read_bytes())
    return target
