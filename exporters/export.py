"""``export``: a published checkpoint becomes a bundle."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from intaglio.errors import InputError, OutputError
from intaglio.exporters.architecture import find_architecture
from intaglio.exporters.bundle import (
    BUNDLE_FILE,
    ROLES,
    WEIGHTS_FILE,
    AdapterInfo,
    Bundle,
    Dim,
    Kind,
    SourceFile,
    StageInfo,
    TensorInfo,
    TextToImageInfo,
    TokenizerInfo,
    WeightsInfo,
    evaluate_dim,
    expression_names,
    is_bundle,
)
from intaglio.exporters.checkpoints import Checkpoint, CheckpointTensor, open_checkpoint
from intaglio.exporters.components import Component, Options, find_component, hash_files, plan_component
from intaglio.exporters.graph import attach_weights, save_graph
from intaglio.exporters.layers.dtype import DTYPES
from intaglio.exporters.lora import Lora, check_claims, open_loras, unmatched_keys
from intaglio.exporters.picture import (
    Sources,
    check_fit,
    find_sources,
    is_pipeline,
    open_source,
    read_tokenizer,
    text_to_image_info,
)
from intaglio.exporters.tokenizer import TokenizerFiles, tokenizer_from_directory, tokenizer_from_gguf
from intaglio.exporters.weights import Part, Written, write_weights
from intaglio.output import replaced_folder
from intaglio.progress import Progress, ProgressCallback

_TOKENIZER_FOLDER = "tokenizer"
_BUNDLE_ENTRIES = {BUNDLE_FILE, WEIGHTS_FILE, _TOKENIZER_FOLDER, "engines"}
# The component that each stage of a picture bundle belongs to, by how its name begins.
_STAGE_ROLES = {"text_encoder": "text_encoder", "transformer": "transformer", "vae_": "vae"}


@dataclass(frozen=True)
class _Plan:
    """All that is known before a weight is read."""

    kind: Kind
    dtype: str
    components: dict[str, Component]
    tokenizer: TokenizerFiles | None
    text_to_image: TextToImageInfo | None = None
    loras: tuple[Lora, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of the weights file."""
        return max(component.end for component in self.components.values())


