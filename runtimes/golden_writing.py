"""Writes a golden folder: one side's outputs on random inputs, for another machine or program to be compared with."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np

from intaglio.engines.graph_stats import output_order
from intaglio.errors import EngineError, InputError, OutputError
from intaglio.output import replaced_folder
from intaglio.progress import Progress, ProgressCallback
from intaglio.runtimes import flow_matching
from intaglio.runtimes.golden_folder import GOLDEN_FILE, STAGE_FILES, GoldenInfo, StageFiles, input_name, stored_stages
from intaglio.runtimes.latents import unpack
from intaglio.runtimes.random_feeds import Sizes, latent_size, random_feeds
from intaglio.runtimes.sides import Run, Side, engine_side, reference_side, sample

ENGINE = "engine"
_FILE_NAME = re.compile("[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


def write_golden(
    bundle: str | Path,
    folder: str | Path,
    *,
    source: str = "onnxruntime",
    target: str = "cpu",
    stage: str | None = None,
    tokens: int | None = None,
    height: int | None = None,
    width: int | None = None,
    batch: int = 1,
    steps: int = 4,
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> GoldenInfo:
    """Runs the stages of a bundle and stores inputs, outputs and taps, which ``parity`` takes as ``golden:FOLDER``.

    ``source`` is ``engine``, that of ``target``, or a reference as of ``parity``. A pipeline's stages follow each
    other as in a picture: the conditioning is the text encoder's, the decoder gets the latents after ``steps`` of the
    sampler; where a stage before is not there, its outputs are random. The folder appears whole or not at all; one
    that is there must be a golden folder. Raises InputError, EngineError (also for outputs that are not finite),
    OutputError, RuntimeMissingError, CancelledError.
    """
    path = Path(folder)
    if steps < 1:
        raise InputError(f"steps is {steps}, expected at least 1")
    side = engine_side(bundle, target) if source == ENGINE else reference_side(bundle, source)
    sizes = Sizes.choose(side.dims, tokens=tokens, height=height, width=width, batch=batch)
    stages = stored_stages(side.bundle, stage)
    _check_target(path)
    count = Progress(progress, "golden folder", len(stages), "stages")
    with replaced_folder(path) as partial:
        writing = _Writing(side, partial, sizes, steps, seed)
        for name in stages:
            writing.stage(name)
            count.advance(1)
        info = GoldenInfo(
            intaglio_version=importlib.metadata.version("intaglio"),
            source=source if source != ENGINE else f"{ENGINE} for {target}",
            runtime=_runtime(side),
            kind=side.bundle.kind,
            dtype=side.bundle.dtype,
            stages=stages,
            seed=seed,
            sizes={**asdict(sizes), "steps": steps},
            weights_sha256=side.bundle.weights.sha256,
            graphs={name: side.bundle.stages[name].sha256 for name in stages},
        )
        (partial / GOLDEN_FILE).write_text(info.model_dump_json(indent=1) + "\n", "utf-8")
    return info


def _runtime(side: Side) -> str:
    package = "tract" if side.name == "tract" else "onnxruntime"
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:  # onnxruntime-gpu owns the same module
        return f"{package}, its version not known"


def _check_target(path: Path) -> None:
    if path.resolve() == Path.cwd() or path.resolve() in Path.cwd().parents:
        raise OutputError(f"{path}: is the working folder, which cannot be replaced; name a folder in it")
    if not path.exists():
        return
    if not path.is_dir() or (any(path.iterdir()) and not (path / GOLDEN_FILE).is_file()):
        raise OutputError(f"{path}: exists and holds no {GOLDEN_FILE}, so it is not replaced; choose another path")
    strangers = sorted(p.name for p in path.iterdir() if p.suffix != ".npy" and p.name != GOLDEN_FILE)
    if strangers:
        raise OutputError(
            f"{path}: holds {', '.join(strangers)} beside the golden folder's files, which replacing it would delete; "
            "move that away or choose another path"
        )


class _Writing:
    """One folder on its way: what stages hand on to the next is kept."""

    def __init__(self, side: Side, folder: Path, sizes: Sizes, steps: int, seed: int) -> None:
        self._side, self._folder, self._sizes, self._steps, self._seed = side, folder, sizes, steps, seed
        self._cond: np.ndarray | None = None
        self._latents: np.ndarray | None = None

    def stage(self, name: str) -> None:
        """Runs one stage and writes its inputs and outputs."""
        feeds = random_feeds(self._side.bundle, self._side.stage(name), self._side.dims, self._sizes, self._seed)
        run = self._side.load(name)
        if name == "transformer":
            self._transformer(run, feeds)
            return
        if name == "vae_decoder" and self._latents is not None:
            feeds["latents"] = self._latents.astype(feeds["latents"].dtype)
        self._write_feeds(name, feeds)
        self._write_outputs(name, run, feeds)

    def _transformer(self, run: Run, feeds: dict[str, np.ndarray]) -> None:
        described, tokens = self._side.bundle, feeds["hidden_states"].shape[1]
        shift = described.text_to_image.shift if described.text_to_image else None
        sigmas = flow_matching.sigmas(self._steps, tokens, shift=shift)
        stored = flow_matching.timesteps(sigmas)
        # Divided as a reader does, so that both feed the same bits.
        timesteps = stored / np.float32(1000)
        feeds["timestep"] = np.full_like(feeds["timestep"], timesteps[0])
        if self._cond is not None:
            feeds["encoder_hidden_states"] = self._cond.astype(feeds["encoder_hidden_states"].dtype)
        self._write_feeds("transformer", {name: value for name, value in feeds.items() if name != "timestep"})
        self._write("timestep_step0", stored[0])
        self._write("timesteps", stored)
        self._write("sigmas", sigmas)
        self._write_outputs("transformer", run, feeds)
        latents = feeds["hidden_states"].astype(np.float32)
        for i, noise, after in sample(run, feeds, latents, sigmas, timesteps):
            self._write(f"noise_step{i}", noise)
            assert after is not None, "noise that is not finite is refused"
            self._write(f"latent_after_step{i}", after)
            latents = after
        self._latents = unpack(latents, *latent_size(self._side.dims, self._sizes))

    def _write_feeds(self, stage: str, feeds: Mapping[str, np.ndarray]) -> None:
        for tensor, value in feeds.items():
            self._write(input_name(stage, tensor), value)

    def _write_outputs(self, stage: str, run: Run, feeds: Mapping[str, np.ndarray]) -> None:
        files = STAGE_FILES.get(stage, StageFiles()).outputs
        for output, value in run(feeds, output_order(self._side.graph(stage))):
            if output == "prompt_embeds":
                self._cond = value
                names: tuple[str, ...] = (f"te_cond_{value.shape[-1]}", "cond")
            else:
                names = files.get(output, (output,))
            for name in names:
                self._write(name, value)

    def _write(self, name: str, value: np.ndarray) -> None:
        if not _FILE_NAME.fullmatch(name):
            raise InputError(f"the bundle has the tensor {name!r:.100}, which cannot be the name of a file")
        if value.dtype.kind in "iu":
            array = value.astype("<i8")
        else:
            with np.errstate(over="ignore"):
                array = value.astype("<f4")
            if not np.isfinite(array).all():
                bad = int(np.count_nonzero(~np.isfinite(array)))
                raise EngineError(
                    f"{self._side.name}: {bad} of {array.size} values of {name} are not finite, so they can be no "
                    "reference; compare with `intaglio parity`, or export in float32"
                )
        np.save(self._folder / f"{name}.npy", array, allow_pickle=False)
