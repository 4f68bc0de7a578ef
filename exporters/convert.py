"""``convert``: a checkpoint in another format, exactly or not at all.

Within a format tensors, names and settings are copied. Between GGUF and Hugging Face folders they go through the
model's architecture, which knows both spellings and the order of rows; FLUX.2's transformer is a single file on both
sides and has a module of its own. Only ``storage`` asks for rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from intaglio.errors import ConfigError, InputError
from intaglio.exporters.architecture import Architecture, find_architecture, match_weights, model_tensors, read_config
from intaglio.exporters.checkpoints import Checkpoint, CheckpointTensor, open_checkpoint
from intaglio.exporters.checkpoints.gguf_blocks import DENSE_TYPES, StoredTensor
from intaglio.exporters.checkpoints.gguf_header import GgufMetadata
from intaglio.exporters.checkpoints.gguf_pack import PACKED_TYPES
from intaglio.exporters.checkpoints.gguf_writer import GgufTensor, write_gguf
from intaglio.exporters.checkpoints.mlx import UnresolvedMlxTensor
from intaglio.exporters.checkpoints.safetensors_writer import SHARD_BYTES, write_file
from intaglio.exporters.checkpoints.tensors import reorder_rows
from intaglio.exporters.checkpoints.ternary import TernaryTensor, pack_blocks
from intaglio.exporters.config import assumed_note
from intaglio.exporters.convert_config import (
    check_gguf_config,
    gguf_architecture,
    gguf_config,
    gguf_tensor_name,
    hf_config,
    untranslated_config,
    untranslated_metadata,
)
from intaglio.exporters.convert_flux2 import flux2_to_gguf, flux2_to_safetensors, is_flux2, resolved_flux2
from intaglio.exporters.convert_folder import FolderPlan, copied_files, separate_parts, tokenizer_files, write_folder
from intaglio.exporters.convert_tensors import (
    FLOATS,
    FloatTensor,
    as_float,
    check_values,
    packed_storage,
    storage_in_gguf,
)
from intaglio.exporters.convert_tokenizer import tokenizer_metadata
from intaglio.exporters.tokenizer import TokenizerFiles, tokenizer_from_directory, tokenizer_from_gguf
from intaglio.progress import ProgressCallback

# Types that ``storage`` may name.
STORAGES = tuple(dict.fromkeys([*FLOATS, *PACKED_TYPES]))


@dataclass(frozen=True)
class ConvertedTensor:
    """One tensor of the report: its names and types on both sides, and whether every value stayed what it was."""

    source: str
    name: str
    shape: tuple[int, ...]
    source_storage: str
    storage: str
    exact: bool


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did, or with ``dry_run`` would do. ``notes`` say what did not go along."""

    source: Path
    target: Path
    source_format: str
    target_format: str
    architecture: str | None
    tensors: tuple[ConvertedTensor, ...]
    notes: tuple[str, ...]

    @property
    def rounded(self) -> tuple[ConvertedTensor, ...]:
        """The tensors whose values were rounded, which happens only where a type was asked for."""
        return tuple(tensor for tensor in self.tensors if not tensor.exact)


