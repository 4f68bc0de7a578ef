"""Runs FLUX.2's transformer in stable-diffusion.cpp, with random ternary weights of the type TQ2_0: a denoising step
and its seconds for each line on stdin.

Started by ``bench`` with the request as JSON on the command line. Timings only: the values mean nothing. Its sampler
calls back before the first step and after each one; there it waits for the next line. It wants a text encoder and an
autoencoder too, which are made of random weights as well.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

# More steps than anybody asks for: the process is ended before.
_STEPS = 1000
# Qwen3 4B, the only text encoder that it knows for a conditioning of three times its width.
_TEXT = {"width": 2560, "inner": 9728, "layers": 36, "queries": 4096, "keys": 1024, "head": 128, "vocabulary": 151936}
_LATENT, _CHANNELS, _RESNETS = 32, (128, 256, 512, 512), 2
_Shapes = Iterator[tuple[str, tuple[int, ...]]]


def transformer_shapes(config: Mapping[str, Any]) -> _Shapes:
    """Names, as Black Forest Labs' files have them, and shapes ``[out, in]`` of all tensors."""
    head = config["attention_head_dim"]
    width = config["num_attention_heads"] * head
    inner = round(width * config["mlp_ratio"])
    channels = config["in_channels"]
    yield "img_in.weight", (width, channels)
    yield "txt_in.weight", (width, config["joint_attention_dim"])
    yield "time_in.in_layer.weight", (width, config["timestep_guidance_channels"])
    yield "time_in.out_layer.weight", (width, width)
    yield "double_stream_modulation_img.lin.weight", (6 * width, width)
    yield "double_stream_modulation_txt.lin.weight", (6 * width, width)
    yield "single_stream_modulation.lin.weight", (3 * width, width)
    yield "final_layer.adaLN_modulation.1.weight", (2 * width, width)
    yield "final_layer.linear.weight", (config["out_channels"] or channels, width)
    for i in range(config["num_layers"]):
        for part in ("img", "txt"):
            block = f"double_blocks.{i}.{part}"
            yield f"{block}_attn.qkv.weight", (3 * width, width)
            yield f"{block}_attn.proj.weight", (width, width)
            yield f"{block}_attn.norm.query_norm.scale", (head,)
            yield f"{block}_attn.norm.key_norm.scale", (head,)
            yield f"{block}_mlp.0.weight", (2 * inner, width)
            yield f"{block}_mlp.2.weight", (width, inner)
    for i in range(config["num_single_layers"]):
        yield f"single_blocks.{i}.linear1.weight", (3 * width + 2 * inner, width)
        yield f"single_blocks.{i}.linear2.weight", (width, width + inner)
        yield f"single_blocks.{i}.norm.query_norm.scale", (head,)
        yield f"single_blocks.{i}.norm.key_norm.scale", (head,)


def text_encoder_shapes() -> _Shapes:
    """Of a Qwen3 as llama.cpp's files have it."""
    width, inner, head = _TEXT["width"], _TEXT["inner"], _TEXT["head"]
    yield "token_embd.weight", (_TEXT["vocabulary"], width)
    yield "output_norm.weight", (width,)
    for i in range(_TEXT["layers"]):
        yield f"blk.{i}.attn_norm.weight", (width,)
        yield f"blk.{i}.attn_q.weight", (_TEXT["queries"], width)
        yield f"blk.{i}.attn_k.weight", (_TEXT["keys"], width)
        yield f"blk.{i}.attn_v.weight", (_TEXT["keys"], width)
        yield f"blk.{i}.attn_output.weight", (width, _TEXT["queries"])
        yield f"blk.{i}.attn_q_norm.weight", (head,)
        yield f"blk.{i}.attn_k_norm.weight", (head,)
        yield f"blk.{i}.ffn_norm.weight", (width,)
        yield f"blk.{i}.ffn_gate.weight", (inner, width)
        yield f"blk.{i}.ffn_up.weight", (inner, width)
        yield f"blk.{i}.ffn_down.weight", (width, inner)


