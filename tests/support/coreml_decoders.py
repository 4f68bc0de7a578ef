"""Decoders whose cache is in states, saved as one package of two functions and run by the evaluator."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime

from intaglio.engines.coreml.cache_calls import cache_calls
from intaglio.engines.coreml.description import DECODE, PREFILL, PackageDescription
from intaglio.engines.coreml.evaluator import Evaluator
from intaglio.engines.coreml.functions import merge_functions
from intaglio.engines.coreml.package import write_package
from intaglio.engines.coreml.states import convert_with_cache
from intaglio.engines.lowering.narrow_dtype import NarrowDtypePass
from intaglio.exporters.bundle import Dim


def bundle_dims(bundle: Path) -> dict[str, int | Dim]:
    """The dims table of a bundle."""
    return {name: Dim(**dim) for name, dim in json.loads((bundle / "bundle.json").read_text())["dims"].items()}


def write_decoder(
    bundle: Path, path: Path, *, context: int, chunk: int, batch: int = 1, narrow: bool = False
) -> PackageDescription:
    """The stage ``generate`` as a package of ``decode`` and ``prefill``, with those of one function beside it.

    ``narrow`` makes a float32 graph float16 first.
    """
    functions, packages = {}, {}
    for name, tokens in ((DECODE, 1), (PREFILL, chunk)):
        model = ir.load(bundle / "generate.onnx")
        if narrow:
            NarrowDtypePass(ir.DataType.FLOAT16)(model)
        dims = {**bundle_dims(bundle), "batch": batch}
        converted, functions[name] = convert_with_cache(model, "generate", context=context, tokens=tokens, dims=dims)
        packages[name] = path.with_name(f"{name}.mlpackage")
        write_package(converted, packages[name])
    merge_functions(packages, path)
    return PackageDescription(default_function=DECODE, functions=functions)


def token_feeds(ids: np.ndarray, mask: np.ndarray, past: int) -> dict[str, np.ndarray]:
    """The feeds of tokens ``[B, S]`` behind ``past`` others, under a mask ``[B, past + S]``."""
    positions = np.maximum(mask.cumsum(axis=1) - 1, 0)[:, past:]
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


class StateDecoder:
    """A package and its state: tokens go in, logits of the last one come out. ``calls`` are those of the last step."""

    def __init__(self, path: Path, description: PackageDescription) -> None:
        self._evaluator, self._description = Evaluator(path), description
        self.state = self._evaluator.make_state()
        self.length = 0
        self.calls: list[tuple[str, int]] = []

    def append(self, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
        """Logits ``[B, 1, V]``."""
        calls = cache_calls(self._description, feeds, self.length)
        for call in calls:
            function = self._description.functions[call.function]
            outputs = self._evaluator.run(function.pack(call.feeds), call.function, self.state)
        self.calls = [(call.function, call.tokens) for call in calls]
        self.length += feeds["input_ids"].shape[1]
        return function.unpack(outputs)["logits"]


class CacheDecoder:
    """The same with the portable graph in onnxruntime, whose cache goes in and out."""

    def __init__(self, bundle: Path, batch: int = 1) -> None:
        options = onnxruntime.SessionOptions()
        # Folded, packed weights would be unpacked.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._session = onnxruntime.InferenceSession(bundle / "generate.onnx", options)
        self._past = {
            value.name: np.zeros([batch, value.shape[1], 0, value.shape[3]], np.float32)
            for value in self._session.get_inputs()
            if value.name.startswith("past_key_values.")
        }
        self.length = 0

    def append(self, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
        """Logits ``[B, 1, V]``."""
        names = ["logits", *(name.replace("past_key_values.", "present.") for name in self._past)]
        logits, *present = self._session.run(names, {**feeds, **self._past})
        self._past = dict(zip(self._past, present, strict=True))
        self.length += feeds["input_ids"].shape[1]
        return logits


def relative_l2(found: np.ndarray, expected: np.ndarray) -> float:
    """The norm of the difference, of that of what is expected."""
    wide = expected.astype(np.float64)
    return float(np.linalg.norm(found - wide) / np.linalg.norm(wide))
