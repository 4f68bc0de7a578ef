"""Ternary matrices: packed from dense ones exactly or refused by row and group, and told apart in one pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from peak_memory import peak_memory

from intaglio.errors import CheckpointError, InputError
from intaglio.exporters.checkpoints import open_checkpoint
from intaglio.exporters.checkpoints.mlx import MlxTensor
from intaglio.exporters.checkpoints.safetensors_writer import write_file
from intaglio.exporters.checkpoints.tensors import ArrayTensor, CheckpointTensor, QuantizedLayout, reorder_rows
from intaglio.exporters.checkpoints.ternary import (
    RescaledTensor,
    TernaryMlxTensor,
    pack_blocks,
    pack_ternary,
    without_offsets,
)
from intaglio.kernels.grouped_quant import GroupedQuantFormat, GroupedQuantRows, dequantize, pack_codes

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float32), np.dtype(np.float16), BFLOAT16]
STORAGES = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16", BFLOAT16: "BF16"}


def ternary(rows: int, width: int, dtype: Any, seed: int = 0, scale_dtype: Any = BFLOAT16) -> tuple[Any, Any, Any]:
    """Dense values ``[rows, width]``, steps -1, 0, 1, and a scale a group of 128 that ``scale_dtype`` holds."""
    rng = np.random.default_rng(seed)
    steps = rng.integers(-1, 2, (rows, width // 128, 128))
    scales = np.exp(rng.normal(-3, 0.3, (rows, width // 128))).astype(scale_dtype).astype(dtype)
    values = (steps * scales.astype(np.float64)[..., None]).astype(dtype)
    return values.reshape(rows, width), steps, scales


def tensor(values: np.ndarray, name: str = "a.weight") -> CheckpointTensor:
    return ArrayTensor(name, values.shape, STORAGES.get(values.dtype, str(values.dtype)), values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_and_scales(dtype: Any) -> None:
    values, steps, scales = ternary(37, 384, dtype, scale_dtype=BFLOAT16 if dtype != np.float16 else dtype)
    values[5, 128:256] = 0
    values[6, 10] = -0.0
    steps[5, 1], steps[6, 0, 10], scales[5, 1] = 0, 0, 0
    packed = pack_ternary(tensor(values))
    rows = packed.read()
    assert isinstance(rows, GroupedQuantRows)
    codes = (steps.reshape(37, -1, 4) + 1 << np.array([0, 2, 4, 6])).sum(axis=-1)
    np.testing.assert_array_equal(rows.codes, codes.reshape(37, 96))
    np.testing.assert_array_equal(rows.scales, scales.astype(rows.scales.dtype))
    assert not rows.has_offsets
    assert packed.layout is not None
    assert packed.layout.format == GroupedQuantFormat(2, 128, 1)
    assert packed.shape == (37, 384)
    assert packed.dtype is None
    part = packed.read_rows(9, 12)
    assert isinstance(part, GroupedQuantRows)
    np.testing.assert_array_equal(part.codes, rows.codes[9:12])


@pytest.mark.parametrize(
    ("dtype", "scale", "expected"),
    [
        (np.float32, 0.0625, BFLOAT16),
        (np.float32, 2.0**120, BFLOAT16),
        (np.float32, 1 + 2**-10, np.float16),
        (np.float32, 2**-24 * 3, BFLOAT16),
        (np.float32, 1 + 2**-11, np.float32),
        (np.float16, 1.5, np.float16),
        (BFLOAT16, 1.5, BFLOAT16),
    ],
)  # fmt: skip
def test_the_narrowest_type_that_holds_all_scales(dtype: Any, scale: float, expected: Any) -> None:
    values = ternary(8, 256, dtype, scale_dtype=np.float16 if dtype == np.float16 else BFLOAT16)[0]
    values[3, 128:] = np.where(np.arange(128) % 3, dtype(scale) if dtype != BFLOAT16 else BFLOAT16.type(scale), 0)
    packed = pack_ternary(tensor(values))
    assert packed.layout is not None
    assert packed.layout.scale_dtype == expected
    rows = packed.read()
    assert isinstance(rows, GroupedQuantRows)
    assert rows.scales.dtype == expected
    assert float(rows.scales[3, 1]) == float(values[3, 129])


def test_scales_that_no_type_of_16_bits_holds_together() -> None:
    values = ternary(4, 256, np.float32)[0]
    # One is too large for float16, another has too many digits for bfloat16.
    values[0, :128], values[1, :128] = 1e6, 1 + 2**-10
    values[0, :128] = np.float32(BFLOAT16.type(1e6))
    layout = pack_ternary(tensor(values)).layout
    assert layout is not None
    assert layout.scale_dtype == np.float32


def test_mlx_reads_what_is_written(tmp_path: Path) -> None:
    values = ternary(64, 512, BFLOAT16)[0]
    write_file(tmp_path / "a.safetensors", {"a.weight": pack_ternary(tensor(values))})
    stored = mx.load(str(tmp_path / "a.safetensors"))
    assert stored["a.weight"].shape == (64, 32)
    found = mx.dequantize(*(stored[f"a.{part}"] for part in ("weight", "scales", "biases")), group_size=128, bits=2)
    np.testing.assert_array_equal(np.array(found.astype(mx.float32)), values.astype(np.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (0.25, r"holds .*0\.25.*; expected minus one scale, zero, and that scale"),
        (np.nan, "holds .*nan"),
        (np.inf, "holds .*inf"),
    ],
)
def test_what_is_not_ternary_is_refused_by_row_and_group(dtype: Any, spoil: float, says: str) -> None:
    values = ternary(3000, 1024, dtype, scale_dtype=np.float16 if dtype == np.float16 else BFLOAT16)[0]
    values[2900, 700] = spoil
    with pytest.raises(CheckpointError, match=rf"a\.weight: row 2900, group 5 {says}"):
        pack_ternary(tensor(values))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_group_of_one_value_that_is_not_finite(value: float) -> None:
    values = ternary(4, 256, np.float32)[0]
    values[3, 128:] = value
    with pytest.raises(CheckpointError, match=r"row 3, group 1 holds (nan|-?inf); expected"):
        pack_ternary(tensor(values))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (np.ones(128, np.float32), r"is F32 \[128\]; packed are matrices"),
        (np.ones((2, 128, 1), np.float32), "packed are matrices"),
        (np.ones((2, 128), np.int32), "packed are matrices of F32, F16 or BF16"),
        (np.ones((2, 128), np.float64), "packed are matrices of F32, F16 or BF16"),
        (np.ones((2, 192), np.float32), "rows of 192 values are no multiple of 128"),
    ],
)
def test_what_is_no_matrix_of_whole_groups(values: np.ndarray, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        pack_ternary(tensor(values))


def test_other_group_sizes() -> None:
    values = np.repeat(np.array([[1, 2, 1, 4]], np.float32), 64, axis=1)
    rows = pack_ternary(tensor(values), group_size=64).read()
    assert isinstance(rows, GroupedQuantRows)
    np.testing.assert_array_equal(rows.scales.astype(np.float32), [[1, 2, 1, 4]])


def test_blocks_are_packed_all_or_none() -> None:
    """By the first number in a name, whatever spelling it is; no values outside, no vectors, nothing packed before."""
    values = ternary(4, 256, np.float32)[0]
    inside = ["layers.0.q_proj.weight", "blk.11.attn_q.weight", "transformer_blocks.1.attn.to_out.0.weight"]
    outside = ["embed.weight", "final_layer.adaLN_modulation.1.weight", "layers.0.attn.bias", "layers.0.norm.weight"]
    tensors = {name: tensor(values if "norm" not in name else values[0], name) for name in inside + outside}
    packed = pack_blocks(tensors, "model")
    assert list(packed) == list(tensors)
    assert [name for name, found in packed.items() if found.layout is not None] == inside
    assert all(packed[name] is tensors[name] for name in outside)
    with pytest.raises(InputError, match="--pack-ternary: model has no dense matrices in its blocks"):
        pack_blocks({**packed, "embed.weight": tensor(values)}, "model")
    values[2, 130] = 0.3
    with pytest.raises(CheckpointError, match=r"layers\.0\.q_proj\.weight: row 2, group 1 holds"):
        pack_blocks(tensors, "model")


@dataclass(frozen=True)
class Counted(ArrayTensor):
    """Notes which rows are read."""

    read_from: list[tuple[int, int]] = field(default_factory=list)

    def read_rows(self, start: int, stop: int) -> Any:
        self.read_from.append((start, stop))
        return super().read_rows(start, stop)


def test_a_matrix_is_read_once_to_know_its_layout() -> None:
    values = ternary(6000, 1024, np.float32)[0]
    source = Counted("a.weight", values.shape, "F32", values)
    packed = pack_ternary(source)
    assert [start for start, _ in source.read_from] == list(range(0, 6000, 1024))
    source.read_from.clear()
    packed.read_rows(7, 9)
    assert source.read_from == [(7, 9)]


def test_a_matrix_that_changed_meanwhile_is_refused() -> None:
    values = ternary(4, 128, np.float32)[0]
    packed = pack_ternary(tensor(values))
    values[2, 3] = np.float32(1 + 2**-20)
    with pytest.raises(CheckpointError, match=r"a\.weight: row 2, group 0 holds"):
        packed.read()
    values[2] = np.float32(1 + 2**-20)
    with pytest.raises(CheckpointError, match=r"row 2, group 0 has the scale 1\.00000095.*bfloat16 does not hold"):
        packed.read()


def test_memory_does_not_grow_with_the_matrix(tmp_path: Path) -> None:
    values = ternary(1 << 13, 4096, BFLOAT16)[0]
    write_file(tmp_path / "dense.safetensors", {"a.weight": tensor(values)})
    size = values.nbytes
    del values
    opened = open_checkpoint(tmp_path / "dense.safetensors").tensors["a.weight"]
    with peak_memory() as peak:
        write_file(tmp_path / "packed.safetensors", {"a.weight": pack_ternary(opened)})
    assert size == 64 << 20
    assert peak.nbytes < 40 << 20


def mlx_tensor(path: Path, **changes: Any) -> MlxTensor:
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 3, (6, 256)).astype(np.uint8)
    scales = np.exp(rng.normal(-3, 0.3, (6, 2))).astype(np.float32).astype(BFLOAT16)
    biases = -scales
    for name, (at, value) in changes.items():
        {"codes": codes, "scales": scales, "biases": biases}[name][at] = value
    parts = {
        "a.weight": pack_codes(codes, 2).view(np.uint32),
        "a.scales": scales,
        "a.biases": biases,
    }
    write_file(path / "a.safetensors", {name: ArrayTensor(name, a.shape, "x", a) for name, a in parts.items()})
    (path / "config.json").write_text('{"quantization": {"group_size": 128, "bits": 2}}')
    found = open_checkpoint(path / "a.safetensors").tensors["a.weight"]
    assert isinstance(found, MlxTensor)
    return found


def as_ternary(source: MlxTensor) -> TernaryMlxTensor:
    return TernaryMlxTensor(source.name, source.shape, source.storage, source)


def test_mlx_matrices_as_ternary_rows(tmp_path: Path) -> None:
    # A scale of zero may have either sign, and so may its bias.
    source = mlx_tensor(tmp_path, scales=((1, 1), -0.0), biases=((1, 1), -0.0))
    rows, expected = as_ternary(source).read(), source.read()
    assert isinstance(rows, GroupedQuantRows)
    assert isinstance(expected, GroupedQuantRows)
    np.testing.assert_array_equal(rows.codes, expected.codes)
    np.testing.assert_array_equal(rows.scales.view(np.uint16), expected.scales.view(np.uint16))
    assert as_ternary(source).layout == QuantizedLayout(GroupedQuantFormat(2, 128, 1), BFLOAT16, has_offsets=False)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"biases": ((2, 1), 0.5)}, r"row 2, group 1 has the scale 0\.\d+ and the bias 0\.5, expected minus the scale"),
        ({"biases": ((0, 0), np.nan)}, "row 0, group 0 has .* bias nan"),
        ({"scales": ((5, 0), np.inf), "biases": ((5, 0), -np.inf)}, "row 5, group 0 has the scale inf"),
    ],
)
def test_mlx_matrices_with_other_biases(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=rf"a\.safetensors: a\.weight: {says}"):
        as_ternary(mlx_tensor(tmp_path, **changes)).read()
    # Rows are counted from the first of the matrix, not from the first that is read.
    row = int(says.split()[1].rstrip(","))
    with pytest.raises(CheckpointError, match=f"row {row}, "):
        as_ternary(mlx_tensor(tmp_path, **changes)).read_rows(row, row + 1)
    source = mlx_tensor(tmp_path, **changes)
    assert without_offsets(source) is source


def test_a_zero_point_in_place_of_biases(tmp_path: Path) -> None:
    """Whatever the codes, of a whole matrix or of some of its rows."""
    source = mlx_tensor(tmp_path, codes=((4, 130), 3))
    order = np.array([5, 4, 0])
    for tensor in (source, reorder_rows(source, order)):
        found = without_offsets(tensor)
        assert found == TernaryMlxTensor(tensor.name, tensor.shape, "MLX2", tensor)
        rows, expected = found.read(), tensor.read()
        assert isinstance(rows, GroupedQuantRows)
        assert isinstance(expected, GroupedQuantRows)
        assert found.layout is not None
        assert tensor.layout is not None
        np.testing.assert_array_equal(dequantize(rows, found.layout.format), dequantize(expected, tensor.layout.format))
    dense = ArrayTensor("b", (2, 128), "F32", np.ones((2, 128), np.float32))
    assert without_offsets(dense) is dense


@pytest.mark.parametrize(
    ("scale", "dtype", "held"),
    [
        (0.0625, np.float16, True),
        (2.0**-14 * 1.0078125, np.float16, True),
        (3e-8, np.float16, False),
        (70000.0, np.float16, False),
        (1 + 2**-10, BFLOAT16, False),
        (np.inf, BFLOAT16, False),
    ],
)
def test_scales_in_another_type(scale: float, dtype: Any, held: bool) -> None:
    dtype, other = np.dtype(dtype), BFLOAT16 if dtype == np.float16 else np.dtype(np.float16)
    scales = np.full((3, 2), 0.5, other)
    scales[2, 1] = scale
    rows = GroupedQuantRows(np.full((3, 64), 0x55, np.uint8), scales, np.zeros((), other))
    layout = QuantizedLayout(GroupedQuantFormat(2, 128, 1), other, has_offsets=False)
    source = ArrayTensor("a.weight", (3, 256), "ternary", rows, layout)
    changed = RescaledTensor("a.weight", (3, 256), "ternary", source, dtype)
    assert changed.layout == QuantizedLayout(layout.format, dtype, has_offsets=False)
    if held:
        found = changed.read()
        assert isinstance(found, GroupedQuantRows)
        assert found.scales.dtype == dtype
        np.testing.assert_array_equal(found.scales.astype(np.float64), scales.astype(np.float64))
    else:
        with pytest.raises(CheckpointError, match=rf"a\.weight: row 2, group 1 has the scale .* {dtype.name} does not"):
            changed.read()
