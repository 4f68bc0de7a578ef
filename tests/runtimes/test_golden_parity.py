"""Golden folders: written, compared with, and every way in which one can differ named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoint
from klein_bundle import export_klein, write_klein
from measure import intaglio as command_line
from safetensors.torch import load_file, save_file

import intaglio
from intaglio.errors import EngineError, InputError, OutputError
from intaglio.runtimes.golden_folder import read_golden
from intaglio.runtimes.golden_parity import golden_bounds
from intaglio.runtimes.golden_writing import write_golden
from intaglio.runtimes.parity import BOUNDS, Bounds, ParityReport

SIZES = {"tokens": 7, "height": 32, "width": 48}
TRANSFORMER = 28  # tensors that its graph gives, of the tiny model


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_klein(tmp_path_factory.mktemp("klein"))


@pytest.fixture(scope="module")
def written(bundle: Path) -> Path:
    folder = bundle.parent / "golden"
    write_golden(bundle, folder, seed=5, **SIZES)
    return folder


@pytest.fixture
def golden(written: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(written, tmp_path / "golden")


def change(golden: Path, name: str, function: object) -> None:
    file = golden / f"{name}.npy"
    np.save(file, function(np.load(file)))  # type: ignore[operator]


def only(golden: Path, *names: str) -> None:
    """Removes the outputs that are not named; inputs stay."""
    inputs = {"tf_in_hidden_states", "cond", "img_ids", "txt_ids", "timestep_step0", "timesteps", "sigmas"}
    for file in golden.glob("*.npy"):
        if file.stem not in inputs | set(names):
            file.unlink()


def against(bundle: Path, golden: Path, **options: object) -> ParityReport:
    return intaglio.parity(bundle, against=f"golden:{golden}", **options)  # type: ignore[arg-type]


def test_every_tensor_of_a_written_folder_is_compared(bundle: Path, written: Path) -> None:
    # Measured: at most 1.3e-6.
    report = against(bundle, written, bound=1e-5, min_cosine=0.9999999)
    assert report.first_divergent is None
    assert report.stages == ("text_encoder", "transformer", "vae_decoder", "vae_encoder")
    counts = {stage: sum(d.stage == stage for d in report.differences) for stage in (*report.stages, "sampler")}
    assert counts == {"text_encoder": 6, "transformer": TRANSFORMER, "sampler": 8, "vae_decoder": 11, "vae_encoder": 1}
    assert (report.not_compared, report.unmatched, report.notes) == ((), (), ())
    names = [d.name for d in report.differences]
    order = ["te_hidden_0", "te_cond_384", "cond", "shift_msa", "x_emb_out", "rope_cos", "double_block0_h"]
    order += ["single_in_hidden_states", "single_block2_h", "noise_step0", "latent_after_step0", "noise_step3"]
    order += ["latent_after_step3", "vae_bn_denorm", "vae_up3", "vae_decoded", "vae_encoded"]
    assert [names.index(name) for name in order] == sorted(names.index(name) for name in order)
    assert all(d.bounds == Bounds(0.9999999, 1e-5) for d in report.differences)


def test_what_a_folder_says_of_itself(bundle: Path, written: Path) -> None:
    described = json.loads((bundle / "bundle.json").read_text())
    content = json.loads((written / "golden.json").read_text())
    assert content["source"] == "onnxruntime" and content["runtime"].startswith("onnxruntime 1.")
    assert content["seed"] == 5 and content["sizes"] == {**SIZES, "batch": 1, "steps": 4}
    assert content["weights_sha256"] == described["weights"]["sha256"]
    assert content["graphs"] == {name: stage["sha256"] for name, stage in described["stages"].items()}
    types = {file.stem: np.load(file).dtype.str for file in written.glob("*.npy")}
    assert {name for name, dtype in types.items() if dtype == "<i8"} == {
        "input_ids", "attention_mask", "img_ids", "txt_ids"
    }  # fmt: skip
    assert set(types.values()) == {"<i8", "<f4"}


def test_the_stages_of_a_folder_follow_each_other(written: Path) -> None:
    tensors = {file.stem: np.load(file) for file in written.glob("*.npy")}
    joined = np.concatenate([tensors[f"te_hidden_{i}"] for i in (1, 2, 3)], axis=-1)
    assert (tensors["cond"] == joined).all()
    sigmas, latents = tensors["sigmas"], tensors["tf_in_hidden_states"]
    assert tensors["timestep_step0"] == 1000 and (tensors["timesteps"] == sigmas[:-1] * np.float32(1000)).all()
    for i in range(4):
        latents = latents + (sigmas[i + 1] - sigmas[i]) * tensors[f"noise_step{i}"]
        np.testing.assert_allclose(tensors[f"latent_after_step{i}"], latents, rtol=0, atol=1e-6)
    assert (tensors["vae_in_packed"] == latents.reshape(1, 2, 3, 128).transpose(0, 3, 1, 2)).all()


@pytest.mark.parametrize("source", ["engine", "tract"])
def test_other_sides_write_too(bundle: Path, source: str, tmp_path: Path) -> None:
    info = write_golden(bundle, tmp_path / "golden", source=source, stage="vae_decoder", batch=3, **SIZES)
    assert info.source == {"engine": "engine for cpu", "tract": "tract"}[source]
    assert np.load(tmp_path / "golden/vae_decoded.npy").shape == (3, 3, 32, 48)
    report = against(bundle, tmp_path / "golden", bound=1e-5)
    assert report.stages == ("vae_decoder",) and report.first_divergent is None
    assert (max(d.relative_l2 for d in report.differences) == 0) == (source == "engine")


def test_a_folder_may_leave_out_axes_of_one_element(bundle: Path, golden: Path) -> None:
    for file in golden.glob("*.npy"):
        array = np.load(file)
        np.save(file, array.squeeze() if file.stem != "sigmas" else array[:-1])
    (golden / "golden.json").unlink()
    report = against(bundle, golden, bound=1e-5)
    assert report.first_divergent is None and len(report.differences) == 54
    assert np.load(golden / "shift_msa.npy").shape == (256,)


def test_inputs_of_one_row_serve_a_batch(bundle: Path, golden: Path) -> None:
    only(golden, "noise_step0", "latent_after_step1", "sigmas")
    for name in ("tf_in_hidden_states", "noise_step0", "latent_after_step1"):
        change(golden, name, lambda x: np.concatenate([x, x]))
    report = against(bundle, golden, bound=1e-5, stage="transformer")
    assert [d.name for d in report.differences] == ["noise_step0", "noise_step0", "latent_after_step1"]
    assert report.first_divergent is None


@pytest.mark.parametrize("name", ["rope_sin", "double_block1_enc", "single_block0_h", "vae_mid", "vae_decoded"])
def test_a_wrong_tensor_is_the_first(bundle: Path, golden: Path, name: str) -> None:
    change(golden, name, lambda x: x + np.random.default_rng(0).normal(scale=0.1 * np.abs(x).max(), size=x.shape))
    report = against(bundle, golden)
    first = report.first_divergent
    assert first is not None and first.name == name and first == report.differences[-1]
    assert first.reason is not None and "relative L2 is" in first.reason
    report = against(bundle, golden, keep_going=True)
    assert report.first_divergent == first and len(report.differences) == 54
    assert [d.name for d in report.differences if d.reason] == [name]


def test_the_text_encoder_is_held_to_the_direction(bundle: Path, golden: Path) -> None:
    change(golden, "te_hidden_2", lambda x: 2 * x)
    assert against(bundle, golden, stage="text_encoder").first_divergent is None
    first = against(bundle, golden, stage="text_encoder", bound=0.1).first_divergent
    assert first is not None and first.name == "te_hidden_2" and first.relative_l2 == pytest.approx(0.5)
    change(golden, "te_hidden_1", lambda x: x + np.random.default_rng(0).normal(scale=x.std(), size=x.shape))
    first = against(bundle, golden, stage="text_encoder").first_divergent
    assert first is not None and first.name == "te_hidden_1"
    assert first.reason is not None and first.reason.startswith("cosine is 0.7")
    assert against(bundle, golden, stage="text_encoder", min_cosine=0.5).first_divergent is None


def test_bounds_of_the_names() -> None:
    for stage, name, relative_l2 in (
        ("transformer", "noise_step0", 2e-2),
        ("sampler", "noise_step0", 5e-2),
        ("sampler", "latent_after_step3", 5e-2),
        ("transformer", "c_scale_mlp", 2e-2),
        ("transformer", "double_block4_enc", 2e-2),
        ("transformer", "single_block0_h", 2e-2),
        ("transformer", "single_block11_h", 2e-2),
        ("transformer", "single_block12_h", 5e-2),
        ("transformer", "single_block19_h", 5e-2),
        ("vae_decoder", "vae_bn_denorm", 2e-2),
        ("vae_decoder", "vae_up3", 5e-2),
        ("vae_decoder", "vae_decoded", 2e-2),
        ("text_encoder", "te_cond_7680", np.inf),
        ("text_encoder", "te_hidden_27", np.inf),
    ):
        assert golden_bounds(stage, name, "float32") == Bounds(0.999, relative_l2), name
    assert golden_bounds("score", "logits", "float16") == BOUNDS["float16"]


def test_other_weights_are_found(bundle: Path, written: Path, tmp_path: Path) -> None:
    """A bundle whose second double block has one other matrix."""
    shutil.copytree(bundle.parent / "checkpoint", tmp_path / "checkpoint")
    file = tmp_path / "checkpoint/transformer/diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["transformer_blocks.1.ff_context.linear_out.weight"] *= 1.5
    save_file(tensors, file)
    report = against(export_klein(tmp_path), written, keep_going=True)
    wrong = [d.name for d in report.differences if d.reason]
    assert wrong[0] == "double_block1_enc" and "single_block0_h" in wrong and "double_block1_h" not in wrong
    assert len(report.notes) == 1 and "other weights" in report.notes[0]


def test_the_sampler_is_checked_by_itself(bundle: Path, golden: Path) -> None:
    change(golden, "noise_step2", lambda x: -x)
    report = against(bundle, golden)
    first = report.first_divergent
    assert first is not None and (first.stage, first.name) == ("sampler", "noise_step2")
    assert [d.name for d in report.differences if d.stage == "sampler"][-2:] == ["latent_after_step1", "noise_step2"]
    (golden / "sigmas.npy").unlink()
    report = against(bundle, golden)
    assert report.first_divergent is None and not any(d.stage == "sampler" for d in report.differences)
    assert report.notes == ("the sampler was not run: sigmas.npy not there",)
    # noise_step0 is the transformer's own output.
    steps = [f"latent_after_step{i}" for i in range(4)] + [f"noise_step{i}" for i in range(1, 4)]
    assert report.unmatched == tuple(steps)


def test_sigmas_alone_are_a_schedule(bundle: Path, golden: Path) -> None:
    (golden / "timesteps.npy").unlink()
    assert against(bundle, golden, stage="transformer", bound=1e-5).first_divergent is None
    change(golden, "sigmas", lambda x: x * np.float32(0.9))
    first = against(bundle, golden, stage="transformer").first_divergent
    assert first is not None and first.name == "noise_step0" and first.stage == "sampler"


def test_a_first_timestep_may_come_from_the_schedule(bundle: Path, golden: Path) -> None:
    (golden / "timestep_step0.npy").unlink()
    assert against(bundle, golden, stage="transformer", bound=1e-5).first_divergent is None


def test_what_is_not_finite_is_named(bundle: Path, golden: Path) -> None:
    def holed(x: np.ndarray) -> np.ndarray:
        x.flat[[1, 5]] = np.nan, np.inf
        return x

    change(golden, "double_block0_h", holed)
    first = against(bundle, golden).first_divergent
    assert first is not None and first.name == "double_block0_h"
    assert first.reason == "0 of 1536 values are not finite, and 2 of the reference's"


def test_an_engine_that_overflows_is_named(bundle: Path, golden: Path) -> None:
    change(golden, "tf_in_hidden_states", lambda x: np.sign(x) * np.float32(3e38))
    first = against(bundle, golden, stage="transformer").first_divergent
    assert first is not None and first.name == "x_emb_out" and first.max_abs == np.inf
    only(golden, "latent_after_step2")
    report = against(bundle, golden, stage="transformer", keep_going=True)
    assert [(d.stage, d.name, d.reason) for d in report.differences] == [
        ("sampler", "noise_step0", "holds values that are not finite")
    ]


def test_other_shapes_are_named(bundle: Path, golden: Path) -> None:
    change(golden, "ctx_emb_out", lambda x: x[:, :-1])
    first = against(bundle, golden).first_divergent
    assert first is not None and first.name == "ctx_emb_out"
    assert first.reason == "has the shape [1, 7, 256], ctx_emb_out.npy [1, 6, 256]"
    change(golden, "ctx_emb_out", lambda x: np.zeros((1, 256, 7), np.float32))
    first = against(bundle, golden, bound=10, min_cosine=-1).first_divergent
    assert first is not None and first.reason == "has the shape [1, 7, 256], ctx_emb_out.npy [1, 256, 7]"


def test_missing_and_stray_files_are_listed(bundle: Path, golden: Path) -> None:
    for name in ("rope_cos", "noise_step1", "vae_up2", "input_ids"):
        (golden / f"{name}.npy").unlink()
    np.save(golden / "te_hidden_35.npy", np.zeros(3, np.float32))
    np.save(golden / "noise_step4.npy", np.zeros(3, np.float32))
    report = against(bundle, golden)
    assert report.first_divergent is None
    assert report.stages == ("transformer", "vae_decoder", "vae_encoder")
    assert report.notes == ("text_encoder was not run: input_ids.npy not there",)
    assert report.not_compared == ("rope_cos", "vae_up2", "noise_step1")
    assert report.unmatched == ("noise_step4", "te_hidden_35")
    with pytest.raises(InputError, match=r"text_encoder was not run: input_ids\.npy not there"):
        against(bundle, golden, stage="text_encoder")


def test_a_bundle_without_taps_says_so(bundle: Path, written: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle.parent / "checkpoint", tmp_path / "checkpoint")
    report = against(export_klein(tmp_path, taps=False), written)
    assert report.first_divergent is None and len(report.differences) == 2 + 1 + 8 + 1 + 1
    assert report.notes == ("the bundle has no taps; export it with --taps to compare more",)
    assert "double_block0_h" in report.unmatched and not report.not_compared


@pytest.mark.parametrize(
    ("name", "function", "message"),
    [
        ("tf_in_hidden_states", lambda x: x[..., :-1], r"tf_in_hidden_states\.npy: has the shape \[1, 6, 127\]"),
        ("tf_in_hidden_states", lambda x: x * np.float32(np.nan), r"768 values are not finite; it is an input"),
        ("img_ids", lambda x: x + 0.5, r"img_ids\.npy: holds values that are no integers"),
        ("img_ids", lambda x: x[..., :3], r"img_ids\.npy: has the shape \[1, 6, 3\]"),
        ("txt_ids", lambda x: x.astype("U"), r"txt_ids\.npy: holds <U21, expected float32 or integers"),
        ("sigmas", lambda x: x[:3], "has 4 timesteps and 3 sigmas, expected one more"),
        ("sigmas", lambda x: x[None], "must be lists of numbers"),
        ("timesteps", lambda x: x[:0], "must be lists of numbers"),
        ("cond", lambda x: x[:, :-1], "text_tokens"),
    ],
)
def test_wrong_inputs_are_errors(bundle: Path, golden: Path, name: str, function: object, message: str) -> None:
    change(golden, name, function)
    with pytest.raises(InputError, match=message):
        against(bundle, golden, stage="transformer")


def test_wrong_folders_are_errors(bundle: Path, golden: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        against(bundle, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"holds no \.npy files"):
        against(bundle, tmp_path / "empty")
    np.save(tmp_path / "empty" / "something.npy", np.zeros(2))
    with pytest.raises(InputError, match=r"text_encoder was not run: input_ids\.npy, attention_mask\.npy not there"):
        against(bundle, tmp_path / "empty")
    with pytest.raises(InputError, match="the sizes of a golden folder's inputs are stored there"):
        against(bundle, golden, height=64)
    file = golden / "rope_cos.npy"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(InputError, match=r"rope_cos\.npy: cannot be read as an \.npy file"):
        against(bundle, golden)
    only(golden)
    with pytest.raises(InputError, match="no file matches an output of transformer; it has cond, img_ids, sigmas"):
        against(bundle, golden, stage="transformer")
    (golden / "golden.json").write_text("{}")
    with pytest.raises(InputError, match=r"golden\.json: is damaged"):
        read_golden(golden)


def test_what_cannot_be_written(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "letter.txt").write_text("dear")
    with pytest.raises(OutputError, match=r"exists and holds no golden\.json"):
        write_golden(bundle, target)
    (target / "golden.json").write_text("{}")
    with pytest.raises(OutputError, match=r"holds letter\.txt beside the golden folder's files"):
        write_golden(bundle, target)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputError, match="is the working folder"):
        write_golden(bundle, ".")
    for options, message in (
        ({"steps": 0}, "steps is 0"),
        ({"source": "abacus"}, "the reference 'abacus' is unknown"),
        ({"stage": "paint"}, "has no stage 'paint'"),
        ({"height": 40}, "height is 40, expected 16 to 4096, a multiple of 16"),
        ({"batch": 65}, "batch is 65, expected 1 to 64"),
    ):
        with pytest.raises(InputError, match=message):
            write_golden(bundle, tmp_path / "new", **options)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["target"]


def test_a_failed_writer_leaves_the_old_folder(bundle: Path, golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {file.name: file.read_bytes() for file in golden.iterdir()}
    monkeypatch.setattr("intaglio.runtimes.golden_writing.random_feeds", _too_large)
    with pytest.raises(EngineError, match="values of vae_post_quant_conv are not finite, so they can be no reference"):
        write_golden(bundle, golden, stage="vae_decoder", **SIZES)
    assert {file.name: file.read_bytes() for file in golden.iterdir()} == before
    assert [p.name for p in golden.parent.iterdir()] == ["golden"]
    monkeypatch.undo()
    write_golden(bundle, golden, stage="vae_decoder", **SIZES)
    assert not (golden / "cond.npy").exists() and (golden / "vae_decoded.npy").exists()


def _too_large(*_: object) -> dict[str, np.ndarray]:
    return {"latents": np.full((1, 128, 2, 3), 2e38, np.float32)}


def test_a_language_model_has_golden_folders_too(tmp_path: Path) -> None:
    source = tiny_checkpoint.write(tmp_path / "checkpoint")
    intaglio.export(source, tmp_path / "bundle", taps=True)
    intaglio.compile(tmp_path / "bundle")
    for stage, last in ((None, "logits"), ("generate", "logits")):
        info = write_golden(tmp_path / "bundle", tmp_path / "golden", stage=stage, batch=2)
        assert info.stages == (stage or "score",)
        report = against(tmp_path / "bundle", tmp_path / "golden")
        assert report.first_divergent is None and report.differences[-1].name == last
        assert report.differences[0].bounds == BOUNDS["float32"] and not report.unmatched


def test_command_line(bundle: Path, golden: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    done = command_line("parity", bundle, "--write-golden", new, "--from", "engine", "--stage", "vae_decoder")
    assert done.returncode == 0, done.stderr
    assert f"wrote {new}: vae_decoder by engine for cpu" in done.stderr and not done.stdout
    change(golden, "single_block1_h", lambda x: -x)
    done = command_line("parity", bundle, "--against", f"golden:{golden}", "--stage", "transformer")
    assert done.returncode == 1
    assert "first beyond its bounds: single_block1_h of transformer: relative L2 is 2.00e+00, above 0.02" in done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[-1][0] == "single_block1_h" and rows[-1][-1] == "no" and rows[-2][-1] == "yes"
    done = command_line("parity", bundle, "--against", f"golden:{golden}", "--json", "--keep-going")
    assert done.returncode == 1
    content = json.loads(done.stdout, parse_constant=pytest.fail)
    assert content["first_divergent"]["name"] == "single_block1_h" and len(content["differences"]) == 54
    (golden / "rope_sin.npy").rename(golden / "stray.npy")
    done = command_line("parity", bundle, "--against", f"golden:{golden}", "--stage", "transformer", "--bound", "3",
                        "--min-cosine", "-1")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "not compared, no file: rope_sin" in done.stderr
    assert "files that match no output of the bundle: stray" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--against", "golden:nowhere"), "nowhere: no such folder"),
        (("--from", "engine"), "--from and --steps say what --write-golden stores"),
        (("--steps", "3"), "--from and --steps say what --write-golden stores"),
        (("--write-golden", "x", "--bound", "1"), "--bound is for a comparison"),
        (("--write-golden", "x", "--against", "tract"), "--against is for a comparison"),
        (("--min-cosine", "2"), "the least cosine is 2.0"),
        (("--height", "17"), "height is 17, expected 16 to 4096, a multiple of 16"),
    ],
)
def test_bad_input(bundle: Path, options: tuple[str, ...], message: str) -> None:
    done = command_line("parity", bundle, *options)
    assert done.returncode == 2 and message in done.stderr
    assert not Path("x").exists()