@dataclass
class _Job:
    """What is to be written: tensors under their new names, with the type to write them in where it is not theirs."""

    checkpoint: Checkpoint
    target: Path
    overrides: Mapping[str, Any]
    architecture: Architecture | None = None
    tensors: dict[str, tuple[str, CheckpointTensor, str | None]] = field(default_factory=dict)
    metadata: Any = field(default_factory=dict)
    config: dict[str, Any] | None = None
    tokenizer: TokenizerFiles | None = None
    copies: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def convert(
    source: str | Path,
    target: str | Path,
    *,
    storage: str | None = None,
    config: Mapping[str, Any] | None = None,
    pack_ternary: bool = False,
    tokenizer: bool = True,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    dry_run: bool = False,
    progress: ProgressCallback | None = None,
) -> ConversionReport:
    """Converts the checkpoint at ``source`` to ``target``: a GGUF file if that ends in ``.gguf``, else a folder, or
    one safetensors file for a model that needs no ``config.json``.

    A folder holds safetensors as Hugging Face lays them out, quantized matrices as MLX's three tensors, with
    ``config.json`` and tokenizer. Every value stays what it is, or the conversion is refused naming tensor, row and
    group. ``storage`` asks for another type: of matrices in GGUF files (F32, F16, BF16, Q8_0, Q4_0, …; vectors are
    F32 there), of all floating-point tensors in folders (F32, F16, BF16). Dense tensors are then rounded or
    quantized, and the report says which; quantized ones become another block type exactly or not at all.

    ``config`` overrides or adds configuration keys, of a checkpoint without ``config.json`` for example.
    ``pack_ternary`` packs the dense matrices of the blocks, which must be exactly ternary in groups of 128 inputs, into
    two bits.
    ``tokenizer`` false leaves the tokenizer out, ``overwrite`` replaces what is at ``target``, ``shard_bytes`` is the
    size above which a folder gets another shard, ``dry_run`` does everything but write.

    The target appears in one step at the end. Raises CheckpointError, ConfigError, WeightsError, InputError,
    or OutputError where a folder cannot be written.
    """
    checkpoint, target = open_checkpoint(source), Path(target)
    to_gguf, overrides = target.suffix == ".gguf", dict(config or {})
    same_format, flux2 = (checkpoint.format == "gguf") == to_gguf, is_flux2(checkpoint)
    _check_arguments(checkpoint, target, storage, to_gguf=to_gguf, overwrite=overwrite)
    if flux2 and storage is not None and any(isinstance(t, UnresolvedMlxTensor) for t in checkpoint.tensors.values()):
        checkpoint = resolved_flux2(checkpoint, overrides)
    elif same_format and overrides:
        raise InputError(
            f"--config {', '.join(overrides)}: within a format the configuration is copied; change the copy's"
        )
    job = _Job(checkpoint, target, overrides)
    if pack_ternary:
        _pack(job, storage)
    if same_format:
        _same_format(job, tokenizer)
    elif flux2:
        _flux2(job, storage, to_gguf=to_gguf)
    elif to_gguf:
        _to_gguf(job, tokenizer)
    else:
        _to_folder(job, tokenizer)
    native = to_gguf and checkpoint.format == "gguf"
    for name, (origin, tensor, settled) in job.tensors.items():
        what = f"{target}: {name}"
        if to_gguf and settled is None:
            job.tensors[name] = (origin, *storage_in_gguf(what, tensor, storage, native=native))
        elif not to_gguf:
            job.tensors[name] = (origin, as_float(tensor, storage), None)
    if to_gguf:
        _write_gguf(job, dry_run, progress)
    elif target.suffix == ".safetensors":
        _write_file(job, dry_run, progress)
    else:
        _write_folder(job, storage, shard_bytes, dry_run, progress)
    return _report(job, "gguf" if to_gguf else "safetensors")


def _check_arguments(
    checkpoint: Checkpoint, target: Path, storage: str | None, *, to_gguf: bool, overwrite: bool
) -> None:
    allowed = STORAGES if to_gguf else tuple(FLOATS)
    if storage is not None and storage not in allowed:
        kind = "a GGUF file" if to_gguf else "a folder"
        raise InputError(f"--type {storage!r}: {kind} can be written as {', '.join(allowed)}, or as it is without it")
    # FLUX.2's transformer is published as one file, and what has no configuration has none to lose.
    alone = is_flux2(checkpoint) or (checkpoint.format == "safetensors" and not checkpoint.config)
    if target.suffix == ".json" or (target.suffix == ".safetensors" and not alone):
        raise InputError(f"{target}: name NAME.gguf or a folder; weights alone would lose configuration and tokenizer")
    to_file = target.suffix in (".gguf", ".safetensors")
    files = [file.resolve() for file in (*checkpoint.files, checkpoint.path)]
    if any(target.resolve() in (file, *file.parents) for file in files):
        raise InputError(f"{target}: holds the checkpoint that is read; choose another path")
    if target.is_dir() if to_file else target.exists() and not target.is_dir():
        raise InputError(
            f"{target}: is a {'folder' if to_file else 'file'}, so it is not replaced; choose another path"
        )
    if not target.exists() or (not to_file and not any(target.iterdir())):
        return
    if not overwrite:
        raise InputError(f"{target}: exists; --overwrite replaces it")
    if not to_file and not (target / "config.json").is_file():
        raise InputError(f"{target}: is no model's folder (no config.json), so it is not replaced; choose another path")


# --- what is to be written ----------------------------------------------------------------------------------


def _pack(job: _Job, storage: str | None) -> None:
    if storage is not None:
        raise InputError(f"--pack-ternary and --type {storage} ask for two things; leave one of them out")
    checkpoint = job.checkpoint
    job.checkpoint = replace(checkpoint, tensors=pack_blocks(checkpoint.tensors, str(checkpoint.path)))


