"""Decodes a picture in bands of rows, with the numbers of the whole decoder and much less memory.

The group norms of a decoder are over the whole picture: tiles that are normed on their own show seams and other
colours. Here the decoder is cut at its norms (see ``exporters/layers/tiled_decoder.py``): every pass over the picture
gives the statistics that the next one needs, put together from those of its bands in float64
(Chan, Golub and LeVeque, 1983, Algorithms for computing the sample variance).

Two activations of the whole picture are alive at a time. A residual block replaces its input row by row, since each
band reads only its own rows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from intaglio.errors import InputError
from intaglio.progress import Progress, ProgressCallback

DEFAULT_BAND_ROWS = 64


class TileStage(Protocol):
    """A stage as an engine loads it."""

    def run(self, feeds: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """The outputs by name."""


@dataclass(frozen=True)
class _Geometry:
    """The decoder of a config: widths from the latents outwards, and the size of what passes through it."""

    widths: tuple[int, ...]
    resnets: int
    out_channels: int
    packed_channels: int
    patch: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> _Geometry:
        return cls(
            tuple(config["decoder_block_out_channels"])[::-1],
            config["layers_per_block"] + 1,
            config["out_channels"],
            config["latent_channels"] * config["patch_size"] ** 2,
            config["patch_size"],
        )

    @property
    def banded(self) -> range:
        """The blocks that run in bands: the last two."""
        return range(len(self.widths) - 2, len(self.widths))

    def scale(self, block: int) -> int:
        """Pixels of the picture that a pixel in this block is wide and high."""
        return 2 ** (len(self.widths) - 1 - block)


@dataclass
class _Statistics:
    """Count, mean and summed squared distance of each group, ``[1, G]`` float64, of the rows seen so far."""

    count: int = 0
    mean: Any = 0.0
    squares: Any = 0.0

    def add(self, count: int, mean: np.ndarray, variance: np.ndarray) -> None:
        """``count`` more values of each group."""
        total = self.count + count
        step = mean.astype(np.float64) - self.mean
        self.squares = self.squares + variance.astype(np.float64) * count + step**2 * (self.count * count / total)
        self.mean = self.mean + step * (count / total)
        self.count = total

    def feeds(self) -> dict[str, np.ndarray]:
        """As a stage takes them."""
        return {"mean": self.mean.astype(np.float32), "variance": (self.squares / self.count).astype(np.float32)}


def decode_tiled(
    load_stage: Callable[[str], TileStage],
    config: Mapping[str, Any],
    latents: np.ndarray,
    *,
    band_rows: int | None = None,
    progress: ProgressCallback | None = None,
) -> np.ndarray:
    """Packed latents ``[B, K, h, w]``, as the transformer leaves them, to ``[B, 3, H, W]`` in about -1 to 1.

    ``load_stage`` gives a stage of the bundle by its name; each is let go before the next is loaded. ``config`` is the
    autoencoder's in the bundle. ``band_rows`` is how many rows of the picture run at a time (64 by default;
    :func:`rows_within` says how many fit into memory). Pictures of a batch run one after another. Raises InputError,
    CancelledError.
    """
    geometry = _Geometry.of(config)
    if latents.ndim != 4 or latents.shape[1] != geometry.packed_channels or 0 in latents.shape:
        expected = f"[batch, {geometry.packed_channels}, height, width]"
        raise InputError(f"latents have the shape {list(latents.shape)}, expected {expected}")
    if not has_tiles(config):
        raise InputError("this decoder has too few blocks, or no attention, to be decoded in bands; decode it whole")
    height, width = (side * geometry.patch * geometry.scale(0) for side in latents.shape[2:])
    rows = min(DEFAULT_BAND_ROWS if band_rows is None else band_rows, height)
    if rows < 1:
        raise InputError(f"band_rows is {band_rows}, expected at least 1")
    decoder = _TiledDecoder(load_stage, geometry, rows, latents.itemsize)
    decoder.progress = Progress(progress, "decode", len(latents) * decoder.bands(height, width), "bands")
    pictures = [decoder.decode(latents[i : i + 1]) for i in range(len(latents))]
    return pictures[0] if len(pictures) == 1 else np.concatenate(pictures)


def has_tiles(config: Mapping[str, Any]) -> bool:
    """Whether an autoencoder has stages to decode in bands."""
    return bool(config["mid_block_add_attention"]) and len(config["decoder_block_out_channels"]) > 2


class _TiledDecoder:
    """One decode with bands of ``rows`` rows of the picture."""

    progress: Progress

    def __init__(self, load: Callable[[str], TileStage], geometry: _Geometry, rows: int, itemsize: int) -> None:
        self.load, self.geometry, self.rows, self.itemsize = load, geometry, rows, itemsize

    def decode(self, latents: np.ndarray) -> np.ndarray:
        x = self._attention(latents)
        for block in self.geometry.banded:
            x, statistics = self._pass(f"vae_tiles_up{block - 1}_upsample", x, rows=max(1, self.rows // 2))
            for resnet in range(self.geometry.resnets):
                name = f"vae_tiles_up{block}_resnet{resnet}"
                h, h_statistics = self._pass(f"{name}_conv1", x, statistics)
                x, statistics = self._pass(f"{name}_conv2", h, h_statistics, residual=x)
                del h
                if x.base is not None:  # fewer channels than the block's input, in whose memory they lie
                    x = x.copy()
        sample, _ = self._pass("vae_tiles_out", x, statistics)
        return sample

    def _attention(self, latents: np.ndarray) -> np.ndarray:
        # Copied: an output may keep all the memory of the session that made it.
        inner = {n: v.copy() for n, v in self.load("vae_tiles_attention_in").run({"latents": latents}).items()}
        self.progress.advance(1)
        residual, query = inner.pop("residual"), inner.pop("query")
        stage = self.load("vae_tiles_attention")
        for start, stop in _ranges(query.shape[1], self._queries(query.shape[1], latents.shape[3])):
            attended = stage.run({"query": query[:, start:stop], **inner})["attended"]
            query[:, start:stop] = attended  # which no other query reads
            self.progress.advance(1)
        del stage, inner, attended
        x = self.load("vae_tiles_attention_out").run({"attended": query, "residual": residual})["y"].copy()
        self.progress.advance(1)
        return x

    def _queries(self, tokens: int, latent_width: int) -> int:
        # As many as make scores of about a band's size.
        scale = self.geometry.patch * self.geometry.scale(0)
        band = self.rows * latent_width * scale * max(self.geometry.widths[-2:])
        return max(16, min(tokens, band // tokens))

    def _pass(
        self,
        name: str,
        x: np.ndarray,
        statistics: _Statistics | None = None,
        *,
        residual: np.ndarray | None = None,
        rows: int | None = None,
    ) -> tuple[np.ndarray, _Statistics]:
        """Runs a stage over all bands of ``x`` ``[1, C, H, W]``; its output takes the memory of ``residual``."""
        stage, found, y = self.load(name), _Statistics(), None
        for start, stop in _ranges(x.shape[2], rows or self.rows):
            band, mask = _with_neighbours(x, start, stop)
            feeds = {"x": band}
            if statistics is not None:
                feeds |= {**statistics.feeds(), "row_mask": mask}
            if residual is not None:
                feeds["residual"] = np.ascontiguousarray(residual[:, :, start:stop])
            outputs = stage.run(feeds)
            part = outputs["y"]
            scale = part.shape[2] // (stop - start)
            if y is None:
                y = _output(residual, part, (1, part.shape[1], x.shape[2] * scale, x.shape[3] * scale))
            y[:, :, start * scale : stop * scale] = part
            if "y_mean" in outputs:
                groups = outputs["y_mean"].shape[1]
                found.add(part.size // groups, outputs["y_mean"], outputs["y_variance"])
            self.progress.advance(1)
        assert y is not None, "a picture has rows"
        return y, found

    def bands(self, height: int, width: int) -> int:
        """How often stages run for one picture."""
        geometry = self.geometry
        tokens = height * width // geometry.scale(0) ** 2
        latent_width = width // (geometry.patch * geometry.scale(0))
        count = 2 + len(_ranges(tokens, self._queries(tokens, latent_width)))
        for block in geometry.banded:
            rows = height // geometry.scale(block)
            count += len(_ranges(rows // 2, max(1, self.rows // 2)))
            count += 2 * geometry.resnets * len(_ranges(rows, self.rows))
        return count + len(_ranges(height, self.rows))


def _ranges(total: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(start + step, total)) for start in range(0, total, step)]


def _with_neighbours(x: np.ndarray, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows ``start`` to ``stop`` with one more on either side, zeros beyond the picture; and which are rows of it."""
    low, high = max(start - 1, 0), min(stop + 1, x.shape[2])
    inside = slice(low - start + 1, high - start + 1)
    band = np.zeros((*x.shape[:2], stop - start + 2, x.shape[3]), x.dtype)
    band[:, :, inside] = x[:, :, low:high]
    mask = np.zeros(stop - start + 2, x.dtype)
    mask[inside] = 1
    return band, mask


