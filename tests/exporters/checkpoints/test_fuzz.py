"""Damaged files: whatever the bytes, a reader answers or raises CheckpointError, soon and in little memory.

INTAGLIO_FUZZ_SECONDS lengthens the run of each format, for by hand: a new seed each time, counts printed (-s).
"""

from __future__ import annotations

import json
import os
import random
import struct
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf_files import gguf_bytes, info, pair, start, text
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from peak_memory import peak_memory
from safetensors_files import entry, safetensors_bytes

from intaglio.errors import CheckpointError
from intaglio.exporters.checkpoints import open_checkpoint
from intaglio.exporters.checkpoints.gguf_blocks import BLOCK_TYPES, TYPES

SECONDS = float(os.environ.get("INTAGLIO_FUZZ_SECONDS", "0"))
EXAMPLES = 6000
# A file may not take longer; the whole run of a format ends on time by itself.
HANG_SECONDS = 5
CI_SECONDS = 30


def _gguf_files() -> list[bytes]:
    rng = np.random.default_rng(0)
    blocks = [
        (f"w{type_id}", (2, values), type_id, rng.bytes(2 * size))
        for type_id, (name, values, size) in TYPES.items()
        if name in BLOCK_TYPES
    ]
    codes = np.full((8, 34), 0x55, np.uint8)
    codes[:, 32:] = [0x00, 0x24]
    ternary = [(f"t{i}", (4, 128), 42, codes[4 * i : 4 * i + 4].tobytes()) for i in range(2)]
    sizes = {0: 1, 5: 4, 6: 4, 7: 1, 8: 8, 12: 8}
    arrays = [text(f"a{kind}") + struct.pack("<IIQ", 9, kind, 2) + bytes(2 * size) for kind, size in sizes.items()]
    nested = text("nested") + struct.pack("<IIQ", 9, 9, 2) + (struct.pack("<IQ", 5, 2) + bytes(8)) * 2
    return [
        gguf_bytes({"general.architecture": "llama", "n": 3, "eps": 0.5, "yes": True}, [("v", (4,), 0, bytes(16))]),
        gguf_bytes({"general.alignment": 64}, [("a", (2, 3), 1, bytes(12)), ("b", (1, 1, 2, 2), 30, bytes(8))]),
        gguf_bytes({}, [*blocks, ("opaque", (1, 256), 17, bytes(74)), ("unknown", (2,), 99, bytes(8))]),
        gguf_bytes({"general.architecture": "bonsai-image"}, ternary),
        gguf_bytes({"split.no": 0, "split.count": 1, "split.tensors.count": 1}, [("v", (4,), 0, bytes(16))]),
        start(0, len(arrays) + 1) + b"".join(arrays) + nested,
        start(1, 1, 2) + pair("key", "value") + info("scalar", (), 0, 0) + bytes(64),
    ]


def _safetensors_files() -> list[bytes]:
    return [
        safetensors_bytes(
            {"__metadata__": {"format": "pt"}, "a": entry(0, 24, [2, 3]), "b": entry(24, 32, [4], "F16")}, bytes(32)
        ),
        safetensors_bytes({f"t{i}": entry(4 * i, 4 * i + 4, [1, 1, 1]) for i in range(12)}, bytes(48)),
        safetensors_bytes(
            {"s": entry(0, 8, [], "F64"), "z": entry(8, 8, [0, 7], "BF16"), "u": entry(8, 12, [4], "U8")}, bytes(12)
        ),
        safetensors_bytes({}),
    ]


def _mlx_folders() -> list[bytes]:
    """A file and the configuration beside it, in one string so that damage falls on both."""
    triplet = {"a.weight": entry(0, 48, [2, 6], "U32"), "a.scales": entry(48, 56, [2, 2], "F16")}
    triplet |= {"a.biases": entry(56, 64, [2, 2], "F16"), "b.weight": entry(64, 68, [1])}
    configs: list[dict[str, object]] = [
        {"quantization": {"bits": 3, "group_size": 32, "mode": "affine"}},
        {"quantization_config": {"bits": 4, "group_size": 64, "a": {"bits": 3, "group_size": 32}, "b": False}},
        {},
    ]
    return [json.dumps(config).encode() + _SEAM + safetensors_bytes(triplet, bytes(68)) for config in configs]


