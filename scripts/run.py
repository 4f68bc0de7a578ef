"""``intaglio run``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import intaglio
from intaglio.engines.engine import engine_path
from intaglio.engines.target import session_options, target_module
from intaglio.errors import InputError
from intaglio.exporters.bundle import read_bundle
from intaglio.runtimes.noise import GENERATORS
from intaglio.scripts.console import Json, Quiet, Target, Threads, adapter_file, progress_bar, say
from intaglio.scripts.run_picture import check_picture, check_targets, paint, parse_bytes
from intaglio.scripts.run_text import write_text

_MAX_PROMPT = 16 << 20
# What an option is called on the command line where its name says otherwise.
_SPELLINGS = {
    "num_inference_steps": "--steps",
    "guidance_scale": "--guidance",
    "num_images_per_prompt": "--num-images",
    "as_json": "--json",
}


def run(
    bundle: Annotated[Path, typer.Argument(help="A bundle that `intaglio export` wrote.")],
    prompt: Annotated[
        str, typer.Argument(help="The text to continue, or with --chat to answer; what to paint. - reads stdin.")
    ],
    target: Target = "cpu",
    seed: Annotated[
        list[int] | None,
        typer.Option(help="Makes a draw repeatable. Of pictures one for each, or the first of numbers that follow."),
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Text: most tokens to write (128).")] = None,
    temperature: Annotated[float | None, typer.Option(help="Text: 0 always takes the likeliest token (0).")] = None,
    top_k: Annotated[int | None, typer.Option(help="Text: draw from the k likeliest tokens only.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Text: draw from the likeliest tokens that sum to p.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Text: draw from tokens at least p times as likely as the likeliest only.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Text: above 1, tokens that the prompt or the text has are less likely.")
    ] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Text: put the prompt through the model's chat template.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Pictures: the PNG to write; several become NAME-1.png, NAME-2.png, …"),
    ] = None,
    width: Annotated[
        int | None, typer.Option(help="Pictures: pixels, of FLUX.2 a multiple of 16 (the model's, or that of --image).")
    ] = None,
    height: Annotated[int | None, typer.Option(help="Pictures: likewise.")] = None,
    steps: Annotated[int | None, typer.Option(help="Pictures: how many (4; 50 for a model not distilled).")] = None,
    guidance: Annotated[
        float | None, typer.Option(help="Pictures: how strictly to follow the prompt (1; 4 for a model not distilled).")
    ] = None,
    negative_prompt: Annotated[str | None, typer.Option(help="Pictures: what to keep away from.")] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(help="Pictures: one to work from; repeatable. With --strength, the one to start from."),
    ] = None,
    strength: Annotated[
        float | None, typer.Option(help="Pictures: how much of --image to repaint, above 0 to 1.")
    ] = None,
    num_images: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Pictures: how many (one, or one a seed).")
    ] = None,
    rng: Annotated[
        str | None, typer.Option(help=f"Pictures: whose draw of noise: {', '.join(GENERATORS)} (numpy).")
    ] = None,
    sigmas: Annotated[
        str | None, typer.Option(metavar="SIGMA,…", help="Pictures: noise levels by hand, falling from 1.")
    ] = None,
    shift: Annotated[float | None, typer.Option(help="Pictures: a fixed shift of the noise levels.")] = None,
    truncate: Annotated[
        bool | None, typer.Option("--truncate", help="Pictures: cut a prompt that is too long.", show_default=False)
    ] = None,
    memory_budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Pictures: memory to stay within, as 4GiB (a GPU's own)."),
    ] = None,
    tiled: Annotated[
        bool | None,
        typer.Option("--tiled/--no-tiled", help="Pictures: decode in bands, with less memory and more time."),
    ] = None,
    preview: Annotated[Path | None, typer.Option(help="Pictures: a small PNG, written anew at each step.")] = None,
    golden: Annotated[
        Path | None, typer.Option(help="Pictures: a folder of stored tensors to start from and compare with.")
    ] = None,
    golden_replace: Annotated[
        str | None,
        typer.Option(
            metavar="STAGE,…", help="Pictures: stages to replace by stored tensors: text_encoder, transformer."
        ),
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE[:STRENGTH]",
            help="tensorrt: a LoRA adapter to run with (repeatable); the engine must be compiled with --refit.",
        ),
    ] = None,
    compute_units: Annotated[
        str | None, typer.Option(help="coreml: what may compute: all, cpu, cpu+gpu or cpu+ne (all).")
    ] = None,
    as_json: Json = False,
    threads: Threads = 0,
    quiet: Quiet = False,
) -> None:
    """Write text or paint a picture with a bundle. Compiles it first where no engine is there yet."""
    text_options = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "chat": chat,
    }
    picture_options = {
        "width": width,
        "height": height,
        "num_inference_steps": steps,
        "guidance_scale": guidance,
        "negative_prompt": negative_prompt,
        "image": image,
        "strength": strength,
        "num_images_per_prompt": num_images,
        "rng": rng,
        "sigmas": _numbers(sigmas),
        "shift": shift,
        "truncate": truncate,
        "tiled": tiled,
        "golden": golden,
        "golden_replace": golden_replace.split(",") if golden_replace else None,
    }
    files = {"output": output, "memory_budget": memory_budget, "preview": preview, "as_json": as_json or None}
    paints = read_bundle(bundle).kind == "text-to-image"
    module = target_module(target)
    adapters = _adapters(lora or (), target)
    module.check_runs(**session_options(target, threads=threads, compute_units=compute_units))
    how = {"target": target, "threads": threads, "compute_units": compute_units, "lora": adapters}
    if paints:
        _refuse(text_options, "paints pictures", "text")
        targets = check_targets(output, preview, num_images or len(seed or [0]), image or [])
        budget = parse_bytes(memory_budget) if memory_budget is not None else None
        options = _given(picture_options)
        if seed:
            options["seed"] = seed[0] if len(seed) == 1 else seed
            options.setdefault("num_images_per_prompt", len(seed))
    else:
        _refuse(picture_options | files, "writes text", "pictures")
        if seed and len(seed) > 1:
            raise InputError(f"--seed is given {len(seed)} times, and {bundle} writes one text; expected it once")
        options = _given(text_options | {"seed": seed[0] if seed else None})
    text = _read_stdin() if prompt == "-" else prompt
    if not engine_path(bundle, target).exists():
        if paints:
            check_picture(bundle, text, options)
        say(f"no engine for {target} yet: compiling", quiet=quiet)
        with progress_bar(quiet=quiet) as progress:
            intaglio.compile(bundle, target, refit=bool(adapters), progress=progress)
    if paints:
        paint(
            bundle,
            text,
            targets,
            options,
            how=how,
            memory_budget=budget,
            preview=preview,
            as_json=as_json,
            quiet=quiet,
        )
    else:
        write_text(bundle, text, options, how=how, quiet=quiet)


def _adapters(texts: Sequence[str], target: str) -> dict[str, float]:
    if texts and target != "tensorrt":
        raise InputError(f"--lora is for the target tensorrt, and this one is {target}; export the bundle with --lora")
    read = [adapter_file(text) for text in texts]
    if twice := [file for i, (file, _) in enumerate(read) if file in dict(read[:i])]:
        raise InputError(f"--lora {twice[0]} is given twice; expected each file once")
    if missing := [file for file, _ in read if not Path(file).exists()]:
        raise InputError(f"--lora {missing[0]}: there is no such file")
    return dict(read)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _refuse(options: Mapping[str, Any], does: str, kind: str) -> None:
    """Raises InputError for an option that a bundle of this kind would ignore."""
    for name in _given(options):
        flag = _SPELLINGS.get(name, f"--{name.replace('_', '-')}")
        raise InputError(f"{flag} is for {kind}, and this bundle {does}; leave it out")


def _numbers(text: str | None) -> list[float] | None:
    try:
        return [float(item) for item in text.split(",")] if text is not None else None
    except ValueError as error:
        raise InputError(f"--sigmas {text!r}: expected numbers, comma-separated") from error


def _read_stdin() -> str:
    if sys.stdin is None:
        raise InputError("the prompt is to come from stdin, which is closed")
    raw = sys.stdin.buffer.read(_MAX_PROMPT + 1)
    if len(raw) > _MAX_PROMPT:
        raise InputError(f"the prompt on stdin is longer than {_MAX_PROMPT} bytes")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"the prompt on stdin is not UTF-8 (byte {error.start}); expected text") from error
