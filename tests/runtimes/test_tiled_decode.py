"""Decoding in bands gives the numbers of the whole decoder, whatever the band, and holds two activations.

Bounds: relative L2 <= 2e-5 and largest difference <= 1e-4 (a step of an 8-bit picture is 8e-3) against diffusers, of
which the float32 decoder itself needs 8.5e-6.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import onnx
import pytest
import torch
from peak_memory import peak_memory
from stage_runner import write_stages
from vae_stages import FULL, SMALL, tiny_vae

from intaglio.engines.references import OnnxruntimeReference
from intaglio.errors import CancelledError, InputError
from intaglio.exporters.architecture import find_architecture
from intaglio.exporters.checkpoints import open_checkpoint
from intaglio.progress import ProgressEvent
from intaglio.runtimes.parity import compare
from intaglio.runtimes.tiled_decode import (
    _Statistics,
    decode_bytes,
    decode_tiled,
    has_tiles,
    rows_within,
    tiled_decode_bytes,
)

BOUND, MAX_ABS, HALF_BOUND = 2e-5, 1e-4, 1e-2


@dataclass
class Case:
    oracle: diffusers.AutoencoderKLFlux2
    config: dict[str, Any]
    folder: Path
    names: list[str]
    loaded: dict[str, OnnxruntimeReference] = field(default_factory=dict)

    def load(self, name: str) -> OnnxruntimeReference:
        if name not in self.loaded:
            self.loaded[name] = OnnxruntimeReference(self.folder / f"{name}.onnx")
        return self.loaded[name]

    def decode(self, latents: np.ndarray) -> np.ndarray:
        """The oracle's picture."""
        bn = self.oracle.bn
        std = torch.sqrt(bn.running_var.view(1, -1, 1, 1) + self.config["batch_norm_eps"])
        x = torch.from_numpy(latents) * std + bn.running_mean.view(1, -1, 1, 1)
        return self.oracle.decode(torch.nn.functional.pixel_shuffle(x, 2)).sample.numpy()


def latents(batch: int, height: int, width: int) -> np.ndarray:
    return np.random.default_rng(5).normal(size=(batch, 32, height, width)).astype(np.float32)


_CASES: dict[str, Case] = {}


def made(name: str, paths: pytest.TempPathFactory) -> Case:
    if name not in _CASES:
        folder = paths.mktemp(name)
        oracle = tiny_vae(folder / "checkpoint", **{"full": FULL, "small": SMALL}[name])
        names = write_stages(folder / "checkpoint", folder / "stages")
        architecture, keys = find_architecture(open_checkpoint(folder / "checkpoint"))
        config = dataclasses.asdict(architecture.read_config(keys))
        _CASES[name] = Case(oracle, config, folder / "stages", names)
    return _CASES[name]


