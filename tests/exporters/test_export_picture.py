"""Export of picture pipelines: every published spelling, part by part, and sources that do not fit each other."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import tiny_checkpoint
from klein import make_checkpoint as maker
from measure import intaglio as command_line
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

import intaglio
from intaglio.errors import CheckpointError, ConfigError, InputError, IntaglioError, OutputError, WeightsError
from intaglio.exporters.bundle import Bundle, read_bundle
from intaglio.kernels.grouped_quant import GroupedQuantFormat, GroupedQuantRows, dequantize

SEED = 5
LAYERS = maker.TINY.layers
# A single file without a config.json says its shapes; the rest is that of the tiny model.
SAID = {
    "transformer.patch_size": 1,
    "transformer.rope_theta": 2000.0,
    "transformer.eps": 1e-6,
    "transformer.axes_dims_rope": [16, 16, 16, 16],
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each part in each spelling: the same weights."""
    folder = tmp_path_factory.mktemp("sources")
    maker.write_pipeline(folder / "pipeline", seed=SEED)
    for spelling, name in (("bfl", "bfl.safetensors"), ("mlx", "packed.safetensors"), ("gguf", "dit.gguf")):
        (folder / spelling).mkdir()
        maker.write_transformer(folder / spelling / name, spelling, seed=SEED)
    maker.write_text_encoder(folder / "encoder-mlx", "mlx", seed=SEED)
    maker.write_vae(folder / "vae-small", seed=SEED, decoder="small")
    maker.write_vae(folder / "ae.safetensors", spelling="bfl", seed=SEED)
    maker.write_text_encoder(folder / "te.gguf", "gguf", seed=SEED)
    return folder


def export(sources: Path, bundle: Path, transformer: str | Path | None = None, **options: Any) -> Bundle:
    """The pipeline, with another transformer of ``sources`` (or anywhere) where one is named."""
    parts = {"transformer": sources / transformer} if transformer else {}
    if options.get("stages") is None:
        options["hidden_states"] = LAYERS
    return intaglio.export(sources / "pipeline", bundle, **parts, **options)


def parameters(bundle: Path, stage: str) -> dict[str, np.ndarray]:
    """Every weight of a stage that lies in the weights file."""
    graph = ir.load(bundle / f"{stage}.onnx").graph
    stored = {name: value.const_value for name, value in graph.initializers.items()}
    return {name: tensor.numpy() for name, tensor in stored.items() if isinstance(tensor, ir.ExternalTensor)}


def unpacked(bundle: Path, stage: str) -> dict[str, np.ndarray]:
    """The same with quantized matrices unpacked to float32, under the names of the checkpoint."""
    graph = ir.load(bundle / f"{stage}.onnx").graph
    stored, result = parameters(bundle, stage), {}
    for node in graph:
        if node.op_type == "GroupedQuantMatMul":
            name = str(node.inputs[1].name).removesuffix(".codes")
            layout = GroupedQuantFormat(*(node.attributes[a].as_int() for a in ("bits", "group_size", "zero_point")))
            rows = GroupedQuantRows(*(stored.pop(f"{name}.{part}") for part in ("codes", "scales", "offsets")))
            result[name] = dequantize(rows, layout)
    return result | stored


def test_a_diffusers_directory_becomes_a_bundle(sources: Path, tmp_path: Path) -> None:
    bundle = export(sources, tmp_path / "bundle")
    assert bundle == read_bundle(tmp_path / "bundle")
    assert bundle.kind == "text-to-image"
    assert list(bundle.components) == ["text_encoder", "transformer", "vae"]
    assert {"text_encoder", "transformer", "vae_decoder", "vae_encoder"} <= set(bundle.stages)
    info = bundle.text_to_image
    assert info is not None
    assert (info.text_encoder_layers, info.text_length, info.is_distilled, info.shift) == (LAYERS, 512, True, None)
    assert bundle.tokenizer is not None
    assert bundle.tokenizer.has_chat_template
    assert bundle.dims["latent_height"].expression == "height / 16"
    assert [file.name for file in bundle.components["vae"].source.files] == ["diffusion_pytorch_model.safetensors"]


