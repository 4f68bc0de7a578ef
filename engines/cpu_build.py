"""The child process of ``engines.cpu.build``: a request on stdin, one line of JSON on stdout."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from intaglio.engines.cpu_session import run_once
from intaglio.engines.memory import peak_rss_bytes
from intaglio.errors import IntaglioError
from intaglio.exporters.bundle import Dim, StageInfo
from intaglio.kernels.cpu.library import instruction_set


def main() -> int:
    """Builds what stdin asks for; 2 and a message on stderr if it cannot be built."""
    request = json.load(sys.stdin)
    try:
        operators = run_once(
            Path(request["graph"]),
            Path(request["weights_folder"]),
            StageInfo.model_validate(request["stage"]),
            {name: Dim.model_validate(dim) for name, dim in request["dims"].items()},
        )
    except IntaglioError as error:
        sys.stderr.write(" ".join(str(error).split()) + "\n")
        return 2
    result = {"operators": operators, "instruction_set": instruction_set(), "peak_rss_bytes": peak_rss_bytes()}
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
