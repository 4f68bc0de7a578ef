"""``intaglio export``."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from dotenv import dotenv_values

import intaglio
from intaglio.errors import InputError
from intaglio.exporters.config import assumed_note
from intaglio.scripts.console import Config, PackTernary, Quiet, adapter_file, human_bytes, progress_bar, say, settings

# Where the parts of a picture pipeline are named when the command line does not.
_VARIABLES = {
    "transformer": "INTAGLIO_TRANSFORMER",
    "text_encoder": "INTAGLIO_TEXT_ENCODER",
    "vae": "INTAGLIO_VAE",
    "tokenizer": "INTAGLIO_TOKENIZER",
}


# Python's parser of such files takes minutes for some tens of megabytes.
_MAX_DOTENV = 1 << 20


def _part(what: str, variable: str) -> Any:
    return typer.Option(
        help=f"{what} Without SOURCE also from {variable}, in the environment or in .env.", show_default=False
    )


def export(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="[SOURCE] BUNDLE",
            help="SOURCE: a .gguf file, a .safetensors file, a Hugging Face folder or a diffusers directory. "
            "BUNDLE: the folder to write; an older bundle there is replaced.",
        ),
    ],
    transformer: Annotated[Path | None, _part("A picture's transformer.", "INTAGLIO_TRANSFORMER")] = None,
    text_encoder: Annotated[Path | None, _part("Its text encoder.", "INTAGLIO_TEXT_ENCODER")] = None,
    vae: Annotated[Path | None, _part("Its VAE.", "INTAGLIO_VAE")] = None,
    tokenizer: Annotated[Path | None, _part("The folder of its tokenizer.", "INTAGLIO_TOKENIZER")] = None,
    dtype: Annotated[
        str,
        typer.Option(
            help="float32, float16 or bfloat16: of dense weights, activations and cache. Norms, softmax, rotary angles "
            "and logits stay float32, quantized weights as they are."
        ),
    ] = "float32",
    stages: Annotated[
        str | None,
        typer.Option(
            help="Graphs, comma-separated: generate, score, encode (hidden states only; not by default); of pictures "
            "text_encoder, transformer, vae_decoder, vae_encoder, …"
        ),
    ] = None,
    hidden_states: Annotated[
        str | None,
        typer.Option(
            help="Layers whose hidden states become outputs, comma-separated; 0 is the embeddings. Of a picture's text "
            "encoder, those that make the conditioning (9,18,27)."
        ),
    ] = None,
    text_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens that a picture's prompt is padded to (512).")
    ] = None,
    distilled: Annotated[
        bool | None,
        typer.Option(
            "--distilled/--not-distilled", help="Whether the transformer was distilled, so takes no guidance."
        ),
    ] = None,
    config: Config = None,
    pack_ternary: PackTernary = False,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE[:STRENGTH]",
            help="A LoRA adapter to add (repeatable): a .safetensors file as peft, diffusers or kohya's scripts write "
            "it, or the folder that peft saves. The strength is 1 where none is given.",
        ),
    ] = None,
    taps: Annotated[bool, typer.Option("--taps", help="Make every named point of the graph an output.")] = False,
    allow_unused: Annotated[
        bool, typer.Option("--allow-unused", help="Go on past tensors, or modules of an adapter, that are unknown.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, write nothing.")] = False,
    quiet: Quiet = False,
) -> None:
    """Turn a checkpoint into a bundle: portable ONNX graphs, packed weights, tokenizer."""
    if len(paths) > 2:
        raise InputError(f"{len(paths)} paths are given; expected [SOURCE] BUNDLE")
    source, bundle = (paths[0] if len(paths) == 2 else None), paths[-1]
    chosen = stages.split(",") if stages else None
    parts = {"transformer": transformer, "text_encoder": text_encoder, "vae": vae, "tokenizer": tokenizer}
    if source is None:
        # What the chosen stages do not need is not looked for; named on the command line it would be an error.
        from intaglio.exporters.export import picture_roles  # brings the graph library

        roles = picture_roles(chosen)
        unnamed = [name for name, path in parts.items() if path is None]
        wanted = [name for name in unnamed if ("text_encoder" if name == "tokenizer" else name) in roles]
        parts |= _from_environment(wanted, quiet=quiet)
        if not any(parts.values()):
            raise InputError(
                f"only {bundle} is given; name a SOURCE to export from, or --transformer, --text-encoder, --vae and "
                "--tokenizer of a picture pipeline"
            )
    with progress_bar(quiet=quiet) as progress:
        result = intaglio.export(
            source,
            bundle,
            **parts,
            dtype=dtype,
            stages=chosen,
            hidden_states=_integers(hidden_states),
            text_length=text_length,
            is_distilled=distilled,
            config=settings(config),
            pack_ternary=pack_ternary,
            lora=[adapter_file(text) for text in lora or ()],
            taps=taps,
            allow_unused=allow_unused,
            dry_run=dry_run,
            progress=progress,
        )
    done = "would write" if dry_run else "wrote"
    say(
        f"{done} {bundle}: {', '.join(component.architecture for component in result.components.values())}, "
        f"stages {', '.join(result.stages)}, in {result.dtype}, "
        f"{human_bytes(result.weights.bytes)} of weights",
        quiet=quiet,
    )
    if flushed := result.weights.flushed_to_zero:
        say(f"{flushed} weights are too small for {result.dtype} and became zero", quiet=quiet)
    for adapter in result.adapters:
        say(
            f"LoRA {adapter.name}:{adapter.strength:g}: {adapter.matched} of {adapter.total_modules} modules "
            f"({', '.join(adapter.modules)}), rank {', '.join(map(str, adapter.ranks))}",
            quiet=quiet,
        )
        if adapter.unused:
            say(f"LoRA {adapter.name}: not used: {_first(adapter.unused)}", quiet=quiet)
    for component in result.components.values():
        if component.assumed:
            say(f"{component.architecture}: {assumed_note(component.assumed, component.config)}", quiet=quiet)
        if unused := component.unused_tensors:
            say(f"{component.architecture}: not used: {len(unused)} tensors ({_first(unused)})", quiet=quiet)


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (", …" if len(names) > 10 else "")


def _from_environment(names: Sequence[str], *, quiet: bool) -> dict[str, Path]:
    """What the environment says of the parts ``names``, else what ``.env`` in the working folder says."""
    found = {}
    sources = (("the environment", os.environ), (".env", _dotenv())) if names else ()
    for name in names:
        variable = _VARIABLES[name]
        where, value = next(((where, text) for where, values in sources if (text := values.get(variable))), ("", None))
        if value:
            say(f"{name.replace('_', ' ')}: {value}, as {variable} in {where} says", quiet=quiet)
            found[name] = Path(value)
    return found


def _dotenv() -> Mapping[str, str | None]:
    file = Path(".env")
    if not file.exists():
        return {}
    try:
        if file.stat().st_size > _MAX_DOTENV:
            raise InputError(f".env: has {file.stat().st_size} bytes, expected at most {_MAX_DOTENV}")
        return dotenv_values(stream=io.StringIO(file.read_text("utf-8-sig")))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f".env: cannot be read as text ({error}); mend it, or name the parts with options") from error


def _integers(text: str | None) -> list[int]:
    try:
        return [int(item) for item in text.split(",")] if text else []
    except ValueError as error:
        raise InputError(f"--hidden-states {text!r}: expected layer numbers, comma-separated") from error
