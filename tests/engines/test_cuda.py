"""``--target cuda``: graphs for onnxruntime-gpu, compared on the CPU's provider, and what is said where no GPU is."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import coreml_models
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import tiny_checkpoint

import intaglio
from intaglio.engines.engine import open_engine
from intaglio.engines.nvidia import cuda_session
from intaglio.engines.nvidia.cuda_ops import runs_on_cpu
from intaglio.engines.nvidia.cuda_session import CUDA, TENSORRT, gpu_providers
from intaglio.errors import CompileError, EngineError, InputError, RuntimeMissingError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny decoder, compiled for both targets."""
    folder = tmp_path_factory.mktemp("decoder")
    intaglio.export(tiny_checkpoint.write(folder / "checkpoint"), folder / "bundle")
    intaglio.compile(folder / "bundle")
    report = intaglio.compile(folder / "bundle", "cuda")
    assert {stage.dtype for stage in report.stages.values()} == {"float32"}
    return folder / "bundle"


def test_text_is_that_of_the_cpu(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_session, "check_provider", lambda provider: None)
    monkeypatch.setattr(cuda_session, "gpu_providers", lambda *given: [])
    on_cpu: Any = functools.partial(cuda_session.CudaSession, device="cpu")
    monkeypatch.setattr(cuda_session, "CudaSession", on_cpu)
    ours, theirs = intaglio.load(bundle, "cuda"), intaglio.load(bundle, threads=1)
    for prompt in ("The capital of France is", "x"):
        assert ours(prompt, max_new_tokens=6) == theirs(prompt, max_new_tokens=6)
    np.testing.assert_allclose(ours.score("that is").logprobs, theirs.score("that is").logprobs, rtol=1e-4, atol=1e-4)


def test_a_closed_session_holds_nothing(bundle: Path) -> None:
    session = open_engine(bundle, "cuda").load_for_parity("score")
    feeds = {name: np.ones((1, 3), np.int64) for name in ("input_ids", "attention_mask", "position_ids")}
    with pytest.raises(InputError, match="score: has no output 'probabilities'; there are logits"):
        session.run(feeds, ["probabilities"])
    assert list(session.run(feeds)) == ["logits"]
    session.close()
    with pytest.raises(EngineError, match="score: its session was closed; load the stage again"):
        session.run(feeds)


def test_parity_without_a_gpu(bundle: Path) -> None:
    report = intaglio.parity(bundle, "cuda", keep_going=True)
    assert max(difference.relative_l2 for difference in report.differences) <= 1e-5


@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_ternary_weights_for_either_provider(provider: str, tmp_path: Path) -> None:
    intaglio.export(ROOT / "demo" / "emoji", tmp_path / "bundle", stages=["transformer"])
    intaglio.compile(tmp_path / "bundle", "cuda", provider=provider)
    report = intaglio.parity(tmp_path / "bundle", "cuda", keep_going=True)
    assert max(difference.relative_l2 for difference in report.differences) <= 1e-5


def test_what_is_said_where_it_cannot_run(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeMissingError, match=r"has no CUDAExecutionProvider, only .*: pip uninstall onnxruntime"):
        intaglio.load(bundle, "cuda")("x")
    # An onnxruntime that leaves its provider out, as it does where a library is missing.
    monkeypatch.setattr(cuda_session, "check_provider", lambda provider: None)
    with pytest.raises(EngineError, match=r"onnxruntime (left out CUDAExecutionProvider|cannot load it)"):
        intaglio.load(bundle, "cuda")("x")


def test_options_and_providers(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--provider is 'rocm', expected cuda or tensorrt"):
        check({"provider": "rocm"})
    with pytest.raises(InputError, match="--dtype is 'int8', expected float16"):
        check({"dtype": "int8"})
    with pytest.raises(InputError, match="--sm: is no option of the target cuda"):
        check({"sm": "86"})
    assert check({}) == {"provider": "cuda"}
    with pytest.raises(InputError, match="--shapes: the target cuda takes every size in a range; give it once"):
        check({}, 2)
    ((name, options),) = gpu_providers("cuda", tmp_path, 5 << 30)
    assert (name, options["gpu_mem_limit"]) == (CUDA, 5 << 30)
    assert [each for each, _ in gpu_providers("tensorrt", tmp_path, None)] == [TENSORRT, CUDA]
    (_, options), _ = gpu_providers("tensorrt", tmp_path, 5 << 30)
    assert options["trt_max_workspace_size"] == 5 << 30


def check(options: dict[str, str], sets_of_sizes: int = 0) -> dict[str, str]:
    from intaglio.engines import cuda

    return cuda.check_options(options, sets_of_sizes)


def test_operators_without_a_kernel_are_counted() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]> g (int32[2] x) => (int32[2] y)
    { a = BitwiseAnd(x, x) b = BitwiseAnd(a, x) y = Add(b, x) }"""
    model = ir.serde.deserialize_model(onnx.parser.parse_model(text))
    assert runs_on_cpu(model) == {"BitwiseAnd": 2}


def test_foreign_files_are_checked(tmp_path: Path) -> None:
    cycle = "g (float[4] x) => (float[4] y) { a = Add(x, y) y = Relu(a) }"
    onnx.save(coreml_models.model(cycle), tmp_path / "net.onnx")
    with pytest.raises(CompileError, match=r"fails onnx.checker: .*topologically sorted"):
        intaglio.compile(tmp_path / "net.onnx", "cuda")


def test_attention_of_a_foreign_file_that_says_no_shapes(tmp_path: Path) -> None:
    text = """g (float16[1,8,4,64] x) => (float16[1,4,8,64] y) {
        q = Transpose<perm=[0, 2, 1, 3]>(x) t = Tanh(q) y = Attention(q, t, t)
    }"""
    onnx.save(coreml_models.model(text, opset=23), tmp_path / "net.onnx")
    stage = intaglio.compile(tmp_path / "net.onnx", "cuda").stages["net"]
    assert (stage.attention_fused, stage.attention_total) == (1, 1)


def test_our_operators_that_are_left(tmp_path: Path) -> None:
    proto = coreml_models.model("g (float[4] x) => (float[4] y) { y = Relu(x) }")
    proto.graph.node[0].domain, proto.graph.node[0].op_type = "intaglio", "Odd"
    proto.opset_import.add(domain="intaglio", version=1)
    onnx.save(proto, tmp_path / "net.onnx")
    with pytest.raises(CompileError, match="onnxruntime has no operator Odd of the domain intaglio"):
        intaglio.compile(tmp_path / "net.onnx", "cuda")
