"""The weight file and compressed weights: written by coremltools, read and decompressed by the evaluator."""

import struct

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from coremltools.libmilstoragepython import _BlobStorageReader as Reader
from coremltools.libmilstoragepython import _BlobStorageWriter as Writer
from mil_packages import build, error, run, save

from intaglio.engines.coreml.evaluator import Evaluator
from intaglio.engines.coreml.evaluator.blobs import Blobs
from intaglio.errors import EngineError

SUB_BYTE = {"int4": (-8, 8), "uint1": (0, 2), "uint2": (0, 4), "uint3": (0, 8), "uint4": (0, 16), "uint6": (0, 64)}
WHOLE = ["int8", "uint8", "int16", "uint16", "int32", "uint32"]


@pytest.mark.parametrize("count", [64, 37])
def test_every_dtype_is_read_as_it_was_written(tmp_path, count):
    rng = np.random.default_rng()
    path, written = tmp_path / "weight.bin", {}
    writer = Writer(str(path))
    for name, (low, high) in SUB_BYTE.items():
        values = rng.integers(low, high, count).astype(np.int8 if low < 0 else np.uint8)
        written[name] = getattr(writer, f"write_{name}_data")(values), values
    for name in WHOLE:
        limits = np.iinfo(name)
        values = rng.integers(limits.min, limits.max, count, dtype=name, endpoint=True)
        written[name] = getattr(writer, f"write_{name}_data")(values), values
    floats = rng.standard_normal(count).astype(np.float32)
    written["float32"] = writer.write_float_data(floats), floats
    half = floats.astype(np.float16)
    written["float16"] = writer.write_fp16_data(half.view(np.uint16)), half
    del writer
    blobs = Blobs(path)
    assert blobs.count == len(written)
    for name, (offset, values) in written.items():
        found = blobs.read(offset, name.upper(), (count,))
        assert found.dtype == values.dtype
        np.testing.assert_array_equal(found, values, err_msg=name)
    theirs = Reader(str(path))
    for name in SUB_BYTE:
        found = blobs.read(written[name][0], name.upper(), (count,))
        np.testing.assert_array_equal(found, getattr(theirs, f"read_{name}_data")(written[name][0]))


def test_damaged_weight_files(tmp_path):
    path = tmp_path / "weight.bin"
    writer = Writer(str(path))
    offset = writer.write_float_data(np.arange(16, dtype=np.float32))
    del writer
    with pytest.raises(EngineError, match="it holds FLOAT32, the program expects FLOAT16"):
        Blobs(path).read(offset, "FLOAT16", (16,))
    with pytest.raises(EngineError, match=r"has 64 bytes, shape \[17\] of FLOAT32 needs 68"):
        Blobs(path).read(offset, "FLOAT32", (17,))
    with pytest.raises(EngineError, match="no record can lie there"):
        Blobs(path).read(offset + 8, "FLOAT32", (16,))
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    with pytest.raises(EngineError, match="are not in the file"):
        Blobs(path).read(offset, "FLOAT32", (16,))
    path.write_bytes(whole[:offset] + struct.pack("<I", 1) + whole[offset + 4 :])
    with pytest.raises(EngineError, match="begins with 0x1, expected 0xdeadbeef"):
        Blobs(path).read(offset, "FLOAT32", (16,))
    path.write_bytes(struct.pack("<II", 1, 3) + whole[8:])
    with pytest.raises(EngineError, match="version 3, expected 2"):
        Blobs(path)
    path.unlink()
    with pytest.raises(EngineError, match="cannot read the weight file"):
        Blobs(path)


def codes(bits, *shape):
    dtype = types.nptype_from_builtin(types.string_to_builtin(f"uint{bits}"))
    return np.random.default_rng().integers(0, 1 << bits, shape).astype(dtype)


def plain(array):
    return np.asarray(array).astype(np.int64)


