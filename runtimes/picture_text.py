"""What the PNG of a picture says of how it was made."""

from __future__ import annotations

import importlib.metadata

from intaglio.engines.engine import Engine
from intaglio.runtimes.picture_request import PictureRequest


def picture_text(engine: Engine, request: PictureRequest, index: int) -> dict[str, str]:
    """Keywords and texts of picture ``index`` of a request: with the same bundle they make the same picture again."""
    bundle, schedule = engine.bundle, request.schedule
    text = {"prompt": request.prompts[index]}
    if request.negative_prompts is not None:
        text["negative prompt"] = request.negative_prompts[index]
    if request.seeds is not None:
        text |= {"seed": str(request.seeds[index]), "rng": request.rng}
    elif request.golden is not None:
        text["golden"] = ", ".join([request.golden.path.name, *request.golden.replaced])
    else:
        text["seed"] = "none: latents were given"
    text |= {
        "steps": str(len(schedule.timesteps)),
        "sigmas": ", ".join(f"{sigma:.8g}" for sigma in schedule.sigmas),
        "guidance": f"{request.guidance:g}",
        "size": f"{request.width}x{request.height}",
    }
    if request.strength is not None:
        text["strength"] = f"{request.strength:g}"
    if request.references:
        text["reference pictures"] = ", ".join(f"{r.shape[3]}x{r.shape[2]}" for r in request.references)
    text["model"] = ", ".join(component.architecture for component in bundle.components.values())
    text["sources"] = "\n".join(
        f"{role} {file.name} sha256 {file.sha256}"
        for role, component in bundle.components.items()
        for file in component.source.files
    )
    compiler = next(iter(engine.info.identities.values())).compiler
    text["Software"] = f"intaglio {importlib.metadata.version('intaglio')}, {compiler}"
    return text
