"""MLX-quantized tensors: equal to ``mx.dequantize`` bit for bit, told apart by config or width, refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_files import dequantized, quantized

from intaglio.errors import CheckpointError
from intaglio.exporters.checkpoints import open_checkpoint
from intaglio.exporters.checkpoints.mlx import (
    BITS,
    GROUP_SIZES,
    HELD_BITS,
    MlxTensor,
    UnresolvedMlxTensor,
    with_width,
)
from intaglio.exporters.checkpoints.tensors import CheckpointTensor, reorder_rows
from intaglio.kernels.grouped_quant import GroupedQuantRows, dequantize, unpack_codes

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def write(folder: Path, arrays: dict[str, Any], quantization: Any = None, key: str = "quantization") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    (folder / "config.json").write_text(json.dumps({key: quantization} if quantization else {}))
    return folder


def triplet(module: str, bits: int, group_size: int, width: int = 384, dtype: Any = mx.float32) -> dict[str, Any]:
    rng = np.random.default_rng(bits * 1000 + group_size)
    values = rng.normal(size=(12, width)).astype(np.float32)
    values[1] = 0
    values[2, :32] = 0.25
    values[3] = np.abs(values[3])
    values[4] *= -1e-4
    parts = quantized(values, bits, group_size, dtype)
    return {f"{module}.{part}": array for part, array in zip(("weight", "scales", "biases"), parts, strict=True)}


def random_triplet(bits: int, group_size: int, dtype: Any) -> dict[str, Any]:
    """Codes, scales and biases that no quantizer chose: every code is met, scales of both signs."""
    rng = np.random.default_rng(7)
    words = mx.array(rng.integers(0, 1 << 32, (9, 384 * bits // 32), np.uint64).astype(np.uint32))
    scales, biases = (
        mx.array(rng.normal(size=(9, 384 // group_size)).astype(np.float32)).astype(dtype) for _ in range(2)
    )
    return {"a.weight": words, "a.scales": scales, "a.biases": biases}


def values_of(tensor: CheckpointTensor) -> np.ndarray:
    rows = tensor.read()
    assert isinstance(rows, GroupedQuantRows)
    assert tensor.layout is not None
    return dequantize(rows, tensor.layout.format)


def same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("random", [False, True])
def test_values_are_those_of_mlx(tmp_path: Path, bits: int, group_size: int, dtype: str, random: bool) -> None:
    kind = DTYPES[dtype]
    arrays = random_triplet(bits, group_size, kind) if random else triplet("a", bits, group_size, dtype=kind)
    folder = write(tmp_path, arrays, {"bits": bits, "group_size": group_size})
    checkpoint = open_checkpoint(folder)
    assert list(checkpoint.tensors) == ["a.weight"]
    tensor = checkpoint.tensors["a.weight"]
    assert (tensor.storage, tensor.shape[1], tensor.dtype) == (f"MLX{bits}", 384, None)
    assert tensor.layout is not None
    quantization = tensor.layout.format
    assert (quantization.bits, quantization.group_size, quantization.zero_point) == (HELD_BITS[bits], group_size, 0)
    assert (tensor.layout.has_offsets, tensor.layout.scale_dtype.name) == (True, dtype)
    same_bits(values_of(tensor), dequantized(folder / "model.safetensors", "a", bits, group_size))
    rows = tensor.read()
    assert isinstance(rows, GroupedQuantRows)
    np.testing.assert_array_equal(rows.scales.astype(np.float32), np.array(arrays["a.scales"].astype(mx.float32)))
    np.testing.assert_array_equal(rows.offsets.astype(np.float32), np.array(arrays["a.biases"].astype(mx.float32)))
    if bits in (2, 4, 8):
        np.testing.assert_array_equal(rows.codes, np.array(arrays["a.weight"]).view(np.uint8))
    else:
        assert unpack_codes(rows.codes, HELD_BITS[bits]).max() < 1 << bits
    assert tensor.nbytes == sum(array.nbytes for array in arrays.values())


@pytest.mark.parametrize("bits", [3, 4])
def test_rows_can_be_read_in_parts_and_reordered(tmp_path: Path, bits: int) -> None:
    folder = write(tmp_path, triplet("a", bits, 32), {"bits": bits, "group_size": 32})
    tensor = open_checkpoint(folder).tensors["a.weight"]
    expected = dequantized(folder / "model.safetensors", "a", bits, 32)
    assert tensor.layout is not None
    for start, rows in tensor.chunks(1000):
        assert isinstance(rows, GroupedQuantRows)
        same_bits(dequantize(rows, tensor.layout.format), expected[start : start + len(rows.codes)])
    order = np.random.default_rng(0).permutation(12)
    same_bits(values_of(reorder_rows(tensor, order)), expected[order])


def test_modules_may_have_settings_of_their_own(tmp_path: Path) -> None:
    arrays = {
        **triplet("a", 4, 64), **triplet("b.q", 8, 32), **triplet("b.k", 6, 64), "c.weight": mx.ones((4, 4)),
        **triplet("d", 4, 64), "b.bias": mx.ones((4,)),
    }  # fmt: skip
    quantization = {
        "bits": 4, "group_size": 64, "mode": "affine", "b.q": {"bits": 8, "group_size": 32}, "b.k": {"bits": 6},
        "c": False, "d": True,
    }  # fmt: skip
    for key in ("quantization", "quantization_config"):
        checkpoint = open_checkpoint(write(tmp_path, arrays, quantization, key))
        found = {name: tensor.storage for name, tensor in checkpoint.tensors.items()}
        assert found == {
            "a.weight": "MLX4", "b.q.weight": "MLX8", "b.k.weight": "MLX6", "c.weight": "F32", "d.weight": "MLX4",
            "b.bias": "F32",
        }  # fmt: skip
        for module, bits, group_size in (("b.q", 8, 32), ("b.k", 6, 64), ("d", 4, 64)):
            expected = dequantized(tmp_path / "model.safetensors", module, bits, group_size)
            same_bits(values_of(checkpoint.tensors[f"{module}.weight"]), expected)
    quantization |= {"gone": {"bits": 2}}
    (note,) = open_checkpoint(write(tmp_path, arrays, quantization)).notes
    assert "quantization names 1 modules that are not quantized in the files, first gone" in note


def test_the_parts_may_lie_in_different_shards(tmp_path: Path) -> None:
    arrays = triplet("a", 4, 32)
    write(tmp_path, {"a.weight": arrays.pop("a.weight")}, {"bits": 4, "group_size": 32})
    (tmp_path / "model.safetensors").rename(tmp_path / "1.safetensors")
    mx.save_safetensors(str(tmp_path / "2.safetensors"), arrays)
    places = {"a.weight": "1.safetensors", "a.scales": "2.safetensors", "a.biases": "2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert open_checkpoint(tmp_path).tensors["a.weight"].storage == "MLX4"


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_without_config_the_width_decides(tmp_path: Path, bits: int, group_size: int) -> None:
    checkpoint = open_checkpoint(write(tmp_path, triplet("a", bits, group_size)))
    tensor = checkpoint.tensors["a.weight"]
    alike = [(b, g) for b in BITS for g in GROUP_SIZES if b * g == bits * group_size]
    if len(alike) == 1:
        assert checkpoint.notes[0].endswith("1 MLX tensors are the only ones that their shapes allow")
    else:
        assert isinstance(tensor, UnresolvedMlxTensor)
        with pytest.raises(
            CheckpointError, match=rf"a.weight: is .*{bits} bits in groups of {group_size}.*config.json"
        ):
            tensor.read()
        for width in (0, 7, 384 * 64, 100):
            assert with_width(tensor, (12, width)) is tensor
        assert with_width(tensor, None) is with_width(tensor, (384,)) is tensor
        for b, g in alike:
            assert with_width(tensor, (12, 384 * g // group_size)).storage == f"MLX{b}"
    same_bits(
        values_of(with_width(tensor, (12, 384))), dequantized(tmp_path / "model.safetensors", "a", bits, group_size)
    )


def changed(part: str, array: Any) -> dict[str, Any]:
    return {**triplet("a", 4, 32), f"a.{part}": array}


ONES = mx.ones((12, 12))
BAD: list[tuple[dict[str, Any], Any, str]] = [
    (
        triplet("a", 4, 32),
        {"bits": 4, "group_size": 64},
        "48 words and 12 groups a row contradict the 4 bits in groups",
    ),
    (triplet("a", 4, 32), {"bits": 7, "group_size": 32}, "is 7 bits in groups of 32; expected bits of 2, 3, 4"),
    (triplet("a", 4, 32), {"bits": 4, "group_size": 16}, "is 4 bits in groups of 16"),
    (triplet("a", 4, 32), {"bits": "4", "group_size": 32}, "bits is '4', expected a number"),
    (triplet("a", 4, 32), {"bits": True, "group_size": 32}, "bits is True, expected a number"),
    (triplet("a", 4, 32), {"bits": 4, "group_size": 32, "mode": 3}, "mode is 3, expected a name"),
    (triplet("a", 4, 32), {"bits": 4, "group_size": 32, "a": False}, "says it is not quantized"),
    (triplet("a", 4, 32), {"bits": 4, "group_size": 32, "a": {"bits": 1}}, "config.json: a: is 1 bits in groups of 32"),
    (
        changed("biases", ONES.astype(mx.float16)),
        None,
        r"scales F32 \[12, 12\] and biases F16 \[12, 12\]; expected both",
    ),
    (changed("biases", ONES[:, :3]), None, r"biases F32 \[12, 3\]; expected both F16, BF16 or F32 of one shape"),
    ({**changed("biases", ONES[:4]), "a.scales": ONES[:4]}, None, "of one shape, with 12 rows"),
    ({**changed("biases", ONES.astype(mx.int32)), "a.scales": ONES.astype(mx.int32)}, None, r"scales I32 \[12, 12\]"),
    ({**changed("biases", ONES[0]), "a.scales": ONES[0]}, None, r"scales F32 \[12\]"),
    ({**changed("biases", ONES[:, :7]), "a.scales": ONES[:, :7]}, None, "48 words and 7 groups a row fit no bits"),
]


@pytest.mark.parametrize("case", range(len(BAD)))
def test_contradictions_are_refused(tmp_path: Path, case: int) -> None:
    arrays, quantization, message = BAD[case]
    with pytest.raises(CheckpointError, match=message) as error:
        open_checkpoint(write(tmp_path, arrays, quantization))
    assert str(error.value).startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("mode", "group_size", "bits"), [("mxfp4", 32, 4), ("nvfp4", 16, 4), ("mxfp8", 32, 8), (None, 32, 4)]
)
def test_other_modes_are_refused_by_name_when_they_are_needed(
    tmp_path: Path, mode: str | None, group_size: int, bits: int
) -> None:
    values = mx.array(np.random.default_rng(0).normal(size=(4, 128)).astype(np.float32))
    weight, scales = mx.quantize(values, group_size=group_size, bits=bits, mode=mode or "mxfp4")
    quantization = {"bits": bits, "group_size": group_size, "mode": mode} if mode else None
    arrays = {"a.weight": weight, "a.scales": scales, "b.weight": values}
    checkpoint = open_checkpoint(write(tmp_path, arrays, quantization))
    assert checkpoint.tensors["a.weight"].storage == (mode or "MLX fp")
    assert list(checkpoint.tensors) == ["a.weight", "b.weight"]
    with pytest.raises(CheckpointError, match=rf"a.weight: has scales and no biases \({mode or 'mxfp4, nvfp4'}"):
        checkpoint.tensors["a.weight"].read()


def test_tensors_that_only_look_alike_are_left_alone(tmp_path: Path) -> None:
    arrays = {
        "a.weight": mx.ones((4, 4)), "a.scales": mx.ones((4, 1)), "b.weight": mx.ones((4, 4), mx.uint32),
        "c.scales": mx.ones((2,)), "scales": mx.ones((2,)), "weight": mx.ones((2, 2), mx.uint32),
    }  # fmt: skip
    assert set(open_checkpoint(write(tmp_path, arrays)).tensors) == set(arrays)


def test_stacked_experts_are_listed_and_refused_when_read(tmp_path: Path) -> None:
    arrays = {name: mx.stack([array, array]) for name, array in triplet("a", 4, 32).items()}
    tensor = open_checkpoint(write(tmp_path, arrays, {"bits": 4, "group_size": 32})).tensors["a.weight"]
    assert not isinstance(tensor, MlxTensor)
    with pytest.raises(CheckpointError, match=r"a.weight: is an MLX tensor of shape \[2, 12, 48\]; read are matrices"):
        tensor.read()