def test_look_up_tables(tmp_path):
    rng = np.random.default_rng()
    x = rng.standard_normal((3, 32)).astype(np.float32)
    indices = {bits: codes(bits, 16, 32) for bits in (1, 2, 3, 4, 6, 8)}
    tables = {bits: rng.standard_normal((2, 4, 1 << bits, 1)).astype(np.float32) for bits in indices}
    vectors, table = codes(2, 8, 32), rng.standard_normal((2, 1, 4, 2)).astype(np.float32)

    def body(x):
        weights = [mb.constexpr_lut_to_dense(indices=indices[bits], lut=tables[bits]) for bits in indices]
        weights.append(mb.constexpr_lut_to_dense(indices=vectors, lut=table, vector_axis=np.int32(0)))
        return [mb.linear(x=x, weight=weight) for weight in weights]

    expected = []
    for bits in indices:
        values = np.empty((16, 32))
        for i, j in np.ndindex(16, 32):
            values[i, j] = tables[bits][i // 8, j // 8, plain(indices[bits])[i, j], 0]
        expected.append(x @ values.T)
    values = np.empty((16, 32))
    for i, j in np.ndindex(8, 32):
        for k in range(2):
            # Two rows a code; the result's first eight rows have the first table.
            values[2 * i + k, j] = table[i // 4, 0, plain(vectors)[i, j], k]
    expected.append(x @ values.T)
    for found, other in zip(run(tmp_path, body, {"x": x}), expected, strict=True):
        assert error(found, other) <= 1e-6


def test_few_codes_are_stored_in_the_program(tmp_path):
    """Less than ten values lie in the program itself, packed like those of the weight file."""
    rng = np.random.default_rng()
    x = rng.standard_normal((3, 3)).astype(np.float32)
    indices = {bits: codes(bits, 3, 3) for bits in (1, 2, 3, 4, 6)}
    tables = {bits: rng.standard_normal((1, 1, 1 << bits, 1)).astype(np.float32) for bits in indices}
    int4, signed = types.nptype_from_builtin(types.int4), rng.integers(-8, 8, (3, 3))

    def body(x):
        weights = [mb.constexpr_lut_to_dense(indices=indices[bits], lut=tables[bits]) for bits in indices]
        scale = np.full((1, 1), 0.5, np.float32)
        weights.append(mb.constexpr_blockwise_shift_scale(data=signed.astype(int4), scale=scale))
        return [mb.linear(x=x, weight=weight) for weight in weights]

    expected = [x @ tables[bits][0, 0, plain(indices[bits]), 0].T for bits in indices]
    for found, other in zip(run(tmp_path, body, {"x": x}), [*expected, x @ (signed * 0.5).T], strict=True):
        assert error(found, other) <= 1e-6


def test_shift_and_scale(tmp_path):
    rng = np.random.default_rng()
    x = rng.standard_normal((3, 32)).astype(np.float32)
    int4 = types.nptype_from_builtin(types.int4)
    q4, offsets = rng.integers(-8, 8, (16, 32)), rng.integers(-8, 8, (16, 4))
    q8 = rng.integers(-128, 128, (16, 32)).astype(np.int8)
    scales = rng.uniform(0.1, 1, (16, 4)).astype(np.float32)
    column = rng.uniform(0.1, 1, (1, 32)).astype(np.float32)

    def body(x):
        weights = [
            mb.constexpr_blockwise_shift_scale(data=q4.astype(int4), scale=scales, offset=offsets.astype(int4)),
            mb.constexpr_blockwise_shift_scale(data=q8, scale=column),
        ]
        return [mb.linear(x=x, weight=weight) for weight in weights]

    wide = np.repeat(scales, 8, 1).astype(np.float64) * (q4 - np.repeat(offsets, 8, 1))
    expected = [x @ wide.T, x @ (q8 * column.astype(np.float64)).T]
    for found, other in zip(run(tmp_path, body, {"x": x}), expected, strict=True):
        assert error(found, other) <= 1e-6


def test_sparse_weights(tmp_path):
    rng = np.random.default_rng()
    x = rng.standard_normal((3, 32)).astype(np.float32)
    uint1 = types.nptype_from_builtin(types.uint1)
    mask = rng.random((16, 32)) < 0.4
    count = int(mask.sum())
    values = rng.standard_normal(count).astype(np.float32)
    data, scales = rng.integers(-8, 8, count).astype(np.int8), rng.uniform(0.1, 1, (16, 2)).astype(np.float32)
    picks, table = codes(2, count), rng.standard_normal((4, 1, 4, 1)).astype(np.float32)

    def body(x):
        bits = mask.astype(uint1)
        scaled = mb.constexpr_sparse_blockwise_shift_scale(data_mask=bits, nonzero_data=data, scale=scales)
        looked = mb.constexpr_lut_to_sparse(indices_mask=bits, indices_nonzero_data=picks, lut=table)
        weights = [
            mb.constexpr_sparse_to_dense(nonzero_data=values, mask=bits),
            mb.constexpr_sparse_to_dense(nonzero_data=scaled[1], mask=scaled[0]),
            mb.constexpr_sparse_to_dense(nonzero_data=looked[1], mask=looked[0]),
        ]
        return [mb.linear(x=x, weight=weight) for weight in weights]

    dense = np.zeros((3, 16, 32))
    rows, columns = np.nonzero(mask)
    dense[0][mask], dense[1][mask] = values, data * scales[rows, columns // 16].astype(np.float64)
    dense[2][mask] = table[rows // 4, 0, plain(picks), 0]
    for found, weight in zip(run(tmp_path, body, {"x": x}), dense, strict=True):
        assert error(found, x @ weight.T) <= 1e-6


def ternary(rows, columns, block):
    rng = np.random.default_rng()
    trits = rng.integers(-1, 2, (rows, columns))
    scales = rng.uniform(0.01, 0.1, (rows, columns // block)).astype(np.float16)
    weight = trits * np.repeat(scales, block, 1).astype(np.float64)
    return (trits + 1).astype(types.nptype_from_builtin(types.uint2)), scales, weight


@pytest.mark.parametrize("keep_order", [True, False])
def test_ternary_weights_in_both_orders(tmp_path, keep_order):
    """Two bits a weight, a table of -1, 0, 1 and a scale a block of 128; coremltools may exchange the last two."""
    indices, scales, weight = ternary(64, 256, 128)
    x = np.random.default_rng().standard_normal((3, 256)).astype(np.float16)

    def body(x):
        lut = np.array([-1, 0, 1, 0], np.int8).reshape(1, 1, 4, 1)
        looked = mb.constexpr_lut_to_dense(indices=indices, lut=lut)
        return mb.linear(x=x, weight=mb.constexpr_blockwise_shift_scale(data=looked, scale=scales))

    passes = ct.PassPipeline.DEFAULT
    if keep_order:
        passes.remove_passes({"common::canonicalize_quantized_lut_pattern"})
    path = save(build(body, {"x": (x.shape, "float16")}), tmp_path / "m.mlpackage", passes)
    evaluator = Evaluator(path)
    order = [operation.type for operation in evaluator.program.functions["main"].block.operations]
    order = [name for name in order if name.startswith("constexpr")]
    expected = ["constexpr_lut_to_dense", "constexpr_blockwise_shift_scale"]
    assert order == (expected if keep_order else expected[::-1])
    (found,) = evaluator.run({"x": x}).values()
    assert found.dtype == np.float16
    assert error(found, (x.astype(np.float64) @ weight.T)) <= 1e-3


def test_compressed_convolution_and_embedding(tmp_path):
    rng = np.random.default_rng()
    x = rng.standard_normal((1, 4, 5, 5)).astype(np.float32)
    ids = rng.integers(0, 32, (2, 3)).astype(np.int32)
    kernel, table = codes(2, 8, 4, 3, 3), rng.standard_normal((8, 1, 1, 1, 4, 1)).astype(np.float32)
    embedding, rows = codes(4, 32, 16), rng.standard_normal((4, 1, 16, 1)).astype(np.float32)

    def body(x, ids):
        weight = mb.constexpr_lut_to_dense(indices=kernel, lut=table)
        tokens = mb.constexpr_lut_to_dense(indices=embedding, lut=rows)
        return [mb.conv(x=x, weight=weight), mb.gather(x=tokens, indices=ids, axis=0)]

    found = run(tmp_path, body, {"x": x, "ids": ids})
    import torch

    weight = np.stack([table[i, 0, 0, 0, plain(kernel)[i], 0] for i in range(8)])
    expected = torch.nn.functional.conv2d(torch.from_numpy(x).double(), torch.from_numpy(weight).double())
    assert error(found[0], expected.numpy()) <= 1e-6
    dense = np.stack([rows[i // 8, 0, plain(embedding)[i], 0] for i in range(32)])
    np.testing.assert_array_equal(found[1], dense[ids])


def test_compressed_weights_of_ios_16(tmp_path):
    rng = np.random.default_rng()
    x = rng.standard_normal((3, 8)).astype(np.float32)
    q, scale, zero = rng.integers(-128, 128, (4, 8)).astype(np.int8), rng.uniform(0.1, 1, 4), rng.integers(-9, 9, 4)
    scale, zero = scale.astype(np.float32), zero.astype(np.int8)
    six, table = rng.integers(0, 64, 32), rng.standard_normal(64).astype(np.float32)
    stream = np.unpackbits(six.astype(np.uint8)[:, None], axis=1, bitorder="little")[:, :6]
    mask = rng.random(32) < 0.5
    values = rng.standard_normal(int(mask.sum())).astype(np.float32)
    half = rng.standard_normal((4, 8)).astype(np.float16)
    shape = np.array([4, 8], np.uint32)

    def body(x):
        weights = [
            mb.constexpr_affine_dequantize(quantized_data=q, zero_point=zero, scale=scale, axis=0),
            mb.constexpr_lut_to_dense(indices=np.packbits(stream.ravel(), bitorder="little"), lut=table, shape=shape),
            mb.constexpr_sparse_to_dense(nonzero_data=values, mask=np.packbits(mask, bitorder="little"), shape=shape),
            mb.constexpr_cast(source_val=half, output_dtype="fp32"),
        ]
        return [mb.linear(x=x, weight=weight) for weight in weights]

    sparse = np.zeros(32)
    sparse[mask] = values
    dense = [
        (q - zero[:, None].astype(np.float64)) * scale[:, None], table[six].reshape(4, 8), sparse.reshape(4, 8), half,
    ]  # fmt: skip
    for found, weight in zip(run(tmp_path, body, {"x": x}, target=ct.target.iOS16), dense, strict=True):
        assert error(found, x @ weight.astype(np.float64).T) <= 1e-6


@pytest.mark.parametrize("axis", [None, 1])
def test_quantize_and_dequantize(tmp_path, axis):
    rng = np.random.default_rng()
    x = (rng.standard_normal((2, 3, 4)) * 30).astype(np.float32)
    scale = rng.uniform(0.2, 0.6, 3).astype(np.float32) if axis else np.float32(0.4)
    zero = np.array([3, 120, 200], np.uint8) if axis else np.uint8(100)
    given = {"scale": scale, "zero_point": zero} | ({"axis": axis} if axis else {})

    def body(x):
        q = mb.quantize(input=x, output_dtype="uint8", **given)
        signed = mb.quantize(input=x, output_dtype="int8", scale=scale, **({"axis": axis} if axis else {}))
        return [mb.cast(x=q, dtype="int32"), mb.dequantize(input=q, **given), mb.cast(x=signed, dtype="int32")]

    found = run(tmp_path, body, {"x": x})
    column = (lambda v: v[:, None]) if axis else (lambda v: v)
    quotient = np.rint(x / column(scale))
    np.testing.assert_array_equal(found[0], np.clip(quotient + column(zero), 0, 255))
    assert error(found[1], (found[0] - column(zero).astype(np.float64)) * column(scale)) <= 1e-6
    np.testing.assert_array_equal(found[2], np.clip(quotient, -128, 127))
    assert len(np.unique(found[0])) > 10