def _flux2(job: _Job, storage: str | None, *, to_gguf: bool) -> None:
    if to_gguf:
        planned = flux2_to_gguf(job.checkpoint, storage, job.overrides)
        job.metadata = planned.settings
    else:
        with_config = job.target.suffix != ".safetensors"
        planned = flux2_to_safetensors(job.checkpoint, storage, job.overrides, with_config=with_config)
        job.config = planned.settings
        packed = any(tensor.layout is not None for _, tensor, _ in planned.tensors.values()) and storage is None
        job.metadata = {"format": "mlx" if packed else "pt"}
    job.tensors = planned.tensors
    job.notes += planned.notes


def _same_format(job: _Job, tokenizer: bool) -> None:
    checkpoint = job.checkpoint
    job.tensors = {name: (name, tensor, None) for name, tensor in checkpoint.tensors.items()}
    if checkpoint.format == "gguf":
        job.metadata = GgufMetadata(checkpoint.metadata)
        if not tokenizer:
            raise InputError("--no-tokenizer: a GGUF file is copied with all of its metadata; leave the option out")
        return
    job.metadata = dict(checkpoint.metadata)
    job.config = dict(checkpoint.config) or None
    job.copies, left = copied_files(checkpoint, tokenizer=tokenizer)
    if left:
        job.notes.append(f"not copied: {', '.join(left)}")


def _model(job: _Job) -> tuple[Architecture, Any, dict[str, CheckpointTensor], list[str]]:
    checkpoint = job.checkpoint
    architecture, keys = find_architecture(checkpoint)
    config, assumed = read_config(architecture, keys, job.overrides)
    if assumed:
        job.notes.append(assumed_note(assumed, asdict(config)))
    if checkpoint.format != "gguf":
        carried = {"bos_token_id", "eos_token_id", "pad_token_id"}
        if left := [key for key in untranslated_config(keys) if key not in carried]:
            job.notes.append(f"config.json keys without a place in GGUF, not carried over: {', '.join(left)}")
    model = architecture.build(config)
    weights, unused = match_weights(
        model,
        {name for name, _ in model.named_parameters()},
        model_tensors(checkpoint, architecture, config),
        lambda name: architecture.unneeded(name, config),
        str(checkpoint.path),
        advice="a conversion would lose them",
    )
    if unused:
        job.notes.append(f"tensors that the model does not need, not carried over: {', '.join(unused)}")
    job.architecture = architecture
    return architecture, config, weights, unused


def _to_gguf(job: _Job, tokenizer: bool) -> None:
    architecture, config, weights, _ = _model(job)
    _, spelled = gguf_architecture(architecture)
    folder = job.checkpoint.path if job.checkpoint.path.is_dir() else job.checkpoint.path.parent
    metadata, extra = gguf_config(architecture, config, str(folder / "config.json"))
    for hf_name, tensor in weights.items():
        order = spelled.gguf_row_order(hf_name, tensor.shape[0], config)
        moved = tensor if order is None else reorder_rows(tensor, np.argsort(order))
        job.tensors[gguf_tensor_name(hf_name, spelled)] = (hf_name, moved, None)
    job.tensors |= {key: (key, tensor, None) for key, tensor in extra.items()}
    check_gguf_config(architecture, config, job.target, metadata, {k: t for k, (_, t, _) in job.tensors.items()})
    files = tokenizer_from_directory(folder) if tokenizer else None
    if files is not None:
        metadata |= tokenizer_metadata(files, config.vocab_size, str(folder / "tokenizer.json"))
    else:
        job.notes.append("no tokenizer" + ("" if tokenizer else ", as asked for"))
    job.metadata = metadata
    known = {"config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"}
    left = [file.name for file in copied_files(job.checkpoint, tokenizer=True)[0] if file.name not in known]
    if left:
        job.notes.append(f"files of the folder without a place in GGUF, not carried over: {', '.join(left)}")
    if stray := sorted(set(job.checkpoint.metadata) - {"format"}):
        job.notes.append(f"metadata of the safetensors files, not carried over: {', '.join(stray)}")


