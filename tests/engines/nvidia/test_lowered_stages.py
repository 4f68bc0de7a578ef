"""Every stage as TensorRT is given it, run by onnxruntime: the numbers of the portable graph, and what its parser says.

Bounds of relative L2, lowered against portable: 1e-5 in float32; 8e-3 in float16 and 5e-2 in bfloat16, sixteen and
thirteen roundings, since both round every result. Measured in five runs, at most: 1.1e-6, 3.9e-3 and 2.5e-2.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from gpu_stages import export_decoder, relative_l2
from klein import make_checkpoint
from klein_sizes import TINY
from run_graph import run_onnxruntime
from tensorrt_rtx_builds import parse_for_gpu, require_tensorrt_rtx
from tiny_models import TINY_MODELS, TinyModel

import intaglio
from intaglio.engines.kv_cache import PAST
from intaglio.engines.lowering.external_weights import write_graph
from intaglio.engines.nvidia.building import lowered_model
from intaglio.engines.nvidia.evaluation import LoweredGraph
from intaglio.engines.nvidia.options import RtxOptions
from intaglio.engines.stage_interface import runs_as
from intaglio.exporters.bundle import Bundle, read_bundle
from intaglio.runtimes.random_feeds import Sizes, random_feeds

DEMO = Path(__file__).parents[3] / "demo" / "emoji"
BOUNDS = {"float32": 1e-5, "float16": 8e-3, "bfloat16": 5e-2}
# The dtype of a bundle, and the option; both make a graph of halves.
DTYPES = [
    ("float32", None), ("float32", "float16"), ("float32", "bfloat16"), ("float16", None), ("bfloat16", None),
]  # fmt: skip
FLAVOURS = ("tensorrt-rtx", "tensorrt")
PROBED = ("text_encoder", "transformer", "vae_decoder")
CONTEXT = 32
BATCH = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stages")


@cache
def exported(folder: Path, family: str, dtype: str) -> Path:
    """A bundle of random weights (or the demo's), exported when it is first asked for."""
    made = folder / f"{family}-{dtype}"
    made.mkdir()
    if family == "klein":
        make_checkpoint.write_pipeline(made / "checkpoint", TINY)
        options: dict[str, Any] = {"hidden_states": TINY.layers, "pack_ternary": True}
        intaglio.export(made / "checkpoint", made / "bundle", dtype=dtype, **options)
    elif family == "demo":
        intaglio.export(DEMO, made / "bundle", dtype=dtype)
    elif family == "decoder":
        export_decoder(made, dtype=dtype)
    else:
        next(tiny for tiny in TINY_MODELS if tiny.name == family).build(made / "checkpoint")
        intaglio.export(made / "checkpoint", made / "bundle", dtype=dtype)
    return made / "bundle"


def lowered(bundle: Path, stage: str, option: str | None, flavour: str, context: int = 0) -> LoweredGraph:
    described = read_bundle(bundle)
    options = {} if option is None else {"dtype": option}
    interface = runs_as(described.stages[stage])
    return LoweredGraph(stage, bundle / f"{stage}.onnx", interface, described.dims, options, context, flavour)


def compared(graph: LoweredGraph, bundle: Path, feeds: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """What the portable graph gives, which the lowered one gives as well, in the same dtypes."""
    expected = run_onnxruntime(bundle / f"{graph.name}.onnx", feeds)
    found = graph.run(feeds)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype, name
        assert np.isfinite(values).all()
        distance = relative_l2(found[name].astype(np.float64), values.astype(np.float64))
        assert distance <= BOUNDS[dtype], f"{graph.name}: {name}: {distance}"
    return expected


@pytest.mark.parametrize(
    ("family", "dtype", "option"),
    [*(("klein", *each) for each in DTYPES), *(("demo", *each) for each in DTYPES if each[0] == "float32")],
)
def test_pictures(folder: Path, family: str, dtype: str, option: str | None) -> None:
    bundle = exported(folder, family, dtype)
    described = read_bundle(bundle)
    for stage in described.stages:
        sizes = Sizes.choose(described.dims, batch=BATCH)
        seed = int.from_bytes(np.random.bytes(4))
        feeds = random_feeds(described, runs_as(described.stages[stage]), described.dims, sizes, seed)
        is_plain = not {"GroupedQuantMatMul", "Attention"} & {
            n.op_type for n in ir.load(bundle / f"{stage}.onnx").graph
        }
        for flavour in FLAVOURS[: 1 if is_plain else 2]:
            graph = lowered(bundle, stage, option, flavour)
            compared(graph, bundle, feeds, option or dtype)
            if flavour == FLAVOURS[0] and stage in PROBED:
                assert graph.large_activations(feeds) == ()


def steps(described: Bundle, lengths: list[int]) -> Iterator[dict[str, np.ndarray]]:
    """Feeds without a cache: a prompt and what follows it; the second row is padded on the left."""
    rng, past = np.random.default_rng(), 0
    for count in lengths:
        mask = np.ones((BATCH, past + count), np.int64)
        mask[1, :2] = 0
        positions = np.maximum(mask.cumsum(axis=1) - 1, 0)[:, past:]
        yield {
            "input_ids": rng.integers(0, 97, (BATCH, count)), "attention_mask": mask, "position_ids": positions
        }  # fmt: skip
        past += count


def written(bundle: Path, flavour: str, dtype: str, option: str | None, lengths: list[int]) -> None:
    """A prompt and steps in the stage ``generate``, each behind the portable graph's own cache; and ``score``."""
    described = read_bundle(bundle)
    generate = lowered(bundle, "generate", option, flavour, CONTEXT)
    past = {
        tensor.name: np.zeros([BATCH, int(tensor.shape[1]), 0, int(tensor.shape[3])], tensor.dtype)
        for tensor in generate.stage.inputs
        if tensor.name.startswith(PAST) and tensor.shape is not None
    }
    for number, feeds in enumerate(steps(described, lengths)):
        found = compared(generate, bundle, {**feeds, **past}, option or dtype)
        past = {name: found[name.replace(PAST, "present.", 1)] for name in past}
        if not number:
            compared(lowered(bundle, "score", option, flavour), bundle, feeds, option or dtype)


@pytest.mark.parametrize("tiny", TINY_MODELS, ids=lambda tiny: tiny.name)
def test_decoders_of_every_architecture(folder: Path, tiny: TinyModel) -> None:
    """Their heads are of 8 and of 16: products, and Attention in halves."""
    bundle = exported(folder, tiny.name, "float32")
    for option in (None, "float16", "bfloat16") if tiny.own_graph else (None,):
        written(bundle, "tensorrt-rtx", "float32", option, [9, 1, 5, 1, 16])


@pytest.mark.parametrize(("dtype", "option"), DTYPES)
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_decoder_whose_heads_have_kernels(folder: Path, dtype: str, option: str | None, flavour: str) -> None:
    written(exported(folder, "decoder", dtype), flavour, dtype, option, [7, 1, 1, 3, 20])


def test_a_cache_beyond_the_context_is_refused(folder: Path) -> None:
    bundle = exported(folder, "decoder", "float32")
    with pytest.raises(intaglio.errors.InputError, match="context is 32"):
        written(bundle, "tensorrt-rtx", "float32", None, [30, 3])


@pytest.mark.parametrize(("dtype", "option"), [("float32", "float16"), ("float32", "bfloat16"), ("float16", None)])
def test_a_cache_is_of_the_dtype_that_the_engine_computes_in(folder: Path, dtype: str, option: str | None) -> None:
    """Half the memory, and no cast of the whole of it at each token."""
    graph = exported(folder, "decoder", dtype) / "generate.onnx"
    model, _ = lowered_model(graph, RtxOptions(dtype=option), CONTEXT)
    expected = ir.DataType[(option or dtype).upper()]
    caches = [v for v in (*model.graph.inputs, *model.graph.outputs) if str(v.name).startswith((PAST, "present."))]
    assert len(caches) == 8
    for value in caches:
        assert value.dtype == expected
        assert not {node.op_type for node, _ in value.uses()} & {"Cast"}
        assert value.producer() is None or value.producer().op_type == "TensorScatter"


def test_tensorrt_parses_every_stage(folder: Path) -> None:
    require_tensorrt_rtx()
    graphs = []
    families = ["klein", "demo", "decoder", *(tiny.name for tiny in TINY_MODELS if tiny.own_graph)]
    for family in families:
        bundle = exported(folder, family, "float32")
        for stage in read_bundle(bundle).stages:
            for option in (None, "float16", "bfloat16"):
                context = CONTEXT if stage == "generate" else 0
                model, _ = lowered_model(bundle / f"{stage}.onnx", RtxOptions(dtype=option), context)
                graphs.append(folder / f"{family}-{stage}-{option}.onnx")
                write_graph(model, graphs[-1])
    assert len(graphs) > 100
    assert parse_for_gpu(graphs) == {}