def test_packed_and_gguf_are_equal_in_every_code_and_scale(sources: Path, tmp_path: Path) -> None:
    export(sources, tmp_path / "mlx", "mlx/packed.safetensors", config=SAID)
    export(sources, tmp_path / "gguf", "gguf/dit.gguf")
    mlx, gguf = (parameters(tmp_path / name, "transformer") for name in ("mlx", "gguf"))
    assert mlx.keys() == gguf.keys()
    packed = [name for name in mlx if name.endswith(".codes")]
    assert len(packed) == 2 * 12 + 3 * 2
    for name, found in mlx.items():
        # Scales are bfloat16 in one file and float16 in the other.
        np.testing.assert_array_equal(found.astype(np.float32), gguf[name].astype(np.float32), err_msg=name)
    for bundle in ("mlx", "gguf"):
        kinds = [q for q in read_bundle(tmp_path / bundle).components["transformer"].quantization if q.group_size]
        assert [(q.bits, q.group_size, q.zero_point, q.has_offsets) for q in kinds] == [(2, 128, 1, False)]


def test_codes_and_scales_are_those_of_the_source(sources: Path, tmp_path: Path) -> None:
    """Block by block, by the bytes of the file."""
    export(sources, tmp_path / "bundle", "mlx/packed.safetensors", config=SAID)
    found = parameters(tmp_path / "bundle", "transformer")
    raw = (sources / "mlx" / "packed.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])

    def stored(name: str) -> bytes:
        start, end = header[name]["data_offsets"]
        return raw[8 + length + start : 8 + length + end]

    modules = [name.removesuffix(".codes") for name in found if name.endswith(".codes")]
    assert modules
    for name in modules:
        assert found[f"{name}.codes"].tobytes() == stored(name), name
        assert found[f"{name}.scales"].tobytes() == stored(name.removesuffix("weight") + "scales"), name


@pytest.mark.parametrize("spelling", [None, "bfl/bfl.safetensors"])
def test_dense_spellings_are_the_same_and_equal_once_packed(
    spelling: str | None, sources: Path, tmp_path: Path
) -> None:
    said = {} if spelling is None else SAID
    export(sources, tmp_path / "gguf", "gguf/dit.gguf")
    export(sources, tmp_path / "dense", spelling, config=said)
    packed = export(sources, tmp_path / "packed", spelling, config=said, pack_ternary=True)
    expected = unpacked(tmp_path / "gguf", "transformer")
    for bundle in ("dense", "packed"):
        found = unpacked(tmp_path / bundle, "transformer")
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)
    reference = parameters(tmp_path / "gguf", "transformer")
    for name, array in parameters(tmp_path / "packed", "transformer").items():
        np.testing.assert_array_equal(array.astype(np.float32), reference[name].astype(np.float32), err_msg=name)
    quantized = [q for q in packed.components["transformer"].quantization if q.group_size]
    assert [(q.bits, q.zero_point, q.has_offsets) for q in quantized] == [(2, 1, False)]
    # The option is the transformer's: no other matrix was meant to be ternary.
    assert not any(q.group_size for q in packed.components["text_encoder"].quantization)


def test_weights_that_are_not_ternary_are_not_packed(sources: Path, tmp_path: Path) -> None:
    folder = tmp_path / "transformer"
    maker.write_transformer(folder, "diffusers", seed=SEED, dtype="F32")
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    name = "single_transformer_blocks.1.attn.to_out.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][7, 130] = 0.01
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=rf"{name}.*row 7.*group 1"):
        export(sources, tmp_path / "bundle", folder, pack_ternary=True)
    assert not (tmp_path / "bundle").exists()


def test_the_vae_of_black_forest_labs_is_equal_in_every_value(sources: Path, tmp_path: Path) -> None:
    said = {"vae.norm_num_groups": 8, "vae.batch_norm_eps": 1e-4}
    stages = ["vae_decoder", "vae_encoder"]
    with pytest.raises(ConfigError, match=r"--config vae\.norm_num_groups="):
        export(sources, tmp_path / "bfl", vae=sources / "ae.safetensors", stages=stages)
    bundles = [
        export(sources, tmp_path / "bfl", vae=sources / "ae.safetensors", stages=stages, config=said),
        export(sources, tmp_path / "diffusers", stages=stages),
    ]
    assert bundles[0].stages == bundles[1].stages
    assert bundles[0].weights == bundles[1].weights


