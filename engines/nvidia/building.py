"""The child process that builds a TensorRT engine: a request on stdin, lines of JSON on stdout, the last the result."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from intaglio.engines.child import end_with_parent, fail, refuse, say_progress
from intaglio.engines.graph_file import load_graph
from intaglio.engines.graph_stats import activation_dtype, count_nodes
from intaglio.engines.lowering.external_weights import write_graph
from intaglio.engines.lowering.narrow_dtype import NarrowDtypePass, broken_constants
from intaglio.engines.memory import peak_rss_bytes
from intaglio.engines.model_build import check_model
from intaglio.engines.model_engine import ModelTensor
from intaglio.engines.nvidia.bindings import import_tensorrt, import_tensorrt_rtx
from intaglio.engines.nvidia.full import has_few_rows, mark_refittable, refittable
from intaglio.engines.nvidia.limits import BuildSize, check_capabilities, check_memory
from intaglio.engines.nvidia.logger import make_logger
from intaglio.engines.nvidia.lower import lower
from intaglio.engines.nvidia.mapped_pages import release_pages
from intaglio.engines.nvidia.monitor import can_watch_memory, memory_watched, progress_monitor
from intaglio.engines.nvidia.options import FullOptions, RtxOptions
from intaglio.engines.nvidia.profiles import Range, profiles_of
from intaglio.engines.nvidia.stats import handed_over
from intaglio.engines.nvidia.timing_cache import TimingCache
from intaglio.engines.shapes import Tensor, largest_sizes
from intaglio.errors import CompileError, IntaglioError
from intaglio.exporters.bundle import Dim, TensorInfo
from intaglio.kernels.cuda.ahead_of_time import require_triton
from intaglio.kernels.grouped_quant import DOMAIN

# The last that TensorRT said, for the error.
_MOST_SAID = 3
# What it says besides where there is no driver, which a build does not need.
_NO_DRIVER = re.compile(
    r"\s*(IBuilder::\w+: |ITensor::\w+: )?\[checkMacros\.cpp::catchCudaError::\d+\] Error Code 1: Cuda Runtime "
    r"\(In catchCudaError at \S+ \(cudaError (?:35|100): [^()]*\)\)"
)
# Of the name of a tensor, in bytes.
_LONGEST_NAME = 4095

Options = RtxOptions | FullOptions


def build(
    graph: Path,
    artifact: Path,
    inputs: Sequence[Tensor],
    variants: Sequence[Mapping[str, Dim]],
    options: Options,
    context: int = 0,
    measured: Sequence[str] = (),
) -> dict[str, Any]:
    """Lowers ``graph`` and builds ``artifact`` of it; what the report says.

    ``inputs`` are those of the portable graph, with the names that the dims of each of the ``variants`` have. A
    key-value cache becomes buffers of ``context`` tokens. For full TensorRT, ``measured`` are the compiler and the
    device. Raises CompileError.
    """
    name, is_rtx = graph.stem, isinstance(options, RtxOptions)
    # First, since what is missing is then known before any work is done.
    trt = import_tensorrt_rtx() if is_rtx else import_tensorrt()
    model = load_graph(graph)
    # Before lowering, which takes apart those that have no kernel.
    attentions, weights = count_nodes(model, "Attention"), set(model.graph.initializers)
    notes = _lower(model, options, context, [largest_sizes(each) for each in variants])
    _check_names(name, model)
    taken = lowered_inputs(model, inputs)
    for value, tensor in zip(model.graph.inputs, taken, strict=True):
        # TensorRT takes dims of one name for equal, and some files call all that they do not know "?".
        value.shape = ir.Shape(tensor.shape)
    profiles = profiles_of(taken, variants)
    handed = handed_over(model)
    size = BuildSize(handed.weight_bytes, sum(handed.operators.values()), len(profiles))
    memory = ""
    if isinstance(options, RtxOptions):
        notes += check_capabilities(name, model, options.sm)
        memory = check_memory(name, size)
    if not is_rtx and any(node.domain == DOMAIN for node in model.graph.all_nodes()):
        # The plugins' kernels are compiled inside TensorRT, which would not pass on what they say.
        require_triton()
    exchanged = refittable(model, weights) if isinstance(options, FullOptions) and options.refit else []
    with tempfile.TemporaryDirectory(prefix=".lowered-", dir=artifact.parent) as folder:
        lowered = Path(folder) / f"{name}.onnx"
        say_progress(f"lower {name}", 0, max(handed.weight_bytes, 1), "bytes", memory)
        write_graph(model, lowered, lambda done, total: say_progress(f"lower {name}", done, max(total, 1), "bytes"))
        del model
        timing = None if is_rtx else TimingCache(*measured)
        plan = _build_plan(trt, name, lowered, profiles, options, size, exchanged, timing)
        artifact.write_bytes(plan)
    return {
        **handed.for_report(),
        "attention_total": attentions,
        "fallbacks": {},
        "notes": [*notes, *handed.notes()],
        "package_bytes": artifact.stat().st_size,
        "profiles": len(profiles),
    }


def lowered_model(
    graph: Path, options: Options, context: int = 0, largest: Sequence[Mapping[str, int]] = ()
) -> tuple[ir.Model, list[str]]:
    """The portable ``graph`` as TensorRT is given it, and what the report says of that. Raises CompileError.

    ``context`` is the length of the buffers that a key-value cache becomes; 0 leaves it as it is. ``largest`` are the
    greatest sizes of each profile, which full TensorRT's plugins are chosen by.
    """
    model = load_graph(graph)
    return model, _lower(model, options, context, largest)


def _lower(model: ir.Model, options: Options, context: int, largest: Sequence[Mapping[str, int]]) -> list[str]:
    notes = [f"{name}: {reason}" for name, reason in broken_constants(model.graph).items()]
    computes_in = activation_dtype(model)
    if options.dtype is not None and computes_in == "float32":
        narrow = NarrowDtypePass(ir.DataType[options.dtype.upper()])
        narrow(model)
        notes += narrow.notes
    elif options.dtype not in (None, computes_in):
        notes.append(f"--dtype {options.dtype} changes nothing: the graph computes in {computes_in} already")
    if isinstance(options, RtxOptions):
        notes += lower(model, "tensorrt-rtx", context=context)
    else:
        notes += lower(model, "tensorrt", context=context, few_rows=has_few_rows(model, largest))
    return notes


def lowered_inputs(model: ir.Model, declared: Sequence[Tensor]) -> list[TensorInfo]:
    """The inputs of the lowered ``model``: named as the portable ones, fixed where lowering fixed or added them."""
    names = {tensor.name: tensor.shape for tensor in declared}
    result = []
    for value in model.graph.inputs:
        assert value.dtype is not None and value.name is not None
        shape = value.shape
        if shape is None:
            raise CompileError(f"the input {value.name!r} is of unknown rank, and TensorRT must know it")
        known = names.get(value.name) or tuple(str(dim) for dim in shape)
        # Some files say -1 where they mean any size.
        dims = tuple(dim if isinstance(dim, int) and dim >= 0 else name for dim, name in zip(shape, known, strict=True))
        result.append(TensorInfo(name=value.name, dtype=value.dtype.numpy().name, shape=dims))
    return result


def _check_names(name: str, model: ir.Model) -> None:
    """Raises CompileError for names of inputs and outputs that TensorRT's engines cannot have."""
    taken = {value.name for value in model.graph.inputs}
    for value in [*model.graph.inputs, *model.graph.outputs]:
        named = str(value.name)
        if "\0" in named or len(named.encode()) > _LONGEST_NAME:
            raise CompileError(
                f"{name}: the name {named[:40]!r} of an input or output has {len(named.encode())} bytes, expected at "
                f"most {_LONGEST_NAME}, none of them 0; rename it in the model"
            )
        if value in model.graph.outputs and named in taken:
            raise CompileError(
                f"{name}: the output {named!r} is an input, and an engine's have names of their own; put an Identity "
                "before it in the model, or take it from what is fed"
            )


