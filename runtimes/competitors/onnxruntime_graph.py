"""Runs a stage's portable graph in onnxruntime alone, without our kernels and lowering: seconds for lines on stdin.

Started by ``bench`` with the request as JSON on the command line.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from intaglio.engines.lowering.widen_dtype import WidenDtypePass
from intaglio.engines.onnxruntime_ import import_onnxruntime
from intaglio.engines.stage_interface import runs_as
from intaglio.exporters.bundle import read_bundle
from intaglio.kernels.grouped_quant import DOMAIN
from intaglio.runtimes.competitors.text_protocol import answer_generations
from intaglio.runtimes.decoding import Decoding
from intaglio.runtimes.random_feeds import Sizes, random_feeds


class GraphSession:
    """A portable stage with onnxruntime's own optimisations.

    With ``unpack`` it folds packed weights into float32 ones at load, which is what it does by itself; without, the
    graph unpacks them in each run, in less memory.
    """

    def __init__(self, bundle: Path, stage: str, *, threads: int, unpack: bool) -> None:
        ort = self._ort = import_onnxruntime()
        described = read_bundle(bundle)
        self.stage = runs_as(described.stages[stage])
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4
        options.add_session_config_entry("session.force_spinning_stop", "1")
        folder = str(bundle.resolve())
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
        model = ir.load(bundle / f"{stage}.onnx")
        WidenDtypePass(ir.DataType.BFLOAT16, [DOMAIN])(model)
        self._session = ort.InferenceSession(
            ir.serde.serialize_model(model).SerializeToString(),
            options,
            providers=["CPUExecutionProvider"],
            enable_fallback=0,
            disabled_optimizers=[] if unpack else ["ConstantFolding"],
        )

    def new_cache(self, batch: int) -> None:
        """None: the portable graph takes and gives its key-value cache whole."""

    def run(
        self, feeds: Mapping[str, Any], outputs: Collection[str] | None = None, *, resident: Collection[str] = ()
    ) -> dict[str, Any]:
        """As an engine's session."""
        names = [tensor.name for tensor in self.stage.outputs if outputs is None or tensor.name in outputs]
        values = {
            name: self._ort.OrtValue.ortvalue_from_numpy(value) if isinstance(value, np.ndarray) else value
            for name, value in feeds.items()
        }
        found = self._session.run_with_ort_values(names, values)
        return {name: value if name in resident else value.numpy() for name, value in zip(names, found, strict=True)}


def main() -> int:
    """Answers with the version, then to every line: the seconds of a run, or those of a generation as JSON."""
    request = json.loads(sys.argv[1])
    bundle = Path(request["bundle"])
    session = GraphSession(bundle, request["stage"], threads=request["threads"], unpack=request["unpack"])
    sys.stdout.write(f"onnxruntime {import_onnxruntime().__version__}\n")
    sys.stdout.flush()
    if request["sizes"] is None:
        return answer_generations(lambda prompt: Decoding(session, [prompt]))
    described = read_bundle(bundle)
    feeds = random_feeds(described, session.stage, described.dims, Sizes(**request["sizes"]), seed=0)
    for _ in sys.stdin:
        started = time.perf_counter()
        session.run(feeds)
        sys.stdout.write(f"{time.perf_counter() - started}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
