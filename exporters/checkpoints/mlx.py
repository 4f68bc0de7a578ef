"""MLX's quantized tensors in safetensors files: three tensors there, one grouped-quantized tensor here.

``x.weight`` is uint32 ``[out, in * bits / 32]``, a stream of codes with the first input in the lowest bits;
``x.scales`` and ``x.biases`` are ``[out, in / group_size]``, and ``w = scale * code + bias`` (mlx's mode ``affine``).
Shapes give the product of bits and group size only, so the two come from ``quantization`` in ``config.json``, else
from the input width that an architecture declares.

Values are those of ``mx.dequantize`` in float32. Where scales are float16 or bfloat16, mlx itself rounds to that
type after the product and again after the sum; here both are float32, so nothing is lost that the file holds.
Source: https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from intaglio.errors import CheckpointError
from intaglio.exporters.checkpoints.tensors import (
    CheckpointTensor,
    DenseTensor,
    QuantizedLayout,
    Rows,
    UnreadableTensor,
)
from intaglio.kernels.grouped_quant import SCALE_DTYPES, GroupedQuantFormat, GroupedQuantRows, pack_codes

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
# Bits in the file -> bits here; a stream whose codes straddle bytes is packed anew in the next wider ones.
HELD_BITS = {2: 2, 3: 4, 4: 4, 5: 8, 6: 8, 8: 8}


@dataclass(frozen=True)
class MlxTensor(CheckpointTensor):
    """A quantized matrix ``[out, in]`` made of three stored tensors; ``storage`` is ``MLX4`` for 4 bits."""

    weight: DenseTensor
    scales: DenseTensor
    biases: DenseTensor
    bits: int
    group_size: int

    def __post_init__(self) -> None:
        quantization = GroupedQuantFormat(HELD_BITS[self.bits], self.group_size, 0)
        object.__setattr__(self, "layout", QuantizedLayout(quantization, self.scales.element, True))

    @property
    def row_bytes(self) -> int:
        return self.weight.row_bytes + self.scales.row_bytes + self.biases.row_bytes

    def read_rows(self, start: int, stop: int) -> GroupedQuantRows:
        packed = self.weight.read_rows(start, stop).view(np.uint8)
        if self.bits not in (2, 4, 8):
            packed = pack_codes(unpack_stream(packed, self.bits), HELD_BITS[self.bits])
        return GroupedQuantRows(packed, self.scales.read_rows(start, stop), self.biases.read_rows(start, stop))


@dataclass(frozen=True)
class UnresolvedMlxTensor(CheckpointTensor):
    """A triplet whose bits and group size its file does not tell; ``shape`` is that of the packed codes."""

    weight: DenseTensor
    scales: DenseTensor
    biases: DenseTensor
    why: str

    @property
    def row_bytes(self) -> int:
        return self.weight.row_bytes + self.scales.row_bytes + self.biases.row_bytes

    def with_width(self, width: int) -> CheckpointTensor:
        """The tensor for an input width that is known from elsewhere; itself where that fits no bits and groups."""
        stored, groups = 32 * self.weight.shape[1], self.scales.shape[1]
        if not width or stored % width or width % groups:
            return self
        bits, group_size = stored // width, width // groups
        if bits not in BITS or group_size not in GROUP_SIZES:
            return self
        return _tensor(self.name, self.weight, self.scales, self.biases, bits, group_size)

    def read_rows(self, start: int, stop: int) -> Rows:
        raise CheckpointError(self.why)


def with_width(tensor: CheckpointTensor, shape: tuple[int, ...] | None) -> CheckpointTensor:
    """``tensor`` with its bits and group size taken from the declared ``shape`` ``[out, in]``, where it needs them."""
    if isinstance(tensor, UnresolvedMlxTensor) and shape is not None and len(shape) == 2:
        return tensor.with_width(shape[1])
    return tensor


def join_triplets(
    path: Path, tensors: Mapping[str, CheckpointTensor], config: Mapping[str, Any]
) -> tuple[dict[str, CheckpointTensor], list[str]]:
    """``tensors`` with each triplet as one tensor under the name of its weight, and notes for whoever inspects.

    Triplets of a mode other than affine are listed and refused when they are read. Raises CheckpointError where
    the configuration makes no sense or contradicts the shapes, naming both.
    """
    settings = _Settings.read(path, config)
    joined, parts, quantized = dict(tensors), set[str](), set[str]()
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        if module == name or weight.storage != "U32" or f"{module}.scales" not in tensors:
            continue
        scales, biases = tensors[f"{module}.scales"], tensors.get(f"{module}.biases")
        quantized.add(module)
        parts |= {f"{module}.scales", *([f"{module}.biases"] if biases is not None else [])}
        joined[name] = _join(path, module, weight, scales, biases, settings)
    for name in parts:
        del joined[name]
    return joined, settings.notes(path, joined, quantized)


@dataclass(frozen=True)
class _Settings:
    """``quantization`` of ``config.json``: the setting of all modules, and those of single ones.

    A setting is bits, group size and mode; None means that a module is left as it is.
    """

    common: tuple[int, int, str] | None = None
    modules: dict[str, tuple[int, int, str] | None] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, config: Mapping[str, Any]) -> _Settings:
        # Tools of other formats use the second key too, with keys of their own.
        content = config.get("quantization") or config.get("quantization_config")
        if not is_mlx_quantization(content):
            return cls()
        assert isinstance(content, dict)
        where = f"{path}: quantization of config.json"
        common = _setting(where, content, ("affine", None, None))
        modules: dict[str, tuple[int, int, str] | None] = {}
        for name, value in content.items():
            if isinstance(value, dict):
                modules[name] = _setting(f"{where}: {name}", value, (common[2], common[0], common[1]))
            elif isinstance(value, bool):
                modules[name] = common if value else None
        return cls(common, modules)

    def of(self, module: str) -> tuple[int, int, str] | None:
        return self.modules.get(module, self.common)

    def notes(self, path: Path, tensors: Mapping[str, CheckpointTensor], quantized: set[str]) -> list[str]:
        stray = sorted(name for name, value in self.modules.items() if value is not None and name not in quantized)
        notes = []
        if stray:
            notes.append(
                f"{path.name}: quantization names {len(stray)} modules that are not quantized in the files, "
                f"first {stray[0]}"
            )
        told = sum(isinstance(t, MlxTensor) for t in tensors.values()) if self.common is None else 0
        if told:
            notes.append(
                f"{path.name}: config.json has no quantization; bits and group size of {told} MLX tensors are the "
                "only ones that their shapes allow"
            )
        return notes


def is_mlx_quantization(content: object) -> bool:
    """Whether a configuration's ``quantization`` is one that mlx writes."""
    return isinstance(content, dict) and {"bits", "group_size"} <= set(content) and "quant_method" not in content


