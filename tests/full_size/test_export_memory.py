"""Export of a checkpoint with four billion parameters: 8 GB in, 16 GB out. Run by ``make bench``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from measure import intaglio as command_line

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
_SHARD_BYTES = 5 << 30


def shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of the model: 4.02 billion values."""
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (151936, 2560), "model.norm.weight": (2560,)}
    for layer in range(36):
        prefix = f"model.layers.{layer}."
        result |= {
            f"{prefix}input_layernorm.weight": (2560,),
            f"{prefix}post_attention_layernorm.weight": (2560,),
            f"{prefix}self_attn.q_proj.weight": (4096, 2560),
            f"{prefix}self_attn.k_proj.weight": (1024, 2560),
            f"{prefix}self_attn.v_proj.weight": (1024, 2560),
            f"{prefix}self_attn.o_proj.weight": (2560, 4096),
            f"{prefix}mlp.gate_proj.weight": (9728, 2560),
            f"{prefix}mlp.up_proj.weight": (9728, 2560),
            f"{prefix}mlp.down_proj.weight": (2560, 9728),
        }
    return result


def write_checkpoint(folder: Path) -> int:
    """Writes random bfloat16 weights in shards; returns the bytes of the largest tensor."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    noise = np.random.default_rng(0).normal(scale=0.02, size=8 << 20).astype(ml_dtypes.bfloat16).view(np.uint8)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes().items():
        nbytes = 2 * int(np.prod(shape))
        if size + nbytes > _SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += nbytes
    weight_map = {}
    for i, shard in enumerate(shards):
        file_name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        weight_map |= dict.fromkeys(shard, file_name)
        _write_shard(folder / file_name, shard, noise)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return max(2 * int(np.prod(shape)) for shape in shapes().values())


def _write_shard(path: Path, shard: dict[str, tuple[int, ...]], noise: np.ndarray) -> None:
    header, offset = {}, 0
    for name, shape in shard.items():
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        left = offset
        while left:
            part = noise[: min(left, len(noise))]
            file.write(part)
            left -= len(part)


@pytest.mark.full_size
def test_peak_memory_is_the_largest_tensor_and_a_constant(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    if free < 26 << 30:
        pytest.skip(f"needs 26 GiB of disk, {free >> 30} GiB are free")
    largest = write_checkpoint(tmp_path / "checkpoint")
    done = command_line("export", tmp_path / "checkpoint", tmp_path / "bundle")
    assert done.returncode == 0, done.stderr
    print(f"peak RSS {done.peak_rss_mib:.0f} MiB; largest tensor {largest / 2**20:.0f} MiB")
    print(done.stderr)
    shutil.rmtree(tmp_path / "checkpoint")
    shutil.rmtree(tmp_path / "bundle")
    assert done.peak_rss_mib <= largest / 2**20 + 300