@pytest.fixture
def small(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return made("small", tmp_path_factory)


# A row at a time, tails of one row and of several, one band that is larger than the picture; all at three scales.
@pytest.mark.parametrize("band_rows", [1, 2, 5, 16, 31, 1000])
@pytest.mark.parametrize("size", [(1, 1, 1), (1, 2, 3), (2, 3, 2)])
def test_bands_give_the_whole_picture(small: Case, size: tuple[int, int, int], band_rows: int) -> None:
    x = latents(*size)
    difference = compare("sample", decode_tiled(small.load, small.config, x, band_rows=band_rows), small.decode(x))
    assert difference.relative_l2 <= BOUND
    assert difference.max_abs <= MAX_ABS


def test_full_decoder(tmp_path_factory: pytest.TempPathFactory) -> None:
    case = made("full", tmp_path_factory)
    x = latents(1, 4, 3)
    found = decode_tiled(case.load, case.config, x, band_rows=9)
    difference = compare("sample", found, case.decode(x))
    assert difference.relative_l2 <= BOUND
    assert difference.max_abs <= MAX_ABS
    whole = case.load("vae_decoder").run({"latents": x})["sample"]
    assert np.abs(found - whole).max() <= MAX_ABS


def test_latents_are_left_alone(small: Case) -> None:
    x = latents(1, 2, 2)
    x.flags.writeable = False
    assert np.array_equal(
        decode_tiled(small.load, small.config, x, band_rows=8), decode_tiled(small.load, small.config, x, band_rows=8)
    )


def test_float16(small: Case, tmp_path: Path) -> None:
    checkpoint = small.folder.parent / "checkpoint"
    write_stages(checkpoint, tmp_path, [n for n in small.names if n.startswith("vae_tiles")], dtype="float16")
    x = latents(1, 2, 3)
    found = decode_tiled(
        lambda name: OnnxruntimeReference(tmp_path / f"{name}.onnx"), small.config, x.astype(np.float16), band_rows=12
    )
    assert found.dtype == np.float16
    assert compare("sample", found, small.decode(x)).relative_l2 <= HALF_BOUND


def test_tile_stages_are_valid_onnx_and_share_the_weights(small: Case) -> None:
    parameters: dict[str, set[str]] = {}
    for name in small.names:
        onnx.checker.check_model(str(small.folder / f"{name}.onnx"), full_check=True)
        graph = onnx.load(str(small.folder / f"{name}.onnx"), load_external_data=False).graph
        parameters[name] = {i.name for i in graph.initializer if i.external_data}
    tiles = [parameters[name] for name in small.names if name.startswith("vae_tiles")]
    assert set().union(*tiles) == parameters["vae_decoder"]
    assert sum(map(len, tiles)) == len(parameters["vae_decoder"])


def test_statistics_of_parts_are_those_of_the_whole() -> None:
    """Far from zero, where a sum of squares less the square of a sum would keep nothing."""
    rng = np.random.default_rng(0)
    values = rng.normal(3000, [[0.5], [2.0]], size=(2, 10_000))
    found = _Statistics()
    for part in np.split(values, [1, 7, 2000, 9999], axis=1):
        found.add(part.shape[1], part.mean(axis=1)[None], part.var(axis=1)[None])
    assert found.count == 10_000
    np.testing.assert_allclose(found.mean, values.mean(axis=1)[None], rtol=1e-14)
    np.testing.assert_allclose(found.squares / found.count, values.var(axis=1)[None], rtol=1e-10)


def test_one_stage_is_loaded_at_a_time(small: Case) -> None:
    alive: list[weakref.ref[Any]] = []
    most = 0

    class Loaded:
        def __init__(self, name: str) -> None:
            self.stage = small.load(name)

        def run(self, feeds: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
            nonlocal most
            most = max(most, sum(ref() is not None for ref in alive))
            return self.stage.run(dict(feeds))

    def load(name: str) -> Loaded:
        loaded = Loaded(name)
        alive.append(weakref.ref(loaded))
        return loaded

    decode_tiled(load, small.config, latents(1, 1, 2), band_rows=8)
    assert most == 1
    assert len(alive) == len([name for name in small.names if name.startswith("vae_tiles")])


def test_two_activations_of_the_picture_are_held(small: Case) -> None:
    """Counts NumPy's memory, which is that of everything but the stages."""
    x = latents(1, 8, 16)
    height, width = 128, 256
    decode_tiled(small.load, small.config, x, band_rows=8)  # loads
    with peak_memory() as peak:
        decode_tiled(small.load, small.config, x, band_rows=8)
    outer, inner = small.config["decoder_block_out_channels"][:2]
    held = (outer + inner) * height * width * 4
    bands = 3 * (outer + inner) * 10 * width * 4
    assert held <= peak.nbytes <= held + bands


# Memory.

PUBLISHED = {
    "small": {**SMALL, "latent_channels": 32, "decoder_block_out_channels": (96, 192, 384, 384)},
    "full": {**FULL, "latent_channels": 32, "decoder_block_out_channels": (128, 256, 512, 512)},
}
for _config in PUBLISHED.values():
    _config.update(patch_size=2, mid_block_add_attention=True)

# MiB beyond the process's own, as measured with onnxruntime on two threads: model, size, rows (None is undivided).
MEASURED = [
    ("small", 512, None, 948),
    ("small", 1024, None, 3269),
    ("full", 512, None, 1269),
    ("full", 1024, None, 3650),
    ("small", 512, 64, 490),
    ("small", 512, 256, 857),
    ("small", 1024, 64, 1527),
    ("full", 512, 16, 556),
]


@pytest.mark.parametrize(("model", "size", "rows", "mib"), MEASURED)
def test_memory_is_told_from_above_and_not_by_far(model: str, size: int, rows: int | None, mib: int) -> None:
    config = PUBLISHED[model]
    told = decode_bytes(config, size, size) if rows is None else tiled_decode_bytes(config, size, size, rows)
    assert mib <= told / 2**20 <= 1.5 * mib


@pytest.mark.parametrize("model", PUBLISHED)
def test_rows_within_are_the_most_that_fit(model: str) -> None:
    config = PUBLISHED[model]
    least = tiled_decode_bytes(config, 1024, 1024, 1)
    for budget in (least, least + 10**8, 2 * least):
        rows = rows_within(config, 1024, 1024, budget)
        assert tiled_decode_bytes(config, 1024, 1024, rows) <= budget
        assert rows == 1024 or tiled_decode_bytes(config, 1024, 1024, rows + 1) > budget
    assert rows_within(config, 1024, 1024, 10**12) == 1024
    with pytest.raises(InputError, match=r"1024x1024 needs \d+ MiB .* are allowed"):
        rows_within(config, 1024, 1024, least - 1)


# Progress and refusals.


def test_progress_ends_at_its_total(small: Case) -> None:
    events: list[ProgressEvent] = []
    decode_tiled(small.load, small.config, latents(2, 3, 2), band_rows=7, progress=events.append)
    assert {event.total for event in events} == {events[-1].done}
    assert [event.done for event in events] == list(range(events[-1].total + 1))


def test_progress_cancels(small: Case) -> None:
    with pytest.raises(CancelledError, match="decode: cancelled after 3"):
        decode_tiled(small.load, small.config, latents(1, 2, 2), progress=lambda event: event.done < 3)


@pytest.mark.parametrize(
    ("shape", "arguments", "message"),
    [
        ((1, 16, 2, 2), {}, r"\[1, 16, 2, 2\], expected \[batch, 32"),
        ((32, 2, 2), {}, r"expected \[batch, 32"),
        ((1, 32, 0, 2), {}, r"expected \[batch, 32"),
        ((1, 32, 2, 2), {"band_rows": 0}, "band_rows is 0, expected at least 1"),
    ],
)
def test_refusals(small: Case, shape: tuple[int, ...], arguments: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        decode_tiled(small.load, small.config, np.zeros(shape, np.float32), **arguments)


@pytest.mark.parametrize("change", [{"mid_block_add_attention": False}, {"decoder_block_out_channels": (4, 8)}])
def test_decoders_without_tiles(small: Case, change: dict[str, Any]) -> None:
    config = {**small.config, **change}
    assert has_tiles(small.config)
    assert not has_tiles(config)
    with pytest.raises(InputError, match="decode it whole"):
        decode_tiled(small.load, config, latents(1, 2, 2))
