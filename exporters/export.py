"""``export``: a published checkpoint becomes a bundle."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnxscript import nn

from intaglio.errors import ConfigError, InputError, OutputError, WeightsError
from intaglio.exporters.architecture import (
    Architecture,
    Stage,
    find_architecture,
    match_weights,
    model_tensors,
)
from intaglio.exporters.bundle import (
    BUNDLE_FILE,
    WEIGHTS_FILE,
    Bundle,
    QuantizationInfo,
    SourceFile,
    SourceInfo,
    StageInfo,
    TensorInfo,
    TokenizerInfo,
    WeightsInfo,
    is_bundle,
)
from intaglio.exporters.checkpoints import Checkpoint, CheckpointTensor, open_checkpoint
from intaglio.exporters.graph import attach_weights, build_graph, quantize_modules, save_graph, stage_parameters
from intaglio.exporters.layers.dtype import DTYPES, set_dtype
from intaglio.exporters.tokenizer import TokenizerFiles, tokenizer_from_directory, tokenizer_from_gguf
from intaglio.exporters.weights import Part, Written, plan_weights, write_weights
from intaglio.output import replaced_folder
from intaglio.progress import Progress, ProgressCallback

_TOKENIZER_FOLDER = "tokenizer"
_BUNDLE_ENTRIES = {BUNDLE_FILE, WEIGHTS_FILE, _TOKENIZER_FOLDER, "engines"}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Plan:
    """All that is known before a weight is read."""

    checkpoint: Checkpoint
    architecture: Architecture
    config: Any
    dtype: str
    weights: dict[str, CheckpointTensor]
    unused: list[str]
    parts: dict[str, tuple[Part, ...]]
    size: int
    stages: dict[str, Stage]
    tokenizer: TokenizerFiles | None


def export(
    source: str | Path,
    bundle: str | Path,
    *,
    dtype: str = "float32",
    stages: Sequence[str] | None = None,
    hidden_states: Sequence[int] = (),
    config: Mapping[str, Any] | None = None,
    taps: bool = False,
    allow_unused: bool = False,
    dry_run: bool = False,
    progress: ProgressCallback | None = None,
) -> Bundle:
    """Exports the checkpoint at ``source`` into the folder ``bundle`` and returns what ``bundle.json`` says.

    ``dtype`` (float32, float16 or bfloat16) is that of dense weights, activations and the cache; what an
    architecture declares to be float32 stays so, and quantized weights stay as they are. ``stages`` chooses graphs
    by name (all but ``encode`` by default), and only the weights that they need are exported. ``hidden_states`` adds
    the hidden states of these layers as outputs (0 is the embeddings, the last one normed, as transformers numbers
    them). ``config`` overrides or adds configuration keys, ``taps`` makes every named point an output,
    ``allow_unused`` goes on past tensors that the architecture does not know, and ``dry_run`` does everything but
    write.

    The folder appears, or replaces an older bundle, in one step at the end. Raises CheckpointError, ConfigError,
    WeightsError (also for a weight too large for ``dtype``), InputError, or OutputError if the target is something else
    than a bundle or the disk is full.
    """
    target = Path(bundle).resolve()
    _check_target(target)
    plan = _plan(Path(source), dtype, stages, tuple(hidden_states), config or {}, allow_unused)
    if dry_run:
        return _describe(plan, _graphs(plan, taps), {}, Written("0" * 64, 0), ())
    with replaced_folder(target) as folder:
        graphs = _graphs(plan, taps)
        parts = {part.name: part for group in plan.parts.values() for part in group}
        hashes = {}
        for name, graph in graphs.items():
            attach_weights(graph, parts, WEIGHTS_FILE)
            save_graph(graph, folder / f"{name}.onnx")
            hashes[name] = hashlib.sha256((folder / f"{name}.onnx").read_bytes()).hexdigest()
        total = sum(tensor.nbytes for tensor in plan.weights.values())
        written = write_weights(
            folder / WEIGHTS_FILE,
            plan.weights,
            plan.parts,
            plan.size,
            Progress(progress, "weights", total, "bytes"),
        )
        if plan.tokenizer:
            _write_tokenizer(folder / _TOKENIZER_FOLDER, plan.tokenizer)
        source_files = _hash_files(plan.checkpoint.files, progress)
        result = _describe(plan, graphs, hashes, written, source_files)
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


def _plan(
    source: Path,
    dtype: str,
    stages: Sequence[str] | None,
    hidden_states: tuple[int, ...],
    overrides: Mapping[str, Any],
    allow_unused: bool,
) -> _Plan:
    if dtype not in DTYPES:
        raise InputError(f"the dtype {dtype!r} is unknown; there are {', '.join(DTYPES)}")
    checkpoint = open_checkpoint(source)
    architecture, keys = find_architecture(checkpoint)
    _log.info("%s: %s, read as %s", source, checkpoint.format, architecture.name)
    keys = keys.overridden(overrides)
    config = architecture.read_config(keys)
    if unknown := sorted(set(overrides) - keys.asked):
        read = ", ".join(sorted(keys.asked))
        raise ConfigError(f"--config {', '.join(unknown)}: {architecture.name} does not read it; read are {read}")
    layers = config.num_hidden_layers
    _check_layers(checkpoint, layers)
    for layer in hidden_states:
        if not 0 <= layer <= layers:
            raise InputError(f"hidden states of layer {layer} are asked for; the model has 0 to {layers}")
    selected = _select(architecture.stages(config, hidden_states, DTYPES[dtype]), stages, architecture.name)
    needed = [stage_parameters(_build(architecture, config, dtype), stage) for stage in selected.values()]
    weights, unused = match_weights(
        _build(architecture, config, dtype),
        set().union(*needed),
        model_tensors(checkpoint, architecture, config),
        lambda name: architecture.unneeded(name, config),
        str(checkpoint.path),
        allow_unused=allow_unused,
    )
    parts, size = plan_weights(weights, DTYPES[dtype])
    tokenizer = _tokenizer(checkpoint)
    return _Plan(checkpoint, architecture, config, dtype, weights, unused, parts, size, selected, tokenizer)


def _build(architecture: Architecture, config: Any, dtype: str) -> nn.Module:
    model = architecture.build(config)
    set_dtype(model, DTYPES[dtype])
    return model


def _check_layers(checkpoint: Checkpoint, layers: int) -> None:
    # Before the model is built: a lie here would have us build it for hours.
    found = max((int(m[1]) + 1 for name in checkpoint.tensors if (m := re.search(r"\.(\d{1,9})\.", name))), default=0)
    if layers > found + 1000:
        raise WeightsError(f"{checkpoint.path}: the config says {layers} layers, the checkpoint has {found}")


def _select(available: Mapping[str, Stage], stages: Sequence[str] | None, model: str) -> dict[str, Stage]:
    chosen = [name for name, stage in available.items() if stage.by_default] if stages is None else stages
    for name in chosen:
        if name == "encode" and name not in available:
            raise InputError("the stage encode gives hidden states; name their layers with --hidden-states")
        if name not in available:
            raise InputError(f"the stage {name!r} is unknown; {model} has {', '.join(available)}")
    if not chosen:
        raise InputError(f"no stage is chosen; {model} has {', '.join(available)}")
    return {name: available[name] for name in chosen}


def _tokenizer(checkpoint: Checkpoint) -> TokenizerFiles | None:
    if checkpoint.format == "gguf":
        if not any(key.startswith("tokenizer.") for key in checkpoint.metadata):
            return None
        return tokenizer_from_gguf(checkpoint.metadata, str(checkpoint.path))
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    return tokenizer_from_directory(folder)


def _graphs(plan: _Plan, with_taps: bool) -> dict[str, ir.Model]:
    graphs = {}
    for name, stage in plan.stages.items():
        model = _build(plan.architecture, plan.config, plan.dtype)
        quantize_modules(model, plan.weights)
        graphs[name] = build_graph(name, model, stage, with_taps=with_taps)
    return graphs


def _write_tokenizer(folder: Path, files: TokenizerFiles) -> None:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(files.tokenizer_json, "utf-8")
    if files.chat_template is not None:
        (folder / "chat_template.jinja").write_text(files.chat_template, "utf-8")


def _hash_files(files: Sequence[Path], progress: ProgressCallback | None) -> tuple[SourceFile, ...]:
    total = Progress(progress, "source hashes", sum(file.stat().st_size for file in files), "bytes")
    result = []
    for path in files:
        digest, size = hashlib.sha256(), 0
        with path.open("rb") as file:
            while chunk := file.read(4 << 20):
                digest.update(chunk)
                size += len(chunk)
                total.advance(len(chunk))
        result.append(
            SourceFile(name=os.fsencode(path.name).decode("utf-8", "replace"), bytes=size, sha256=digest.hexdigest())
        )
    return tuple(result)


def _describe(
    plan: _Plan,
    graphs: Mapping[str, ir.Model],
    hashes: Mapping[str, str],
    written: Written,
    files: tuple[SourceFile, ...],
) -> Bundle:
    return Bundle(
        intaglio_version=importlib.metadata.version("intaglio"),
        kind="text-generation",
        architecture=plan.architecture.name,
        dtype=plan.dtype,
        config=json.loads(json.dumps(dataclasses.asdict(plan.config))),
        stages={
            name: StageInfo(
                file=f"{name}.onnx",
                sha256=hashes.get(name, "0" * 64),
                inputs=tuple(map(_tensor_info, graph.graph.inputs)),
                outputs=tuple(map(_tensor_info, graph.graph.outputs)),
            )
            for name, graph in graphs.items()
        },
        dims=plan.architecture.dims(plan.config),
        weights=WeightsInfo(
            file=WEIGHTS_FILE,
            bytes=plan.size,
            tensors=sum(len(group) for group in plan.parts.values()),
            sha256=written.sha256,
            flushed_to_zero=written.flushed_to_zero,
        ),
        tokenizer=_tokenizer_info(plan.tokenizer),
        quantization=_quantization(plan.weights.values()),
        source=SourceInfo(format=plan.checkpoint.format, files=files),
        unused_tensors=tuple(plan.unused),
    )


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


def _quantization(tensors: Any) -> tuple[QuantizationInfo, ...]:
    counts: dict[QuantizationInfo, int] = {}
    for tensor in tensors:
        if tensor.layout is None:
            info = QuantizationInfo(storage=tensor.storage, tensors=0, bits=tensor.dtype.itemsize * 8)
        else:
            quantization = tensor.layout.format
            info = QuantizationInfo(
                storage=tensor.storage,
                tensors=0,
                bits=quantization.bits,
                group_size=quantization.group_size,
                zero_point=quantization.zero_point,
                has_offsets=tensor.layout.has_offsets,
            )
        counts[info] = counts.get(info, 0) + 1
    return tuple(info.model_copy(update={"tensors": n}) for info, n in counts.items())
