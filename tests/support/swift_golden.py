"""The numbers that the Swift package's tests compare with, from our own runtime.

``python tests/support/swift_golden.py`` writes them anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from intaglio.runtimes import flow_matching
from intaglio.runtimes.images import to_pixels
from intaglio.runtimes.latents import image_ids, pack, text_ids
from intaglio.runtimes.noise import normal

FILE = Path(__file__).parents[2] / "engines" / "coreml" / "swift" / "Tests" / "PictureMathTests" / "golden.json"


def golden() -> dict[str, Any]:
    """All of them, as plain numbers."""
    schedules = [(4, 1024, None), (4, 64, 1.0), (20, 4356, None), (1, 256, None), (50, 4096, 3.0), (2, 16, 2.5)]
    # An odd count, all bits of a seed, and one of which a number lies far out, where another polynomial is taken.
    draws = [(0, 1), (0, 7), (42, 16), (2**64 - 1, 9), (2**40 + 5, 12), (_far_out(), 16)]
    rng = np.random.default_rng(8)
    grid = rng.standard_normal((1, 3, 2, 5), np.float32)
    latents, velocity, negative = rng.standard_normal((3, 1, 6, 2), np.float32)
    guidance, (sigma, after) = np.float32(3.5), np.float32([0.9482, 0.7361])
    guided = negative + guidance * (velocity - negative)
    # Halves of a byte, both ends, and what lies beyond them.
    steps = (np.arange(24, dtype=np.float32) + np.float32(0.5)) / np.float32(255)
    sample = np.concatenate([2 * steps - 1, np.float32([-1, 1, -3, 3, 0, 0.999])]).reshape(1, 3, 2, 5)
    return {
        "sigmas": [
            {
                "steps": n,
                "tokens": tokens,
                "shift": shift,
                "levels": _plain(flow_matching.sigmas(n, tokens, shift=shift)),
            }
            for n, tokens, shift in schedules
        ],
        "normals": [
            {"seed": seed, "count": count, "values": _plain(normal((count,), seed, "mlx"))} for seed, count in draws
        ],
        "grid": {
            "channels": 3,
            "height": 2,
            "width": 5,
            "grid": _plain(grid),
            "tokens": _plain(pack(grid)),
            "ids": _plain(image_ids(2, 5)),
        },
        "text": _plain(text_ids(4)),
        "step": {
            "latents": _plain(latents),
            "velocity": _plain(velocity),
            "negative": _plain(negative),
            "guidance": float(guidance),
            "sigma": float(sigma),
            "next": float(after),
            "guided": _plain(guided),
            "after": _plain(flow_matching.step(latents, guided, np.array([sigma, after]), 0)),
        },
        "pixels": {"sample": _plain(sample), "bytes": _plain(to_pixels(sample))},
    }


def text() -> str:
    """The content of the file."""
    return json.dumps(golden(), indent=1) + "\n"


def _plain(array: np.ndarray) -> list[float] | list[int]:
    return array.ravel().tolist()


def _far_out() -> int:
    return next(seed for seed in range(10_000) if np.abs(normal((16,), seed, "mlx")).max() > 3.4)


if __name__ == "__main__":
    FILE.write_text(text(), "utf-8")