def _to_folder(job: _Job, tokenizer: bool) -> None:
    architecture, config, weights, _ = _model(job)
    checkpoint, source = job.checkpoint, str(job.checkpoint.path)
    origins = {architecture.gguf_name(name) or name: name for name in checkpoint.tensors}
    job.tensors = {name: (origins[name], tensor, None) for name, tensor in weights.items()}
    job.metadata = {"format": "pt"}
    job.config = hf_config(architecture, config, source, "float32")
    if tokenizer and any(key.startswith("tokenizer.") for key in checkpoint.metadata):
        try:
            job.tokenizer = tokenizer_from_gguf(checkpoint.metadata, source)
        except ConfigError as error:
            raise ConfigError(f"{error} --no-tokenizer converts the weights alone.") from error
        ids = job.tokenizer.eos_token_ids
        job.config |= {
            "bos_token_id": job.tokenizer.bos_token_id,
            "eos_token_id": ids[0] if len(ids) == 1 else list(ids) or None,
            "pad_token_id": job.tokenizer.pad_token_id,
        }
    else:
        job.notes.append("no tokenizer" + ("" if tokenizer else ", as asked for"))
    name = checkpoint.metadata["general.architecture"]
    if left := untranslated_metadata(checkpoint.metadata, name, tokenizer=tokenizer):
        job.notes.append(f"metadata without a place in a folder, not carried over: {', '.join(left)}")


# --- writing ------------------------------------------------------------------------------------------------


def _write_gguf(job: _Job, dry_run: bool, progress: ProgressCallback | None) -> None:
    for name, (origin, tensor, storage) in job.tensors.items():
        if tensor.layout is not None and storage is None and not isinstance(tensor, StoredTensor):
            job.tensors[name] = (origin, tensor, packed_storage(str(job.target), name, tensor))
    if any(storage == "TQ2_0_g128" for _, _, storage in job.tensors.values()):
        job.notes.append(
            "TQ2_0_g128 is written with the type id 42, which other readers may refuse or take for another"
        )
    if job.metadata.get("general.file_type") is not None and any(storage for _, _, storage in job.tensors.values()):
        del job.metadata["general.file_type"]
        job.notes.append("general.file_type, which named the old types, is left out")
    if dry_run:
        for name, (_, tensor, storage) in job.tensors.items():
            check_values(str(job.target), name, tensor, storage, to_gguf=True)
        return
    tensors = [GgufTensor(name, tensor, storage) for name, (_, tensor, storage) in job.tensors.items()]
    if any(storage in PACKED_TYPES for _, _, storage in job.tensors.values()):
        job.metadata.setdefault("general.quantization_version", 2)
    write_gguf(job.target, job.metadata, tensors, progress)


def _write_file(job: _Job, dry_run: bool, progress: ProgressCallback | None) -> None:
    tensors = {name: tensor for name, (_, tensor, _) in job.tensors.items()}
    if dry_run:
        for name, tensor in tensors.items():
            check_values(str(job.target), name, tensor, None, to_gguf=False)
        return
    write_file(job.target, separate_parts(tensors), job.metadata, progress)


def _write_folder(
    job: _Job, storage: str | None, shard_bytes: int, dry_run: bool, progress: ProgressCallback | None
) -> None:
    tensors = {name: tensor for name, (_, tensor, _) in job.tensors.items()}
    plan = FolderPlan(
        tensors=tensors,
        metadata=job.metadata,
        config=job.config,
        changed=storage is not None
        or job.checkpoint.format == "gguf"
        or any(isinstance(tensor, TernaryTensor) for tensor in tensors.values()),
        texts=tokenizer_files(job.tokenizer) if job.tokenizer else {},
        copies=tuple(job.copies),
    )
    if dry_run:
        for name, tensor in tensors.items():
            check_values(str(job.target), name, tensor, None, to_gguf=False)
        return
    write_folder(job.target, plan, shard_bytes, progress)


def _report(job: _Job, target_format: str) -> ConversionReport:
    tensors = []
    for name, (origin, tensor, storage) in job.tensors.items():
        written = storage or tensor.storage
        if storage is None and target_format == "safetensors" and tensor.layout is not None:
            written = f"MLX{tensor.layout.format.bits}" if not tensor.storage.startswith("MLX") else tensor.storage
        stored = tensor
        while isinstance(source := getattr(stored, "source", None), CheckpointTensor):
            stored = source
        exact = _is_exact(tensor, storage)
        tensors.append(ConvertedTensor(origin, name, tensor.shape, stored.storage, written, exact))
    architecture = job.architecture.name if job.architecture else None
    return ConversionReport(
        job.checkpoint.path,
        job.target,
        job.checkpoint.format,
        target_format,
        architecture,
        tuple(tensors),
        (*job.checkpoint.notes, *job.notes),
    )


def _is_exact(tensor: CheckpointTensor, storage: str | None) -> bool:
    if isinstance(tensor, FloatTensor) and not tensor.exact:
        return False
    if storage is None or storage == tensor.storage or tensor.layout is not None:
        return True
    return storage in DENSE_TYPES and FloatTensor.of(tensor, storage).exact


__all__ = ["STORAGES", "ConversionReport", "ConvertedTensor", "convert"]
