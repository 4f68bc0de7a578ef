"""The Swift package that paints with a bundle's Core ML stages, beside them in ``engines/coreml/swift/``.

Its sources are the same for every bundle; what differs stands in ``picture.json``.
"""

from __future__ import annotations

import importlib.resources
import json
import shutil
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from intaglio.engines.coreml.description import FunctionDescription, read_description
from intaglio.engines.engine import Engine, open_engine, write_report
from intaglio.engines.report import Report
from intaglio.errors import BundleError, InputError
from intaglio.exporters.bundle import read_bundle
from intaglio.output import replaced_folder
from intaglio.runtimes.picture_request import PictureModel, check_stages
from intaglio.runtimes.tokenizer import Tokenizer

FOLDER, SETTINGS_FILE = "swift", "picture.json"
STAGES = ("text_encoder", "transformer", "vae_decoder")
_VERSION = 1
# The classes of swift-transformers, by the kind of the model in `tokenizer.json`.
_TOKENIZERS = {"BPE": "PreTrainedTokenizer", "Unigram": "T5Tokenizer", "WordPiece": "BertTokenizer"}
# What a chat template could do more with than put text around it: white space at the ends, markup, other scripts.
_PROBES = ("a red apple", "  two  spaces\n", "", "{{ 1 }} <b>&amp;", "Ärger 苹果 🍎")
# What the PictureModel takes where a model heeds guidance at all.
_MOST_GUIDANCE = 1000.0


def add_swift_package(bundle: str | Path, report: Report) -> Report:
    """Writes the package for a bundle that has all it takes, and says in the report of the engine that it is there.

    Raises what :func:`write_swift_package` raises where the bundle should have one; what the Swift code cannot do is
    said in the report and is no error.
    """
    described = read_bundle(Path(bundle))
    if described.kind != "text-to-image" or any(stage not in described.stages for stage in STAGES):
        return report
    try:
        write_swift_package(bundle)
        note = f"{FOLDER}/ is a Swift package that paints with these stages; it was not tried on this system"
    except InputError as error:
        note = f"there is no Swift package: {error}"
    noted = report.model_copy(update={"notes": (*report.notes, note)})
    write_report(bundle, noted)
    return noted


def write_swift_package(bundle: str | Path) -> Path:
    """Writes the package of a picture bundle that was compiled for Core ML, and returns its folder.

    Raises BundleError for a bundle of another kind or that lacks a stage, InputError where the package cannot do what
    the bundle needs, EngineError where it is not compiled, OutputError.
    """
    engine = open_engine(bundle, "coreml")
    settings = picture_settings(engine)
    with replaced_folder(engine.path / FOLDER) as folder:
        _copy(importlib.resources.files("intaglio.engines.coreml") / "swift", folder)
        (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return engine.path / FOLDER


def picture_settings(engine: Engine) -> dict[str, Any]:
    """What ``picture.json`` says of an engine; paths are relative to the package. Errors as above."""
    model = PictureModel.of(engine.bundle, engine.bundle_path, engine.dims)
    check_stages(engine.bundle, engine.bundle_path, STAGES)
    info = engine.bundle.text_to_image
    assert info is not None, "a bundle for text-to-image"
    height, width = model.default_size
    heeds = model.guidance_embeds or not model.is_distilled
    return {
        "version": _VERSION,
        "stages": {stage: _stage(engine, stage) for stage in STAGES},
        "prompt": _prompt(engine, model.text_length),
        "latents": {"channels": model.channels, "pixels": model.factor},
        "sampling": {
            "steps": model.steps(None),
            "guidance": model.guidance(None),
            "most": _MOST_GUIDANCE if heeds else 1.0,
            "shift": info.shift,
            "embedded": model.guidance_embeds,
        },
        "size": {"height": height, "width": width},
    }


def _stage(engine: Engine, stage: str) -> dict[str, Any]:
    package = engine.artifact(stage)
    functions = read_description(package).functions
    several = len(functions) > 1
    return {
        "package": f"../{package.name}",
        "functions": [_function(each, name if several else None) for name, each in functions.items()],
    }


def _function(function: FunctionDescription, name: str | None) -> dict[str, Any]:
    return {
        "name": name,
        "sizes": function.sizes,
        "dims": {dim: {"min": bounds.min, "max": bounds.max} for dim, bounds in function.dims.items()},
        "inputs": {tensor.name: tensor.package_name for tensor in function.inputs},
        "outputs": {tensor.name: tensor.package_name for tensor in function.outputs},
    }


def _prompt(engine: Engine, length: int) -> dict[str, Any]:
    tokenizer = Tokenizer.of_bundle(engine.bundle_path, engine.bundle)
    if tokenizer.pad_token_id is None:
        raise BundleError(f"{engine.bundle_path}: its tokenizer has no token to pad with; export it again")
    model = json.loads((tokenizer.folder / "tokenizer.json").read_text("utf-8"))["model"]
    if model["type"] not in _TOKENIZERS:
        raise InputError(
            f"{engine.bundle_path}: its tokenizer is a {model['type']}; swift-transformers has {', '.join(_TOKENIZERS)}"
        )
    before, after = text_around(tokenizer)
    text = _PROBES[0]
    return {
        "tokenizer": f"../../../{tokenizer.folder.relative_to(engine.bundle_path).as_posix()}/tokenizer.json",
        "kind": _TOKENIZERS[model["type"]],
        "unknown": model.get("unk_token"),
        "before": before,
        "after": after,
        "length": length,
        "pad": tokenizer.pad_token_id,
        "probe": {"text": text, "ids": tokenizer.encode(before + text + after, add_special_tokens=False)},
    }


def text_around(tokenizer: Tokenizer) -> tuple[str, str]:
    """What the chat template puts before and after a prompt. Raises InputError for one that does more than that."""

    def rendered(prompt: str) -> str:
        return tokenizer.apply_chat_template([{"role": "user", "content": prompt}], enable_thinking=False)

    mark = "\u2603intaglio\u2603"
    before, found, after = rendered(mark).partition(mark)
    changed = [probe for probe in _PROBES if rendered(probe) != before + probe + after]
    if not found or mark in after or changed:
        raise InputError(
            f"{tokenizer.folder}: its chat template does more than put text around a prompt"
            f"{f' such as {changed[0]!r}' if changed else ''}, which the Swift package does not"
        )
    return before, after


def _copy(source: Traversable, target: Path) -> None:
    for item in source.iterdir():
        if item.is_dir():
            (target / item.name).mkdir()
            _copy(item, target / item.name)
        else:
            with item.open("rb") as read, (target / item.name).open("wb") as write:
                shutil.copyfileobj(read, write)