def test_the_text_encoder_as_gguf_is_equal_in_every_code_and_scale(sources: Path, tmp_path: Path) -> None:
    """Its groups are half as long as MLX's; the tokenizer comes from the file."""
    options: dict[str, Any] = {"hidden_states": LAYERS, "stages": ["text_encoder"]}
    exported = intaglio.export(None, tmp_path / "gguf", text_encoder=sources / "te.gguf", **options)
    tokenizer = sources / "pipeline" / "tokenizer"
    encoder = sources / "encoder-mlx"
    expected = intaglio.export(None, tmp_path / "mlx", text_encoder=encoder, tokenizer=tokenizer, **options)
    found, mlx = (parameters(tmp_path / name, "text_encoder") for name in ("gguf", "mlx"))
    assert found.keys() == mlx.keys()
    assert sum(name.endswith(".codes") for name in mlx) == 1 + 3 * 7
    for name, array in mlx.items():
        array = np.repeat(array, 2, axis=1) if name.endswith((".scales", ".offsets")) else array
        np.testing.assert_array_equal(found[name].astype(np.float32), array.astype(np.float32), err_msg=name)
    assert exported.tokenizer is not None
    assert expected.tokenizer is not None
    for key in ("eos_token_ids", "pad_token_id", "has_chat_template"):
        assert getattr(exported.tokenizer, key) == getattr(expected.tokenizer, key), key
    ours, theirs = (Tokenizer.from_file(str(tmp_path / n / "tokenizer" / "tokenizer.json")) for n in ("gguf", "mlx"))
    text = "<|im_start|>user\na tiny bonsai tree<|im_end|>\n<think>"
    assert ours.encode(text).ids == theirs.encode(text).ids


def test_mlx_text_encoder_and_small_decoder(sources: Path, tmp_path: Path) -> None:
    bundle = intaglio.export(
        None,
        tmp_path / "bundle",
        transformer=sources / "gguf" / "dit.gguf",
        text_encoder=sources / "encoder-mlx" / "model.safetensors",
        vae=sources / "vae-small",
        tokenizer=sources / "pipeline" / "tokenizer" / "tokenizer.json",
        hidden_states=LAYERS,
        text_length=64,
    )
    assert bundle.components["vae"].config["decoder_block_out_channels"] == list(maker.TINY.small_decoder)
    assert [(q.bits, q.group_size) for q in bundle.components["text_encoder"].quantization if q.group_size] == [(4, 64)]
    assert bundle.text_to_image is not None
    assert (bundle.text_to_image.text_length, bundle.text_to_image.is_distilled) == (64, None)
    dense = intaglio.export(sources / "pipeline", tmp_path / "dense", hidden_states=LAYERS)
    assert dense.weights.sha256 != bundle.weights.sha256


def test_stages_ask_for_a_part(sources: Path, tmp_path: Path) -> None:
    bundle = intaglio.export(sources / "gguf" / "dit.gguf", tmp_path / "bundle", stages=["transformer"])
    assert (list(bundle.components), list(bundle.stages)) == (["transformer"], ["transformer"])
    assert set(bundle.dims) == {"batch", "image_tokens", "text_tokens"}
    with pytest.raises(InputError, match="--text-encoder PATH, --vae PATH, or --stages"):
        intaglio.export(sources / "gguf" / "dit.gguf", tmp_path / "other")
    with pytest.raises(InputError, match="'unet' is unknown"):
        export(sources, tmp_path / "other", stages=["transformer", "unet"])
    with pytest.raises(InputError, match="'text_encoder_2' is unknown"):
        intaglio.export(sources / "pipeline", tmp_path / "other", stages=["text_encoder_2"], hidden_states=LAYERS)


UNUSED = [
    ("transformer", {"tokenizer": "tokenizer"}, "--tokenizer .*tokenizer: is for the text encoder"),
    ("transformer", {"text_encoder": "text_encoder"}, "--text-encoder .*text_encoder: is for the text encoder"),
    ("transformer", {"text_length": 64}, "--text-length 64: is for the text encoder"),
    ("vae_decoder", {"hidden_states": LAYERS}, "--hidden-states: is for the text encoder"),
    ("vae_decoder", {"is_distilled": True}, "--distilled: is for the transformer"),
    ("vae_decoder", {"is_distilled": False}, "--not-distilled: is for the transformer"),
    ("vae_decoder", {"pack_ternary": True}, "--pack-ternary: is for the transformer"),
    ("vae_decoder", {"transformer": "transformer"}, "--transformer .*transformer: is for the transformer"),
    ("text_encoder", {"vae": "vae", "hidden_states": LAYERS}, "--vae .*vae: is for the vae"),
    ("text_encoder", {"config": {"vae.act_fn": 1}, "hidden_states": LAYERS}, "a key begins with text_encoder"),
]


