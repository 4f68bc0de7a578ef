"""Safetensors files of any size that take no room: a true header over a hole."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def write_sparse(
    file: Path,
    shapes: Mapping[str, Sequence[int]],
    *,
    packed: Collection[str] = (),
    bits: int = 4,
    group_size: int = 64,
) -> None:
    """Bfloat16 tensors of ``shapes``; matrices named in ``packed`` as MLX packs them."""
    header: dict[str, Any] = {}
    end = 0

    def add(name: str, dtype: str, *shape: int) -> None:
        nonlocal end
        size = {"BF16": 2, "U32": 4}[dtype] * int(np.prod(shape))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size

    for name, shape in shapes.items():
        if name in packed:
            rows, columns = shape
            module = name.removesuffix(".weight")
            add(name, "U32", rows, columns * bits // 32)
            add(f"{module}.scales", "BF16", rows, columns // group_size)
            add(f"{module}.biases", "BF16", rows, columns // group_size)
        else:
            add(name, "BF16", *shape)
    raw = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(raw).to_bytes(8, "little") + raw)
        out.truncate(8 + len(raw) + end)
