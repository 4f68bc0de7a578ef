"""How often a painted emoji is nearest to the real one of its caption, over all captions of the painter's data.

    python recipes/emoji/evaluate.py bundles/emoji runs/emoji/data

A picture's feature is its 16x16 average colours; pictures are compared by the squared distance of these. Painted
pictures are ranked against all real ones. Stated beside it: chance, and what the pictures themselves score when they
went through the autoencoder and back, which is the most that the painter could reach. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

import intaglio

TOP = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("data", type=Path, help="the folder that prepare.py wrote")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--batch", type=int, default=16)
    arguments = parser.parse_args()
    lines = (arguments.data / "metadata.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    captions = [record["text"] for record in records]
    real = [Image.open(arguments.data / record["file_name"]).convert("RGB") for record in records]
    features = np.stack([feature(image) for image in real])
    pipeline = intaglio.load(arguments.bundle)
    painted: list[int] = []
    for seed in range(arguments.seeds):
        images: list[Image.Image] = []
        for start in range(0, len(captions), arguments.batch):
            images += pipeline(
                captions[start : start + arguments.batch],
                num_inference_steps=arguments.steps,
                guidance_scale=arguments.guidance,
                seed=seed * len(captions) + start,
            ).images
        painted += ranks(images, features)
    figures = {"captions": len(captions), "seeds": arguments.seeds, **_figures("painted", painted)}
    if "vae_encoder" in pipeline.engine.bundle.stages:
        size = real[0].size
        there = [pipeline.decode(pipeline.encode_image(image), height=size[1], width=size[0])[0] for image in real]
        figures |= _figures("autoencoder", ranks(there, features))
    figures[f"chance_top_{TOP}"] = TOP / len(captions)
    print(json.dumps(figures, indent=1))
    return 0


def feature(image: Image.Image) -> np.ndarray:
    """The mean colours of 16x16 fields, float32 ``[768]`` from 0 to 1."""
    return np.asarray(image.resize((16, 16), Image.Resampling.BOX), np.float32).ravel() / 255


def ranks(images: Sequence[Image.Image], features: np.ndarray) -> list[int]:
    """For each picture, how many real ones are nearer than the one of its own caption, which has its place."""
    found = []
    for i, image in enumerate(images):
        distances = np.square(features - feature(image)).sum(axis=1)
        found.append(int((distances < distances[i]).sum()))
    return found


def _figures(name: str, places: Sequence[int]) -> dict[str, float]:
    array = np.array(places)
    return {f"{name}_top_1": float((array < 1).mean()), f"{name}_top_{TOP}": float((array < TOP).mean())}


if __name__ == "__main__":
    sys.exit(main())
