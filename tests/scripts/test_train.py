"""``intaglio train``: what it says, where things lie, how it ends when it is interrupted, and torchrun."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from measure import intaglio as command_line
from training_data import texts, write_jsonl, write_tokenizer

RECIPE = """
tokenizer = "tokenizer"
[task]
kind = "causal-lm"
[model]
architecture = "qwen3"
vocab_size = 400
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 8
[data]
format = "jsonl"
files = ["train.jsonl"]
batch_size = 2
examples = { kind = "text", length = 16 }
[train]
steps = 1000000
log_every = 1
checkpoint_every = 1000000
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path / "tokenizer")
    write_jsonl(tmp_path / "train.jsonl", [{"text": text} for text in texts(60)])
    path = tmp_path / "lm.toml"
    path.write_text(RECIPE)
    return path


def test_train_interrupt_resume_and_export(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [str(Path(sys.executable).parent / "intaglio"), "train", str(recipe), "-o", str(out)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if line.startswith("step "))
        assert ": loss " in line and line.rstrip().endswith(" tokens/s")
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
    assert process.returncode == 130
    assert "stopped by SIGTERM after step " in said
    assert f"intaglio train {recipe} -o {out} --resume" in " ".join(said.split())
    again = command_line("train", recipe, "-o", out)
    assert again.returncode == 2 and "go on with --resume, or train into another folder" in again.stderr
    bad = command_line("train", recipe, "-o", out, "--resume", "--set", "optimizer.lr=0.5")
    assert bad.returncode == 2 and "was written with optimizer.lr = 0.001, the recipe says 0.5" in bad.stderr
    step = int(next((out / "checkpoints").iterdir()).name.removeprefix("step-"))
    done = command_line("train", recipe, "-o", out, "--resume", "--set", f"train.steps={step + 2}")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr.splitlines()[-1] == f"trained {step + 2} steps: {out / 'model'}"
    assert {path.name for path in out.iterdir()} == {"checkpoints", "log.csv", "loss.png", "model"}
    exported = command_line("export", out / "model", tmp_path / "bundle", "--quiet")
    assert exported.returncode == 0, exported.stderr


def test_skip_bad_counts(recipe: Path, tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text('{"text": \n' + data.read_text())
    command = ["train", recipe, "-o", tmp_path / "run", "--set", "train.steps=3", "--set", "train.plot=false"]
    refused = command_line(*command)
    assert refused.returncode == 2 and "line 1: is not JSON" in refused.stderr and "--skip-bad" in refused.stderr
    done = command_line(*command, "--skip-bad")
    assert done.returncode == 0, done.stderr
    assert ", damaged records left out: 1: " in done.stderr.splitlines()[-1]


def test_torchrun(recipe: Path, tmp_path: Path) -> None:
    """Two processes, sharded; one of them speaks, and the model is whole."""
    out = tmp_path / "run"
    program = Path(sys.executable).parent / "intaglio"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--no-python"]
    command = [*launcher, program, "train", recipe, "-o", out]
    settings = ["--set", "train.steps=3", "--set", "parallel.kind=fsdp", "--set", "train.device=cpu"]
    done = subprocess.run([*map(str, command), *settings], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("trained 3 steps") == 1
    exported = command_line("export", out / "model", tmp_path / "bundle", "--quiet")
    assert exported.returncode == 0, exported.stderr