_SEAM = b"\n--\n"


# Numbers that break arithmetic, as they stand in files.
_NUMBERS = [0, 1, 2, 3, 7, 8, 31, 32, 33, 127, 255, 256, 1 << 16, 1 << 20, 1 << 31, 1 << 32, 1 << 62, 1 << 63]
_GGUF_WORDS = [
    *(struct.pack("<Q", n % (1 << 64)) for m in _NUMBERS for n in (m, -m)),
    *(struct.pack("<I", n % (1 << 32)) for n in [*range(45), 99, 142, 143, 1 << 31, -1]),
    text("general.alignment") + struct.pack("<II", 4, 8), text("split.count") + struct.pack("<II", 4, 3),
    struct.pack("<IQ", 9, 1) * 8, b"\xff\xfe", b"GGUF", b"\x7f\x7f\x7f\x7f",
]  # fmt: skip
_JSON_WORDS = [
    *(str(n).encode() for m in _NUMBERS for n in (m, -m)),
    b"1e400", b"1.5", b"NaN", b"Infinity", b"null", b"true", b'""', b"[]", b"{}", b"[0,0]", b"[" * 3000, b'{"a":' * 900,
    b"9" * 5000, b'"\\ud800"', b'"dtype"', b'"shape"', b'"data_offsets"', b'"F32"', b'"BF16"', b'"U8"', b'"F8_E4M3"',
    b'"U32"', b'"bits"', b'"group_size"', b'"mode"', b'"a"', b'"a.biases"', b'"a.scales"', b'"affine"', b'"mxfp4"',
    b"false", b'"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},', b",", b":", b"\xff", b"\0", b"-", b"\\",
]  # fmt: skip


# Those that move nothing stand twice: what follows them is still met in its place.
_CHANGES = ["bit", "bit", "byte", "byte", "word", "word", "insert", "drop", "cut", "copy", "grow"]


