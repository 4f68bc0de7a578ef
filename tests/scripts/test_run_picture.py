"""``intaglio run`` with a bundle that paints: files, their texts, streams, errors and Ctrl-C."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint
from klein_pipeline import pixels
from measure import intaglio as command_line
from PIL import Image
from png_text import read_png_text

import intaglio
from intaglio.errors import InputError, OutputError
from intaglio.scripts.run_picture import check_targets, parse_bytes

SMALL = ("--width", 48, "--height", 32, "--steps", 2)


def test_a_picture_and_what_it_says_of_itself(klein: Path, tmp_path: Path) -> None:
    out, preview = tmp_path / "bonsai.png", tmp_path / "preview.png"
    done = command_line(
        "run", klein, "a bonsai – 盆栽", "-o", out, *SMALL, "--seed", 7, "--rng", "mlx", "--preview", preview
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr.startswith(f"wrote {out}: load ")
    assert all(f"{stage} " in done.stderr for stage in ("text encoder", "transformer", "vae decoder", "peak memory"))
    expected = intaglio.load(klein)("a bonsai – 盆栽", width=48, height=32, num_inference_steps=2, seed=7, rng="mlx")
    np.testing.assert_array_equal(pixels([Image.open(out)]), pixels(expected.images))
    assert read_png_text(out) == expected.texts[0]
    assert Image.open(preview).size == (48, 32)


def test_several_pictures_and_json(klein: Path, tmp_path: Path) -> None:
    out = tmp_path / "two.png"
    done = command_line("run", klein, "a lake", "-o", out, *SMALL, "--seed", 3, "--seed", 9, "--json", "--quiet")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    said = json.loads(done.stdout)
    assert said.keys() == {"files", "seeds", "timings", "peak_rss_bytes", "golden"}
    assert said["files"] == [str(tmp_path / "two-1.png"), str(tmp_path / "two-2.png")]
    assert said["seeds"] == [3, 9]
    assert said["golden"] is None
    assert said["timings"]["transformer"] > 0
    assert [read_png_text(file)["seed"] for file in said["files"]] == ["3", "9"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["two-1.png", "two-2.png"]
    done = command_line("run", klein, "a lake", "-o", out, *SMALL, "--seed", 3, "--num-images", 2)
    assert [read_png_text(file)["seed"] for file in said["files"]] == ["3", "4"]


def test_pictures_to_work_from_within_a_budget(klein: Path, tmp_path: Path) -> None:
    reference, out = tmp_path / "reference.png", tmp_path / "out.png"
    Image.new("RGB", (48, 32), "teal").save(reference)
    Image.new("RGB", (32, 32), "white").save(tmp_path / "other.png")
    options = ("-o", out, "--steps", 4, "--seed", 1, "--memory-budget", "1GiB")
    done = command_line("run", klein, "x", "--image", reference, "--image", tmp_path / "other.png", *options)
    assert done.returncode == 0, done.stderr
    assert done.peak_rss_mib < 1024
    assert Image.open(out).size == (48, 32)
    said = read_png_text(out)["reference pictures"].splitlines()
    assert [line[:12] for line in said] == ["48x32 sha256", "32x32 sha256"]
    done = command_line("run", klein, "x", "--image", reference, "--strength", 0.5, *options, "--tiled")
    assert done.returncode == 0, done.stderr
    expected = intaglio.load(klein)("x", image=reference, strength=0.5, seed=1)
    assert np.abs(pixels([Image.open(out)]) - pixels(expected.images)).max() <= 1
    assert read_png_text(out)["strength"] == "0.5"
    done = command_line("run", klein, "x", "-o", out, "--memory-budget", "20 MiB")
    assert done.returncode == 2
    assert "the memory budget is 20 MiB, and this needs" in done.stderr


def test_golden_folders_are_reported(klein: Path, tmp_path: Path) -> None:
    golden = tmp_path / "golden"
    done = command_line(
        "parity", klein, "--write-golden", golden, "--tokens", 96, "--height", 32, "--width", 48, "--batch", 1
    )
    assert done.returncode == 0, done.stderr
    (golden / "noise_step3.npy").unlink()
    run = ("run", klein, "x", "-o", tmp_path / "out.png", "--golden", golden, "--golden-replace", "text_encoder")
    done = command_line(*run)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "latent_after_step3: cosine 1.0000000, relative L2 " in done.stderr
    assert "noise_step3: " in done.stderr
    assert "has no noise_step3.npy to compare with" in done.stderr
    report = json.loads(command_line(*run, "--json").stdout)["golden"]
    assert report["missing"] == ["noise_step3"]
    assert report["replaced"] == ["text_encoder"]
    assert all(d["relative_l2"] < 1e-4 for d in report["differences"])


@pytest.fixture(scope="module")
def text_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    intaglio.export(tiny_checkpoint.write(folder / "checkpoint"), folder / "bundle")
    return folder / "bundle"


@pytest.fixture(scope="module")
def unbuilt(klein: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of pictures, without an engine."""
    folder = tmp_path_factory.mktemp("unbuilt") / "bundle"
    return shutil.copytree(klein, folder, ignore=shutil.ignore_patterns("engines"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{klein}", "x"), "name the PNG to write with -o"),
        (("{klein}", "x", "-o", "out.jpg"), "out.jpg: the suffix is '.jpg'; expected .png"),
        (("{klein}", "x", "-o", "nowhere/out.png"), "the folder nowhere does not exist"),
        (("{klein}", "x", "-o", "out.png", "--temperature", "1"), "--temperature is for text, and this bundle paints"),
        (("{klein}", "x", "-o", "out.png", "--no-chat"), "--chat is for text"),
        (("{klein}", "x", "-o", "out.png", "--width", "40"), "width is 40; expected a multiple of 16, and 32 and 48"),
        (("{klein}", "x", "-o", "out.png", "--sigmas", "1,half"), "--sigmas '1,half': expected numbers"),
        (("{klein}", "x", "-o", "out.png", "--memory-budget", "much"), "--memory-budget 'much': expected a size"),
        (("{klein}", "x", "-o", "out.png", "--golden", "nowhere"), "nowhere: no such folder"),
        (("{klein}", "x", "-o", "out.png", "--image", "nowhere.png"), "nowhere.png: there is no such file"),
        (("{klein}", "x", "-o", "out.png", "--strength", "0.5"), "strength is given without image"),
        (("{klein}", "x", "-o", "out.png", "--rng", "dice"), "rng is 'dice'; expected one of numpy, mlx, torch"),
        (("{klein}", "y" * 100, "-o", "out.png"), "the prompt has 125 tokens with its template, and at most 96 fit"),
        (("{text}", "x", "-o", "out.png"), "--output is for pictures, and this bundle writes text"),
        (("{text}", "x", "--steps", "4"), "--steps is for pictures"),
        (("{text}", "x", "--json"), "--json is for pictures"),
        (("{text}", "x", "--seed", "1", "--seed", "2"), "--seed is given 2 times"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_error(
    arguments: tuple[str, ...], message: str, unbuilt: Path, text_bundle: Path
) -> None:
    done = command_line("run", *[argument.format(klein=unbuilt, text=text_bundle) for argument in arguments])
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not Path("out.png").exists()
    # What can be known before an engine is built is.
    assert not (text_bundle / "engines").exists()
    assert not (unbuilt / "engines").exists()


def test_targets(tmp_path: Path) -> None:
    assert check_targets(tmp_path / "a.b.PNG", None, 2) == [tmp_path / "a.b-1.PNG", tmp_path / "a.b-2.PNG"]
    (tmp_path / "out-2.png").mkdir()
    assert check_targets(tmp_path / "out.png", None, 1) == [tmp_path / "out.png"]
    with pytest.raises(OutputError, match=r"out-2.png: it is a folder"):
        check_targets(tmp_path / "out.png", None, 2)
    with pytest.raises(InputError, match="is the picture's own file"):
        check_targets(tmp_path / "out.png", tmp_path / ".." / tmp_path.name / "out.png", 1)
    with pytest.raises(InputError, match=r"expected .png"):
        check_targets(tmp_path / "out.png", tmp_path / "preview.gif", 1)


def test_sizes_of_memory() -> None:
    assert parse_bytes("4GiB") == 4 << 30
    assert parse_bytes("3500 MiB") == 3500 << 20
    assert parse_bytes("1.5gib") == 3 << 29
    assert parse_bytes("4GB") == 4_000_000_000
    assert parse_bytes("1000000") == 1_000_000
    for bad in ("", "GiB", "-1GiB", "4 giga", "1e9", "nan", "0x10"):
        with pytest.raises(InputError, match="expected a size such as 4GiB"):
            parse_bytes(bad)


def test_ctrl_c_ends_it_and_leaves_no_picture(klein: Path, tmp_path: Path) -> None:
    out, preview = tmp_path / "out.png", tmp_path / "preview.png"
    command = [Path(sys.executable).parent / "intaglio", "run", klein, "a lake", "-o", out, "--preview", preview]
    options = ["--steps", "1000", "--width", "256", "--height", "256"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    # It is in the middle of the steps once there is a preview; what waits here is only this test.
    for _ in range(1200):
        if preview.is_file() or process.poll() is not None:
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, ""), stderr
    assert stderr.splitlines()[-1] == "interrupted"
    assert "Traceback" not in stderr
    assert [path.name for path in tmp_path.iterdir()] == ["preview.png"]
