"""The launchers' calls, compiled for a GPU that is not there; and the script that checks the kernels on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tests" / "gpu" / "check_kernels.py"
# Sizes of 1, multiples of 16 and others, which Triton compiles apart; for a process without its interpreter.
LAUNCHES = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from compile_only import compile_only
from intaglio.trainer.ops.attention import launch_attention, launch_backward
from intaglio.trainer.ops.ternary import launch_dequantize, launch_int8_matmul, launch_matmul

def launches():
    for rows, inputs, outputs in ((1, 512, 257), (33, 640, 1)):
        codes, x = torch.zeros(outputs, inputs // 4, dtype=torch.uint8), torch.zeros(rows, inputs).bfloat16()
        scales = torch.ones(outputs, inputs // 128)
        for same in (scales.bfloat16(), scales):
            launch_matmul(x, codes, same)
        launch_int8_matmul(x, codes, scales)
        launch_dequantize(codes, scales, torch.bfloat16)
    for heads, shared, queries, keys in ((1, 1, 1, 1), (4, 2, 32, 33)):
        q, k = torch.zeros(2, heads, queries, 64).half(), torch.zeros(2, shared, keys, 64).half()
        for mask in (None, torch.ones(2, heads, queries, keys, dtype=torch.bool))[: heads]:
            settings = (mask is None, 0.1, 3.0 if mask is None else 0.0, 1)
            o, sums = launch_attention(q, k, k, mask, *settings)
            launch_backward(q, q, k, k, mask, o, sums, *settings)

found = compile_only(90, launches, 227 << 10).shared_bytes
print(*sorted(found), sep="\\n")
"""


def test_launches_compile_with_their_specializations() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", LAUNCHES, str(ROOT / "tests" / "support")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [
        "attention_delta_kernel",
        "attention_key_gradient_kernel",
        "attention_query_gradient_kernel",
        "dequantize_ternary_kernel",
        "flash_attention_kernel",
        "quantize_rows_kernel",
        "sum_splits_kernel",
        "ternary_int8_matmul_kernel",
        "ternary_matmul_kernel",
    ]


def test_the_script_goes_through_all_its_steps(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--tiny", "--output", str(tmp_path / "report.json")]
    command += ["--seconds", "900"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "report.json").read_text())
    assert report["checks"] == 12 and not report["wrong"] and not report["failed"]
    assert report["compiled"][0]["compiled"] > 5 and report["compiled"][0]["refused"] == 0
    assert {"torch", "triton", "cuda"} <= set(report["versions"])
    many, memory, *few, attention, causal = report["times"]
    assert min(many["chosen"], many["tuned"], many["int8"], many["dequantize_then_torch"]) > 0
    assert memory["gb_per_second"] > 0
    assert len(few) == 2 and all(each["chosen"] > 0 for each in few)
    assert attention["backward"] > 0 and (attention["causal"], causal["causal"]) == (False, True)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import check_kernels

    return check_kernels


def test_one_failure_is_told_and_the_rest_go_on(script: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("no such instruction")

    def wrong(*arguments: object) -> torch.Tensor:
        return torch.full((1, 33), float("nan"))

    monkeypatch.setattr(script, "launch_int8_matmul", broken)
    monkeypatch.setattr(script, "launch_matmul", wrong)
    run = script.Run(torch.device("cpu"), script.TINY, 0, 1.0)  # type: ignore[attr-defined]
    results = list(script.check_products(run))  # type: ignore[attr-defined]
    judged = script.judged(results)  # type: ignore[attr-defined]
    assert len(judged["failed"]) == 2 and "no such instruction" in judged["failed"][0]["failed"]
    assert {each["what"] for each in judged["wrong"]} == {"ternary", "ternary, float32 scales"}
    assert judged["checks"] == 8
    json.dumps(judged, allow_nan=False)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os; print('{\"what\": 1}', flush=True); os.abort()", "ended with -6"),
        ("import time; print('{\"what\": 1}', flush=True); time.sleep(60)", "was ended after 3 seconds"),
    ],
)
def test_a_part_that_dies_or_hangs_keeps_what_it_told(script: object, code: str, message: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first, ended = script.finish(process, 3.0)  # type: ignore[attr-defined]
    assert first == {"what": 1}
    assert message in ended["failed"]


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no NVIDIA GPU" in done.stderr
