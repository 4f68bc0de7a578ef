"""``intaglio inspect``. Named so as not to shadow the standard library's module."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

import intaglio
from intaglio.engines.engine import engine_path, open_engine, read_engine, read_report
from intaglio.engines.identity import Identity
from intaglio.engines.model_engine import (
    MODEL_FOLDER,
    NO_MAXIMUM,
    ModelTensor,
    is_model_engine,
    read_model_engine,
    read_model_report,
)
from intaglio.engines.target import target_module
from intaglio.errors import CheckpointError, InputError
from intaglio.exporters.bundle import Dim, is_bundle, read_bundle
from intaglio.exporters.checkpoints.gguf_blocks import StoredTensor
from intaglio.exporters.checkpoints.lora import is_adapter, open_adapter
from intaglio.exporters.checkpoints.tensors import CheckpointTensor
from intaglio.scripts.compile_ import print_report
from intaglio.scripts.console import Json, Quiet, human_bytes, print_json, print_table, progress_bar, say

if TYPE_CHECKING:
    from intaglio.engines.onnx_file import OnnxFile


def inspect_(
    path: Annotated[
        Path,
        typer.Argument(
            help="A checkpoint, an adapter, a bundle, an ONNX file, or an engine (BUNDLE|MODEL.engines/TARGET)."
        ),
    ],
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List every tensor of a checkpoint or an ONNX file.")
    ] = False,
    probe: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Run a bundle that was exported with --taps on this text (repeatable; an empty one stands for a few "
            "texts of our own) and list how large activations become. Exits 1 if one is above half of what the dtype "
            "can hold; a float32 bundle is compared with float16.",
        ),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say what a checkpoint, an adapter, a bundle, an ONNX file or an engine holds. Reads no weights but to probe."""
    path = path.resolve() if path.exists() else path
    if probe is not None:
        _probe(path, probe, as_json, quiet)
    elif is_bundle(path):
        _bundle(path, as_json)
    elif path.parent.name == "engines" and is_bundle(path.parent.parent):
        _engine(path, as_json)
    elif _is_onnx(path):
        _onnx(path, tensors, as_json)
    elif is_model_engine(path):
        _model_engine(path, tensors, as_json)
    elif path.is_dir() and (path / "engine.json").is_file():
        raise InputError(f"{path}: is an engine outside its bundle; expected BUNDLE/engines/TARGET")
    else:
        _checkpoint(path, tensors, as_json)


def _is_onnx(path: Path) -> bool:
    """Whether it is an ONNX file by its name or, as ``compile`` takes any, by its first field: the IR version."""
    if path.suffix.lower() == ".onnx":
        return not path.is_dir()
    try:
        with path.open("rb") as file:
            head = file.read(9)
    except OSError:
        return False
    # A safetensors file may begin with that byte too.
    return head[:1] == b"\x08" and head[8:9] != b"{"


def _checkpoint(path: Path, list_tensors: bool, as_json: bool) -> None:
    checkpoint = intaglio.open_checkpoint(path)
    adapter = _adapter(path) if is_adapter(checkpoint) else None
    content = {
        "path": str(path),
        "format": checkpoint.format,
        "files": [file.name for file in checkpoint.files],
        "config": dict(checkpoint.config),
        "metadata": {key: _short(value) for key, value in checkpoint.metadata.items()},
        "notes": list(checkpoint.notes),
        **({"adapter": adapter} if adapter else {}),
        "tensors": [{"name": name, **_described(t)} for name, t in checkpoint.tensors.items()],
    }
    if as_json:
        print_json(content)
        return
    settings = {**checkpoint.config, **checkpoint.metadata}
    print_table(f"{path}: {checkpoint.format}", ("key", "value"), [(k, _short(v)) for k, v in settings.items()])
    if adapter:
        print_table("\nLoRA adapter", ("key", "value"), [(k, _short(v)) for k, v in adapter.items()])
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


