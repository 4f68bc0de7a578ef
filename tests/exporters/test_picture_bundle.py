"""What a ``bundle.json`` of pictures may say: nothing that the runtime would stumble over later."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from intaglio.errors import BundleError
from intaglio.exporters.bundle import BUNDLE_FILE, read_bundle


def edited(klein: Path, folder: Path, path: str, value: Any) -> Path:
    """A copy of the bundle without its engines and with one value changed; None takes it out."""
    content = json.loads((klein / BUNDLE_FILE).read_text())
    *parents, last = path.split("/")
    inner = content
    for key in parents:
        inner = inner[key]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    shutil.copytree(klein, folder, ignore=shutil.ignore_patterns("engines", BUNDLE_FILE))
    (folder / BUNDLE_FILE).write_text(json.dumps(content))
    return folder


EDITS = [
    ("components/vae", None, "stages.vae_decoder belongs to the component vae, which components lacks"),
    ("components/transformer/config", {}, r"components\.transformer\.config\.in_channels: Field required"),
    ("components/transformer/config/mlp_ratio", "x", r"config\.mlp_ratio"),
    ("components/transformer/config/mlp_ratio", 1e30, r"config\.mlp_ratio"),
    ("components/transformer/config/num_attention_heads", 2**40, r"config\.num_attention_heads"),
    ("components/transformer/config/in_channels", 64, r"hidden_states has the shape .*gives 64"),
    ("components/transformer/config/joint_attention_dim", 7, r"encoder_hidden_states has the shape .*gives 7"),
    ("components/transformer/config/guidance_embeds", True, r"stages.transformer has the inputs .*'guidance'"),
    ("components/vae/config/block_out_channels", 5, r"config\.block_out_channels"),
    ("components/vae/config/block_out_channels", [1] * 100, r"config\.block_out_channels"),
    ("components/vae/config/patch_size", [2, 2], r"config\.patch_size"),
    ("components/vae/config/latent_channels", 16, r"latents has the shape .*gives 64"),
    ("components/text_encoder/config/vocab_size", 0, "vocab_size is 0"),
    ("components/text_encoder/config/intermediate_size", "a", r"config\.intermediate_size"),
    ("stages/transformer/inputs", [], "stages.transformer has the inputs"),
    ("stages/vae_decoder/outputs", [], "stages.vae_decoder lacks the output sample"),
    ("text_to_image/text_encoder_layers", [1, 2, 9], "the text encoder has 4 layers"),
    ("text_to_image/text_encoder_layers", [-1], "text_encoder_layers"),
    ("text_to_image/text_encoder_layers", [1, 2], "prompt_embeds has the shape .*gives 256"),
    ("text_to_image/text_length", 10**9, "text_length"),
    ("text_to_image/is_distilled", "yes", "is_distilled"),
    ("tokenizer/pad_token_id", -1, "pad_token_id"),
    ("dims/latent_height/expression", "latent_height * 2", "depends on itself"),
    ("dims/latent_height/expression", "breadth / 16", "dims lacks breadth"),
    ("dims/image_tokens/max", 10**12, r"dims\.image_tokens\.max"),
]


@pytest.mark.parametrize(("path", "value", "message"), EDITS, ids=[f"{i}-{e[0]}" for i, e in enumerate(EDITS)])
def test_edits_are_refused_when_the_bundle_is_read(
    path: str, value: Any, message: str, klein: Path, tmp_path: Path
) -> None:
    with pytest.raises(BundleError, match=message):
        read_bundle(edited(klein, tmp_path / "bundle", path, value))


def test_what_was_exported_is_read(klein: Path, tmp_path: Path) -> None:
    read_bundle(edited(klein, tmp_path / "bundle", "text_to_image/text_length", 33))
