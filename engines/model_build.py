"""The child process that builds the engine of an ONNX file: a request on stdin, lines of JSON on stdout.

Each line says how far it got, so that the parent can tell a crash of the trial run from one of the compiler.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from intaglio.engines.cpu_session import CpuSession
from intaglio.engines.memory import peak_rss_bytes
from intaglio.engines.model_engine import ModelInterface
from intaglio.engines.onnx_file import all_tensors, parse_onnx
from intaglio.errors import CompileError, EngineError, IntaglioError
from intaglio.exporters.bundle import Dim

# Sizes tried for dims of which nothing is known: 3 channels, and 48 and 224, the fixed sizes of many networks.
TRIAL_SIZES = (1, 2, 3, 4, 8, 16, 32, 48, 64, 128, 224, 256)
# Likewise the ranks of inputs of which not even that is known.
_TRIAL_RANKS = (2, 4, 3, 1, 0)
_LARGE_TENSOR = 1 << 16


def check_model(graph: Path) -> None:
    """Runs ``onnx.checker`` on the file. Raises CompileError.

    It gets the file without large data: external files were checked before, and it takes neither links nor inputs
    of unknown rank, which onnxruntime runs.
    """
    model = parse_onnx(graph)
    for tensor in all_tensors(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL or len(tensor.raw_data) > _LARGE_TENSOR:
            name, data_type = tensor.name, tensor.data_type
            tensor.Clear()
            tensor.name, tensor.data_type, tensor.raw_data = name, data_type, b""
            tensor.dims.append(0)
    for value in [*model.graph.input, *model.graph.output]:
        if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape"):
            value.type.tensor_type.shape.SetInParent()
    try:
        onnx.checker.check_model(model.SerializeToString())
    except onnx.checker.ValidationError as error:
        raise CompileError(f"{graph.name} fails onnx.checker: {error}") from error


def trials(
    interface: ModelInterface, dims: Mapping[str, Dim], given: frozenset[str]
) -> Iterator[tuple[dict[str, int], dict[str, np.ndarray]]]:
    """Sizes and feeds to try, smallest first: dims in ``given`` as bounded, the others at TRIAL_SIZES.

    The first axis of an input stays 1 for as long as that helps: it mostly is the batch.
    """
    leading = {t.shape[0] for t in interface.inputs if t.shape is not None and len(t.shape) > 1}
    unknown_rank = any(tensor.shape is None for tensor in interface.inputs)
    seen = []
    for batch_too in (False, True):
        for size in TRIAL_SIZES:
            for bound in ("min", "opt"):
                sizes = {
                    name: (getattr(dim, bound) or dim.min)
                    if name in given
                    else (1 if name in leading and not batch_too else size)
                    for name, dim in dims.items()
                }
                for rank in _TRIAL_RANKS if unknown_rank else (0,):
                    key = (sizes, rank, size if unknown_rank else 0)
                    if key not in seen:
                        seen.append(key)
                        yield sizes, _feeds(interface, sizes, (1, *[size] * (rank - 1)) if rank else ())


def _feeds(interface: ModelInterface, sizes: Mapping[str, int], unknown: tuple[int, ...]) -> dict[str, np.ndarray]:
    feeds = {}
    for tensor in interface.inputs:
        shape = unknown if tensor.shape is None else [n if isinstance(n, int) else sizes[n] for n in tensor.shape]
        fill = 1 if tensor.name == "attention_mask" else 0
        feeds[tensor.name] = np.full(shape, fill, np.dtype(tensor.dtype))
    return feeds


def try_model(graph: Path, interface: ModelInterface, dims: Mapping[str, Dim], given: frozenset[str]) -> dict[str, Any]:
    """Loads the model and runs it at the first sizes that it takes.

    Gives the ``operators`` that ran, the ``sizes``, and ``not_finite`` outputs; or only ``failed``, the reason of the
    first trial. Raises EngineError if the model cannot be loaded.
    """
    with tempfile.TemporaryDirectory(prefix=".profile-", dir=graph.parent) as folder:
        session = CpuSession(graph.stem, graph, graph.parent, interface, dims, profile=Path(folder) / "profile")
        _say({"loaded": True})
        failed = ""
        for sizes, feeds in trials(interface, dims, given):
            _say({"trying": sizes})
            try:
                outputs = session.run(feeds)
            except EngineError as error:
                failed = failed or f"{_sizes_text(sizes)}: {_short(str(error))}"
                continue
            events = json.loads(session.end_profiling().read_text("utf-8"))
            bad = [n for n, v in outputs.items() if v.dtype.kind == "f" and not np.isfinite(v).all()]
            return {"operators": _last_run(events), "sizes": sizes, "not_finite": bad}
        return {"failed": failed}


def _last_run(events: list[dict[str, Any]]) -> dict[str, int]:
    """Counts the operators of the last run; earlier ones failed half-way."""
    run = [event for event in events if event.get("name") == "model_run"][-1]
    names = [
        e["args"]["op_name"]
        for e in events
        if e.get("cat") == "Node" and "op_name" in e.get("args", {}) and e["ts"] >= run["ts"]
    ]
    return dict(Counter(names))


def _sizes_text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items()) or "the declared shapes"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 400 else f"{line[:400]}…"


def _say(content: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Builds what stdin asks for; 2 and a message on stderr if it cannot be built."""
    request = json.load(sys.stdin)
    graph = Path(request["graph"])
    try:
        check_model(graph)
        result = try_model(
            graph,
            ModelInterface.model_validate(request["interface"]),
            {name: Dim.model_validate(dim) for name, dim in request["dims"].items()},
            frozenset(request["given"]),
        )
    except IntaglioError as error:
        sys.stderr.write(" ".join(str(error).split()) + "\n")
        return 2
    _say({**result, "peak_rss_bytes": peak_rss_bytes()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