@pytest.mark.parametrize(("stage", "options", "message"), UNUSED, ids=[str(i) for i in range(len(UNUSED))])
def test_options_of_a_component_that_is_not_exported(
    stage: str, options: dict[str, Any], message: str, sources: Path, tmp_path: Path
) -> None:
    """Each is heeded where its component is exported; the part of a directory is no option."""
    given = {name: sources / "pipeline" / value if isinstance(value, str) else value for name, value in options.items()}
    with pytest.raises(InputError, match=message):
        intaglio.export(sources / "pipeline", tmp_path / "bundle", stages=[stage], **given)
    assert not (tmp_path / "bundle").exists()


def test_a_source_of_a_component_that_is_not_exported(sources: Path, tmp_path: Path) -> None:
    file, vae = sources / "gguf" / "dit.gguf", sources / "pipeline" / "vae"
    with pytest.raises(InputError, match=r"dit\.gguf: is for the transformer, of which --stages chooses nothing"):
        intaglio.export(file, tmp_path / "bundle", vae=vae, stages=["vae_decoder"])
    tiny_checkpoint.write(tmp_path / "llama")
    with pytest.raises(InputError, match=r"--vae belongs to picture bundles, and .*llama is a language model"):
        intaglio.export(tmp_path / "llama", tmp_path / "bundle", vae=vae)


@pytest.mark.parametrize("transformer", ["mlx/packed.safetensors", "gguf/dit.gguf"])
def test_what_is_packed_is_not_packed_again(transformer: str, sources: Path, tmp_path: Path) -> None:
    said = SAID if transformer.startswith("mlx") else {}
    with pytest.raises(InputError, match=r"--pack-ternary: .* has no dense matrices in its blocks; leave the option"):
        export(sources, tmp_path / "bundle", transformer, config=said, pack_ternary=True)