def export(
    source: str | Path | None,
    bundle: str | Path,
    *,
    transformer: str | Path | None = None,
    text_encoder: str | Path | None = None,
    vae: str | Path | None = None,
    tokenizer: str | Path | None = None,
    dtype: str = "float32",
    stages: Sequence[str] | None = None,
    hidden_states: Sequence[int] = (),
    text_length: int | None = None,
    is_distilled: bool | None = None,
    config: Mapping[str, Any] | None = None,
    pack_ternary: bool = False,
    lora: Sequence[str | Path | tuple[str | Path, float]] = (),
    taps: bool = False,
    allow_unused: bool = False,
    dry_run: bool = False,
    progress: ProgressCallback | None = None,
) -> Bundle:
    """Exports a checkpoint into the folder ``bundle`` and returns what ``bundle.json`` says.

    ``source`` is a language model, or a diffusers directory. ``transformer``, ``text_encoder``, ``vae`` and
    ``tokenizer`` name the parts of a picture pipeline one by one, each in any published spelling, and go before those
    of a directory. A picture bundle needs all three models, unless ``stages`` asks for less.

    ``dtype`` (float32, float16 or bfloat16) is that of dense weights, activations and the cache; what an
    architecture declares to be float32 stays so, and quantized weights stay as they are. ``pack_ternary`` packs dense
    weights (of the transformer, in a picture bundle) that are exactly ternary, and refuses others. ``stages`` chooses
    graphs by name, and only the weights that they need are exported. ``hidden_states`` adds the hidden states of these
    layers as outputs (0 is the embeddings, the last one normed, as transformers numbers them); in a picture bundle
    they make the conditioning, with ``text_length`` the tokens that prompts are padded to, and ``is_distilled`` says
    that the transformer takes no guidance. ``lora`` names adapters (a path, or a path and a strength; see
    ``exporters.lora``): dense weights are exported with them merged, quantized ones with a branch beside them.
    ``config`` overrides or adds configuration keys (``transformer.KEY`` in a
    picture bundle), ``taps`` makes every named point an output, ``allow_unused`` goes on past tensors that the
    architecture or an adapter's modules that no component knows, and ``dry_run`` does everything but write.

    The folder appears, or replaces an older bundle, in one step at the end. Raises CheckpointError, ConfigError,
    WeightsError (also for a weight too large for ``dtype``), InputError, or OutputError if the target is something else
    than a bundle or the disk is full.
    """
    target = Path(bundle).resolve()
    _check_target(target)
    if dtype not in DTYPES:
        raise InputError(f"the dtype {dtype!r} is unknown; there are {', '.join(DTYPES)}")
    loras = open_loras(lora)
    options = Options(dtype, tuple(hidden_states), dict(config or {}), allow_unused, pack_ternary, loras)
    given = {"text_encoder": text_encoder, "transformer": transformer, "vae": vae}
    paths = {role: Path(path) if path is not None else None for role, path in given.items()}
    folder = Path(source) if source is not None else None
    checkpoint = None
    if folder is not None and not is_pipeline(folder):
        checkpoint = open_checkpoint(folder)
        roles = find_architecture(checkpoint)[0].roles
        if "language_model" not in roles or any(paths.values()):
            role = next((role for role in roles if role in paths), None)
            if role is None:
                options_given = ", ".join(f"--{_option(role)}" for role, path in paths.items() if path is not None)
                raise InputError(f"{options_given} belongs to picture bundles, and {source} is a language model")
            if paths[role] is not None:
                raise InputError(f"{folder}: is a {role}, and so is {paths[role]}; name one of them")
            paths[role], folder, checkpoint = folder, None, None
    if checkpoint is not None:
        for value, option in ((tokenizer, "tokenizer"), (text_length, "text-length"), (is_distilled, "distilled")):
            if value is not None:
                raise InputError(f"--{option} belongs to picture bundles, and {source} is a language model")
        plan = _plan_text(checkpoint, stages, options)
    else:
        chosen = _stages_by_role(stages)
        _check_used(chosen, paths, options, {"tokenizer": tokenizer, "text-length": text_length}, is_distilled)
        sources = find_sources(folder, paths, Path(tokenizer) if tokenizer is not None else None)
        plan = _plan_picture(sources, chosen, options, text_length, is_distilled)
    claims = {role: component.claims for role, component in plan.components.items()}
    check_claims(loras, claims, allow_unused=allow_unused)
    if dry_run:
        return _describe(plan, _graphs(plan, taps), {}, Written("0" * 64, 0), {}, [()] * len(loras))
    with replaced_folder(target) as partial:
        return _write(plan, partial, taps, progress)


def _write(plan: _Plan, folder: Path, taps: bool, progress: ProgressCallback | None) -> Bundle:
    graphs = _graphs(plan, taps)
    hashes = {}
    for name, (component, graph) in graphs.items():
        parts = {part.name: part for group in component.parts.values() for part in group}
        attach_weights(graph, parts, WEIGHTS_FILE)
        save_graph(graph, folder / f"{name}.onnx")
        hashes[name] = hashlib.sha256((folder / f"{name}.onnx").read_bytes()).hexdigest()
    # Two components may name a tensor alike.
    weights: dict[str, CheckpointTensor] = {}
    placed: dict[str, tuple[Part, ...]] = {}
    for role, component in plan.components.items():
        weights |= {f"{role} {name}": tensor for name, tensor in component.weights.items()}
        placed |= {f"{role} {name}": parts for name, parts in component.parts.items()}
    total = sum(tensor.nbytes for tensor in weights.values())
    written = write_weights(
        folder / WEIGHTS_FILE, weights, placed, plan.size, Progress(progress, "weights", total, "bytes")
    )
    if plan.tokenizer:
        _write_tokenizer(folder / _TOKENIZER_FOLDER, plan.tokenizer)
    files = {role: component.checkpoint.files for role, component in plan.components.items()}
    adapters = [lora.adapter.files for lora in plan.loras]
    sizes = sum(file.stat().st_size for group in (*files.values(), *adapters) for file in group)
    count = Progress(progress, "source hashes", sizes, "bytes")
    sources = {role: hash_files(group, count) for role, group in files.items()}
    result = _describe(plan, graphs, hashes, written, sources, [hash_files(group, count) for group in adapters])
    (folder / BUNDLE_FILE).write_text(result.model_dump_json(indent=1) + "\n", "utf-8")
    return result


