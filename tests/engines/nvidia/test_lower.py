"""Whole stages lowered for TensorRT: engines that build without a GPU, and what they are built of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest
from gpu_stages import export_decoder, write_lowered
from klein import make_checkpoint
from klein_sizes import TINY
from tensorrt_rtx_builds import build_for_gpu, require_tensorrt_rtx

import intaglio
from intaglio.engines.nvidia.lower import lower
from intaglio.errors import InputError
from intaglio.exporters.bundle import Dim, read_bundle

DEMO = Path(__file__).parents[3] / "demo" / "emoji"
PICTURE_STAGES = ("text_encoder", "transformer", "vae_decoder", "vae_encoder")
SMS = (86, 89, 120)


class Bundles:
    """Tiny bundles by family and dtype, exported when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[tuple[str, str], Path] = {}

    def __call__(self, family: str, dtype: str) -> Path:
        if (family, dtype) not in self._made:
            folder = self._folder / f"{family}-{dtype}"
            folder.mkdir()
            make: dict[str, Callable[[Path, str], Path]] = {"klein": _klein, "demo": _demo, "decoder": _decoder}
            self._made[family, dtype] = make[family](folder, dtype)
        return self._made[family, dtype]


def _klein(folder: Path, dtype: str) -> Path:
    make_checkpoint.write_pipeline(folder / "checkpoint", TINY)
    intaglio.export(folder / "checkpoint", folder / "bundle", hidden_states=TINY.layers, pack_ternary=True, dtype=dtype)
    return folder / "bundle"


def _demo(folder: Path, dtype: str) -> Path:
    intaglio.export(DEMO, folder / "bundle", dtype=dtype)
    return folder / "bundle"


def _decoder(folder: Path, dtype: str) -> Path:
    return export_decoder(folder, dtype=dtype)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    return Bundles(tmp_path_factory.mktemp("bundles"))


def ranges_of(dims: dict[str, Dim]) -> dict[str, tuple[int, int, int]]:
    """Small sizes that fit each other, for a profile."""
    least = {name: max(dim.min, dim.multiple_of) for name, dim in dims.items()}
    ranges = {name: (size, size, min(2 * size, dims[name].max)) for name, size in least.items()}
    return {**ranges, "past_sequence": (1, 8, 32), "sequence": (1, 1, 8), "total_sequence": (2, 9, 40)}


@pytest.mark.parametrize(
    ("family", "stage", "dtype"),
    [
        *(("klein", stage, "float16") for stage in PICTURE_STAGES),
        *(("demo", stage, "float16") for stage in PICTURE_STAGES[:3]),
        ("klein", "transformer", "float32"),
        ("klein", "transformer", "bfloat16"),
    ],
)
def test_engines_of_pictures_build(bundles: Bundles, family: str, stage: str, dtype: str, tmp_path: Path) -> None:
    require_tensorrt_rtx()
    bundle = bundles(family, dtype)
    lowered, notes = write_lowered(bundle / f"{stage}.onnx", tmp_path)
    built = build_for_gpu(lowered, ranges_of(dict(read_bundle(bundle).dims)), SMS)
    assert not built.failure, built
    assert built.engine_bytes
    counts = Counter(node.op_type for node in ir.load(bundle / f"{stage}.onnx").graph)
    packed = counts["GroupedQuantMatMul"] + counts["GroupedQuantDequantize"]
    assert built.layers.get("DEQUANTIZE", 0) == packed
    # Handed over as one op each; in float32 there is none.
    fused = 0 if dtype == "float32" else counts["Attention"]
    assert built.layers.get("ATTENTION_INPUT", 0) == fused
    assert any("Attention" in note for note in notes) == (fused < counts["Attention"])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("stage", "context"), [("score", 0), ("generate", 0), ("generate", 64)])
def test_engines_of_decoders_build(bundles: Bundles, stage: str, context: int, dtype: str, tmp_path: Path) -> None:
    require_tensorrt_rtx()
    bundle = bundles("decoder", dtype)
    lowered, _ = write_lowered(bundle / f"{stage}.onnx", tmp_path, context=context)
    built = build_for_gpu(lowered, ranges_of(dict(read_bundle(bundle).dims)), SMS)
    assert not built.failure, built
    assert built.layers.get("KV_CACHE_UPDATE", 0) == (4 if context else 0)
    assert built.layers.get("ATTENTION_INPUT", 0) == (2 if dtype == "float16" else 0)


def test_an_unknown_flavour_is_refused() -> None:
    model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 23}, name="empty"), ir_version=11)
    with pytest.raises(InputError, match="tensorrt-rtx, tensorrt"):
        lower(model, "tensorrt-lite")
