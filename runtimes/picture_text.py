"""What the PNG of a picture says of how it was made."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

import numpy as np

from intaglio.engines.engine import Engine
from intaglio.runtimes.checks import sha256_of
from intaglio.runtimes.picture_request import PictureRequest


def picture_text(
    engine: Engine, request: PictureRequest, index: int, band_rows: int | None, lora: Sequence[str] = ()
) -> dict[str, str]:
    """Keywords and texts of picture ``index`` of a request, decoded in bands of ``band_rows``, or whole.
    ``lora`` says which adapters the engine had.

    The same bundle, options and inputs make the same picture again, up to the rounding of another batch or machine.
    Inputs that a text cannot hold have a SHA-256: latents, conditioning and pictures of their little-endian float32
    values, pictures as ``[3, height, width]`` from -1 to 1.
    """
    bundle, schedule = engine.bundle, request.schedule
    text = {"prompt": request.prompts[index]}
    if request.negative_prompts is not None:
        text["negative prompt"] = request.negative_prompts[index]
    if request.seeds is not None:
        text |= {"seed": str(request.seeds[index]), "rng": request.rng}
    elif request.golden is not None:
        used = [f"{name} sha256 {sha256}" for name, sha256 in request.golden.used.items()]
        text["golden"] = "\n".join([", ".join([request.golden.path.name, *request.golden.replaced]), *used])
    else:
        assert request.noise is not None, "only golden tensors replace the noise"
        text["seed"] = f"none: latents were given, sha256 {sha256_of(request.noise[index])}"
    text |= {
        "steps": str(len(schedule.timesteps)),
        "sigmas": ", ".join(f"{sigma:.9g}" for sigma in schedule.sigmas),
        "guidance": _number(request.guidance),
        "size": f"{request.width}x{request.height}",
    }
    if request.start is not None and request.strength is not None:
        text |= {"strength": _number(request.strength), "start picture": _picture(request.start)}
    if request.references:
        text["reference pictures"] = "\n".join(map(_picture, request.references))
    if request.truncate:
        text["truncate"] = "yes"
    if band_rows is not None:
        text["decoded"] = f"in bands of {band_rows} rows"
    if lora:
        text["lora"] = "\n".join(lora)
    text["model"] = ", ".join(component.architecture for component in bundle.components.values())
    text["sources"] = "\n".join(
        f"{role} {file.name} sha256 {file.sha256}"
        for role, component in bundle.components.items()
        for file in component.source.files
    )
    text["weights"] = f"{bundle.dtype}, sha256 {bundle.weights.sha256}"
    text["graphs"] = "\n".join(f"{stage} sha256 {bundle.stages[stage].sha256}" for stage in request.work.stages)
    built = next(iter(engine.info.identities.values()))
    text["engine"] = f"{engine.info.target}, {built.accuracy}, {built.device}"
    text["Software"] = f"intaglio {importlib.metadata.version('intaglio')}, {built.compiler}"
    return text


def _number(value: float) -> str:
    return str(float(value)).removesuffix(".0")


def _picture(image_13HW: np.ndarray) -> str:
    return f"{image_13HW.shape[3]}x{image_13HW.shape[2]} sha256 {sha256_of(image_13HW)}"
