"""The command line on ONNX files that others wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from measure import intaglio as command_line
from onnx_models import product, unary


def test_compile_says_what_it_did(tmp_path: Path) -> None:
    path = product(tmp_path / "net.onnx")
    done = command_line("compile", path, "-o", tmp_path / "out", "--shapes", "batch=2:2:8")
    assert (done.returncode, done.stderr) == (0, "")
    assert "engine for cpu (onnxruntime" in done.stdout
    assert "batch=2" in done.stdout
    again = json.loads(
        command_line("compile", path, "-o", tmp_path / "out", "--shapes", "batch=2:2:8", "--json").stdout
    )
    assert again["stages"]["net"]["from_cache"]
    shown = command_line("inspect", tmp_path / "out" / "cpu")
    for text in ("graph_sha256", "../../net.onnx", "onnxruntime", "MatMul", "others", "batch"):
        assert text in shown.stdout
    content = json.loads(command_line("inspect", tmp_path / "out" / "cpu", "--json", "--tensors").stdout)
    assert content["identity"]["target"] == "cpu"
    assert content["report"]["stages"]["net"]["operators"] == {"MatMul": 1}
    assert content["model"]["dims"] == {"batch": {"min": 2, "max": 8}}
    assert [tensor["name"] for tensor in content["model"]["tensors"]] == ["w"]
    assert command_line("compile", path, "--quiet").stdout == ""


def test_a_trial_run_that_was_not_possible_is_shown(tmp_path: Path) -> None:
    done = command_line("compile", product(tmp_path / "net.onnx", (None, "q"), rows=5))
    assert done.returncode == 0, done.stderr
    assert "the trial run was not possible: x_dim0=1, q=1" in " ".join(done.stdout.split())


def test_inspect(tmp_path: Path) -> None:
    path = product(tmp_path / "net.onnx", (None, 4), external="w.bin")
    (tmp_path / "w.bin").unlink()  # it is not read
    done = command_line("inspect", path, "--tensors")
    assert done.returncode == 0, done.stderr
    for text in ("others", "opset of ai.onnx", "x_dim0", "float32", "initializer, external", "w.bin", "MatMul", "48"):
        assert text in done.stdout
    content = json.loads(command_line("inspect", path, "--json").stdout)
    assert (content["producer"], content["ir_version"], content["opsets"]) == ("others", 10, {"ai.onnx": 20})
    assert content["inputs"] == [{"name": "x", "dtype": "float32", "shape": ["x_dim0", 4]}]
    assert content["dims"] == {"x_dim0": {"min": 1, "max": None}}
    held = {"dtype": "float32", "held_as": "initializer, external", "tensors": 1, "bytes": 48}
    assert (content["weights"], content["operators"]) == ([held], {"MatMul": 1})
    assert "tensors" not in content
    path = unary(tmp_path / "custom.onnx", "Frobnicate", [("n",)], domain="org.others")
    assert json.loads(command_line("inspect", path, "--json").stdout)["custom_domains"] == {
        "org.others": ["Frobnicate"]
    }
    assert "custom domain org.others" in command_line("inspect", path).stdout


def test_inspect_of_a_model_with_another_ending(tmp_path: Path) -> None:
    path = product(tmp_path / "net.model")
    assert command_line("compile", path).returncode == 0
    for inspected in (path, tmp_path / "net.engines" / "cpu"):
        shown = command_line("inspect", inspected).stdout
        assert "inputs and outputs" in shown and "MatMul" in shown, inspected
    content = json.loads(command_line("inspect", tmp_path / "net.engines" / "cpu", "--json").stdout)
    assert content["model"]["operators"] == {"MatMul": 1}
    assert json.loads(command_line("inspect", path, "--json").stdout)["operators"] == {"MatMul": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("compile", "nowhere.onnx"), "nowhere.onnx: cannot be read (No such file or directory)"),
        (("inspect", "nowhere.onnx"), "nowhere.onnx: cannot be read"),
        (("compile", "{text}"), "is no ONNX file, or is damaged or cut short"),
        (("inspect", "{text}"), "is no ONNX file, or is damaged or cut short"),
        (("compile", "{custom}"), "org.others: Frobnicate"),
        (("compile", "{custom}", "--target", "abacus"), "the target 'abacus' is unknown"),
        (("compile", "{net}", "--shapes", "height=3"), "the dim 'height' is unknown; there are batch"),
        (("compile", "{net}", "-o", "{text}"), "cannot be written"),
    ],
)
def test_bad_input_is_one_clear_error(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("this is no model")
    names = {
        "text": tmp_path / "text.onnx",
        "net": product(tmp_path / "net.onnx"),
        "custom": unary(tmp_path / "custom.onnx", "Frobnicate", [("n",)], domain="org.others"),
    }
    done = command_line(*[argument.format(**names) for argument in arguments])
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
