"""MIL programs as .mlpackage folders that are the same to the byte every time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from intaglio.engines.coreml.conversion import MAX_RANK, Converted, Port
from intaglio.engines.coreml.coremltools_ import import_coremltools
from intaglio.errors import CompileError

# The first narrows indices to 16 bits, and with them what a program says of its inputs. The second counts negative
# indices from the end, which converters do where it is needed, and forgets the batch dims of gather_nd. The third makes
# a scale and a bias a batch_norm, whose epsilon of 1e-5 it forgets, and cannot for float16.
_UNWANTED = (
    "common::add_int16_cast",
    "common::guard_negative_gather_indices",
    "common::fuse_elementwise_to_batchnorm",
)
_FLOAT16 = "common::add_fp16_cast"
# Puts look-up tables after their scales: the order that is safe on devices of before iOS 26.
_CANONICAL_TABLES = "common::canonicalize_quantized_lut_pattern"


def write_package(converted: Converted, path: Path, *, float16: bool = False, keep_table_order: bool = False) -> None:
    """Runs coremltools' passes over the program and writes ``path``, a folder whose name ends in .mlpackage.

    ``float16`` narrows the computation, ``keep_table_order`` keeps the smaller form of look-up tables. An existing
    package is replaced. The program is used up. Raises CompileError.
    """
    ct = import_coremltools()
    unwanted = [*_UNWANTED, *([] if float16 else [_FLOAT16]), *([_CANONICAL_TABLES] if keep_table_order else [])]
    pipeline = ct.PassPipeline.DEFAULT
    pipeline.remove_passes(set(unwanted))
    try:
        with _without_progress_bars():
            model = ct.convert(
                converted.program,
                source="milinternal",
                convert_to="mlprogram",
                inputs=_input_types(converted.inputs),
                minimum_deployment_target=ct.target.iOS18,
                compute_precision=ct.precision.FLOAT16 if float16 else ct.precision.FLOAT32,
                pass_pipeline=pipeline,
                skip_model_load=True,
            )
    except Exception as error:  # passes and serialization raise whatever comes
        raise CompileError(
            f"{path.name}: coremltools cannot finish the program: {type(error).__name__}: {error}"
        ) from error
    _check_ranks(model.get_spec(), path)
    with tempfile.TemporaryDirectory(prefix=".mlpackage-", dir=path.parent) as folder:
        made = Path(folder) / path.name
        model.save(str(made))
        _settle(made)
        if path.exists():
            shutil.rmtree(path)
        made.rename(path)


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """coremltools draws one for each group of passes on stderr and has no switch for it."""
    from coremltools.converters.mil.mil.passes import pass_pipeline

    shown = pass_pipeline.tqdm
    pass_pipeline.tqdm = lambda passes, **_: passes
    try:
        yield
    finally:
        pass_pipeline.tqdm = shown


def _input_types(ports: Sequence[Port]) -> list[Any] | None:
    """None where nothing varies: the program says all."""
    import coremltools as ct

    if not any(isinstance(size, str) for port in ports for size in port.shape):
        return None
    for port in ports:
        for size, (_, high) in zip(port.shape, port.bounds, strict=True):
            if high is None:
                raise CompileError(
                    f"the dim {size!r} of the input {port.name!r} has no greatest size, and Core ML must know one; "
                    f"give its bounds: --shapes {size}=MIN:OPT:MAX, or one size: --shapes {size}=N"
                )
    ranges = {
        size: ct.RangeDim(low, high)
        for port in ports
        for size, (low, high) in zip(port.shape, port.bounds, strict=True)
        if isinstance(size, str)
    }
    return [
        ct.TensorType(
            port.mil_name, ct.Shape([ranges.get(s, s) if isinstance(s, str) else s for s in port.shape or (1,)])
        )
        for port in ports
    ]


def _check_ranks(spec: Any, path: Path) -> None:
    for function in spec.mlProgram.functions.values():
        for block in function.block_specializations.values():
            for operation in block.operations:
                if operation.type.startswith("const"):
                    continue
                for output in operation.outputs:
                    rank = output.type.tensorType.rank
                    if rank > MAX_RANK:
                        raise CompileError(
                            f"{path.name}: {output.name} ({operation.type}) has {rank} dims, and Core ML's tensors end "
                            f"at {MAX_RANK}; fold some of its dims together, or compile for another target, such as cpu"
                        )


def _settle(package: Path) -> None:
    """Takes out what differs from run to run: the day, and identifiers drawn at random, which become digests."""
    from coremltools.proto import Model_pb2

    manifest = package / "Manifest.json"
    said = json.loads(manifest.read_text())
    entries = said["itemInfoEntries"]
    file = package / "Data" / entries[said["rootModelIdentifier"]]["path"]
    model = Model_pb2.Model.FromString(file.read_bytes())
    model.description.metadata.userDefined.pop("com.github.apple.coremltools.conversion_date", None)
    file.write_bytes(model.SerializeToString(deterministic=True))
    names = {old: _identifier(package / "Data" / entry["path"], entry["path"]) for old, entry in entries.items()}
    said["itemInfoEntries"] = dict(sorted((names[old], entry) for old, entry in entries.items()))
    said["rootModelIdentifier"] = names[said["rootModelIdentifier"]]
    manifest.write_text(json.dumps(said, indent=4, sort_keys=True) + "\n")


def _identifier(path: Path, name: str) -> str:
    digest = hashlib.sha256(name.encode())
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    # In the form of a UUID of version 8: made by rules of one's own.
    text = digest.hexdigest().upper()
    return f"{text[:8]}-{text[8:12]}-8{text[13:16]}-8{text[17:20]}-{text[20:32]}"