def _check_target(target: Path) -> None:
    if target == Path.cwd() or target in Path.cwd().parents:
        raise OutputError(f"{target}: is the working folder, which cannot be replaced; name a folder in it")
    if not target.exists():
        return
    if not is_bundle(target) and (not target.is_dir() or any(target.iterdir())):
        raise OutputError(f"{target}: exists and is not a bundle, so it is not replaced; choose another path")
    strangers = [p.name for p in target.iterdir() if p.name not in _BUNDLE_ENTRIES and p.suffix != ".onnx"]
    if strangers:
        raise OutputError(
            f"{target}: holds {', '.join(sorted(strangers))} beside the bundle, which replacing it would delete; "
            "move that away or choose another path"
        )


def _plan_text(checkpoint: Checkpoint, stages: Sequence[str] | None, options: Options) -> _Plan:
    role = "language_model"
    component = plan_component(role, checkpoint, *find_component(checkpoint, role, options), stages, options)
    tokenizer = _text_tokenizer(checkpoint)
    return _Plan("text-generation", options.dtype, {role: component}, tokenizer, loras=options.loras)


def _text_tokenizer(checkpoint: Checkpoint) -> TokenizerFiles | None:
    if checkpoint.format == "gguf":
        if not any(key.startswith("tokenizer.") for key in checkpoint.metadata):
            return None
        return tokenizer_from_gguf(checkpoint.metadata, str(checkpoint.path))
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    return tokenizer_from_directory(folder)


def _plan_picture(
    sources: Sources,
    chosen: Mapping[str, list[str] | None],
    options: Options,
    text_length: int | None,
    is_distilled: bool | None,
) -> _Plan:
    info = text_to_image_info(sources, options.hidden_states, text_length, is_distilled)
    if missing := [role for role in chosen if role not in sources.paths]:
        flags = ", ".join(f"--{_option(role)} PATH" for role in missing)
        raise InputError(
            f"a picture bundle needs {', '.join(ROLES['text-to-image'])}; give {flags}, or --stages for a part of it"
        )
    overrides = _split_config(options.config, chosen)
    checkpoints = {role: open_source(sources.paths[role]) for role in chosen}
    components: dict[str, Component] = {}
    end = 0
    for role, checkpoint in checkpoints.items():
        # Hidden states are the text encoder's, ternary weights the transformer's.
        own = replace(
            options,
            hidden_states=info.text_encoder_layers if role == "text_encoder" else (),
            config=overrides[role],
            pack_ternary=options.pack_ternary and role == "transformer",
        )
        found = find_component(checkpoint, role, own)
        # By default a language model would be exported to write text.
        names = chosen[role] or (["text_encoder"] if role == "text_encoder" else None)
        components[role] = plan_component(role, checkpoint, *found, names, own, end)
        end = components[role].end
    encoder = checkpoints.get("text_encoder")
    files = read_tokenizer(sources.tokenizer, encoder) if encoder else None
    check_fit(components, files, info)
    return _Plan("text-to-image", options.dtype, components, files, info, options.loras)


