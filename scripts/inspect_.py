"""``intaglio inspect``. Named so as not to shadow the standard library's module."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import intaglio
from intaglio.engines.engine import open_engine, read_report
from intaglio.errors import InputError
from intaglio.exporters.bundle import is_bundle, read_bundle
from intaglio.exporters.checkpoints.gguf_blocks import StoredTensor
from intaglio.exporters.checkpoints.tensors import CheckpointTensor
from intaglio.scripts.compile_ import print_report
from intaglio.scripts.console import Json, human_bytes, print_json, print_table


def inspect_(
    path: Annotated[Path, typer.Argument(help="A checkpoint, a bundle, or an engine (BUNDLE/engines/TARGET).")],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor of a checkpoint.")] = False,
    as_json: Json = False,
) -> None:
    """Say what a checkpoint, a bundle or an engine holds. Reads headers, no weights."""
    if is_bundle(path):
        _bundle(path, as_json)
    elif path.parent.name == "engines" and is_bundle(path.parent.parent):
        _engine(path, as_json)
    elif path.is_dir() and (path / "engine.json").is_file():
        raise InputError(f"{path}: is an engine outside its bundle; expected BUNDLE/engines/TARGET")
    else:
        _checkpoint(path, tensors, as_json)


def _checkpoint(path: Path, list_tensors: bool, as_json: bool) -> None:
    checkpoint = intaglio.open_checkpoint(path)
    content = {
        "path": str(path),
        "format": checkpoint.format,
        "files": [file.name for file in checkpoint.files],
        "config": dict(checkpoint.config),
        "metadata": {key: _short(value) for key, value in checkpoint.metadata.items()},
        "notes": list(checkpoint.notes),
        "tensors": [{"name": name, **_described(t)} for name, t in checkpoint.tensors.items()],
    }
    if as_json:
        print_json(content)
        return
    settings = {**checkpoint.config, **checkpoint.metadata}
    print_table(f"{path}: {checkpoint.format}", ("key", "value"), [(k, _short(v)) for k, v in settings.items()])
    if len(checkpoint.files) > 1:
        files = [(file.name, human_bytes(file.stat().st_size)) for file in checkpoint.files]
        print_table(f"\n{len(files)} files", ("file", "size"), files)
    kinds: dict[tuple[object, ...], list[CheckpointTensor]] = {}
    for t in checkpoint.tensors.values():
        group = t.layout.format.group_size if t.layout else None
        kinds.setdefault((t.storage, group, str(t.layout.scale_dtype) if t.layout else ""), []).append(t)
    print_table(
        f"\n{len(checkpoint.tensors)} tensors", ("storage", "tensors", "bits", "group size", "scales", "size"),
        [
            (
                storage, len(ts), _bits(sum(t.nbytes for t in ts), sum(_values(t) for t in ts)),
                "" if group is None else group, scales, human_bytes(sum(t.nbytes for t in ts)),
            )
            for (storage, group, scales), ts in sorted(kinds.items(), key=lambda item: -len(item[1]))
        ],
    )  # fmt: skip
    if list_tensors:
        print_table(
            "", ("tensor", "storage", "shape", "bytes"),
            [(n, t.storage, str(list(t.shape)), t.nbytes) for n, t in checkpoint.tensors.items()],
        )  # fmt: skip
    if checkpoint.notes:
        print_table("\nnotes", ("note",), [(note,) for note in checkpoint.notes])


def _described(tensor: CheckpointTensor) -> dict[str, Any]:
    content: dict[str, Any] = {
        "storage": tensor.storage, "shape": list(tensor.shape), "bytes": tensor.nbytes,
        "bits_per_weight": _bits(tensor.nbytes, _values(tensor)) or None,
    }  # fmt: skip
    if tensor.layout is not None:
        content |= {
            "group_size": tensor.layout.format.group_size,
            "zero_point": tensor.layout.format.zero_point,
            "scales": tensor.layout.scale_dtype.name,
            "offsets": tensor.layout.has_offsets,
        }
    return content


def _values(tensor: CheckpointTensor) -> int:
    count = 1
    for n in tensor.shape:
        count *= n
    # The values of a tensor that is not read are not known.
    return 0 if tensor.layout is None and tensor.dtype is None and not isinstance(tensor, StoredTensor) else count


def _bits(size: int, values: int) -> float | str:
    return round(8 * size / values, 3) if values else ""


def _bundle(path: Path, as_json: bool) -> None:
    bundle = read_bundle(path)
    if as_json:
        print_json(bundle.model_dump(mode="json"))
        return
    print_table(
        f"{path}: bundle for {bundle.kind}, written by intaglio {bundle.intaglio_version}", ("key", "value"),
        [
            ("architecture", bundle.architecture),
            ("dtype", bundle.dtype),
            *((key, value) for key, value in bundle.config.items()),
            ("weights", human_bytes(bundle.weights.bytes)),
            ("source", ", ".join(f"{f.name} ({human_bytes(f.bytes)})" for f in bundle.source.files)),
            ("chat template", bool(bundle.tokenizer and bundle.tokenizer.has_chat_template)),
        ],
    )  # fmt: skip
    print_table(
        "\nstages", ("stage", "inputs", "outputs"),
        [
            (name, _tensors(stage.inputs), _tensors(stage.outputs))
            for name, stage in bundle.stages.items()
        ],
    )  # fmt: skip
    print_table(
        "\ndims", ("dim", "min", "opt", "max", "is"),
        [(n, d.min, "" if d.opt is None else d.opt, d.max, d.expression or "") for n, d in bundle.dims.items()],
    )  # fmt: skip
    print_table(
        "\nweights", ("storage", "tensors", "bits", "group size", "zero point", "offsets"),
        [
            (q.storage, q.tensors, q.bits, _or_blank(q.group_size), _or_blank(q.zero_point), q.has_offsets)
            for q in bundle.quantization
        ],
    )  # fmt: skip


def _engine(path: Path, as_json: bool) -> None:
    bundle, target = path.parent.parent, path.name
    engine = open_engine(bundle, target)
    report = read_report(bundle, target)
    if as_json:
        identities = {name: i.model_dump(mode="json") for name, i in engine.info.identities.items()}
        print_json({"identities": identities, "report": report.model_dump()})
        return
    print_report(report)
    for name, identity in engine.info.identities.items():
        rows = [(key, value) for key, value in identity if key != "shapes"]
        print_table(f"\nidentity of {name}", ("key", "value"), rows)


def _tensors(infos: Any) -> str:
    # The cache repeats once a layer: say it once.
    names = [
        f"{i.name} {list(i.shape)}" for i in infos if ".0." in i.name or not i.name.startswith(("past_", "present."))
    ]
    return "\n".join(names)


def _or_blank(value: int | None) -> int | str:
    return "" if value is None else value


def _short(value: object) -> object:
    if isinstance(value, list | np.ndarray):
        return f"{len(value)} values" if len(value) > 8 else str(list(value))
    if isinstance(value, str) and len(value) > 100:
        return f"{value[:100]}… ({len(value)} characters)"
    return value
