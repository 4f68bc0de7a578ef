"""An engine beside the tensors of a golden folder: every stage on the stored inputs, and the sampler's loop."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from intaglio.engines.graph_stats import output_order
from intaglio.errors import InputError
from intaglio.progress import Progress, ProgressCallback
from intaglio.runtimes.difference import Bounds, Difference, compare
from intaglio.runtimes.golden_folder import (
    STAGE_FILES,
    GoldenFolder,
    known_names,
    read_golden,
    same_shape,
    stored_stages,
)
from intaglio.runtimes.parity import BOUNDS, FAST_BOUNDS, ParityReport, some_of, until_divergent
from intaglio.runtimes.sides import Run, Side, engine_side, sample

SAMPLER = "sampler"
_COSINE = 0.999
# What implementations of FLUX.2-klein are held to where the stored run was in bfloat16, of which one convolution alone
# makes 2e-2. Depth and the sampler's loop add to it; of the text encoder only the direction is asked for.
_GOLDEN_BOUNDS = (
    (r"te_hidden_\d+|te_cond_\d+|cond", np.inf),
    (r"single_block(1[2-9]|[2-9]\d)_h|latent_after_step\d+", 5e-2),
    (r"vae_(conv_in|mid|up\d+|conv_norm_out)", 5e-2),
    (r"x_emb_out|ctx_emb_out|rope_(cos|sin)|(c_)?(shift|scale|gate)_(msa|mlp)|single_mod_(shift|scale|gate)", 2e-2),
    (r"double_block\d+_(enc|h)|single_in_hidden_states|single_block\d_h|single_block1[01]_h|noise_step0", 2e-2),
    (r"vae_(bn_denorm|unpatchified|post_quant_conv|decoded)", 2e-2),
)


def golden_bounds(stage: str, name: str, dtype: str) -> Bounds:
    """What a file is held to by default; a name that is not FLUX.2's, to the bounds of the bundle's dtype."""
    if stage == SAMPLER:
        return Bounds(_COSINE, 5e-2)
    for pattern, relative_l2 in _GOLDEN_BOUNDS:
        if re.fullmatch(pattern, name):
            return Bounds(_COSINE, relative_l2)
    return BOUNDS[dtype]


def against_golden(
    bundle: str | Path,
    target: str,
    path: Path,
    stage: str | None,
    bound: float | None,
    min_cosine: float | None,
    keep_going: bool,
    progress: ProgressCallback | None,
) -> ParityReport:
    """:func:`parity` with the golden folder at ``path``. Raises InputError also where nothing can be compared."""
    folder, engine = read_golden(path), engine_side(bundle, target)
    stages, notes = _runnable(folder, engine, stage)
    schedule = _schedule(folder, stages, notes)
    steps = len(schedule[1]) if schedule else 0
    outputs = {name: output_order(engine.graph(name)) for name in stages}
    not_compared = [output for name in stages for output in outputs[name] if not folder.output_names(name, output)] + [
        name for i in range(steps) for name in _step_names(i) if name not in folder.names
    ]
    if len(not_compared) == sum(map(len, outputs.values())) + 2 * steps:
        raise InputError(
            f"{path}: no file matches an output of {', '.join(stages)}; it has {some_of(sorted(folder.names))}. A "
            "bundle exported with --taps has more outputs"
        )
    count = Progress(progress, "parity", len(stages), "stages")

    def walk() -> Generator[Difference]:
        for name in stages:
            sampled = schedule if name == "transformer" else None
            for difference in _stage(engine, folder, name, outputs[name], sampled):
                default = golden_bounds(difference.stage, difference.name, engine.bundle.dtype)
                if engine.is_fast and default.relative_l2 < FAST_BOUNDS.relative_l2:
                    default = FAST_BOUNDS
                bounds = Bounds(
                    default.cosine if min_cosine is None else min_cosine,
                    default.relative_l2 if bound is None else bound,
                )
                yield replace(difference, bounds=bounds)
            count.advance(1)

    differences = until_divergent(walk(), keep_going)
    named = {n: s for n, s in engine.bundle.stages.items() if n in stages or n in STAGE_FILES}
    known = known_names(folder, named, steps)
    unmatched = tuple(sorted(folder.names - known))
    if unmatched and all(len(engine.bundle.stages[name].outputs) == 1 for name in stages):
        notes.append("the bundle has no taps; export it with --taps to compare more")
    against = f"golden:{path}"
    return ParityReport(
        target, against, stages, bound, min_cosine, differences, tuple(not_compared), unmatched, tuple(notes)
    )


def _runnable(folder: GoldenFolder, engine: Side, stage: str | None) -> tuple[tuple[str, ...], list[str]]:
    """The stages whose inputs are stored, and what to say of the others and of the folder's origin."""
    described, info = engine.bundle, folder.info
    if stage is None and info is not None and (stored := [name for name in info.stages if name in described.stages]):
        chosen = tuple(stored)
    else:
        chosen = stored_stages(described, stage)
    missing = {name: folder.missing_inputs(name, described.stages[name]) for name in chosen}
    notes = [
        f"{name} was not run: {', '.join(f'{file}.npy' for file in files)} not there"
        for name, files in missing.items()
        if files
    ]
    stages = tuple(name for name in chosen if not missing[name])
    if not stages:
        raise InputError(f"{folder.path}: {'; '.join(notes)}")
    if info is not None and info.weights_sha256 != described.weights.sha256:
        notes.append(f"the folder was written from other weights ({info.dtype}, sha256 {info.weights_sha256[:12]}…)")
    return stages, notes


