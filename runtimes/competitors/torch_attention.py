"""Runs torch's scaled_dot_product_attention on random float32: a call and its seconds for each line on stdin.

Started by ``bench`` with the request as JSON on the command line.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any


def main() -> int:
    """Answers with torch's version, then the seconds of a call to every line."""
    request = json.loads(sys.argv[1])
    # Imported by name: nothing else in this room knows torch, and its types are not installed with this package.
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(request["threads"])
    with torch.inference_mode():
        shape = (1, request["heads"], request["tokens"], request["head_dim"])
        query, key, value = (torch.randn(shape) for _ in range(3))
        sys.stdout.write(f"torch {torch.__version__}\n")
        sys.stdout.flush()
        for _ in sys.stdin:
            started = time.perf_counter()
            torch.nn.functional.scaled_dot_product_attention(query, key, value)
            sys.stdout.write(f"{time.perf_counter() - started}\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
