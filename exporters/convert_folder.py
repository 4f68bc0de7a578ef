"""The Hugging Face folder that a conversion writes: shards, ``config.json``, tokenizer."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from intaglio.errors import CheckpointError
from intaglio.exporters.checkpoints.mlx import UnresolvedMlxTensor, is_mlx_quantization
from intaglio.exporters.checkpoints.safetensors_writer import mlx_setting, write_shards
from intaglio.exporters.checkpoints.tensors import Checkpoint, CheckpointTensor
from intaglio.exporters.tokenizer import TokenizerFiles
from intaglio.output import replaced_folder
from intaglio.progress import ProgressCallback

# Settings and tokenizers of a folder, by suffix; anything else is not part of a checkpoint.
_SUFFIXES = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".md"}
_TOKENIZER_NAMES = ("tokenizer", "special_tokens_map", "vocab", "merges", "added_tokens", "chat_template")
_DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class FolderPlan:
    """What the folder will hold. ``changed`` says that ``config`` does not describe the tensors yet."""

    tensors: Mapping[str, CheckpointTensor]
    metadata: Mapping[str, str]
    config: dict[str, Any] | None
    changed: bool
    texts: Mapping[str, str]
    copies: tuple[Path, ...]


def copied_files(checkpoint: Checkpoint, *, tokenizer: bool) -> tuple[list[Path], list[str]]:
    """The files beside the weights that belong to a folder, and the names of those that stay behind."""
    if not checkpoint.path.is_dir() and not checkpoint.config:
        return [], []
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    taken, left = [], []
    for file in sorted(folder.iterdir()):
        if file in checkpoint.files or file.name == "config.json" or file.name.endswith(".safetensors.index.json"):
            continue
        kept = file.is_file() and file.suffix in _SUFFIXES and not file.name.startswith(".")
        if kept and not tokenizer and file.name.startswith(_TOKENIZER_NAMES):
            kept = False
        if kept:
            taken.append(file)
        else:
            left.append(file.name)
    return taken, left


def tokenizer_files(files: TokenizerFiles) -> dict[str, str]:
    """The files of a tokenizer by name."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{
            key: value
            for key in ("bos_token", "eos_token", "pad_token")
            if (value := getattr(files, key)) is not None
        },
    }  # fmt: skip
    texts = {"tokenizer.json": files.tokenizer_json, "tokenizer_config.json": _json(settings)}
    if files.chat_template is not None:
        texts["chat_template.jinja"] = files.chat_template
    return texts


def write_folder(target: Path, plan: FolderPlan, shard_bytes: int, progress: ProgressCallback | None) -> None:
    """Writes the folder beside ``target`` and exchanges the two at the end. Raises CheckpointError, OutputError."""
    config = _described(plan) if plan.changed else plan.config
    with replaced_folder(target) as folder:
        try:
            for file in plan.copies:
                shutil.copyfile(file, folder / file.name)
            for name, text in plan.texts.items():
                (folder / name).write_text(text, "utf-8")
            if config is not None:
                (folder / "config.json").write_text(_json(config), "utf-8")
        except OSError as error:
            raise CheckpointError(f"{target}: cannot be written ({error.strerror or error})") from error
        # diffusers has a name of its own for the files.
        stem = "diffusion_pytorch_model" if config is not None and "_class_name" in config else "model"
        tensors = separate_parts(plan.tensors)
        write_shards(folder, tensors, plan.metadata, stem=stem, shard_bytes=shard_bytes, progress=progress)


def separate_parts(tensors: Mapping[str, CheckpointTensor]) -> dict[str, CheckpointTensor]:
    """``tensors`` with the three parts of MLX matrices of unknown bits one by one, as they are copied."""
    parts: dict[str, CheckpointTensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, UnresolvedMlxTensor):
            module = name.removesuffix(".weight")
            stored = (tensor.weight, tensor.scales, tensor.biases)
            parts |= dict(zip((name, f"{module}.scales", f"{module}.biases"), stored, strict=True))
        else:
            parts[name] = tensor
    return parts


def _described(plan: FolderPlan) -> dict[str, Any] | None:
    """``config.json`` with the types that the tensors have now."""
    if plan.config is None:
        return None
    config = dict(plan.config)
    for key in ("quantization", "quantization_config"):
        if is_mlx_quantization(config.get(key)):
            del config[key]
    settings = {n.removesuffix(".weight"): mlx_setting(t) for n, t in plan.tensors.items() if t.layout is not None}
    if settings:
        common = Counter(tuple(setting.items()) for setting in settings.values()).most_common(1)[0][0]
        own = {module: setting for module, setting in settings.items() if tuple(setting.items()) != common}
        config["quantization"] = {**dict(common), "mode": "affine", **own}
    if "_class_name" in config:
        # diffusers takes the other keys for its own.
        return config
    if settings:
        config["quantization_config"] = config["quantization"]
    dense = Counter(_DTYPE_NAMES[t.storage] for t in plan.tensors.values() if t.storage in _DTYPE_NAMES)
    if dense:
        key = "dtype" if "dtype" in config else "torch_dtype"
        config[key] = dense.most_common(1)[0][0]
    return config


def _json(content: Any) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