def picture_roles(stages: Sequence[str] | None) -> list[str]:
    """The components of a picture bundle that ``stages`` ask for; None asks for all. Raises InputError."""
    return list(_stages_by_role(stages))


def _stages_by_role(stages: Sequence[str] | None) -> dict[str, list[str] | None]:
    """The chosen stages of each component that has any; None takes those it exports by default."""
    if stages is None:
        return dict.fromkeys(ROLES["text-to-image"])
    chosen: dict[str, list[str] | None] = {}
    for role in ROLES["text-to-image"]:
        names = [name for name in stages if any(name.startswith(s) and r == role for s, r in _STAGE_ROLES.items())]
        if names:
            chosen[role] = names
    if not chosen or (unknown := [name for name in stages if not name.startswith(tuple(_STAGE_ROLES))]):
        what = f"the stage {unknown[0]!r} is unknown" if chosen else "no stage is chosen"
        raise InputError(f"{what}; a picture bundle has text_encoder, transformer, vae_decoder, vae_encoder")
    return chosen


def _check_used(
    chosen: Mapping[str, Any],
    paths: Mapping[str, Path | None],
    options: Options,
    text: Mapping[str, Any],
    is_distilled: bool | None,
) -> None:
    """Refuses what was asked of a component that is not exported; ``text`` are options of the text encoder."""
    asked = [(role, f"--{_option(role)} {path}") for role, path in paths.items() if path is not None]
    asked += [("text_encoder", f"--{name} {value}") for name, value in text.items() if value is not None]
    asked += [("text_encoder", "--hidden-states")] if options.hidden_states else []
    asked += [("transformer", "--pack-ternary")] if options.pack_ternary else []
    asked += [("transformer", "--distilled")] if is_distilled else []
    asked += [("transformer", "--not-distilled")] if is_distilled is False else []
    for role, option in asked:
        if role not in chosen:
            raise InputError(
                f"{option}: is for the {role.replace('_', ' ')}, of which --stages chooses nothing; leave it out, or "
                "add a stage"
            )


def _option(role: str) -> str:
    return role.replace("_", "-")


