"""Random inputs for every kind of stage, from a seed: what two implementations are compared on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from intaglio.errors import InputError
from intaglio.exporters.bundle import Bundle, Dim, StageInfo, evaluate_dim
from intaglio.runtimes.latents import FACTOR, image_ids, text_ids

_TOKENS, _BATCH = 12, 2
# Not square, so that rows and columns cannot be mixed up unseen.
_HEIGHT, _WIDTH = 64, 96
# Of a decoder that works in bands.
_BANDS = {"query_tokens": 5, "band_rows": 6, "band_width": 10}
_TEXT = {"input_ids", "attention_mask", "position_ids"}
_PICTURE = {
    "input_ids", "attention_mask", "hidden_states", "encoder_hidden_states", "timestep", "guidance", "img_ids",
    "txt_ids", "latents", "image", "query", "key", "value", "attended", "residual", "x", "mean", "variance", "row_mask",
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Tokens of text, pixels of a picture, rows of a batch."""

    tokens: int
    height: int
    width: int
    batch: int

    @classmethod
    def choose(
        cls,
        dims: Mapping[str, Dim],
        *,
        tokens: int | None = None,
        height: int | None = None,
        width: int | None = None,
        batch: int | None = None,
    ) -> Sizes:
        """What is asked for, else small sizes, both within ``dims``. Raises InputError."""
        if "sequence" in dims:
            # A stage with a cache gets as many tokens of past again.
            new = dims["sequence"]
            least = max(min(2, new.max), new.min)
            longest = max(new.max // 2, least)
            if tokens is not None and not least <= tokens <= longest:
                raise InputError(f"tokens is {tokens}, expected {least} to {longest}")
            length = min(max(_TOKENS, least), longest) if tokens is None else tokens
        else:
            length = _size("tokens", tokens, dims.get("text_tokens"), _TOKENS)
        return cls(
            length,
            _size("height", height, dims.get("height"), _HEIGHT),
            _size("width", width, dims.get("width"), _WIDTH),
            _size("batch", batch, dims.get("batch"), _BATCH),
        )


def _size(name: str, asked: int | None, dim: Dim | None, default: int) -> int:
    dim = dim or Dim(min=1, max=2**31 - 1, multiple_of=FACTOR if name in ("height", "width") else 1)
    if asked is None:
        size = min(max(default, dim.min), dim.max)
        return max(size - size % dim.multiple_of, dim.min)
    if not dim.min <= asked <= dim.max or asked % dim.multiple_of:
        multiple = f", a multiple of {dim.multiple_of}" if dim.multiple_of > 1 else ""
        raise InputError(f"{name} is {asked}, expected {dim.min} to {dim.max}{multiple}")
    return asked


def is_known(stage: StageInfo) -> bool:
    """Whether :func:`random_feeds` knows what all inputs of a stage mean."""
    names = {tensor.name for tensor in stage.inputs if not tensor.name.startswith("past_key_values.")}
    return names == _TEXT or names <= _PICTURE


def latent_size(dims: Mapping[str, Dim], sizes: Sizes) -> tuple[int, int]:
    """Rows and columns of the packed latents of a picture."""

    def along(name: str, pixels: int) -> int:
        dim = dims.get(f"latent_{name}")
        size = evaluate_dim(dim.expression, {name: pixels}) if dim is not None and dim.expression else None
        return pixels // FACTOR if size is None else size

    return along("height", sizes.height), along("width", sizes.width)


def random_feeds(
    bundle: Bundle, stage: StageInfo, dims: Mapping[str, Dim], sizes: Sizes, seed: int
) -> dict[str, np.ndarray]:
    """Inputs of ``stage`` as an engine takes them.

    Of a language model the second row is padded on the left by a third, and a stage with a cache gets as many tokens
    of random past as new ones. Of a text encoder the last row is padded on the right by a third. Latents, hidden
    states and conditioning are normal, timesteps uniform in 0 to 1 and pictures in -1 to 1. Raises InputError for a
    stage whose inputs are not known here.
    """
    if not is_known(stage):
        inputs = ", ".join(tensor.name for tensor in stage.inputs)
        raise InputError(f"{stage.file}: has the inputs {inputs}, of which no random values are known")
    generator = np.random.Generator(np.random.Philox(seed))
    if any(tensor.name == "position_ids" for tensor in stage.inputs):
        return _text_feeds(bundle, stage, sizes, generator)
    return _picture_feeds(bundle, stage, dims, sizes, generator)


def _vocab_size(bundle: Bundle) -> int:
    component = bundle.components.get("language_model") or bundle.components["text_encoder"]
    return int(component.config["vocab_size"])


def _text_feeds(
    bundle: Bundle, stage: StageInfo, sizes: Sizes, generator: np.random.Generator
) -> dict[str, np.ndarray]:
    batch, tokens = sizes.batch, sizes.tokens
    cache = [t for t in stage.inputs if t.name.startswith("past_key_values.")]
    past = tokens if cache else 0
    mask = np.ones((batch, past + tokens), np.int64)
    mask[1:2, : tokens // 3] = 0
    feeds = {
        "input_ids": generator.integers(0, _vocab_size(bundle), (batch, tokens)),
        "attention_mask": mask,
        "position_ids": np.maximum(mask.cumsum(axis=1) - 1, 0)[:, past:],
    }
    named = {"batch": batch, "past_sequence": past}
    for tensor in cache:
        shape = [n if isinstance(n, int) else named[n] for n in tensor.shape]
        feeds[tensor.name] = generator.normal(size=shape).astype(tensor.dtype)
    return feeds


def _picture_feeds(
    bundle: Bundle, stage: StageInfo, dims: Mapping[str, Dim], sizes: Sizes, generator: np.random.Generator
) -> dict[str, np.ndarray]:
    rows, columns = latent_size(dims, sizes)
    named = {
        "batch": sizes.batch, "text_tokens": sizes.tokens, "image_tokens": rows * columns, "height": sizes.height,
        "width": sizes.width, "latent_height": rows, "latent_width": columns,
    }  # fmt: skip
    named |= {name: _size(name, None, dims.get(name), default) for name, default in _BANDS.items()}
    for name, dim in dims.items():
        if dim.expression is not None and name not in named:
            named[name] = evaluate_dim(dim.expression, named) or dim.min
    mask = np.ones((sizes.batch, sizes.tokens), np.int64)
    mask[-1, sizes.tokens - sizes.tokens // 3 :] = 0

    def draw(name: str, shape: list[int]) -> np.ndarray:
        match name:
            case "input_ids":
                return generator.integers(0, _vocab_size(bundle), shape)
            case "attention_mask":
                return mask
            case "img_ids":
                return np.broadcast_to(image_ids(rows, columns), shape)
            case "txt_ids":
                return np.broadcast_to(text_ids(sizes.tokens), shape)
            case "timestep":
                return generator.uniform(size=shape)
            case "guidance":
                return generator.uniform(1, 5, shape)
            case "variance":
                return generator.uniform(0.1, 2, shape)
            case "row_mask":  # the last row lies beyond the picture
                return np.append(np.ones(shape[0] - 1), 0)
            case "image":
                return generator.uniform(-1, 1, shape)
        return generator.normal(size=shape)

    feeds = {}
    for tensor in stage.inputs:
        shape = [n if isinstance(n, int) else named[n] for n in tensor.shape]
        feeds[tensor.name] = np.ascontiguousarray(draw(tensor.name, shape).astype(tensor.dtype))
    return feeds
