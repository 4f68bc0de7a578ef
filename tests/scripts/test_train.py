"""``intaglio train``: what it says, where things lie, how it ends when it is interrupted, and torchrun."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_painter
from measure import intaglio as command_line
from training_data import picture, png, texts, write_jsonl, write_tar, write_tokenizer

from intaglio.scripts.train import _resuming

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
    command += ["--set", 'data.files=["train.jsonl"]', "--set", "train.plot=true"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if line.startswith("step "))
        assert ": loss " in line and line.rstrip().endswith(" tokens/s")
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
    assert process.returncode == 130
    assert "stopped by SIGTERM after step " in said
    settings = """--set 'data.files=["train.jsonl"]' --set train.plot=true"""
    assert f"; to go on: intaglio train {recipe} -o {out} --resume {settings}\n" in said
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


def test_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a shell takes it, and as torchrun starts it."""
    recipe, overrides = tmp_path / "my recipe.toml", ['data.files=["a b"]', "train.steps=9"]
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    expected = ["intaglio", "train", str(recipe), "-o", "out", "--resume"]
    words = shlex.split(_resuming(recipe, Path("out"), overrides, skip_bad=True))
    assert words == [*expected, "--set", overrides[0], "--set", overrides[1], "--skip-bad"]
    assert shlex.split(_resuming(recipe, Path("out"), [], skip_bad=False)) == expected
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    said = _resuming(recipe, Path("out"), [], skip_bad=False)
    assert (
        said == f"torchrun --nproc-per-node 4 --no-python {shlex.join(expected)} (torchrun's other options as before)"
    )


PICTURES = """
[task]
kind = "autoencoder"
[data]
batch_size = 2
examples = { kind = "pictures", size = 16 }
shuffle = false
[train]
steps = 2
plot = false
device = "cpu"
[model]
"""


def _picture_recipe(folder: Path, data: str) -> Path:
    values = {**tiny_painter.VAE, "block_out_channels": [8, 8, 8], "norm_num_groups": 4, "sample_size": 16}
    path = folder / "vae.toml"
    path.write_text(
        PICTURES.replace("[data]", f"[data]\n{data}")
        + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
    )
    return path


def _refused_then_left_out(recipe: Path, place: str, count: int) -> None:
    """The error names ``place``, and with --skip-bad the last line the number left out."""
    command = ["train", recipe, "-o", recipe.parent / "run"]
    refused = command_line(*command)
    assert refused.returncode == 2, refused.stderr
    last = refused.stderr.splitlines()[-1]
    assert re.search(rf"^error: .*{place}", last) and last.endswith(
        "leave such records out with --skip-bad (data.skip_bad)"
    )
    done = command_line(*command, "--resume", "--skip-bad")
    assert done.returncode == 0, done.stderr
    assert f", damaged records left out: {count}: " in done.stderr.splitlines()[-1]


def test_a_picture_that_does_not_decode(tmp_path: Path) -> None:
    for i in range(5):
        path = tmp_path / "pictures" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(picture(i, 16))[: 60 if i == 1 else None])
    recipe = _picture_recipe(tmp_path, 'format = "image-folder"\nfolder = "pictures"')
    _refused_then_left_out(recipe, r"pictures/b/1\.png: the picture does not decode", 1)


def test_a_damaged_member_of_a_tar(tmp_path: Path) -> None:
    """A picture that is cut short, and a field that is none."""
    samples = [{"png": png(picture(i, 16)), "cls": b"%d" % i} for i in range(5)]
    samples[1]["png"] = samples[1]["png"][:60]
    samples[3]["cls"] = b"cat"
    write_tar(tmp_path / "a.tar", samples)
    recipe = _picture_recipe(tmp_path, 'format = "webdataset"\nfiles = ["a.tar"]')
    _refused_then_left_out(recipe, r"a\.tar, byte \d+: data/00001: the picture does not decode", 2)


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