def autoencoder_shapes() -> _Shapes:
    """Of FLUX.2's autoencoder as Black Forest Labs' file has it."""

    def convolution(name: str, outputs: int, inputs: int, size: int) -> _Shapes:
        yield f"{name}.weight", (outputs, inputs, size, size)
        yield f"{name}.bias", (outputs,)

    def norm(name: str, channels: int) -> _Shapes:
        yield f"{name}.weight", (channels,)
        yield f"{name}.bias", (channels,)

    def resnet(name: str, outputs: int, inputs: int) -> _Shapes:
        yield from norm(f"{name}.norm1", inputs)
        yield from convolution(f"{name}.conv1", outputs, inputs, 3)
        yield from norm(f"{name}.norm2", outputs)
        yield from convolution(f"{name}.conv2", outputs, outputs, 3)
        if outputs != inputs:
            yield from convolution(f"{name}.nin_shortcut", outputs, inputs, 1)

    def middle(name: str, channels: int) -> _Shapes:
        yield from resnet(f"{name}.block_1", channels, channels)
        yield from norm(f"{name}.attn_1.norm", channels)
        for part in ("q", "k", "v", "proj_out"):
            yield from convolution(f"{name}.attn_1.{part}", channels, channels, 1)
        yield from resnet(f"{name}.block_2", channels, channels)

    last, top = len(_CHANNELS) - 1, _CHANNELS[-1]
    yield from convolution("encoder.conv_in", _CHANNELS[0], 3, 3)
    yield from middle("encoder.mid", top)
    yield from norm("encoder.norm_out", top)
    yield from convolution("encoder.conv_out", 2 * _LATENT, top, 3)
    yield from convolution("encoder.quant_conv", 2 * _LATENT, 2 * _LATENT, 1)
    yield from convolution("decoder.post_quant_conv", _LATENT, _LATENT, 1)
    yield from convolution("decoder.conv_in", top, _LATENT, 3)
    yield from middle("decoder.mid", top)
    yield from norm("decoder.norm_out", _CHANNELS[0])
    yield from convolution("decoder.conv_out", 3, _CHANNELS[0], 3)
    yield "bn.running_mean", (4 * _LATENT,)
    yield "bn.running_var", (4 * _LATENT,)
    for i, width in enumerate(_CHANNELS):
        before, after = _CHANNELS[max(i - 1, 0)], _CHANNELS[min(i + 1, last)]
        for j in range(_RESNETS):
            yield from resnet(f"encoder.down.{i}.block.{j}", width, before if j == 0 else width)
        for j in range(_RESNETS + 1):
            yield from resnet(f"decoder.up.{i}.block.{j}", width, after if j == 0 else width)
        if i < last:
            yield from convolution(f"encoder.down.{i}.downsample.conv", width, width, 3)
        if i > 0:
            yield from convolution(f"decoder.up.{i}.upsample.conv", width, width, 3)


def write_gguf(path: Path, architecture: str, shapes: _Shapes) -> None:
    """A GGUF file of random weights: TQ2_0 where rows are of whole blocks of 256, else float16 or float32."""
    gguf: Any = importlib.import_module("gguf")
    kinds = gguf.GGMLQuantizationType
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), architecture)
    for name, shape in shapes:
        if len(shape) == 2 and shape[1] % 256 == 0:
            # 64 bytes of four codes each, of which 3 does not occur, and a float16 scale.
            blocks = np.empty((shape[0], shape[1] // 256, 66), np.uint8)
            codes = rng.integers(0, 3, (4, 1 << 16), np.uint8)
            packed = codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6
            blocks[..., :64] = np.resize(packed, blocks[..., :64].shape)
            blocks[..., 64:] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
            writer.add_tensor(name, blocks.reshape(shape[0], -1), raw_dtype=kinds.TQ2_0)
        elif len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
        else:
            writer.add_tensor(name, (0.02 * rng.standard_normal(shape, np.float32)).astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> int:
    """Answers with the version, then the seconds of a step to every line."""
    request = json.loads(sys.argv[1])
    # The package turns stdout away while it works.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    # Imported by name: it is no dependency, and its types are not installed with this package.
    package: Any = importlib.import_module("stable_diffusion_cpp")
    importlib.import_module("gguf")
    with tempfile.TemporaryDirectory(prefix="intaglio-sd-cpp-") as folder:
        files = {name: Path(folder) / f"{name}.gguf" for name in ("transformer", "text_encoder", "autoencoder")}
        write_gguf(files["transformer"], "flux", transformer_shapes(request["config"]))
        write_gguf(files["text_encoder"], "qwen3", text_encoder_shapes())
        write_gguf(files["autoencoder"], "vae", autoencoder_shapes())
        model = package.StableDiffusion(
            diffusion_model_path=str(files["transformer"]),
            llm_path=str(files["text_encoder"]),
            vae_path=str(files["autoencoder"]),
            n_threads=request["threads"],
            verbose=False,
        )
    started = 0.0

    def between_steps(step: int, steps: int, seconds: float) -> None:
        nonlocal started
        now = time.perf_counter()
        text = f"{now - started}" if started else f"stable-diffusion-cpp-python {package.__version__}"
        answers.write(text + "\n")
        answers.flush()
        if not sys.stdin.readline():
            raise SystemExit
        started = time.perf_counter()

    model.generate_image(
        prompt="a tiny bonsai tree in a ceramic pot",
        width=request["width"],
        height=request["height"],
        cfg_scale=1.0,
        sample_steps=_STEPS,
        progress_callback=between_steps,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