def _build_plan(
    trt: Any,
    name: str,
    lowered: Path,
    profiles: Sequence[Mapping[str, Range]],
    options: Options,
    size: BuildSize,
    exchanged: Sequence[str] = (),
    timing: TimingCache | None = None,
) -> memoryview:
    if isinstance(options, FullOptions):
        from intaglio.engines.nvidia.plugins import register_plugins

        register_plugins(trt)
    said: list[str] = []
    builder = trt.Builder(make_logger(trt, lambda text: _told(said, text)))
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, builder.logger)
    if not parser.parse_from_file(str(lowered)):
        raise CompileError(f"{name}: TensorRT cannot read the graph: {_parser_errors(parser, lowered)}")
    config = builder.create_builder_config()
    watches = isinstance(options, RtxOptions) and can_watch_memory()
    # The parser maps the weights, and the builder copies them: pages of both would be in memory at once.
    config.progress_monitor = progress_monitor(
        trt, name, says_steps=not watches, after_step=lambda: release_pages(lowered.with_suffix(".data"))
    )
    if timing is not None:
        timing.attach(config)
    if exchanged:
        mark_refittable(trt, network, config, exchanged)
    if isinstance(options, RtxOptions) and options.sm:
        config.num_compute_capabilities = len(options.sm)
        for i, sm in enumerate(options.sm):
            config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), i)
    for ranges in profiles:
        config.add_optimization_profile(_profile(builder, network, ranges, name))
    with memory_watched(name, size) if watches else contextlib.nullcontext():
        plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise CompileError(
            f"{name}: TensorRT cannot build it: {'; '.join(said[-_MOST_SAID:]) or 'it does not say why'}"
        )
    if timing is not None:
        timing.keep(config)
    return memoryview(plan)


