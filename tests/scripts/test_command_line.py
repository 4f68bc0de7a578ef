"""The command line: stdout carries the result only, bad input ends with code 2 and one message."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_checkpoint
from measure import intaglio as command_line


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("command-line")
    checkpoint = tiny_checkpoint.write(folder / "checkpoint")
    done = command_line("export", checkpoint, folder / "bundle")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr.startswith(f"wrote {folder / 'bundle'}: llama, stages generate, score, ")
    return folder / "bundle"


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Path:
    done = command_line("compile", bundle)
    assert done.returncode == 0, done.stderr
    assert "engine for cpu (onnxruntime" in done.stdout
    return bundle


def test_run_compiles_first_and_says_so(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint.write(tmp_path / "checkpoint")
    assert command_line("export", checkpoint, tmp_path / "bundle", "--quiet").stderr == ""
    done = command_line("run", tmp_path / "bundle", "abc", "--max-new-tokens", 3)
    assert done.returncode == 0, done.stderr
    assert "no engine for cpu yet: compiling" in done.stderr
    assert "3 tokens: the first after" in done.stderr
    again = command_line("run", tmp_path / "bundle", "abc", "--max-new-tokens", 3, "--quiet")
    assert (again.returncode, again.stdout, again.stderr) == (0, done.stdout, "")


def test_a_narrower_dtype_is_said_at_every_step(tmp_path: Path) -> None:
    weights = tiny_checkpoint.tensors()
    weights["model.norm.weight"][0] = 1e-9
    checkpoint = tiny_checkpoint.write(tmp_path / "checkpoint", weights=weights)
    done = command_line("export", checkpoint, tmp_path / "bundle", "--dtype", "float16")
    assert ", stages generate, score, in float16, " in done.stderr
    assert "1 weights are too small for float16 and became zero" in done.stderr
    done = command_line("compile", tmp_path / "bundle")
    assert done.stdout.count("float16 (products in float32)") == 2, done.stdout
    assert command_line("run", tmp_path / "bundle", "abc", "--max-new-tokens", 3).returncode == 0
    assert "agree within 0.01" in command_line("parity", tmp_path / "bundle").stderr


def test_run_is_repeatable_and_draws_by_seed(engine: Path) -> None:
    def text(*options: object) -> str:
        done = command_line("run", engine, "hello", "--max-new-tokens", 24, "--quiet", *options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert text() == text("--threads", 1)
    drawn = [text("--temperature", 1.5, "--top-k", 50, "--top-p", 0.95, "--seed", seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    # The tiny model repeats itself until it is kept from it; of what is as likely as the likeliest, one is left.
    assert text("--repetition-penalty", 1.5) != text()
    assert text("--temperature", 1.5, "--min-p", 1.0, "--seed", 3) == text()


def test_the_prompt_can_come_from_stdin(engine: Path) -> None:
    def run(prompt: bytes) -> subprocess.CompletedProcess[bytes]:
        command = [Path(sys.executable).parent / "intaglio", "run", engine, "-", "--max-new-tokens", "4", "-q"]
        return subprocess.run(command, input=prompt, capture_output=True, check=False)

    assert run(b"hello").stdout.decode() == command_line("run", engine, "hello", "--max-new-tokens", 4).stdout
    assert run(b"\xff").returncode == 2


def test_json(engine: Path) -> None:
    report = json.loads(command_line("compile", engine, "--json").stdout)
    assert all(stage["from_cache"] for stage in report["stages"].values())
    described = json.loads(command_line("inspect", engine, "--json").stdout)
    assert described["components"]["language_model"]["architecture"] == "llama"
    assert "identities" in json.loads(command_line("inspect", engine / "engines" / "cpu", "--json").stdout)
    checkpoint = json.loads(command_line("inspect", engine.parent / "checkpoint", "--json").stdout)
    assert len(checkpoint["tensors"]) == 20
    result = json.loads(
        command_line("bench", engine, "--json", "--prompt-tokens", 4, "--new-tokens", 4, "--repeats", 1).stdout
    )
    assert result.keys() == {"machine", "ceilings", "rows"}
    assert result["rows"][0]["decode_tokens_per_second"] > 0


@pytest.mark.parametrize("what", ["checkpoint", "bundle", "bundle/engines/cpu"])
def test_inspect_shows_a_table(engine: Path, what: str) -> None:
    done = command_line("inspect", engine.parent / what, *(["--tensors"] if what == "checkpoint" else []))
    assert done.returncode == 0, done.stderr
    expected = {"checkpoint": "model.layers.1.mlp.down_proj.weight", "bundle": "past_sequence + sequence"}
    assert expected.get(what, "graph_sha256") in done.stdout


def test_parity_agrees_and_finds_what_differs(engine: Path) -> None:
    done = command_line("parity", engine)
    assert done.returncode == 0, done.stderr
    assert "all 1 outputs agree" in done.stderr
    # A bound that rounding alone exceeds.
    done = command_line("parity", engine, "--bound", 1e-12, "--json", "--stage", "generate", "--against", "tract")
    assert done.returncode == 1
    assert json.loads(done.stdout)["first_divergent"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("export", "nowhere", "out"), "nowhere: no such file or folder"),
        (("export", "{bundle}", "out"), "holds no *.safetensors and no *.gguf"),
        (("export", "{checkpoint}", "out", "--config", "rope_theta"), "expected KEY=VALUE"),
        (("export", "{checkpoint}", "out", "--hidden-states", "one"), "expected layer numbers"),
        (("export", "{checkpoint}", "out", "--dtype", "half"), "the dtype 'half' is unknown"),
        (("compile", "nowhere"), "nowhere: no such folder; expected a bundle"),
        (("compile", "{bundle}", "--shapes", "batch=0"), "must rise, within 1 to 1024"),
        (("run", "nowhere", "hello"), "nowhere: no such folder; expected a bundle"),
        (("run", "{bundle}", ""), "the prompt is empty"),
        (("run", "{bundle}", "x" * 64), "has 64 tokens, no room is left in a context of 64"),
        (("run", "{bundle}", "hello", "--temperature", "-1"), "temperature is -1.0"),
        (("run", "{bundle}", "hello", "--top-p", "2"), "top_p is 2.0"),
        (("run", "{bundle}", "hello", "--min-p", "2"), "min_p is 2.0"),
        (("run", "{bundle}", "hello", "--repetition-penalty", "0"), "repetition_penalty is 0.0"),
        (("run", "{bundle}", "hello", "--target", "abacus"), "the target 'abacus' is unknown"),
        (("run", "{bundle}", "hello", "--max-new-tokens", "0"), "max-new-tokens"),
        (("inspect", "{bundle}/bundle.json"), "neither GGUF"),
        (("inspect", "{bundle}", "--probe", "abc"), "has no taps to probe; export it again with --taps"),
        (("parity", "{bundle}", "--against", "abacus"), "the reference 'abacus' is unknown"),
        (("parity", "{bundle}", "--stage", "paint"), "has no stage 'paint'"),
        (("bench", "{bundle}", "--new-tokens", "4000"), "do not fit in the context of 64"),
        (("sing",), "No such command 'sing'"),
        (("run", "{bundle}", "hello", "--threads", "1000000"), "threads"),
        (("run", "{bundle}", "hello", "--target", "../x"), "the target '../x' is unknown"),
        (("parity", "{bundle}", "--tokens", "100000000"), "tokens is 100000000, expected 2 to 32"),
        (("parity", "{bundle}", "--bound", "nan"), "the bound is nan"),
        (("compile", "{bundle}", "--shapes", "batch=" + "9" * 5000), "is not NAME=VALUE"),
        (("export", "{checkpoint}", "out", "--config", "vocab_size=" + "[" * 5000), "vocab_size"),
    ],
)
def test_bad_input_is_one_clear_error(arguments: tuple[str, ...], message: str, engine: Path, tmp_path: Path) -> None:
    names = {"bundle": str(engine), "checkpoint": str(engine.parent / "checkpoint")}
    done = command_line(*[argument.format(**names) for argument in arguments])
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not Path("out").exists()


def shell(line: str, **names: object) -> subprocess.CompletedProcess[str]:
    command = str(Path(sys.executable).parent / "intaglio")
    text = line.format(intaglio=command, **names)
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False, timeout=120)


def test_a_reader_that_leaves_is_no_error(engine: Path) -> None:
    for verb in ("inspect {b}", "inspect {b} --json", "run {b} hello --quiet"):
        done = shell("{intaglio} " + verb + " | true; exit ${{PIPESTATUS[0]}}", b=engine)
        assert (done.returncode, done.stderr) == (0, ""), verb


def test_odd_streams(engine: Path) -> None:
    assert "Traceback" not in shell("{intaglio} inspect {b} >&-", b=engine).stderr
    done = shell("{intaglio} run {b} - <&-", b=engine)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert shell("{intaglio} inspect {b} > /dev/full", b=engine).returncode == 2
    done = shell("PYTHONIOENCODING=ascii {intaglio} run {b} héllo --temperature 3 --seed 1 -q", b=engine)
    assert done.returncode == 0, done.stderr
    done = shell("yes | head -c 20000000 | {intaglio} run {b} - -q", b=engine)
    assert done.returncode == 2
    assert "longer than" in done.stderr


def test_over_long_paths_are_errors() -> None:
    for verb in ("export", "compile", "inspect", "run"):
        done = command_line(verb, "x" * 300, *{"run": ["hello"], "export": ["out"]}.get(verb, []))
        assert done.returncode == 2, verb
        assert "File name too long" in done.stderr
        assert "Traceback" not in done.stderr


def test_sigterm_leaves_nothing_behind(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "import intaglio.exporters.export as module\n"
        "from intaglio.scripts.entry import main\n"
        "write = module.write_weights\n"
        "def stop(*a):\n    os.kill(os.getpid(), signal.SIGTERM)\n    return write(*a)\n"
        "module.write_weights = stop\n"
        "sys.argv = ['intaglio', 'export', sys.argv[1], sys.argv[2]]\nmain()\n"
    )
    checkpoint = tiny_checkpoint.write(tmp_path / "checkpoint")
    done = subprocess.run([sys.executable, "-c", program, checkpoint, tmp_path / "bundle"], check=False)
    assert done.returncode == 143
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def test_help_names_every_verb() -> None:
    done = command_line("--help")
    for verb in ("export", "compile", "run", "inspect", "parity", "bench"):
        assert f"  {verb} " in done.stdout
        assert command_line(verb, "--help").returncode == 0
    assert command_line("--version").stdout.startswith("intaglio ")


def test_exporting_and_running_import_no_torch(engine: Path) -> None:
    program = (
        "import sys, intaglio\n"
        "intaglio.export(sys.argv[1], sys.argv[2])\n"
        "intaglio.compile(sys.argv[2]); intaglio.load(sys.argv[2])('hi', max_new_tokens=2)\n"
        "assert not {'torch', 'transformers', 'onnxscript.optimizer.torch'} & sys.modules.keys()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, engine.parent / "checkpoint", engine.parent / "second"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