def _setting(where: str, value: Mapping[str, Any], absent: tuple[Any, Any, Any]) -> tuple[int, int, str]:
    mode, bits, group_size = (
        value.get(key, default) for key, default in zip(("mode", "bits", "group_size"), absent, strict=True)
    )
    for key, found in (("bits", bits), ("group_size", group_size)):
        if type(found) is not int or found < 1:
            raise CheckpointError(f"{where}: {key} is {found!r}, expected a number")
    if not isinstance(mode, str):
        raise CheckpointError(f"{where}: mode is {mode!r}, expected a name such as 'affine'")
    if mode == "affine" and (bits not in BITS or group_size not in GROUP_SIZES):
        raise CheckpointError(
            f"{where}: is {bits} bits in groups of {group_size}; expected bits of {', '.join(map(str, BITS))} and "
            f"groups of {', '.join(map(str, GROUP_SIZES))}"
        )
    return bits, group_size, mode


def _join(
    path: Path,
    module: str,
    weight: CheckpointTensor,
    scales: CheckpointTensor,
    biases: CheckpointTensor | None,
    settings: _Settings,
) -> CheckpointTensor:
    name, setting = weight.name, settings.of(module)
    mode = setting[2] if setting else "affine"
    what = f"{path}: {name}"
    if biases is None or mode != "affine":
        kind = mode if mode != "affine" else "mxfp4, nvfp4 or the like"
        why = f"{what}: has scales and no biases ({kind})" if biases is None else f"{what}: is quantized as {mode}"
        return UnreadableTensor(
            name, weight.shape, kind if mode != "affine" else "MLX fp",
            f"{why}, which is not read; read is MLX's affine mode. Convert the model again with it.",
        )  # fmt: skip
    if len(weight.shape) != 2:
        why = f"{what}: is an MLX tensor of shape {list(weight.shape)}; read are matrices"
        return UnreadableTensor(name, weight.shape, "MLX", why)
    if module in settings.modules and setting is None:
        raise CheckpointError(
            f"{what}: has scales and biases, but quantization in config.json says it is not quantized"
        )
    if not (
        isinstance(weight, DenseTensor)
        and isinstance(scales, DenseTensor)
        and isinstance(biases, DenseTensor)
        and scales.element in SCALE_DTYPES
        and (scales.shape, scales.element) == (biases.shape, biases.element)
        and len(scales.shape) == 2
        and scales.shape[0] == weight.shape[0]
    ):
        raise CheckpointError(
            f"{what}: has scales {scales.storage} {list(scales.shape)} and biases {biases.storage} "
            f"{list(biases.shape)}; expected both F16, BF16 or F32 of one shape, with {weight.shape[0]} rows"
        )
    if setting is None:
        return _from_shapes(what, weight, scales, biases)
    bits, group_size, _ = setting
    width = scales.shape[1] * group_size
    if 32 * weight.shape[1] != width * bits:
        raise CheckpointError(
            f"{what}: {weight.shape[1]} words and {scales.shape[1]} groups a row contradict the {bits} bits in groups "
            f"of {group_size} that quantization in config.json says; one of the two is of another model"
        )
    return _tensor(name, weight, scales, biases, bits, group_size)


