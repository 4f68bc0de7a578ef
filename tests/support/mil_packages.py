"""Core ML packages built with coremltools' builder, saved, and run by the evaluator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import torch
from coremltools.converters.mil.mil import Builder, Function, Program, types

from intaglio.engines.coreml.evaluator import Evaluator

_TYPES = {"float32": types.fp32, "float16": types.fp16, "int32": types.int32}


def save(program: Any, path: Path, passes: Any = None, target: Any = None, **settings: Any) -> Path:
    """Converts a program without any optimization (or with ``passes``) and saves it."""
    model = ct.convert(
        program,
        source="milinternal",
        convert_to="mlprogram",
        minimum_deployment_target=target or ct.target.iOS18,
        pass_pipeline=ct.PassPipeline.EMPTY if passes is None else passes,
        compute_precision=ct.precision.FLOAT32,
        skip_model_load=True,
        **settings,
    )
    model.save(str(path))
    return path


def build(
    body: Callable[..., Any], inputs: dict[str, tuple[Sequence[Any], str]], target: Any = None, names: str = "y"
) -> Any:
    """A program of ``body``, whose results become outputs ``y0``, ``y1``, …; booleans become int32."""

    placeholders = {
        name: Builder.placeholder(shape=tuple(shape), dtype=_TYPES[dtype]) for name, (shape, dtype) in inputs.items()
    }
    program = Program()
    with Function(placeholders, opset_version=target or ct.target.iOS18) as function:
        results = body(**function.inputs)
        results = results if isinstance(results, list | tuple) else [results]
        outputs = []
        for i, result in enumerate(results):
            if result.dtype == types.bool:
                result = Builder.cast(x=result, dtype="int32")
            outputs.append(Builder.identity(x=result, name=f"{names}{i}"))
        function.set_outputs(outputs)
    program.add_function("main", function)
    return program


def run(folder: Path, body: Callable[..., Any], feeds: dict[str, np.ndarray], **settings: Any) -> list[np.ndarray]:
    """Builds, saves, reads and runs ``body`` on ``feeds``: its results in order."""
    inputs = {name: (array.shape, str(array.dtype)) for name, array in feeds.items()}
    path = save(build(body, inputs, settings.get("target")), folder / "model.mlpackage", **settings)
    return list(Evaluator(path).run(feeds).values())


def error(found: np.ndarray, expected: np.ndarray) -> float:
    """Relative L2 distance; infinite where the shapes differ."""
    if found.shape != expected.shape:
        return float("inf")
    found, expected = found.astype(np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(found - expected) / max(float(np.linalg.norm(expected)), 1e-30))


def agree(found: Sequence[np.ndarray], expected: Sequence[Any], bound: float) -> None:
    """Fails unless each result is within the bound of the expected one, by :func:`error`."""
    assert len(found) == len(expected)
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert error(one, np.asarray(other)) <= bound, i


def t(x: Any) -> torch.Tensor:
    """A float64 tensor of torch, to compute what is expected."""
    return torch.from_numpy(np.asarray(x, np.float64))


def numbers(*shape: int) -> np.ndarray:
    """Normal float32, other ones each time."""
    return np.random.default_rng().standard_normal(shape).astype(np.float32)