def _adapter(path: Path) -> dict[str, Any]:
    try:
        adapter = open_adapter(path)
    except CheckpointError as error:
        return {"not exportable": str(error)}
    modules = adapter.modules.values()
    return {
        "spelling": adapter.spelling,
        "modules": len(modules),
        "ranks": list(adapter.ranks),
        "scales (alpha / rank)": sorted({round(module.scale, 6) for module in modules}),
        "values": sum(_values(t) for module in modules for t in (module.down, module.up)),
        "module names": ", ".join(sorted({re.sub(r"\d+", "N", module.name) for module in modules})),
    }


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
            ("dtype", bundle.dtype),
            ("weights", human_bytes(bundle.weights.bytes)),
            ("chat template", bool(bundle.tokenizer and bundle.tokenizer.has_chat_template)),
            *(bundle.text_to_image or ()),
        ],
    )  # fmt: skip
    if bundle.adapters:
        print_table(
            "\nadapters", ("LoRA", "strength", "rank", "modules", "of"),
            [(a.name, a.strength, ", ".join(map(str, a.ranks)), a.matched, a.total_modules) for a in bundle.adapters],
        )  # fmt: skip
    for role, component in bundle.components.items():
        print_table(
            f"\n{role.replace('_', ' ')}", ("key", "value"),
            [
                ("architecture", component.architecture),
                *((key, value) for key, value in component.config.items()),
                ("source", ", ".join(f"{f.name} ({human_bytes(f.bytes)})" for f in component.source.files)),
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
        "\nweights", ("of", "storage", "tensors", "bits", "group size", "zero point", "offsets"),
        [
            (
                role.replace("_", " "), q.storage, q.tensors, q.bits, _or_blank(q.group_size), _or_blank(q.zero_point),
                q.has_offsets,
            )
            for role, component in bundle.components.items()
            for q in component.quantization
        ],
    )  # fmt: skip


def _engine(path: Path, as_json: bool) -> None:
    bundle, target = path.parent.parent, path.name
    info, report = read_engine(bundle, target), read_report(bundle, target)
    if as_json:
        identities = {name: i.model_dump(mode="json") for name, i in info.identities.items()}
        print_json({"identities": identities, "report": report.model_dump()})
    else:
        print_report(report)
        for name, identity in info.identities.items():
            rows = _identity_rows(identity)
            print_table(f"\nidentity of {name}", ("key", "value"), rows)
    # Shown first: an engine that no longer matches is when one wants to look.
    open_engine(bundle, target)


def _onnx(path: Path, list_tensors: bool, as_json: bool) -> None:
    from intaglio.engines.onnx_file import read_onnx  # the graph library is of use here only

    model = read_onnx(path)
    if as_json:
        print_json(_onnx_content(model, model.dims, list_tensors))
    else:
        _onnx_tables(model, model.dims, list_tensors)


def _onnx_tables(model: OnnxFile, dims: Mapping[str, Dim], list_tensors: bool) -> None:
    print_table(
        "ONNX file", ("key", "value"),
        [
            ("file", str(model.path)),
            ("producer", model.producer or "not said"),
            ("IR version", str(model.ir_version)),
            *((f"opset of {domain}", str(version)) for domain, version in model.opsets.items()),
            *((f"custom domain {domain}", ", ".join(ops)) for domain, ops in model.custom_domains.items()),
            *((f"function {name}", f"{nodes} nodes") for name, nodes in model.functions.items()),
            *((f"external file {name}", f"{human_bytes(n)} used") for name, n in model.external_files.items()),
        ],
    )  # fmt: skip
    _interface(model.inputs, model.outputs)
    print_table(
        "\ndims", ("dim", "min", "max"),
        [(name, dim.min, "any" if dim.max == NO_MAXIMUM else dim.max) for name, dim in dims.items()],
    )  # fmt: skip
    print_table(
        f"\n{len(model.weights)} tensors", ("dtype", "held as", "tensors", "size"),
        [(*key, len(sizes), human_bytes(sum(sizes))) for key, sizes in model.sizes_by_dtype().items()],
    )  # fmt: skip
    print_table(f"\n{sum(model.operators.values())} operators", ("operator", "nodes"), [*model.operators.items()])
    if list_tensors:
        print_table(
            "", ("tensor", "dtype", "shape", "bytes", "held as"),
            [(w.name, w.dtype, str(list(w.shape)), w.nbytes, w.held_as) for w in model.weights],
        )  # fmt: skip


def _onnx_content(model: OnnxFile, dims: Mapping[str, Dim], list_tensors: bool) -> dict[str, Any]:
    content: dict[str, Any] = {
        "path": str(model.path),
        "format": "onnx",
        "producer": model.producer,
        "ir_version": model.ir_version,
        "opsets": model.opsets,
        "inputs": [tensor.model_dump(mode="json") for tensor in model.inputs],
        "outputs": [tensor.model_dump(mode="json") for tensor in model.outputs],
        "dims": {
            name: {"min": dim.min, "max": None if dim.max == NO_MAXIMUM else dim.max} for name, dim in dims.items()
        },
        "weights": [
            {"dtype": dtype, "held_as": held_as, "tensors": len(sizes), "bytes": sum(sizes)}
            for (dtype, held_as), sizes in model.sizes_by_dtype().items()
        ],
        "external_files": model.external_files,
        "operators": model.operators,
        "functions": model.functions,
        "custom_domains": model.custom_domains,
    }
    if list_tensors:
        content["tensors"] = [
            {"name": w.name, "dtype": w.dtype, "shape": list(w.shape), "bytes": w.nbytes, "held_as": w.held_as}
            for w in model.weights
        ]
    return content


def _interface(inputs: Sequence[ModelTensor], outputs: Sequence[ModelTensor]) -> None:
    rows = [
        (what, tensor.name, tensor.dtype, "unknown rank" if tensor.shape is None else str(list(tensor.shape)))
        for what, tensors in (("input", inputs), ("output", outputs))
        for tensor in tensors
    ]
    print_table("\ninputs and outputs", ("", "name", "dtype", "shape"), rows)


def _model_engine(path: Path, list_tensors: bool, as_json: bool) -> None:
    from intaglio.engines.onnx_file import read_onnx

    info, report = read_model_engine(path), read_model_report(path)
    dims = info.identity.shapes
    # Other engines hold what was built of the model, and not the model.
    is_kept = target_module(info.target).KEEPS_MODEL
    model = read_onnx(path / MODEL_FOLDER / info.artifact) if is_kept else None
    if as_json:
        content = {"model": None if model is None else _onnx_content(model, dims, list_tensors)}
        print_json({**info.model_dump(mode="json"), **content, "report": report.model_dump()})
        return
    print_report(report)
    if model is not None:
        _onnx_tables(model, dims, list_tensors)
    files = [(file.name, human_bytes(file.bytes), file.sha256) for file in info.files]
    print_table("\nfiles", ("file", "size", "sha256"), files)
    rows = [("source", info.source), *_identity_rows(info.identity)]
    print_table("\nidentity", ("key", "value"), rows)


def _probe(path: Path, texts: list[str], as_json: bool, quiet: bool) -> None:
    from intaglio.runtimes.probe import TEXTS, probe  # brings the tokenizers, which no other inspection needs

    bundle = read_bundle(path)
    if not engine_path(path, "cpu").exists():
        say("no engine for cpu yet: compiling", quiet=quiet)
        with progress_bar(quiet=quiet) as progress:
            intaglio.compile(path, "cpu", progress=progress)
    report = probe(path, [t for text in texts for t in ([text] if text else TEXTS)])
    above = report.above_half
    if as_json:
        # JSON has no infinity: null stands for a value that is not finite.
        ranges = [{"name": r.name, "max_abs": _finite(r.max_abs), "share": _finite(r.share)} for r in report.ranges]
        print_json({**asdict(report), "ranges": ranges, "above_half": [r.name for r in above]})
    else:
        rows = [(r.name, f"{r.max_abs:.4g}", f"{100 * r.share:.3g} %", r in above) for r in report.ranges]
        title = f"{path} in {bundle.dtype}: largest activations beside {report.dtype}'s {report.maximum:.4g}"
        print_table(title, ("output", "max |x|", "of maximum", "above half"), rows)
    if not above:
        say(f"all {len(report.ranges)} tensors stay below half of what {report.dtype} can hold", quiet=quiet)
        return
    names = "\n".join(f"  {r.name}: {r.max_abs:.4g}" for r in above)
    say(f"{len(above)} tensors are above half of what {report.dtype} can hold:\n{names}")
    raise typer.Exit(1)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _tensors(infos: Any) -> str:
    # The cache repeats once a layer: say it once.
    names = [
        f"{i.name} {list(i.shape)}" for i in infos if ".0." in i.name or not i.name.startswith(("past_", "present."))
    ]
    return "\n".join(names)


def _identity_rows(identity: Identity) -> list[tuple[str, object]]:
    """What an engine was built from; the sizes stand elsewhere, but for the sets of them."""
    rows: list[tuple[str, object]] = [(k, v) for k, v in identity if k not in ("shapes", "variants", "options")]
    rows += [(f"--{name.replace('_', '-')}", value) for name, value in identity.options.items()]
    for i, dims in enumerate(identity.variants):
        differing = [name for name, dim in dims.items() if any(dim != other[name] for other in identity.variants)]
        sizes = ", ".join(f"{name}={_range(dims[name])}" for name in differing)
        rows.append((f"sizes {i + 1}", sizes))
    return rows


def _range(dim: Dim) -> str:
    return str(dim.min) if dim.min == dim.max else f"{dim.min} to {dim.max}"


def _or_blank(value: int | None) -> int | str:
    return "" if value is None else value


def _short(value: object) -> object:
    if isinstance(value, list | np.ndarray):
        return f"{len(value)} values" if len(value) > 8 else str(list(value))
    if isinstance(value, str) and len(value) > 100:
        return f"{value[:100]}… ({len(value)} characters)"
    return value
