"""What the runtime reads of a picture bundle's components, and how the stages fit it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError

if TYPE_CHECKING:
    from intaglio.exporters.bundle import Bundle, StageInfo

_Width = Annotated[int, Field(ge=1, le=2**22, strict=True)]
_Widths = Annotated[tuple[_Width, ...], Field(min_length=1, max_length=16)]


class _Keys(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _TextEncoder(_Keys):
    hidden_size: _Width
    intermediate_size: _Width
    num_attention_heads: _Width
    num_hidden_layers: _Width


class _Transformer(_Keys):
    in_channels: _Width
    joint_attention_dim: _Width
    num_attention_heads: _Width
    attention_head_dim: _Width
    num_layers: Annotated[int, Field(ge=0, le=10_000, strict=True)]
    num_single_layers: Annotated[int, Field(ge=0, le=10_000, strict=True)]
    mlp_ratio: Annotated[float, Field(gt=0, le=1000)]
    guidance_embeds: StrictBool


class _Vae(_Keys):
    latent_channels: _Width
    patch_size: Annotated[int, Field(ge=1, le=16, strict=True)]
    block_out_channels: _Widths
    decoder_block_out_channels: _Widths
    layers_per_block: Annotated[int, Field(ge=1, le=32, strict=True)]
    norm_num_groups: _Width


_KEYS: dict[str, type[_Keys]] = {"text_encoder": _TextEncoder, "transformer": _Transformer, "vae": _Vae}
# Of each stage that a pipeline runs: its inputs and its output. A graph with taps has more outputs.
_STAGES: dict[str, tuple[set[str], str]] = {
    "text_encoder": ({"input_ids", "attention_mask"}, "prompt_embeds"),
    "transformer": ({"hidden_states", "encoder_hidden_states", "timestep", "img_ids", "txt_ids"}, "noise_pred"),
    "vae_decoder": ({"latents"}, "sample"),
    "vae_encoder": ({"image"}, "latents"),
}


def check_picture(bundle: Bundle) -> None:
    """Raises ValueError where a component lacks what the runtime reads, or a stage is not its component's."""
    keys = {role: _read(role, component.config) for role, component in bundle.components.items()}
    for name, stage in bundle.stages.items():
        role = "vae" if name.startswith("vae_") else name
        if role not in keys:
            raise ValueError(f"stages.{name} belongs to the component {role}, which components lacks")
        if name in _STAGES:
            _check_stage(name, stage, keys[role])
    info, encoder = bundle.text_to_image, keys.get("text_encoder")
    if info is not None and isinstance(encoder, _TextEncoder):
        if max(info.text_encoder_layers) > encoder.num_hidden_layers:
            raise ValueError(
                f"text_to_image.text_encoder_layers is {list(info.text_encoder_layers)}, and the text encoder has "
                f"{encoder.num_hidden_layers} layers"
            )
        width = len(info.text_encoder_layers) * encoder.hidden_size
        _check_width(bundle, "text_encoder", "prompt_embeds", -1, width)
    transformer, vae = keys.get("transformer"), keys.get("vae")
    if isinstance(transformer, _Transformer):
        _check_width(bundle, "transformer", "hidden_states", -1, transformer.in_channels)
        _check_width(bundle, "transformer", "encoder_hidden_states", -1, transformer.joint_attention_dim)
    if isinstance(vae, _Vae):
        _check_width(bundle, "vae_decoder", "latents", 1, vae.latent_channels * vae.patch_size**2)


def _read(role: str, config: dict[str, object]) -> _Keys:
    try:
        return _KEYS[role].model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"components.{role}.config.{where}: {first['msg']}") from error


def _check_stage(name: str, stage: StageInfo, keys: _Keys) -> None:
    inputs, output = _STAGES[name]
    expected = inputs | {"guidance"} if isinstance(keys, _Transformer) and keys.guidance_embeds else inputs
    if (found := {tensor.name for tensor in stage.inputs}) != expected:
        raise ValueError(f"stages.{name} has the inputs {sorted(found)}, expected {sorted(expected)}")
    if output not in {tensor.name for tensor in stage.outputs}:
        raise ValueError(f"stages.{name} lacks the output {output}")


def _check_width(bundle: Bundle, stage: str, tensor: str, axis: int, width: int) -> None:
    if stage not in bundle.stages:
        return
    for info in (*bundle.stages[stage].inputs, *bundle.stages[stage].outputs):
        if info.name == tensor and (len(info.shape) < 2 or info.shape[axis] != width):
            raise ValueError(
                f"stages.{stage}: {tensor} has the shape {list(info.shape)}, and its component gives {width}"
            )