def _split_config(config: Mapping[str, Any], roles: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    split: dict[str, dict[str, Any]] = {role: {} for role in roles}
    for key, value in config.items():
        role, dot, name = key.partition(".")
        if not dot or role not in split:
            raise InputError(
                f"--config {key}: in a picture bundle a key begins with {', '.join(f'{r}.' for r in roles)}"
            )
        split[role][name] = value
    return split


def _graphs(plan: _Plan, with_taps: bool) -> dict[str, tuple[Component, ir.Model]]:
    return {
        name: (component, graph)
        for component in plan.components.values()
        for name, graph in component.graphs(with_taps=with_taps).items()
    }


def _write_tokenizer(folder: Path, files: TokenizerFiles) -> None:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(files.tokenizer_json, "utf-8")
    if files.chat_template is not None:
        (folder / "chat_template.jinja").write_text(files.chat_template, "utf-8")


def _describe(
    plan: _Plan,
    graphs: Mapping[str, tuple[Component, ir.Model]],
    hashes: Mapping[str, str],
    written: Written,
    sources: Mapping[str, tuple[SourceFile, ...]],
    adapters: Sequence[tuple[SourceFile, ...]],
) -> Bundle:
    stages = {
        name: StageInfo(
            file=f"{name}.onnx",
            sha256=hashes.get(name, "0" * 64),
            inputs=tuple(map(_tensor_info, graph.graph.inputs)),
            outputs=tuple(map(_tensor_info, graph.graph.outputs)),
        )
        for name, (_, graph) in graphs.items()
    }
    return Bundle(
        intaglio_version=importlib.metadata.version("intaglio"),
        kind=plan.kind,
        dtype=plan.dtype,
        components={role: c.describe(sources.get(role, ())) for role, c in plan.components.items()},
        stages=stages,
        dims=_dims(plan, stages),
        weights=WeightsInfo(
            file=WEIGHTS_FILE,
            bytes=plan.size,
            tensors=sum(len(group) for c in plan.components.values() for group in c.parts.values()),
            sha256=written.sha256,
            flushed_to_zero=written.flushed_to_zero,
        ),
        tokenizer=_tokenizer_info(plan.tokenizer),
        text_to_image=plan.text_to_image,
        adapters=tuple(_adapter_info(plan, index, files) for index, files in enumerate(adapters)),
    )


def _adapter_info(plan: _Plan, index: int, files: tuple[SourceFile, ...]) -> AdapterInfo:
    lora = plan.loras[index]
    claimed = {role: component.claims.modules[index] for role, component in plan.components.items()}
    return AdapterInfo(
        name=os.fsencode(lora.adapter.path.name).decode("utf-8", "replace"),
        files=files,
        strength=lora.strength,
        ranks=lora.adapter.ranks,
        modules={role: len(names) for role, names in claimed.items() if names},
        total_modules=len(lora.adapter.modules),
        unused=tuple(unmatched_keys(lora, set().union(*claimed.values()))),
    )


def _dims(plan: _Plan, stages: Mapping[str, StageInfo]) -> dict[str, Dim]:
    """The dims that inputs have, and those that their expressions name, in the order of the architectures' tables."""
    used = {n for stage in stages.values() for tensor in stage.inputs for n in tensor.shape if isinstance(n, str)}
    dims: dict[str, Dim] = {}
    for component in plan.components.values():
        for name, dim in component.architecture.dims(component.config).items():
            known = dims.setdefault(name, dim)
            # One name means one size in a bundle: what all its graphs can take.
            low, high = max(known.min, dim.min), min(known.max, dim.max)
            opt = known.opt if known.opt is None else min(max(known.opt, low), high)
            dims[name] = known.model_copy(update={"min": low, "max": high, "opt": opt})
    dims |= _usual_tokens(plan, dims)
    open_names = list(used)
    while open_names:
        name = open_names.pop()
        if name in dims and (expression := dims[name].expression):
            named = [other for other in expression_names(expression) if other not in used]
            used |= set(named)
            open_names += named
    return {name: dim for name, dim in dims.items() if name in used}


def _usual_tokens(plan: _Plan, dims: Mapping[str, Dim]) -> dict[str, Dim]:
    """The dims of tokens with the ``opt`` of the bundle's usual picture and text length, as far as it knows them."""
    usual: dict[str, int | None] = {}
    if plan.text_to_image is not None:
        usual["text_tokens"] = plan.text_to_image.text_length
    if sides := [dims[name].expression for name in ("latent_height", "latent_width") if name in dims]:
        sizes = {name: dim.opt for name, dim in dims.items() if dim.opt is not None}
        usual["image_tokens"] = evaluate_dim(" * ".join(f"({side})" for side in sides), sizes)
    return {
        name: dims[name].model_copy(update={"opt": min(max(size, dims[name].min), dims[name].max)})
        for name, size in usual.items()
        if size is not None and name in dims
    }


def _tensor_info(value: ir.Value) -> TensorInfo:
    assert value.name and value.dtype and value.shape is not None, f"{value}: dtype and shape must be known"
    shape = tuple(dim if isinstance(dim, int) else (dim.value or "?") for dim in value.shape)
    return TensorInfo(name=value.name, dtype=value.dtype.numpy().name, shape=shape)


def _tokenizer_info(files: TokenizerFiles | None) -> TokenizerInfo | None:
    if files is None:
        return None
    return TokenizerInfo(
        folder=_TOKENIZER_FOLDER,
        bos_token=files.bos_token,
        eos_token=files.eos_token,
        pad_token=files.pad_token,
        bos_token_id=files.bos_token_id,
        pad_token_id=files.pad_token_id,
        eos_token_ids=files.eos_token_ids,
        has_chat_template=files.chat_template is not None,
    )
