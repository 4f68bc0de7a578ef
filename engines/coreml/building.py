"""The child process that makes the package of a stage: a request on stdin, one line of JSON on stdout."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir

from intaglio.engines.child import end_with_parent, fail, refuse
from intaglio.engines.coreml.conversion import WRAPS, Converted, convert
from intaglio.engines.coreml.coremltools_ import import_coremltools
from intaglio.engines.coreml.description import (
    DECODE,
    MAIN,
    PREFILL,
    FunctionDescription,
    PackageDescription,
    describe,
    write_description,
)
from intaglio.engines.coreml.functions import merge_functions
from intaglio.engines.coreml.options import Options
from intaglio.engines.coreml.package import write_package
from intaglio.engines.coreml.sizes import conversion_dims, function_name
from intaglio.engines.coreml.states import convert_with_cache, depends_on_call_length, has_cache
from intaglio.engines.coreml.stats import weight_stats
from intaglio.engines.graph_file import load_graph
from intaglio.engines.graph_stats import activation_dtype, count_nodes
from intaglio.engines.lowering.narrow_dtype import NarrowDtypePass, broken_constants
from intaglio.engines.memory import peak_rss_bytes
from intaglio.engines.model_build import check_model
from intaglio.errors import CompileError, IntaglioError
from intaglio.exporters.bundle import Dim

# Tokens of a prompt that are taken at once.
CHUNK = 64

Sizes = dict[str, int | Dim]


@dataclass
class Build:
    """One stage on its way into a package."""

    graph: Path
    options: Options
    inputs: Mapping[str, Sequence[int | str]] = field(default_factory=dict)
    is_foreign: bool = False
    notes: list[str] = field(default_factory=list)
    dtype: str = ""
    functions: list[str] = field(default_factory=list)
    attentions_of_graph: int = 0

    def write(self, artifact: Path, shapes: Mapping[str, Dim], variants: Sequence[Mapping[str, Dim]]) -> None:
        """Makes the package: of one function, or of one for each set of sizes. Raises CompileError."""
        packages: dict[str, Path] = {}
        descriptions: dict[str, FunctionDescription] = {}
        with tempfile.TemporaryDirectory(prefix=".functions-", dir=artifact.parent) as folder:
            for called, converted, description in self._functions(shapes, variants):
                name = called
                while name in packages:
                    name += "_"
                packages[name] = Path(folder) / f"{name}.mlpackage"
                write_package(converted, packages[name], deployment_target=self.options.deployment_target)
                descriptions[name] = description
            if len(packages) == 1:
                next(iter(packages.values())).rename(artifact)
                descriptions = {MAIN: next(iter(descriptions.values()))}
            else:
                merge_functions(packages, artifact)
        self.functions = list(descriptions)
        first = next(iter(descriptions))
        write_description(artifact, PackageDescription(default_function=first, functions=descriptions))

    def _functions(
        self, shapes: Mapping[str, Dim], variants: Sequence[Mapping[str, Dim]]
    ) -> Iterator[tuple[str, Converted, FunctionDescription]]:
        model = self._model()
        names = [name for value in model.graph.inputs for name in _dims_of(value)]
        # Dims of those names are known from our own decoders; a cache of others goes in and out as they say.
        if has_cache(model) and {"past_sequence", "sequence"} <= shapes.keys():
            if depends_on_call_length(model):
                self.notes.append(
                    "rotary embeddings stretch with the text: beyond the length that the model was trained for, a "
                    f"prompt in chunks of {CHUNK} tokens gives other numbers than one taken whole"
                )
            if len(variants) > 1:
                self.notes.append("a key-value cache has one length: all sets of sizes share the longest")
            yield from self._with_cache(conversion_dims(shapes, names), shapes)
            return
        sets: list[Sizes] = []
        for dims in variants:
            sizes = conversion_dims(dims, names)
            if sizes not in sets:  # sets may differ in dims of other stages
                sets.append(sizes)
        for sizes in sets:
            converted = self._convert(model if len(sets) == 1 else self._model(), sizes)
            yield function_name(sizes, sets), converted, describe(converted, _fixed(sizes))

    def _with_cache(
        self, sizes: Sizes, shapes: Mapping[str, Dim]
    ) -> Iterator[tuple[str, Converted, FunctionDescription]]:
        context = shapes["total_sequence"].max if "total_sequence" in shapes else shapes["past_sequence"].max + 1
        context = min(context, shapes["past_sequence"].max + 1)
        lengths = {DECODE: 1, PREFILL: min(CHUNK, context, shapes["sequence"].max)}
        for name, tokens in lengths.items():
            if name == PREFILL and tokens == 1:
                continue
            with self._form():
                converted, described = convert_with_cache(
                    self._model(), self.graph.stem, context=context, tokens=tokens, dims=sizes
                )
            self._note_of(converted)
            if name == DECODE:
                batch = described.states[0].shape[0]
                texts = "one text" if batch == 1 else f"{batch} texts"
                self.notes.append(f"the key-value cache is a state of {context} tokens, float16; {texts} at a time")
            yield name, converted, described

    def _convert(self, model: ir.Model, sizes: Sizes) -> Converted:
        with self._form():
            converted = convert(model, self.graph.stem, dims=sizes)
        self._note_of(converted)
        return converted

    def _form(self) -> Any:
        from intaglio.engines.coreml.ops.packed_weights import packed_as

        return packed_as(self.options.weights)

    def _model(self) -> ir.Model:
        """The graph, narrowed if that is asked for."""
        model = load_graph(self.graph)
        for value in model.graph.inputs:
            if (shape := self.inputs.get(value.name or "")) is not None:
                value.shape = ir.Shape(shape)
        self.attentions_of_graph = count_nodes(model, "Attention")
        asked = activation_dtype(model)
        self.dtype = asked if asked != "bfloat16" else "float32 (widened from bfloat16)"
        self._note(f"{name}: {reason}" for name, reason in broken_constants(model.graph).items())
        if self.options.dtype == "float16" and asked not in ("float16", "float32"):
            raise CompileError(
                f"{self.graph.stem}: computes in {asked}, and --dtype float16 narrows float32 graphs; leave it out, or "
                "export the model in float32 or float16"
            )
        if self.options.dtype == "float16" and asked == "float32":
            narrow = NarrowDtypePass(ir.DataType.FLOAT16)
            narrow(model)
            self.dtype = "float16 (narrowed from float32)"
            self._note(iter(narrow.notes))
        return model

    def _note_of(self, converted: Converted) -> None:
        # Our graphs compute positions and lengths, which the dims table bounds.
        self._note(note for note in converted.notes if self.is_foreign or not note.endswith(WRAPS))

    def _note(self, notes: Iterator[str]) -> None:
        self.notes.extend(note for note in notes if note not in self.notes)


def _fixed(sizes: Sizes) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if isinstance(size, int) and size}


def _dims_of(value: ir.Value) -> list[str]:
    return [str(dim.value) for dim in value.shape or () if isinstance(dim, ir.SymbolicDim) and dim.value is not None]


def main() -> int:
    """Builds what stdin asks for; 2 and a message on stderr if it cannot be built."""
    end_with_parent()
    request = json.load(sys.stdin)
    graph, artifact = Path(request["graph"]), Path(request["artifact"])
    variants = [{name: Dim.model_validate(dim) for name, dim in dims.items()} for dims in request["variants"]]
    shapes = {name: Dim.model_validate(dim) for name, dim in request["shapes"].items()}
    build = Build(graph, Options.model_validate(request["options"]), request["inputs"], request["is_foreign"])
    try:
        import_coremltools(alone=True)
        if request["is_foreign"]:
            check_model(graph)
        build.write(artifact, shapes, variants)
        stats = weight_stats(artifact)
    except (IntaglioError, OSError) as error:
        return refuse(error, graph.name)
    except Exception as error:
        return fail(error)
    # In as many programs as there are functions.
    attentions = build.attentions_of_graph * len(build.functions)
    by_hand = max(attentions - stats.fused_attentions, 0)
    result = {
        "dtype": build.dtype,
        "weight_bytes": stats.weights.bytes,
        "weight_count": stats.weights.count,
        "attention_fused": stats.fused_attentions,
        "attention_total": attentions,
        # Those are products, a softmax and products.
        "fallbacks": {"Attention": by_hand} if by_hand else {},
        "operators": stats.ops,
        "package_bytes": stats.bytes,
        "quantized_bits_per_weight": round(stats.quantized.bits, 3),
        "functions": build.functions,
        "deployment_target": build.options.deployment_target,
        "notes": build.notes,
        "peak_rss_bytes": peak_rss_bytes(),
    }
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
