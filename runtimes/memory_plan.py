"""How much memory a picture takes, stage by stage, and how to make it within a budget.

All figures are of the process's resident memory, and those of weights come from the engine's report. What activations
take was measured with onnxruntime 1.32 on x86-64 at FLUX.2-klein's published widths and is a little rounded up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from intaglio.engines.engine import Engine, read_report
from intaglio.engines.target import is_on_gpu
from intaglio.errors import InputError
from intaglio.runtimes.latents import latent_pixels
from intaglio.runtimes.picture_request import Work
from intaglio.runtimes.preview import most_latents
from intaglio.runtimes.tiled_decode import (
    DEFAULT_BAND_ROWS,
    decode_bytes,
    has_tiles,
    rows_within,
    tiled_decode_bytes,
)

# Python with NumPy, onnxruntime and Pillow: 75 MiB; Qwen3's tokenizer: 85, and 40 more while it is read.
_PROCESS = 200 << 20
# What a process may grow by between being told a budget and being given it.
_DRIFT = 16 << 20
# Of the transformer, float32 values: for each token while its feed-forward part runs, 10 times the hidden width and 6
# times the inner one; while it attends, 17 times the hidden width, and for each pair of tokens one a head. Measured at
# 768, 1536 and 2816 tokens: 223, 491 and 1258 MiB; this gives 252, 504 and 1287.
_HIDDEN, _INNER, _ATTENDING = 10, 6, 17
# While the transformer is loaded, its largest dense matrix is there twice: the modulation, 6 times hidden by hidden.
_LARGEST_DENSE = 6
# Of the text encoder, float32 values: for each token 5 times the inner width and 4 times the hidden one, for each pair
# of tokens two a head. Measured at 512 tokens: 160 MiB, and as much for each row; this gives 178.
_TEXT_INNER, _TEXT_HIDDEN, _TEXT_SCORES = 5, 4, 2
# Of the VAE's encoder, float32 values: for each pixel 4.5 times the first width, and two scores for each pair of the
# attention's positions. Measured at 256 and 512 pixels square: 138 and 536 MiB; this gives 145 and 576.
_ENCODER_WORK, _ENCODER_SCORES = 4.5, 2
# Float32 sample, its pixels while they are converted, and Pillow's copy, for each pixel of a picture.
_PICTURE_BYTES = 64
# Without a budget a decoder that would take more than this works in bands, which take little more time.
_MOST_UNTILED = 4 << 30
# Fewer rows than these would be little but neighbours.
_LEAST_BAND_ROWS = 8


@dataclass(frozen=True)
class MemoryPlan:
    """How a call runs: whether stages stay loaded, how many rows of a batch run at once (None: all), and the rows of
    the decoder's bands (None: the whole picture). ``peak`` is what the process is expected to come to, in bytes.
    """

    keep_loaded: bool
    rows: int | None = None
    band_rows: int | None = None
    peak: int = 0


@dataclass(frozen=True)
class _Need:
    """Bytes of a stage: of its weights, and beside them while it runs."""

    weights: int
    run: int

    @property
    def total(self) -> int:
        return self.weights + self.run


def plan_memory(
    engine: Engine,
    work: Work,
    budget: int | None,
    *,
    keep_loaded: bool,
    process: int = 0,
    held: Mapping[str, int] | None = None,
) -> MemoryPlan:
    """The fastest way to do ``work`` within ``budget`` bytes.

    ``held`` is what stages that are loaded hold already, in bytes, and ``process`` what the process does beside them.
    Stages leave in turn, the batch runs in parts and the decoder in bands, in this order, where that is needed. Raises
    InputError with the budget that would do where not even all of that does.
    """
    on_gpu = is_on_gpu(engine.info.target)
    estimate = _Estimate(engine, work, process if on_gpu else max(process, _PROCESS), held or {})
    band = estimate.band_rows(_MOST_UNTILED if work.tiled is None else None)
    if budget is None:
        return MemoryPlan(keep_loaded, None, band, estimate.peak(keep_loaded, work.pictures, band))
    band = DEFAULT_BAND_ROWS if work.tiled else None
    for keep in [True, False] if keep_loaded else [False]:
        for rows in dict.fromkeys([work.pictures, 1]):
            peak = estimate.peak(keep, rows, band)
            if peak <= budget:
                return MemoryPlan(keep, rows, band, peak)
    if estimate.can_tile:
        band = estimate.widest_band(budget)
        for rows in dict.fromkeys([work.pictures, 1]):
            if band is not None and (peak := estimate.peak(False, rows, band)) <= budget:
                return MemoryPlan(False, rows, band, peak)
    if on_gpu:  # these are the CPU's figures: whether it fits is seen where memory is taken, exactly
        return MemoryPlan(False, 1, band, peak)
    least_band = _LEAST_BAND_ROWS if estimate.can_tile else None
    least = estimate.peak(False, 1, least_band) + _DRIFT
    needs = estimate.needs(1, least_band)
    worst = max(needs, key=lambda stage: needs[stage].total)
    raise InputError(
        f"the memory budget is {_mib(budget)} MiB, and this needs {_mib(least)} MiB even with one stage at a time"
        f"{' and the decoder in bands' if estimate.can_tile else ''}, {_mib(estimate.process)} of them for the process "
        f"itself and {_mib(needs[worst].total)} for {worst}; allow that much, or make a smaller picture"
    )


class _Estimate:
    """What the stages of some work need, and the ``process`` beside them."""

    def __init__(self, engine: Engine, work: Work, process: int, held: Mapping[str, int]) -> None:
        self._work, self.process, self._held = work, process, held
        self._configs = {role: component.config for role, component in engine.bundle.components.items()}
        self._text_length = engine.bundle.text_to_image.text_length if engine.bundle.text_to_image else 0
        report = read_report(engine.bundle_path, engine.info.target)
        self._weights = {name: s.weight_bytes + s.widened_bytes for name, s in report.stages.items()}
        self._on_gpu = is_on_gpu(engine.info.target)
        # Of a GPU's engines nothing is known of activations but their dtype: those of the CPU are an upper bound.
        self._width = {name: 0.5 if self._on_gpu and _is_half(s.dtype) else 1.0 for name, s in report.stages.items()}
        vae = self._configs.get("vae")
        has_stages = any(name.startswith("vae_tiles_") for name in engine.bundle.stages)
        can_tile = vae is not None and has_tiles(vae) and has_stages
        # What a decoder takes elsewhere is not known: there it works in bands only where that is asked for.
        chosen = engine.info.target == "cpu" if work.tiled is None else work.tiled
        self.can_tile = can_tile and chosen and "vae_decoder" in work.stages
        if work.tiled and not can_tile:
            raise InputError(
                f"{engine.bundle_path}: has no stages to decode in bands; export it again, or decode without tiled"
            )

    def band_rows(self, most: int | None) -> int | None:
        """Rows of bands without a budget: only where they are asked for, or the whole took more than ``most``."""
        if self._work.tiled:
            return DEFAULT_BAND_ROWS
        too_large = self.can_tile and most is not None and self._need("vae_decoder", 1, None).total > most
        return DEFAULT_BAND_ROWS if too_large else None

    def widest_band(self, budget: int) -> int | None:
        """The most rows that bands may have, up to the usual; None where not even the least fit."""
        size = (self._work.height, self._work.width)
        try:
            rows = rows_within(self._configs["vae"], *size, budget - self.process - self._pictures)
        except InputError:
            return None
        return min(rows, DEFAULT_BAND_ROWS) if rows >= min(_LEAST_BAND_ROWS, size[0]) else None

    def peak(self, keep_loaded: bool, rows: int, band_rows: int | None) -> int:
        """Bytes of the process where ``rows`` of the batch run at once."""
        needs = self.needs(rows, band_rows)
        if keep_loaded:  # a session keeps the memory of its largest run for its next one
            most = sum(max(need.total, self._held.get(stage, 0)) for stage, need in needs.items())
        else:
            most = max(need.total for need in needs.values())
        return self.process + self._pictures + most

    def needs(self, rows: int, band_rows: int | None) -> dict[str, _Need]:
        """What each stage needs, the transformer together with the decoder of its previews."""
        needs = {stage: self._need(stage, rows, band_rows) for stage in self._work.stages}
        if self._work.preview:
            factor = latent_pixels(self._configs["vae"])
            side = most_latents(factor) * factor
            decoder = _Need(self._weights["vae_decoder"], self._decode(side, side))
            transformer = needs["transformer"]
            needs["transformer"] = _Need(transformer.weights + decoder.total, transformer.run)
        return needs

    def _need(self, stage: str, rows: int, band_rows: int | None) -> _Need:
        """With ``rows`` of the batch at once and bands of ``band_rows``."""
        work, size = self._work, (self._work.height, self._work.width)
        if stage == "vae_decoder" and band_rows is not None:
            return _Need(0, tiled_decode_bytes(self._configs["vae"], *size, band_rows))
        weights = self._weights[stage]
        if stage == "text_encoder":
            run = _text_encoder_bytes(self._configs["text_encoder"], self._text_length) * rows
        elif stage == "transformer":
            run = _transformer_bytes(self._configs["transformer"], work.tokens, rows)
        elif stage == "vae_encoder":
            run = max(_encoder_bytes(self._configs["vae"], pixels) for pixels in work.encoded)
        else:
            run = self._decode(*size)
        return _Need(weights, int(self._width[stage] * run))

    def _decode(self, height: int, width: int) -> int:
        # The decoder's own estimate counts the weights as well.
        return max(0, decode_bytes(self._configs["vae"], height, width) - self._weights["vae_decoder"])

    @property
    def _pictures(self) -> int:
        if "vae_decoder" not in self._work.stages or self._on_gpu:
            return 0
        return _PICTURE_BYTES * self._work.height * self._work.width * self._work.pictures


def _is_half(dtype: str) -> bool:
    """Whether a report's dtypes of weights and products are none but packed ones and halves."""
    return "float32" not in dtype and "float16" in dtype


def _text_encoder_bytes(config: Mapping[str, Any], tokens: int) -> int:
    width = _TEXT_INNER * config["intermediate_size"] + _TEXT_HIDDEN * config["hidden_size"]
    return 4 * tokens * (width + _TEXT_SCORES * config["num_attention_heads"] * tokens)


def _transformer_bytes(config: Mapping[str, Any], tokens: int, rows: int) -> int:
    hidden = config["num_attention_heads"] * config["attention_head_dim"]
    feeding = _HIDDEN * hidden + _INNER * int(hidden * config["mlp_ratio"])
    attending = _ATTENDING * hidden + config["num_attention_heads"] * tokens
    return 4 * max(rows * tokens * max(feeding, attending), _LARGEST_DENSE * hidden**2)


def _encoder_bytes(config: Mapping[str, Any], pixels: int) -> int:
    factor = 2 ** (len(config["block_out_channels"]) - 1)
    scores = (pixels // factor**2) ** 2 if config["mid_block_add_attention"] else 0
    return int(4 * max(_ENCODER_WORK * config["block_out_channels"][0] * pixels, _ENCODER_SCORES * scores))


def _mib(size: int) -> int:
    return -(-size >> 20)
