"""The Swift package that paints with a bundle's Core ML stages, beside them in ``engines/coreml/swift/``.

Its sources are the same for every bundle; what differs stands in ``picture.json``.
"""

from __future__ import annotations

import importlib.resources
import json
import shutil
from collections.abc import Mapping
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from intaglio.engines.coreml.description import FunctionDescription, read_description
from intaglio.errors import InputError
from intaglio.exporters.bundle import Bundle, Dim
from intaglio.runtimes.picture_request import PictureModel
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


def finish_coreml(folder: Path, bundle_path: Path, bundle: Bundle, dims: Mapping[str, Dim]) -> list[str]:
    """Writes the Swift package of a picture bundle into ``folder``, where its stages were built for ``dims``.

    Gives what the report is to say: why there is none, where the package cannot do what the bundle needs. Raises
    BundleError for a damaged tokenizer, EngineError, OutputError.
    """
    if bundle.kind != "text-to-image":
        return []
    if missing := [stage for stage in STAGES if stage not in bundle.stages]:
        return [f"no Swift package: the bundle lacks {', '.join(missing)}"]
    try:
        settings = picture_settings(folder, bundle_path, bundle, dims)
    except InputError as error:
        return [f"no Swift package: {error}"]
    package = folder / FOLDER
    package.mkdir()
    _copy(importlib.resources.files("intaglio.engines.coreml") / "swift", package)
    (package / SETTINGS_FILE).write_text(json.dumps(settings, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return [f"{FOLDER}/ is a Swift package that paints with these stages; it has never been compiled or run on a Mac"]


def picture_settings(folder: Path, bundle_path: Path, bundle: Bundle, dims: Mapping[str, Dim]) -> dict[str, Any]:
    """What ``picture.json`` says; paths are relative to the package. Raises InputError, BundleError, EngineError."""
    model = PictureModel.of(bundle, bundle_path, dict(dims))
    height, width = model.default_size
    heeds = model.guidance_embeds or not model.is_distilled
    return {
        "version": _VERSION,
        "stages": {stage: _stage(folder / f"{stage}.mlpackage") for stage in STAGES},
        "prompt": _prompt(bundle_path, bundle, model.text_length),
        "latents": {"channels": model.channels, "pixels": model.factor},
        "sampling": {
            "steps": model.steps(None),
            "guidance": model.guidance(None),
            "most": _MOST_GUIDANCE if heeds else 1.0,
            "shift": model.shift,
            "embedded": model.guidance_embeds,
        },
        "size": {"height": height, "width": width},
    }


def _stage(package: Path) -> dict[str, Any]:
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


def _prompt(bundle_path: Path, bundle: Bundle, length: int) -> dict[str, Any]:
    if bundle.tokenizer is None or bundle.tokenizer.pad_token_id is None:
        raise InputError("the bundle has no tokenizer with a token to pad with; export it again")
    tokenizer = Tokenizer.of_bundle(bundle_path, bundle)
    model = json.loads((tokenizer.folder / "tokenizer.json").read_text("utf-8"))["model"]
    if model.get("type") not in _TOKENIZERS:
        raise InputError(
            f"the tokenizer is a {model.get('type')} model, and swift-transformers has {', '.join(_TOKENIZERS)}"
        )
    before, after = text_around(tokenizer)
    text = _PROBES[0]
    return {
        "tokenizer": f"../../../{bundle.tokenizer.folder}/tokenizer.json",
        "kind": _TOKENIZERS[model["type"]],
        "unknown": model.get("unk_token"),
        "before": before,
        "after": after,
        "length": length,
        "pad": bundle.tokenizer.pad_token_id,
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
            f"the chat template does more than put text around a prompt{f' such as {changed[0]!r}' if changed else ''}"
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