def _output(residual: np.ndarray | None, part: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if residual is not None and residual.dtype == part.dtype and residual.shape[1] >= shape[1]:
        # Its rows are read by the band that replaces them, and by no other.
        return residual if residual.shape == shape else residual[:, : shape[1]]
    return np.empty(shape, part.dtype)


# What a session holds while it runs, in activations; copies of its weights; and what a process needs besides. As
# measured with onnxruntime on the CPU, whose convolutions reorder their inputs, outputs and weights.
_WORK, _WEIGHTS, _CONSTANT = 4.5, 2.0, 112 << 20


def tiled_decode_bytes(config: Mapping[str, Any], height: int, width: int, band_rows: int, itemsize: int = 4) -> int:
    """Peak memory of :func:`decode_tiled` for a picture of this size, in bytes, beyond that of the process before it.

    The largest of all passes: whole input and output, and four and a half times a band of both. Before them comes what
    is not banded: its weights twice, and four and a half times its largest activation.
    """
    geometry = _Geometry.of(config)
    first = geometry.banded[0]
    pixels = height * width

    def whole(channels: int, block: int) -> int:
        return channels * (pixels // geometry.scale(block) ** 2)

    def band(channels: int, block: int, rows: int) -> int:
        side = geometry.scale(block)
        return channels * min(rows + 2, height // side) * (width // side)

    inner = max(geometry.widths[max(0, first - 2) : first])
    peaks = [_WEIGHTS * _parameters(geometry, first) + _WORK * whole(inner, first - 1)]
    before = geometry.widths[first - 1]
    for block in geometry.banded:
        channels = geometry.widths[block]
        work = band(before, block - 1, max(1, band_rows // 2)) + band(before, block, band_rows)
        peaks.append(whole(before, block - 1) + whole(before, block) + _WORK * work)
        both = band(before, block, band_rows) + band(channels, block, band_rows)
        peaks.append(whole(before, block) + whole(channels, block) + _WORK * both)
        before = channels
    return int(max(peaks) * itemsize) + _CONSTANT


def decode_bytes(config: Mapping[str, Any], height: int, width: int, itemsize: int = 4) -> int:
    """Peak memory of the stage ``vae_decoder`` for one picture, as :func:`tiled_decode_bytes` counts it.

    The weights twice, and the larger of two: the input of the last block four and a half times, or the scores of the
    attention twice, of which each pixel of the decoder's input has one for every other.
    """
    geometry = _Geometry.of(config)
    pixels, blocks = height * width, len(geometry.widths)
    widest = max(geometry.widths[-2:]) * pixels
    scores = (pixels // geometry.scale(0) ** 2) ** 2 if config["mid_block_add_attention"] else 0
    inner = 8 * geometry.widths[0] * (pixels // geometry.scale(0) ** 2)
    activations = max(_WORK * widest, 2 * scores + inner)
    return int((_WEIGHTS * _parameters(geometry, blocks) + activations) * itemsize) + _CONSTANT


def _parameters(geometry: _Geometry, blocks: int) -> int:
    """Weights of the decoder up to the end of ``blocks`` blocks, leaving out vectors."""
    widths = geometry.widths
    count = 9 * geometry.packed_channels // geometry.patch**2 * widths[0] + (4 * 9 + 4) * widths[0] ** 2
    before = widths[0]
    for width in widths[:blocks]:
        count += 9 * (before * width + (2 * geometry.resnets - 1) * width**2 + width**2)
        before = width
    return count


def rows_within(config: Mapping[str, Any], height: int, width: int, memory_bytes: int, itemsize: int = 4) -> int:
    """The most rows a band may have for :func:`tiled_decode_bytes` to stay within ``memory_bytes``.

    Raises InputError where not even the smallest band does.
    """
    least = tiled_decode_bytes(config, height, width, 1, itemsize)
    if least > memory_bytes:
        raise InputError(
            f"a picture of {width}x{height} needs {-(-least >> 20)} MiB to be decoded in the smallest bands, and "
            f"{memory_bytes >> 20} MiB are allowed; allow more, or make a smaller picture"
        )
    low, high = 1, height
    while low < high:
        middle = (low + high + 1) // 2
        fits = tiled_decode_bytes(config, height, width, middle, itemsize) <= memory_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    return low
