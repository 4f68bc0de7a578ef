"""``intaglio inspect``. Named so as not to shadow the standard library's module."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import intaglio
from intaglio.engines.engine import engine_path, open_engine, read_report
from intaglio.errors import InputError
from intaglio.exporters.bundle import is_bundle, read_bundle
from intaglio.scripts.compile_ import print_report
from intaglio.scripts.console import Json, Quiet, human_bytes, print_json, print_table, progress_bar, say


def inspect_(
    path: Annotated[Path, typer.Argument(help="A checkpoint, a bundle, or an engine (BUNDLE/engines/TARGET).")],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor of a checkpoint.")] = False,
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
    """Say what a checkpoint, a bundle or an engine holds. Reads headers, no weights, unless it probes."""
    if probe is not None:
        _probe(path, probe, as_json, quiet)
    elif is_bundle(path):
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
        "tensors": [
            {"name": name, "storage": t.storage, "shape": list(t.shape), "bytes": t.nbytes}
            for name, t in checkpoint.tensors.items()
        ],
    }
    if as_json:
        print_json(content)
        return
    settings = checkpoint.metadata or checkpoint.config
    print_table(f"{path}: {checkpoint.format}", ("key", "value"), [(k, _short(v)) for k, v in settings.items()])
    counts = Counter(t.storage for t in checkpoint.tensors.values())
    sizes = Counter[str]()
    for t in checkpoint.tensors.values():
        sizes[t.storage] += t.nbytes
    print_table(
        f"\n{len(checkpoint.tensors)} tensors", ("storage", "tensors", "size"),
        [(storage, n, human_bytes(sizes[storage])) for storage, n in counts.most_common()],
    )  # fmt: skip
    if list_tensors:
        print_table(
            "", ("tensor", "storage", "shape", "bytes"),
            [(n, t.storage, str(list(t.shape)), t.nbytes) for n, t in checkpoint.tensors.items()],
        )  # fmt: skip


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


def _or_blank(value: int | None) -> int | str:
    return "" if value is None else value


def _short(value: object) -> object:
    if isinstance(value, list | np.ndarray):
        return f"{len(value)} values" if len(value) > 8 else str(list(value))
    if isinstance(value, str) and len(value) > 100:
        return f"{value[:100]}… ({len(value)} characters)"
    return value
