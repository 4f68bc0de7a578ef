"""MIL programs as .mlpackage folders that are the same to the byte every time."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from intaglio.engines.coreml.blob_file import BlobFile
from intaglio.engines.coreml.conversion import MAX_RANK, Converted, Port
from intaglio.engines.coreml.coremltools_ import import_coremltools
from intaglio.engines.coreml.manifest import MODEL, WEIGHTS, write_manifest
from intaglio.errors import CompileError

_UNWANTED = (
    # Precision follows the graph.
    "common::add_fp16_cast",
    # Narrows indices to 16 bits, and with them what a program says of its inputs.
    "common::add_int16_cast",
    # Counts negative indices from the end, which converters do where it is needed, and forgets gather_nd's batch dims.
    "common::guard_negative_gather_indices",
    # Makes a scale and a bias a batch_norm, whose epsilon of 1e-5 it forgets, and cannot for float16.
    "common::fuse_elementwise_to_batchnorm",
    # Takes the order of look-ups and scales that some version of iOS likes; converters make the one asked for.
    "common::canonicalize_quantized_lut_pattern",
    # Reads all weights, and takes small ones that are almost equal for one. The weight file stores equal ones once.
    "common::const_deduplication",
)


def write_package(converted: Converted, path: Path, *, deployment_target: str = "iOS18") -> None:
    """Runs coremltools' passes over the program and writes ``path``, a folder whose name ends in .mlpackage.

    Weights are written one by one, without holding more than one. An existing package is replaced. The program is used
    up. Raises CompileError.
    """
    ct = import_coremltools()
    target = ct.target[deployment_target]
    inputs = _input_types(converted.inputs)
    with tempfile.TemporaryDirectory(prefix=".mlpackage-", dir=path.parent) as folder:
        made = Path(folder) / path.name
        try:
            _optimize(converted.program, inputs)
            _write(converted.program, made, int(target))
        except (CompileError, OSError):
            raise
        except Exception as error:  # passes and serialization raise whatever comes
            deep = [said for op, said in converted.too_deep.items() if f'"{op}"' in str(error)]
            if deep and "rank" in str(error):
                raise CompileError(
                    f"{deep[0]}; fold some of its dims together, or compile for another target, such as cpu"
                ) from error
            raise CompileError(
                f"{path.name}: coremltools cannot finish the program: {type(error).__name__}: {error}"
            ) from error
        if path.exists():
            shutil.rmtree(path)
        made.rename(path)


def _optimize(program: Any, inputs: Sequence[Any]) -> None:
    """Runs coremltools' passes, those of its backend included, and then its checks."""
    import coremltools as ct
    from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

    program.functions["main"].set_input_types(tuple(inputs))
    for pipeline in (ct.PassPipeline.DEFAULT, ct.PassPipeline.get_pipeline("backend_mlprogram")):
        pipeline.remove_passes(set(_UNWANTED))
        # One by one: coremltools' own loop checks the whole program after each, which takes as long as the passes.
        for name in pipeline.passes:
            PASS_REGISTRY[name](program)
    program.validate()
    program._check_early_error_out_for_invalid_program()


def _write(program: Any, package: Path, specification_version: int) -> None:
    import coremltools as ct

    from intaglio.engines.coreml.serialization import serialize

    weights = package / "Data" / WEIGHTS / "weight.bin"
    weights.parent.mkdir(parents=True)
    with BlobFile(weights) as blobs:
        model = serialize(program, blobs, specification_version)
    _check_ranks(model, package)
    model.description.metadata.userDefined["com.github.apple.coremltools.version"] = ct.__version__
    (package / "Data" / MODEL).write_bytes(model.SerializeToString(deterministic=True))
    if not blobs.count:
        shutil.rmtree(weights.parent)
    write_manifest(package)


def _input_types(ports: Sequence[Port]) -> list[Any]:
    """How far shapes vary; none where nothing does: the program says all."""
    import coremltools as ct

    if not any(isinstance(size, str) for port in ports for size in port.shape):
        return []
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