@st.composite
def damaged(draw: st.DrawFn, files: list[bytes], words: list[bytes]) -> bytes:
    """One of the files after a few changes: bits, bytes, words, cuts, copies of parts, growth."""
    raw = bytearray(draw(st.sampled_from(files)))
    # Half of the changes fall on the first bytes, where counts and lengths stand.
    for _ in range(draw(st.integers(1, 3))):
        size = len(raw)
        at = draw(st.integers(0, min(size, 96)) if draw(st.booleans()) else st.integers(0, size))
        kind = draw(st.sampled_from(_CHANGES))
        if kind == "bit" and at < size:
            raw[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "byte" and at < size:
            raw[at] = draw(st.integers(0, 255))
        elif kind == "word":
            word = draw(st.sampled_from(words))
            raw[at : at + len(word)] = word
        elif kind == "insert":
            raw[at:at] = draw(st.sampled_from(words))
        elif kind == "drop":
            del raw[at : at + draw(st.integers(1, 64))]
        elif kind == "cut":
            del raw[at:]
        elif kind == "copy":
            length = draw(st.integers(1, 200))
            other = draw(st.integers(0, size))
            raw[at:at] = raw[other : other + length]
        else:
            raw += bytes(draw(st.sampled_from([1, 31, 4096, 100_000])))
    return bytes(raw)


def fix_header_length(raw: bytes) -> bytes:
    """The same with a length that spans the JSON again, so that the change is met by more than the first check."""
    end = raw.rfind(b"}") + 1
    return (end - 8).to_bytes(8, "little") + raw[8:] if end > 8 else raw


def check(path: Path, raw: bytes) -> str:
    """Opens and reads everything. Returns what came of it; anything but an answer or CheckpointError is raised."""
    if path.parent.name == "mlx":
        config, _, rest = raw.partition(_SEAM)
        (path.parent / "config.json").write_bytes(config)
        path.write_bytes(rest)
    else:
        path.write_bytes(raw)
    # The processor's time, not the clock's: on a busy machine any file may wait.
    began = time.process_time()
    outcome, message = "read", str(path)
    with peak_memory() as peak:
        try:
            checkpoint = open_checkpoint(path)
        except CheckpointError as error:
            outcome, message = "refused", str(error)
        else:
            for tensor in checkpoint.tensors.values():
                try:
                    for _, rows in tensor.chunks(1 << 20):
                        del rows
                    tensor.read_rows(0, min(1, tensor.row_count))
                except CheckpointError as error:
                    outcome, message = "opened, a tensor refused", str(error)
    assert time.process_time() - began < HANG_SECONDS
    assert str(path.parent) in message
    assert peak.nbytes <= 2 * len(raw) + (64 << 20)
    return outcome


def run(strategy: st.SearchStrategy[bytes], path: Path, change: Callable[[bytes], bytes] | None = None) -> Counter[str]:
    """Runs until the examples or the seconds are used up; returns the outcomes."""
    counts: Counter[str] = Counter()
    ends = time.monotonic() + (SECONDS or CI_SECONDS)

    def fuzz(raw: bytes, changed: bool) -> None:
        if time.monotonic() < ends:
            counts[check(path, change(raw) if change and changed else raw)] += 1

    # By hand in rounds, as one long run slows down with all that it remembers.
    while not counts or (SECONDS and time.monotonic() < ends):
        decorated = given(strategy, st.booleans())(fuzz)
        decorated = settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )(decorated)
        seed(random.randrange(1 << 60) if SECONDS else 20260131)(decorated)()
    print(f"\n{path.name}: {counts.total()} files: {dict(counts)}")
    return counts


def test_undamaged_files_are_read(tmp_path: Path) -> None:
    for name, files in (("a.gguf", _gguf_files()), ("a.safetensors", _safetensors_files())):
        for raw in files:
            assert check(tmp_path / name, raw) in ("read", "opened, a tensor refused")


def test_damaged_gguf_files(tmp_path: Path) -> None:
    counts = run(damaged(_gguf_files(), _GGUF_WORDS), tmp_path / "a.gguf")
    # Both must be met, or the damage is too little or too much to say anything.
    assert min(counts["read"] + counts["opened, a tensor refused"], counts["refused"]) > counts.total() // 50


def test_damaged_safetensors_files(tmp_path: Path) -> None:
    counts = run(damaged(_safetensors_files(), _JSON_WORDS), tmp_path / "a.safetensors", fix_header_length)
    assert min(counts["read"] + counts["opened, a tensor refused"], counts["refused"]) > counts.total() // 50


def test_damaged_mlx_folders(tmp_path: Path) -> None:
    (tmp_path / "mlx").mkdir()
    path = tmp_path / "mlx" / "model.safetensors"
    for raw in _mlx_folders():
        assert check(path, raw) in ("read", "opened, a tensor refused")

    def fix(raw: bytes) -> bytes:
        config, seam, rest = raw.partition(_SEAM)
        return config + seam + fix_header_length(rest)

    counts = run(damaged(_mlx_folders(), _JSON_WORDS), path, fix)
    assert min(counts["read"] + counts["opened, a tensor refused"], counts["refused"]) > counts.total() // 50


@pytest.mark.skipif(SECONDS > 0, reason="the two formats are being fuzzed by hand")
def test_random_bytes(tmp_path: Path) -> None:
    rng = random.Random(1)
    for front in (b"", b"GGUF", b"GGUF\3\0\0\0", b"GGUF\3\0\0\0" + struct.pack("<QQ", 1, 1), b"\x20\0\0\0\0\0\0\0{"):
        for _ in range(40):
            assert check(tmp_path / "a", front + rng.randbytes(rng.randrange(200))) != "read"
