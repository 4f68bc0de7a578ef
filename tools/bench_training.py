"""Times the training loop beside a plain PyTorch loop of the same language model, and its loader alone.

    python tools/bench_training.py            # 10 M parameters, float32, on the CPU; prints JSON

The two alternate. Both run the same transformers model on the same batches with AdamW and clipped gradients; the plain
loop has its batches in memory beforehand. ``of_plain`` is the median of ours over the plain loop's, in tokens a second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from intaglio.trainer.loop import Trainer
from intaglio.trainer.parallel import Ranks
from intaglio.trainer.recipe import Recipe
from intaglio.trainer.train import build_sources, build_task, seed_everything

LENGTH, BATCH, VOCABULARY = 128, 8, 4096
MODEL = {
    "architecture": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 320,
    "intermediate_size": 960,
    "num_hidden_layers": 7,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), arguments.turns, arguments.steps), indent=1))
    return 0


def measure(folder: Path, turns: int, steps: int) -> dict[str, Any]:
    """Tokens a second of both loops, of the loader alone, and their ratios."""
    np.random.default_rng(0).integers(0, VOCABULARY, 1 << 22, np.uint16).tofile(folder / "tokens.bin")
    recipe = Recipe.model_validate(
        {
            "task": {"kind": "causal-lm"},
            "model": MODEL,
            "data": {
                "format": "tokens",
                "files": ["tokens.bin"],
                "dtype": "uint16",
                "length": LENGTH,
                "batch_size": BATCH,
            },
            "optimizer": {"kind": "adamw", "lr": 1e-4},
            "train": {"steps": 2 * steps, "log_every": steps, "checkpoint_every": 10**6, "plot": False},
        }
    )
    ours, plain = [], []
    for turn in range(turns):
        ours.append(_ours(recipe, folder, folder / f"run{turn}"))
        plain.append(_plain(recipe, folder, steps))
    loader = _loader(recipe, folder)
    parameters = sum(p.numel() for p in build_task(recipe, folder).parameters())
    middle, plain_middle = statistics.median(ours), statistics.median(plain)
    return {
        "parameters": parameters,
        "threads": torch.get_num_threads(),
        "tokens_per_second": middle,
        "plain_tokens_per_second": plain_middle,
        "of_plain": middle / plain_middle,
        "best_of_plain": max(ours) / max(plain),
        "loader_tokens_per_second": loader,
        "loader_of_model": loader / middle,
    }


def _ours(recipe: Recipe, root: Path, folder: Path) -> float:
    """Of the second half of a run, since the first step of each loop makes its optimizer's state."""
    seed_everything(0)
    rows: list[Any] = []
    source, _ = build_sources(recipe, root, Ranks())
    Trainer(build_task(recipe, root), source, recipe, folder, report=rows.append).run()
    return float(rows[-1]["tokens_per_second"])


def _plain(recipe: Recipe, root: Path, steps: int) -> float:
    seed_everything(0)
    source, _ = build_sources(recipe, root, Ranks())
    batches = [batch for batch, _ in zip(source, range(2 * steps), strict=False)]
    model: Any = build_task(recipe, root).model
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    begun = 0.0
    for step, batch in enumerate(batches):
        if step == steps:
            begun = time.perf_counter()
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
    return steps * BATCH * LENGTH / (time.perf_counter() - begun)


def _loader(recipe: Recipe, root: Path) -> float:
    source, _ = build_sources(recipe, root, Ranks())
    begun, tokens = time.perf_counter(), 0
    for batch in source:
        tokens += batch["input_ids"].numel()
    return tokens / (time.perf_counter() - begun)


if __name__ == "__main__":
    sys.exit(main())