def _schedule(folder: GoldenFolder, stages: Sequence[str], notes: list[str]) -> tuple[np.ndarray, np.ndarray] | None:
    """The sigmas and timesteps of the sampler, if there is anything to compare with."""
    if "transformer" not in stages or not folder.sampler_steps():
        return None
    if "sigmas" not in folder.names:
        notes.append("the sampler was not run: sigmas.npy not there")
        return None
    return folder.schedule()


def _step_names(index: int) -> tuple[str, str]:
    return f"noise_step{index}", f"latent_after_step{index}"


def _stage(
    engine: Side,
    folder: GoldenFolder,
    stage: str,
    outputs: Sequence[str],
    schedule: tuple[np.ndarray, np.ndarray] | None,
) -> Generator[Difference]:
    run = engine.load(stage)
    feeds = folder.feeds(stage, engine.stage(stage))
    files = {output: names for output in outputs if (names := folder.output_names(stage, output))}
    if files:
        for output, found in run(feeds, list(files)):
            for name in files[output]:
                yield replace(_measure(folder, name, found), stage=stage)
    if schedule is not None:
        yield from _sampler(run, folder, feeds, *schedule)


def _sampler(
    run: Run, folder: GoldenFolder, feeds: dict[str, np.ndarray], sigmas: np.ndarray, timesteps: np.ndarray
) -> Generator[Difference]:
    # Not those of the feeds, which a float16 graph has rounded.
    stored = folder.load("tf_in_hidden_states").astype(np.float32)
    shape = feeds["hidden_states"].shape
    latents = np.ascontiguousarray(np.broadcast_to(stored.reshape(-1, *shape[1:]), shape))
    timesteps = timesteps[: folder.sampler_steps()]
    for i, noise, after in sample(run, feeds, latents, sigmas, timesteps):
        noise_name, latent_name = _step_names(i)
        if noise_name in folder.names or after is None:
            difference = _measure(folder, noise_name, noise) if noise_name in folder.names else _overflow(noise_name)
            yield replace(difference, stage=SAMPLER)
        if after is not None and latent_name in folder.names:
            yield replace(_measure(folder, latent_name, after), stage=SAMPLER)


def _overflow(name: str) -> Difference:
    return Difference(name, 0.0, np.inf, np.inf, problem="holds values that are not finite")


def _measure(folder: GoldenFolder, name: str, found: np.ndarray) -> Difference:
    stored = folder.load(name)
    if not same_shape(found.shape, stored.shape):
        problem = f"has the shape {list(found.shape)}, {name}.npy {list(stored.shape)}"
        return Difference(name, 0.0, np.inf, np.inf, problem=problem)
    return compare(name, found, stored.reshape(found.shape))
