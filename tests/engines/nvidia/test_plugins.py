"""Plugins through TensorRT's own bindings: what its parser finds, its builder is told, and its runtime launches."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tensorrt_stub import Launched, deploy, has_bindings, interpret

from intaglio.kernels.grouped_quant import GroupedQuantFormat, GroupedQuantRows, matmul, pack_codes

pytestmark = [
    pytest.mark.skipif(
        not has_bindings(), reason="the bindings of TensorRT (tensorrt-cu13-bindings) are not installed"
    ),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
_BOUND = 2e-3  # relative L2, float16
_BOUND_BFLOAT16 = 8e-3
_GROUP = 64


def test_the_ternary_matmul_is_found_and_described(tmp_path: Path) -> None:
    inside, outside = 128, 192
    found = deploy(
        tmp_path,
        "GroupedQuantMatMul",
        [
            (["batch", "tokens", inside], "HALF"),
            ([outside, inside // 16], "INT32"),
            ([outside, 2], "FLOAT"),
        ],
        {"group_size": _GROUP},
        [{"batch": 2, "tokens": 65}, {"batch": 1, "tokens": 1}],
    )
    assert found.dtype == "HALF" and found.types == [["HALF", "INT32", "FLOAT", "HALF"]]
    assert found.shapes == [[2, 65, outside], [1, 1, outside]]
    assert [each.tactic for each in found.launched] == [1, 2, 3, 4]
    for each in found.launched:
        assert each.numbers == [[130, outside, inside], [1, outside, inside]]
        _check_ptx(each, pointers=4, numbers=3)
    # Tiles of 128 x 128, 64 x 128, 128 x 128 and 64 x 64.
    assert [each.grids[0] for each in found.launched] == [[4, 1, 1], [6, 1, 1], [4, 1, 1], [9, 1, 1]]
    assert [each.grids[1] for each in found.launched] == [[2, 1, 1], [2, 1, 1], [2, 1, 1], [3, 1, 1]]


def test_few_rows_are_a_plugin_of_their_own(tmp_path: Path) -> None:
    tensors = [(["rows", 256], "BF16"), ([40, 16], "INT32"), ([40, 4], "BF16")]
    found = deploy(tmp_path, "GroupedQuantMatMulFewRows", tensors, {"group_size": _GROUP}, [{"rows": 17}])
    assert found.types == [["BF16", "INT32", "BF16", "BF16"]] and found.shapes == [[17, 40]]
    assert [each.grids for each in found.launched] == [[[4, 1, 1]], [[2, 1, 1]], [[2, 1, 1]]]
    for each in found.launched:
        _check_ptx(each, pointers=4, numbers=3)


@pytest.mark.parametrize(("plugin", "half", "scales"), [
    ("GroupedQuantMatMul", "float16", "float16"),
    ("GroupedQuantMatMul", "bfloat16", "float32"),
    ("GroupedQuantMatMulFewRows", "float16", "float32"),
    ("GroupedQuantMatMulFewRows", "float16", "float16"),
])  # fmt: skip
def test_what_is_launched_computes_the_ternary_matmul(tmp_path: Path, plugin: str, half: str, scales: str) -> None:
    random = np.random.default_rng()
    rows, inside, outside = int(random.integers(1, 90)), _GROUP * int(random.integers(2, 5)), 16 * 5 + 3
    x = random.standard_normal((rows, inside)).astype(np.float16).astype(np.float32)
    if half == "bfloat16":
        x = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    codes = pack_codes(random.integers(0, 3, (outside, inside), np.uint8), 2)
    weight = random.uniform(0.5, 1.5, (outside, inside // _GROUP)).astype(scales)
    attributes = {"group_size": _GROUP, "is_bfloat16": int(half == "bfloat16")}
    tactics = [1, 2, 3]
    quantized = GroupedQuantRows(codes, weight, np.zeros((), weight.dtype))
    inputs = [x, codes.view(np.int32), weight]
    made = interpret(tmp_path, plugin, inputs, attributes, tactics)
    expected = matmul(x, quantized, GroupedQuantFormat(2, _GROUP, 1))
    for y in made:
        assert y.shape == expected.shape and np.isfinite(y).all()
        assert _relative_l2(y, expected) <= (_BOUND if half == "float16" else _BOUND_BFLOAT16)


@pytest.mark.parametrize(
    ("inputs", "group", "message"),
    [
        ([("HALF", 128), ("INT8", 8), ("HALF", 2)], 64, "expected half precision and INT32"),
        ([("FLOAT", 128), ("INT32", 8), ("HALF", 2)], 64, "expected half precision and INT32"),
        ([("HALF", 128), ("INT32", 8), ("HALF", 8)], 16, "groups of a multiple of 32"),
        ([("HALF", 128), ("INT32", 8), ("HALF", 3)], 64, "128 inputs in 3 groups of 64"),
    ],
)
def test_what_no_kernel_takes_is_refused(
    tmp_path: Path, inputs: list[tuple[str, int]], group: int, message: str
) -> None:
    tensors: list[tuple[list[object], str]] = [([16, size], dtype) for dtype, size in inputs]
    with pytest.raises(RuntimeError, match=message):
        deploy(tmp_path, "GroupedQuantMatMul", tensors, {"group_size": group}, [{}])


def test_attention_is_found_and_described(tmp_path: Path) -> None:
    found = deploy(
        tmp_path,
        "FlashAttentionMasked",
        [
            (["batch", 8, "queries", 40], "HALF"),
            (["batch", 2, "keys", 40], "HALF"),
            (["batch", 2, "keys", 40], "HALF"),
            ([1, 1, "queries", "keys"], "BOOL"),
        ],
        {"scale": 0.158, "softcap": 30.0, "is_causal": 0},
        [{"batch": 3, "queries": 70, "keys": 90}],
    )
    (launched,) = found.launched
    assert found.dtype == "HALF" and found.types == [["HALF", "HALF", "HALF", "BOOL", "HALF"]]
    assert found.shapes == [[3, 8, 70, 40]]
    assert launched.grids == [[2, 8, 3]] and launched.numbers == [[8, 2, 70, 90, 0, 0, 90]]
    _check_ptx(launched, pointers=5, numbers=7)


@pytest.mark.parametrize(("wide", "mask", "causal"), [
    (0, "none", 1), (0, "bool", 0), (0, "float", 1), (1, "heads", 0), (1, "none", 1)
])  # fmt: skip
def test_what_is_launched_computes_attention(tmp_path: Path, wide: int, mask: str, causal: int) -> None:
    random = np.random.default_rng()
    batch, heads, shared, queries, size = 2, 4, 2, int(random.integers(2, 70)), 40
    keys = int(random.integers(2, 90))
    q, k, v = (
        random.standard_normal(shape).astype(np.float16).astype(np.float32)
        for shape in ((batch, heads, queries, size), (batch, shared, keys, size), (batch, shared, keys, size))
    )
    inputs, added = [q, k, v], np.zeros((batch, heads, queries, keys))
    if mask in ("bool", "heads"):
        seen = random.random((batch, 1, queries, keys) if mask == "bool" else (1, heads, 1, keys)) < 0.7
        seen[..., 0] = True
        inputs, added = [*inputs, seen], np.where(seen, 0, -np.inf)
    elif mask == "float":
        added = random.standard_normal((1, 1, queries, keys)).astype(np.float16).astype(np.float32)
        inputs = [*inputs, added]
    if causal:
        added = added + np.where(np.tril(np.ones((queries, keys), bool)), 0, -np.inf)
    attributes = {"scale": 0.2, "softcap": 5.0, "is_causal": causal, "is_float32": wide}
    attributes["open_dims"] = [[0, 2], [0, 2], [0, 2], [3]][: len(inputs)]  # type: ignore[assignment]
    plugin = "FlashAttention" if mask == "none" else "FlashAttentionMasked"
    (made,) = interpret(tmp_path, plugin, inputs, attributes, [1])
    assert np.isfinite(made).all()
    assert _relative_l2(made, _attention(q, k, v, added, 0.2, 5.0)) <= (1e-5 if wide else _BOUND)


def _attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, added: np.ndarray, scale: float, softcap: float
) -> np.ndarray:
    q, k, v = (each.astype(np.float64) for each in (q, k, v))
    k, v = (np.repeat(each, q.shape[1] // each.shape[1], axis=1) for each in (k, v))
    scores = softcap * np.tanh(q @ k.swapaxes(2, 3) * scale / softcap) + added
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True) @ v)


def _relative_l2(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b.astype(np.float64)))


def _check_ptx(launched: Launched, pointers: int, numbers: int) -> None:
    """The kernel takes what TensorRT passes and no more, and NVIDIA's assembler takes it for newer architectures."""
    import triton

    assert re.search(r"^\.version 8\.0$", launched.ptx, re.M) and re.search(r"^\.target sm_80$", launched.ptx, re.M)
    entry = re.search(rf"\.entry {launched.kernel}\((.*?)\)", launched.ptx, re.S)
    assert entry is not None
    assert re.findall(r"\.param \.(u\d+)", entry[1]) == ["u64"] * (pointers - 1) + ["u32"] * numbers + ["u64"]
    assert f".reqntid {launched.threads}" in launched.ptx and launched.shared_bytes <= 48 * 1024
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    for sm in (80, 90, 120):
        assembler = "ptxas-blackwell" if sm >= 100 and (tools / "ptxas-blackwell").exists() else "ptxas"
        done = subprocess.run(
            [tools / assembler, f"--gpu-name=sm_{sm}", "-v", "-o", "/dev/null", "-"],
            input=launched.ptx, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "0 bytes spill stores" in done.stderr, f"sm_{sm}: {done.stderr}"