def _profile(builder: Any, network: Any, ranges: Mapping[str, Range], name: str) -> Any:
    made = builder.create_optimization_profile()
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        if tensor.name not in ranges:
            raise CompileError(f"{name}: lowering made an input {tensor.name!r}, whose sizes nothing says")
        if tensor.is_shape_tensor:
            raise CompileError(
                f"{name}: shapes follow from the values of the input {tensor.name!r}, and TensorRT must know those "
                "when it builds: make it a constant of the model, or compile for another target, such as cpu"
            )
        found = ranges[tensor.name]
        if -1 in tuple(tensor.shape):
            made.set_shape(tensor.name, found.min, found.opt, found.max)
    return made


def _told(said: list[str], text: str) -> None:
    """Keeps an error, without what is said for want of a driver."""
    if text := _NO_DRIVER.sub("", text):
        said.append(text)
        # Of a crash, what stderr ends with is all that is left.
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def _parser_errors(parser: Any, lowered: Path) -> str:
    """What the parser has no operator for, all of it, or else what it says."""
    nodes = [node for node in ir.load(lowered).graph.all_nodes() if not node.domain]
    missing: dict[str, list[str]] = {}
    for node in nodes:
        if not parser.supports_operator(node.op_type):
            missing.setdefault(node.op_type, []).append(node.name or str(node.outputs[0].name))
    if missing:
        listed = "; ".join(f"{op} (node {_listed(names)})" for op, names in missing.items())
        return f"it has no operator {listed}. Compile for another target, such as cpu"
    errors = [parser.get_error(i) for i in range(parser.num_errors)]
    told = "; ".join(_NO_DRIVER.sub("", error.desc()) + _at(error) for error in errors[:_MOST_SAID])
    return f"{told}. Export it otherwise, or compile for another target, such as cpu"


def _at(error: Any) -> str:
    known = error.node() >= 0 or error.node_name()
    return f" (node {error.node_name() or error.node()}, {error.node_operator() or 'no op'})" if known else ""


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_SAID} more" if len(names) > _MOST_SAID else ""
    return ", ".join(names[:_MOST_SAID]) + more


def main() -> int:
    """Builds what stdin asks for; 2 and a message on stderr if it cannot be built."""
    end_with_parent()
    request = json.load(sys.stdin)
    graph, artifact = Path(request["graph"]), Path(request["artifact"])
    inputs = [ModelTensor.model_validate(each) for each in request["inputs"]]
    dims = [{name: Dim.model_validate(dim) for name, dim in each.items()} for each in request["variants"]]
    kind = FullOptions if request["flavour"] == "tensorrt" else RtxOptions
    options = kind.model_validate(request["options"])
    try:
        if request["is_foreign"]:
            check_model(graph)
        result = build(graph, artifact, inputs, dims, options, request["context"], request["measured"])
    except (IntaglioError, OSError) as error:
        return refuse(error, graph.name)
    except Exception as error:
        return fail(error)
    sys.stdout.write(json.dumps({**result, "peak_rss_bytes": peak_rss_bytes()}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
