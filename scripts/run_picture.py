"""``intaglio run`` with a bundle that paints pictures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import intaglio
from intaglio.engines.memory import peak_rss_bytes
from intaglio.errors import InputError
from intaglio.exporters.bundle import read_bundle
from intaglio.runtimes.images import check_png_path, save_png
from intaglio.scripts.console import human_bytes, print_json, progress_bar, say

if TYPE_CHECKING:
    from PIL.Image import Image

    from intaglio.runtimes.golden import GoldenReport

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}iB": 1024 ** (i + 1) for i, letter in enumerate("KMGT")}
_UNITS |= {f"{letter}B": 1000 ** (i + 1) for i, letter in enumerate("kMGT")}


def check_targets(output: Path | None, preview: Path | None, pictures: int, sources: Sequence[Path] = ()) -> list[Path]:
    """The files that ``pictures`` go to, which can be written and are none of ``sources``.

    Raises InputError, OutputError.
    """
    if output is None:
        raise InputError("this bundle paints pictures; name the PNG to write with -o")
    targets = [output]
    if pictures > 1:
        targets = [output.with_name(f"{output.stem}-{i + 1}{output.suffix}") for i in range(pictures)]
    written = [*targets, *([preview] if preview else [])]
    for path in written:
        check_png_path(path)
    if preview is not None and preview.resolve() in [path.resolve() for path in targets]:
        raise InputError(f"--preview {preview} is the picture's own file; name another")
    read = {source.resolve() for source in sources}
    for path in written:
        if path.resolve() in read:
            raise InputError(f"{path}: is one of --image, and would be replaced; name another file to write")
    return targets


def parse_bytes(text: str) -> int:
    """Bytes of ``4GiB``, ``3500MiB``, ``4GB`` or a plain number. Raises InputError."""
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([A-Za-z]*)\s*", text)
    unit = next((size for name, size in _UNITS.items() if match and name.lower() == match[2].lower()), None)
    if match is None or unit is None:
        raise InputError(f"--memory-budget {text!r}: expected a size such as 4GiB or 3500MiB")
    return int(float(match[1]) * unit)


def check_picture(bundle: Path, prompt: str, options: Mapping[str, Any]) -> None:
    """Raises what painting would for the prompt and the options, so that it can be known before an engine is built."""
    from intaglio.runtimes.picture_request import PictureModel, check_stages, make_request, prompt_ids
    from intaglio.runtimes.tokenizer import Tokenizer

    described = read_bundle(bundle)
    model = PictureModel.of(described, bundle, described.dims)
    request = make_request(model, prompt, options)  # type: ignore[arg-type]
    check_stages(described, bundle, request.work.loaded)
    if "text_encoder" in request.work.stages:
        tokenizer = Tokenizer.of_bundle(bundle, described)
        prompts = [*request.prompts, *(request.negative_prompts or ())]
        prompt_ids(tokenizer, prompts, model.text_length, truncate=request.truncate)


def paint(
    bundle: Path,
    prompt: str,
    targets: Sequence[Path],
    options: Mapping[str, Any],
    *,
    how: Mapping[str, Any],
    memory_budget: int | None,
    preview: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Writes the pictures to ``targets``, and says on stderr how long each stage took. ``how`` is for `load`."""
    pipeline = intaglio.load(bundle, **how, memory_budget=memory_budget, keep_loaded=False)

    def show(step: int, picture: Image) -> None:
        assert preview is not None, "asked for below"
        save_png(picture, preview)

    with progress_bar(quiet=quiet) as progress:
        result = pipeline(prompt, progress=progress, preview=show if preview else None, **options)
    for path, picture, text in zip(targets, result.images, result.texts, strict=True):
        save_png(picture, path, text)
    peak = peak_rss_bytes()
    stages = ", ".join(f"{name.replace('_', ' ')} {seconds:.1f} s" for name, seconds in result.timings.items())
    say(f"wrote {', '.join(map(str, targets))}: {stages}, peak memory {human_bytes(peak)}", quiet=quiet)
    if result.golden is not None and not as_json:
        _say_golden(result.golden, quiet=quiet)
    if as_json:
        print_json(
            {
                "files": list(map(str, targets)),
                "seeds": result.seeds,
                "timings": result.timings,
                "peak_rss_bytes": peak,
                "golden": result.golden and asdict(result.golden),
            }
        )


def _say_golden(report: GoldenReport, *, quiet: bool) -> None:
    for difference in report.differences:
        say(
            f"{difference.name}: cosine {difference.cosine:.7f}, relative L2 {difference.relative_l2:.2e}, "
            f"max abs {difference.max_abs:.2e}",
            quiet=quiet,
        )
    for name in report.missing:
        say(f"{name}: {report.folder} has no {name}.npy to compare with", quiet=quiet)