def test_stages_and_the_environment(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the stages do not need is not taken from there, so it is no error either."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("INTAGLIO_TRANSFORMER=/nowhere\nINTAGLIO_TOKENIZER=/nowhere\n")
    done = command_line("export", "--vae", sources / "vae-small", "bundle", "--stages", "vae_decoder", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "nowhere" not in done.stderr


def test_a_decoder_alone_is_exported_without_an_encoder(sources: Path, tmp_path: Path) -> None:
    file = sources / "pipeline" / "vae" / "diffusion_pytorch_model.safetensors"
    from intaglio.exporters.checkpoints import open_checkpoint
    from intaglio.exporters.checkpoints.safetensors_writer import write_file

    (tmp_path / "vae").mkdir()
    tensors = {
        name: tensor
        for name, tensor in open_checkpoint(file).tensors.items()
        if not name.startswith(("encoder.", "quant_conv."))
    }
    write_file(tmp_path / "vae" / file.name, tensors)
    (tmp_path / "vae" / "config.json").write_text((file.parent / "config.json").read_text())
    bundle = export(sources, tmp_path / "bundle", vae=tmp_path / "vae")
    assert "vae_decoder" in bundle.stages
    assert "vae_encoder" not in bundle.stages
    with pytest.raises(WeightsError, match="tensors are missing"):
        export(sources, tmp_path / "other", vae=tmp_path / "vae", stages=["vae_encoder"])


def narrow_text_encoder(sources: Path, folder: Path) -> dict[str, Any]:
    return {"hidden_states": LAYERS[:2]}


def other_latents(sources: Path, folder: Path) -> dict[str, Any]:
    from dataclasses import replace

    sizes = replace(maker.TINY, vae={**maker.TINY.vae, "latent_channels": 16})
    return {"vae": maker.write_vae(folder / "vae", sizes)}


def larger_tokenizer(sources: Path, folder: Path) -> dict[str, Any]:
    maker.write_tokenizer(folder / "tokenizer")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    tokenizer.add_tokens([f"word{i}" for i in range(20)])
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    return {"tokenizer": folder / "tokenizer"}


def sparse_tokenizer(sources: Path, folder: Path) -> dict[str, Any]:
    """No more tokens than the embedding has rows, but one with an id beyond them."""
    maker.write_tokenizer(folder / "tokenizer")
    file = folder / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["ab"] = 400
    content["model"]["vocab"].pop("~")
    file.write_text(json.dumps(content))
    return {"tokenizer": folder / "tokenizer"}


def other_file_beside_the_tokenizer(sources: Path, folder: Path) -> dict[str, Any]:
    maker.write_tokenizer(folder / "tokenizer")
    (folder / "tokenizer" / "vocab.txt").write_text("a")
    return {"tokenizer": folder / "tokenizer" / "vocab.txt"}


def second_of_two_tokenizers(sources: Path, folder: Path) -> dict[str, Any]:
    maker.write_tokenizer(folder / "tokenizer")
    (folder / "tokenizer" / "tokenizer.model").write_text("a")
    return {"tokenizer": folder / "tokenizer" / "tokenizer.model"}


def another_architecture(sources: Path, folder: Path) -> dict[str, Any]:
    from intaglio.exporters.checkpoints.gguf_writer import write_gguf

    write_gguf(folder / "other.gguf", {"general.architecture": "mamba"}, [])
    return {"transformer": folder / "other.gguf"}


def without_template(sources: Path, folder: Path) -> dict[str, Any]:
    maker.write_tokenizer(folder / "tokenizer")
    for file in (folder / "tokenizer").iterdir():
        if file.suffix == ".jinja":
            file.unlink()
        elif file.name == "tokenizer_config.json":
            content = json.loads(file.read_text())
            content.pop("chat_template", None)
            file.write_text(json.dumps(content))
    return {"tokenizer": folder / "tokenizer"}


MISFITS = [
    (narrow_text_encoder, ConfigError, "2 hidden states of width 128 make a conditioning of 256.*takes 384"),
    (other_latents, ConfigError, "has 64 latent channels.*takes 128"),
    (larger_tokenizer, ConfigError, "the tokenizer has token ids up to 280, but the embedding of .* has 261 rows"),
    (sparse_tokenizer, ConfigError, "the tokenizer has token ids up to 400, but the embedding of .* has 261 rows"),
    (other_file_beside_the_tokenizer, InputError, r"vocab.txt: expected tokenizer.json or tokenizer.model, or the f"),
    (second_of_two_tokenizers, InputError, r"tokenizer.model: tokenizer.json stands beside it and is what is read"),
    (another_architecture, ConfigError, "general.architecture is 'mamba'; built are bonsai-image"),
    (without_template, ConfigError, "has no chat template"),
    (
        lambda s, f: {"transformer": s / "pipeline" / "vae"},
        ConfigError,
        "is autoencoder_kl_flux2, a vae; expected a tr",
    ),
    (lambda s, f: {"vae": s / "pipeline"}, CheckpointError, "is a whole pipeline"),
    (lambda s, f: {"vae": s / "nowhere"}, CheckpointError, "no such file or folder"),
    (lambda s, f: {"tokenizer": s / "nowhere"}, CheckpointError, "no such file or folder; expected a tokenizer"),
    (lambda s, f: {"hidden_states": (1, 2, 9)}, InputError, "layer 9 are asked for; the model has 0 to 4"),
    (lambda s, f: {"text_length": 0}, InputError, "text length is 0, expected at least one token"),
    (lambda s, f: {"hidden_states": "1,2"}, InputError, "expected layer numbers"),
    (lambda s, f: {"text_length": 0}, InputError, "the text length is 0, expected at least one token"),
    (lambda s, f: {"is_distilled": "x"}, InputError, "is_distilled is 'x', expected True, False or None"),
    (lambda s, f: {"text_length": 50000}, InputError, "text length is 50000, but the text encoder takes at most 40960"),
    (lambda s, f: {"config": {"rope_theta": 1.0}}, InputError, "a key begins with text_encoder., transformer., vae."),
    (lambda s, f: {"config": {"transformer.rope": 1}}, ConfigError, "rope: flux2 does not read it"),
    (
        lambda s, f: {"transformer": s / "mlx" / "packed.safetensors"},
        ConfigError,
        r"--config transformer\.(patch_size|rope_theta|eps|axes_dims_rope)=",
    ),
]


@pytest.mark.parametrize(("misfit", "error", "message"), MISFITS, ids=[str(i) for i in range(len(MISFITS))])
def test_parts_that_do_not_fit(
    misfit: Any, error: type[IntaglioError], message: str, sources: Path, tmp_path: Path
) -> None:
    (tmp_path / "given").mkdir()
    options = misfit(sources, tmp_path / "given")
    with pytest.raises(error, match=message):
        intaglio.export(sources / "pipeline", tmp_path / "out" / "bundle", **{"hidden_states": LAYERS} | options)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("part", "key", "value", "message"),
    [
        ("text_encoder", "num_hidden_layers", 10**9, "num_hidden_layers is 1000000000, expected at most 10000"),
        ("text_encoder", "num_hidden_layers", 40, "the config says 40 layers, the checkpoint has 4"),
        ("transformer", "num_layers", 1000, "the config says 1000 layers, the checkpoint has 3"),
        ("transformer", "num_attention_heads", 2**30, "num_attention_heads gives a width of"),
        ("transformer", "mlp_ratio", 1e19, "mlp_ratio gives a width of"),
        ("transformer", "timestep_guidance_channels", 2**30, "expected an even number to"),
        ("vae", "latent_channels", 2**31 - 1, "latent_channels is 2147483647, expected at most 65536"),
        ("vae", "in_channels", 2**30, "in_channels is 1073741824, expected at most 65536"),
    ],
)
def test_sizes_that_lie_are_refused_before_anything_is_built(
    part: str, key: str, value: float, message: str, sources: Path, tmp_path: Path
) -> None:
    folder = copied(sources, tmp_path / "pipeline")
    edit(folder / part / "config.json", {key: value})
    with pytest.raises(IntaglioError, match=message):
        intaglio.export(folder, tmp_path / "bundle", hidden_states=LAYERS)


def test_a_gguf_with_another_meaning_of_the_type_id_is_refused(sources: Path, tmp_path: Path) -> None:
    """The same bytes with the scale first: what other programs write under this id."""
    raw = bytearray((sources / "gguf" / "dit.gguf").read_bytes())
    from intaglio.exporters.checkpoints import open_checkpoint

    for tensor in open_checkpoint(sources / "gguf" / "dit.gguf").tensors.values():
        if tensor.storage == "TQ2_0_g128":
            stored: Any = tensor
            blocks = np.frombuffer(raw, np.uint8, tensor.nbytes, stored.offset).reshape(-1, 34)
            raw[stored.offset : stored.offset + tensor.nbytes] = np.roll(blocks, 2, axis=1).tobytes()
    (tmp_path / "dit.gguf").write_bytes(raw)
    with pytest.raises(IntaglioError, match="PQ2_0"):
        export(sources, tmp_path / "bundle", tmp_path / "dit.gguf")
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_class_name": "FluxPipeline"}, "built is only 'Flux2KleinPipeline'"),
        ({"is_distilled": "yes"}, "is_distilled is 'yes', expected true or false"),
        ({"text_encoder_out_layers": [1, "2"]}, "expected a list of layer numbers"),
    ],
)
def test_an_index_that_is_not_built_is_refused(
    change: dict[str, Any], message: str, sources: Path, tmp_path: Path
) -> None:
    folder = copied(sources, tmp_path / "pipeline")
    edit(folder / "model_index.json", change)
    with pytest.raises(ConfigError, match=message):
        intaglio.export(folder, tmp_path / "bundle")


