"""Where the components of a picture bundle come from, and whether they fit each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from intaglio.errors import CheckpointError, ConfigError, InputError
from intaglio.exporters.bundle import TextToImageInfo
from intaglio.exporters.checkpoints import Checkpoint, open_checkpoint
from intaglio.exporters.checkpoints.json_file import read_json
from intaglio.exporters.components import Component
from intaglio.exporters.config import ConfigKeys
from intaglio.exporters.tokenizer import TOKENIZER_FILES, TokenizerFiles, tokenizer_from_directory, tokenizer_from_gguf

MODEL_INDEX = "model_index.json"
# Qwen3's hidden states that FLUX.2-klein was trained with, and the length that prompts are padded to, as published in
# Flux2KleinPipeline.
TEXT_ENCODER_LAYERS, TEXT_LENGTH = (9, 18, 27), 512


@dataclass(frozen=True)
class Sources:
    """Paths of the components by role, of the tokenizer, and what ``model_index.json`` and the scheduler's
    configuration say.
    """

    paths: Mapping[str, Path]
    tokenizer: Path | None
    index: ConfigKeys | None = None
    scheduler: ConfigKeys | None = None


def is_pipeline(path: Path) -> bool:
    """Whether ``path`` is a diffusers directory."""
    return (path / MODEL_INDEX).is_file()


def find_sources(folder: Path | None, given: Mapping[str, Path | None], tokenizer: Path | None) -> Sources:
    """The parts of a diffusers directory, if any, with those that are ``given`` by role in their place.

    Raises CheckpointError, ConfigError for a pipeline that is not built.
    """
    paths = {role: path for role, path in given.items() if path is not None}
    if folder is None:
        return Sources(paths, tokenizer)
    index = _read_keys(folder / MODEL_INDEX)
    index.choice("_class_name", "Flux2KleinPipeline")
    for role in given:
        if role not in paths and (folder / role).is_dir():
            paths[role] = folder / role
    if tokenizer is None and (folder / "tokenizer").is_dir():
        tokenizer = folder / "tokenizer"
    file = folder / "scheduler" / "scheduler_config.json"
    return Sources(paths, tokenizer, index, _read_keys(file) if file.is_file() else None)


def text_to_image_info(
    sources: Sources, hidden_states: tuple[int, ...], text_length: int | None, is_distilled: bool | None
) -> TextToImageInfo:
    """What the bundle says beside its graphs: what was asked for, else what ``model_index.json`` says, else what
    klein's pipeline was published with. Raises ConfigError, InputError.
    """
    if not all(type(layer) is int and 0 <= layer < 2**31 for layer in hidden_states):
        raise InputError(f"the hidden states are {list(hidden_states)}, expected layer numbers")
    if text_length is not None and (type(text_length) is not int or not 1 <= text_length <= 2**20):
        raise InputError(f"the text length is {text_length!r}, expected at least one token, and at most {2**20}")
    if is_distilled is not None and not isinstance(is_distilled, bool):
        raise InputError(f"is_distilled is {is_distilled!r}, expected True, False or None")
    index = sources.index
    if not hidden_states and index is not None and index.has("text_encoder_out_layers"):
        layers = index.values["text_encoder_out_layers"]
        if not isinstance(layers, list) or not layers or not all(type(n) is int and n >= 0 for n in layers):
            raise index.wrong("text_encoder_out_layers", f"is {layers!r}, expected a list of layer numbers")
        hidden_states = tuple(layers)
    if text_length is None and index is not None and index.has("max_sequence_length"):
        text_length = index.integer("max_sequence_length")
    if is_distilled is None and index is not None and index.has("is_distilled"):
        is_distilled = index.boolean("is_distilled")
    return TextToImageInfo(
        text_encoder_layers=hidden_states or TEXT_ENCODER_LAYERS,
        text_length=TEXT_LENGTH if text_length is None else text_length,
        is_distilled=is_distilled,
        shift=_shift(sources.scheduler) if sources.scheduler is not None else None,
    )


def _shift(scheduler: ConfigKeys) -> float | None:
    """The static shift; None where it depends on the size of the picture."""
    scheduler.choice("_class_name", "FlowMatchEulerDiscreteScheduler")
    if scheduler.integer("num_train_timesteps") != 1000:
        raise scheduler.wrong("num_train_timesteps", "is not 1000, the only number that is built")
    for key in ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "invert_sigmas"):
        scheduler.refuse(key, unless=(False,))
    scheduler.refuse("stochastic_sampling", unless=(False,))
    scheduler.refuse("shift_terminal")
    if not scheduler.boolean("use_dynamic_shifting"):
        return scheduler.number("shift")
    scheduler.choice("time_shift_type", "exponential")
    return None


def read_tokenizer(path: Path | None, text_encoder: Checkpoint) -> TokenizerFiles:
    """The tokenizer in the folder ``path``, else the one beside or in the text encoder's file.

    Raises ConfigError where there is none, or where it lacks a chat template or a token to pad with.
    """
    beside = text_encoder.path if text_encoder.path.is_dir() else text_encoder.path.parent
    where = str(path or (text_encoder.path if text_encoder.format == "gguf" else beside))
    if path is not None:
        files = tokenizer_from_directory(_tokenizer_folder(path))
    elif text_encoder.format == "gguf":
        files = tokenizer_from_gguf(text_encoder.metadata, str(text_encoder.path))
    else:
        files = tokenizer_from_directory(beside)
    if files is None:
        raise ConfigError(f"{where}: holds no tokenizer.json; name the tokenizer's folder with --tokenizer")
    if files.chat_template is None:
        raise ConfigError(
            f"{where}: has no chat template, which prompts go through; put the model's chat_template.jinja there"
        )
    if files.pad_token_id is None:
        raise ConfigError(
            f"{where}: names no pad_token, which prompts are padded with; add it to tokenizer_config.json"
        )
    return files


def _tokenizer_folder(path: Path) -> Path:
    """The folder of a tokenizer that is named by it or by the file of the two that is read there."""
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder; expected a tokenizer")
    if path.is_dir():
        return path
    read = next((name for name in TOKENIZER_FILES if (path.parent / name).is_file()), None)
    if path.name != read:
        if path.name in TOKENIZER_FILES:
            raise InputError(f"{path}: {read} stands beside it and is what is read; name that file or the folder")
        raise InputError(f"{path}: expected {' or '.join(TOKENIZER_FILES)}, or the folder that holds it")
    return path.parent


def check_fit(components: Mapping[str, Component], tokenizer: TokenizerFiles | None, info: TextToImageInfo) -> None:
    """Whether components were made for each other, as far as their widths tell. Raises ConfigError."""
    text_encoder, transformer, vae = (components.get(role) for role in ("text_encoder", "transformer", "vae"))
    if text_encoder and transformer:
        layers, hidden = info.text_encoder_layers, text_encoder.config.hidden_size
        found, expected = len(layers) * hidden, transformer.config.joint_attention_dim
        if found != expected:
            raise ConfigError(
                f"{text_encoder.checkpoint.path}: {len(layers)} hidden states of width {hidden} make a conditioning "
                f"of {found}, but the transformer {transformer.checkpoint.path} takes {expected}; they belong to "
                "different models"
            )
    if vae and transformer:
        found, expected = vae.config.packed_channels, transformer.config.in_channels
        if found != expected:
            raise ConfigError(
                f"{vae.checkpoint.path}: has {found} latent channels (packed), but the transformer "
                f"{transformer.checkpoint.path} takes {expected}; they belong to different models"
            )
    if text_encoder and tokenizer:
        # Not how many there are: ids may have gaps.
        largest = max(Tokenizer.from_str(tokenizer.tokenizer_json).get_vocab().values(), default=0)
        if largest >= text_encoder.config.vocab_size:
            raise ConfigError(
                f"the tokenizer has token ids up to {largest}, but the embedding of {text_encoder.checkpoint.path} has "
                f"{text_encoder.config.vocab_size} rows; it is another model's"
            )
        context = text_encoder.config.max_position_embeddings
        if info.text_length > context:
            raise InputError(f"the text length is {info.text_length}, but the text encoder takes at most {context}")


def open_source(path: Path) -> Checkpoint:
    """The checkpoint at ``path``. A folder that holds a pipeline is refused by name. Raises CheckpointError."""
    if is_pipeline(path):
        raise CheckpointError(f"{path}: is a whole pipeline; name the component's own folder in it")
    return open_checkpoint(path)


def _read_keys(path: Path) -> ConfigKeys:
    return ConfigKeys(read_json(path), str(path))