def _from_shapes(what: str, weight: DenseTensor, scales: DenseTensor, biases: DenseTensor) -> CheckpointTensor:
    words, groups = weight.shape[1], scales.shape[1]
    fitting = [(b, g) for b in BITS for g in GROUP_SIZES if 32 * words == b * g * groups and groups]
    if len(fitting) == 1:
        return _tensor(weight.name, weight, scales, biases, *fitting[0])
    if not fitting:
        raise CheckpointError(f"{what}: {words} words and {groups} groups a row fit no bits and group size of MLX")
    choices = " or ".join(f"{b} bits in groups of {g}" for b, g in fitting)
    why = (
        f"{what}: is {choices}, which its shapes do not tell apart. Fetch the config.json of the model, or add to it "
        f'"quantization": {{"group_size": {fitting[0][1]}, "bits": {fitting[0][0]}}} with the right numbers'
    )
    return UnresolvedMlxTensor(weight.name, weight.shape, "MLX", weight, scales, biases, why)


def _tensor(
    name: str, weight: DenseTensor, scales: DenseTensor, biases: DenseTensor, bits: int, group_size: int
) -> MlxTensor:
    shape = (weight.shape[0], scales.shape[1] * group_size)
    return MlxTensor(name, shape, f"MLX{bits}", weight, scales, biases, bits, group_size)


def unpack_stream(packed: np.ndarray, bits: int) -> np.ndarray:
    """Codes of 3, 5 or 6 bits from uint8 ``[rows, n * bits / 8]`` to uint8 ``[rows, n]``."""
    # Eight codes fill as many bytes as a code has bits.
    octets = packed.reshape(packed.shape[0], -1, bits)
    words = np.zeros(octets.shape[:2], np.uint64)
    for i in range(bits):
        words |= octets[..., i].astype(np.uint64) << np.uint64(8 * i)
    codes = np.empty((*words.shape, 8), np.uint8)
    for i in range(8):
        codes[..., i] = words >> np.uint64(bits * i) & np.uint64((1 << bits) - 1)
    return codes.reshape(packed.shape[0], packed.shape[1] * 8 // bits)