def test_the_index_and_the_scheduler_are_heeded(sources: Path, tmp_path: Path) -> None:
    folder = copied(sources, tmp_path / "pipeline")
    edit(folder / "model_index.json", {"text_encoder_out_layers": [3, 1, 2], "max_sequence_length": 99})
    edit(folder / "scheduler" / "scheduler_config.json", {"use_dynamic_shifting": False, "shift": 3.5})
    info = intaglio.export(folder, tmp_path / "bundle", dry_run=True).text_to_image
    assert info is not None
    assert (info.text_encoder_layers, info.text_length, info.shift) == ((3, 1, 2), 99, 3.5)
    for change, message in (
        ({"_class_name": "DDIMScheduler"}, "built is only 'FlowMatchEulerDiscreteScheduler'"),
        ({"use_karras_sigmas": True}, "use_karras_sigmas is True; built is only False"),
        ({"use_dynamic_shifting": True, "time_shift_type": "linear"}, "built is only 'exponential'"),
    ):
        edit(folder / "scheduler" / "scheduler_config.json", change)
        with pytest.raises(ConfigError, match=message):
            intaglio.export(folder, tmp_path / "bundle", dry_run=True)
        (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(maker.SCHEDULER))


def copied(sources: Path, folder: Path) -> Path:
    import shutil

    return Path(shutil.copytree(sources / "pipeline", folder))


