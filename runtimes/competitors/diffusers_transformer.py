"""Runs diffusers' FLUX.2 transformer with random float32 weights: a step and its seconds for each line on stdin.

Started by ``bench`` with the request as JSON on the command line. Timings only: the values mean nothing.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any


def main() -> int:
    """Answers with the versions, then the seconds of a step to every line."""
    request = json.loads(sys.argv[1])
    # Imported by name: nothing else in this room knows torch, and its types are not installed with this package.
    torch: Any = importlib.import_module("torch")
    diffusers: Any = importlib.import_module("diffusers")
    torch.set_num_threads(request["threads"])
    config = request["config"]
    image, text = request["image_tokens"], request["text_tokens"]
    with torch.device("meta"):
        model = diffusers.Flux2Transformer2DModel(**config)
    model = model.to_empty(device="cpu").float().eval()
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.uniform_(-0.02, 0.02)
        feeds = {
            "hidden_states": torch.randn(1, image, config["in_channels"]),
            "encoder_hidden_states": torch.randn(1, text, config["joint_attention_dim"]),
            "timestep": torch.tensor([0.5]),
            "guidance": torch.tensor([4.0]) if config["guidance_embeds"] else None,
            "img_ids": torch.zeros(1, image, 4, dtype=torch.int64),
            "txt_ids": torch.zeros(1, text, 4, dtype=torch.int64),
        }
        sys.stdout.write(f"diffusers {diffusers.__version__}, torch {torch.__version__}\n")
        sys.stdout.flush()
        for _ in sys.stdin:
            started = time.perf_counter()
            model(**feeds, return_dict=False)
            sys.stdout.write(f"{time.perf_counter() - started}\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
