"""A pipeline of FLUX.2's shape that is small enough to train in a test, and a tokenizer for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

LENGTH = 8
VAE: dict[str, Any] = {
    "block_out_channels": [16, 24, 32],
    "down_block_types": ["DownEncoderBlock2D"] * 3,
    "up_block_types": ["UpDecoderBlock2D"] * 3,
    "latent_channels": 4,
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "sample_size": 32,
}
TEXT_ENCODER: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
TRANSFORMER: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 32,
    "num_attention_heads": 4,
    "joint_attention_dim": 128,
    "axes_dims_rope": [8, 8, 8, 8],
    "guidance_embeds": False,
}
MODEL = {"vae": VAE, "text_encoder": TEXT_ENCODER, "transformer": TRANSFORMER}
TASK = {"kind": "flow-matching", "text_encoder_out_layers": [1, 2], "max_sequence_length": LENGTH}


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer of words, with a chat template and a token to pad with."""
    words = ["<pad>", "<start>", "<end>", "a", "red", "green", "apple", "pear", "leaf", "[UNK]"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(words[:3])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Qwen2TokenizerFast", "pad_token": "<pad>", "eos_token": "<end>"}', encoding="utf-8"
    )
    (folder / "chat_template.jinja").write_text("<start> {{ messages[-1].content }} <end>", encoding="utf-8")
    return folder