def edit(file: Path, changes: dict[str, Any]) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_parts_come_from_the_flag_then_the_environment_then_dotenv(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pipeline = sources / "pipeline"
    (tmp_path / ".env").write_text(
        f"INTAGLIO_TRANSFORMER=/nowhere\nINTAGLIO_VAE=/nowhere\nINTAGLIO_TOKENIZER={pipeline / 'tokenizer'}\n"
    )
    environment = {
        "INTAGLIO_TRANSFORMER": "/nowhere/at/all",
        "INTAGLIO_VAE": str(sources / "vae-small"),
        "INTAGLIO_TEXT_ENCODER": str(pipeline / "text_encoder"),
    }
    flags = ("--transformer", sources / "gguf" / "dit.gguf", "--hidden-states", "1,2,3")
    done = command_line("export", *flags, tmp_path / "bundle", env=environment)
    assert done.returncode == 0, done.stderr
    assert "vae: " in done.stderr
    assert "as INTAGLIO_VAE in the environment says" in done.stderr
    assert "as INTAGLIO_TOKENIZER in .env says" in done.stderr
    bundle = read_bundle(tmp_path / "bundle")
    assert bundle.components["transformer"].source.format == "gguf"
    assert bundle.components["vae"].config["decoder_block_out_channels"] == list(maker.TINY.small_decoder)
    # A source of its own is not mixed with what the environment says.
    done = command_line("export", pipeline, tmp_path / "whole", "--hidden-states", "1,2,3", env=environment)
    assert done.returncode == 0, done.stderr
    assert read_bundle(tmp_path / "whole").components["transformer"].source.format == "safetensors"
    # Without either, nothing says what to export.
    (tmp_path / ".env").unlink()
    silent = {k: "" for k in os.environ if k.startswith("INTAGLIO_") and k != "INTAGLIO_CACHE"}
    done = command_line("export", tmp_path / "bundle2", env=silent)
    assert done.returncode == 2
    assert "only " in done.stderr
    assert "bundle2 is given; name a SOURCE to export from, or --transformer, --text-encoder, --vae" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"bundle", "whole"}


def test_a_folder_that_cannot_be_written(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputError, match="file"):
        export(sources, tmp_path / "file" / "bundle")


def test_what_no_file_says_is_that_of_the_published_model_and_said(tmp_path: Path) -> None:
    from intaglio.exporters.checkpoints import Checkpoint
    from intaglio.exporters.components import Options, find_component

    sizes = maker.SIZES["4B"]
    parts = {
        "text_encoder": maker.text_encoder_tensors(sizes.text_encoder),
        "transformer": maker.transformer_tensors(sizes.transformer),
        "vae": maker.vae_tensors(sizes.vae),
    }
    expected = {
        "text_encoder": {"hidden_act", "rms_norm_eps", "rope_theta", "max_position_embeddings"},
        "transformer": {"patch_size", "axes_dims_rope", "rope_theta", "eps"},
        "vae": {"norm_num_groups", "batch_norm_eps"},
    }
    for role, tensors in parts.items():
        checkpoint = Checkpoint(tmp_path / "model.safetensors", "safetensors", tensors, ())
        _, config, assumed = find_component(checkpoint, role, Options("float32"))
        assert expected[role] <= set(assumed), role
        published: Any = getattr(sizes, role)
        for key in expected[role] - {"hidden_act"}:
            found = getattr(config, key)
            assert (list(found) if isinstance(found, tuple) else found) == published[key], key
        key = "batch_norm_eps" if role == "vae" else "rope_theta"
        _, config, assumed = find_component(checkpoint, role, Options("float32", config={key: 0.5}))
        assert key not in assumed
        assert getattr(config, key) == 0.5


def test_a_dotenv_that_is_no_text_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for content in (b"INTAGLIO_VAE=\xff\n", b"A=1\n" * 300_000):
        (tmp_path / ".env").write_bytes(content)
        done = command_line("export", tmp_path / "bundle")
        assert done.returncode == 2
        assert "error: .env: " in done.stderr
    (tmp_path / ".env").unlink()
    (tmp_path / ".env").mkdir()
    assert "error: .env: " in command_line("export", tmp_path / "bundle").stderr
