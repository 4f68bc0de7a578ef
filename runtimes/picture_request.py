"""What a call of a picture pipeline asks for, checked and completed before any stage is loaded."""

from __future__ import annotations

import math
import numbers
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from intaglio.errors import BundleError, InputError
from intaglio.exporters.bundle import Bundle, Dim
from intaglio.progress import ProgressCallback
from intaglio.runtimes import flow_matching
from intaglio.runtimes.checks import integer
from intaglio.runtimes.denoising import Schedule
from intaglio.runtimes.golden import Golden
from intaglio.runtimes.images import check_size, load_image
from intaglio.runtimes.latents import initial_latents, latent_pixels
from intaglio.runtimes.noise import normal
from intaglio.runtimes.tokenizer import Tokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

Picture = Any  # what `load_image` takes: a file, a Pillow picture or a uint8 array
# Of a bundle that says none.
_DEFAULT_SIZE = 512
# A text chunk of a PNG holds the prompt; readers refuse more than a megabyte.
_MAX_PROMPT = 250_000


class PictureOptions(TypedDict, total=False):
    """Options of a picture.

    negative_prompt: what to lead away from, with guidance above 1 (an empty prompt). height, width: in pixels,
    multiples of the side of a latent, 16 in FLUX.2 (the size that the dims of the engine call ``opt``, or that of
    ``image``). num_inference_steps: 4, or 50 for a model that is not distilled.
    guidance_scale: above 1 each step runs twice, with the prompt and with the negative one (1, or 4 for a model that is
    not distilled); for a model with a guidance embedding it is an input. num_images_per_prompt: 1. seed: an integer
    from 0 to 2**64 - 1, to which the second picture adds 1 and so on, or one for each picture (drawn). rng: ``numpy``,
    ``mlx`` or ``torch``. latents: the noise to begin with in place of a seed, ``[batch, tokens, channels]`` or
    ``[batch, channels, rows, columns]``. image: reference pictures to work from; or, with ``strength``, the
    one picture to start from, the more of which is replaced the nearer strength is to 1. sigmas: noise levels by hand,
    falling. shift: a fixed shift of the noise levels in place of the model's own. truncate: cut prompts that are too
    long. tiled: decode in bands of rows, which takes less memory and more time (as the memory budget asks for).
    golden: a folder of stored tensors to compare with, see ``golden.py``; golden_replace: which of ``text_encoder`` and
    ``transformer`` they stand in for. progress: a callback for every step, which can cancel. preview: is called with
    each step's number, from 0, and a small picture of what it is coming to.
    """

    negative_prompt: str | Sequence[str] | None
    height: int | None
    width: int | None
    num_inference_steps: int | None
    guidance_scale: float | None
    num_images_per_prompt: int
    seed: int | Sequence[int] | None
    rng: str | None
    latents: Any
    image: Picture | Sequence[Picture] | None
    strength: float | None
    sigmas: Sequence[float] | np.ndarray | None
    shift: float | None
    truncate: bool
    tiled: bool | None
    golden: str | os.PathLike[str] | None
    golden_replace: Sequence[str]
    progress: ProgressCallback | None
    preview: Callable[[int, Image], object] | None


@dataclass(frozen=True)
class PictureModel:
    """What a bundle and its engine say about the pictures they make. A latent is ``factor`` pixels wide and high."""

    channels: int
    factor: int
    text_length: int
    embeds_width: int
    is_distilled: bool | None
    guidance_embeds: bool
    shift: float | None
    dims: dict[str, Dim]

    @classmethod
    def of(cls, bundle: Bundle, path: object, dims: dict[str, Dim]) -> PictureModel:
        """Of a bundle at ``path``; ``dims`` are those of its engine, or of the bundle where there is none yet.

        Raises BundleError for a bundle of another kind.
        """
        info, components = bundle.text_to_image, bundle.components
        if info is None:
            raise BundleError(f"{path}: is a bundle for {bundle.kind}, expected one for text-to-image")
        transformer = components["transformer"].config if "transformer" in components else {}
        vae = components["vae"].config if "vae" in components else {}
        channels = transformer.get("in_channels") or vae.get("latent_channels", 0) * vae.get("patch_size", 1) ** 2
        return cls(
            channels=channels,
            factor=latent_pixels(vae),
            text_length=info.text_length,
            embeds_width=transformer.get("joint_attention_dim", 0),
            is_distilled=info.is_distilled,
            guidance_embeds=bool(transformer.get("guidance_embeds", False)),
            shift=info.shift,
            dims=dims,
        )

    def steps(self, given: int | None) -> int:
        """Steps to run. Raises InputError."""
        if given is None:
            return 50 if self._by_many_steps else 4
        return integer("num_inference_steps", given, 1, flow_matching.NUM_TRAIN_TIMESTEPS)

    def guidance(self, given: float | None) -> float:
        """The guidance scale. Raises InputError for one that the model would not heed."""
        if given is None:
            return 4.0 if self._by_many_steps else 1.0
        low = 0.0 if self.guidance_embeds else 1.0
        number = isinstance(given, numbers.Real) and not isinstance(given, bool)
        if not number or not math.isfinite(given) or not low <= given <= 1000:
            none = "" if self.guidance_embeds else ", where 1 is none"
            raise InputError(f"guidance_scale is {given!r}; expected a number from {low:g} to 1000{none}")
        if given > 1 and self.is_distilled and not self.guidance_embeds:
            raise InputError(
                f"guidance_scale is {given:g}, but this model was distilled to need none, and heeds none; leave it at "
                "1, or export with --not-distilled if that is wrong"
            )
        return float(given)

    @property
    def default_size(self) -> tuple[int, int]:
        """Height and width of a picture that nobody gives a size, in pixels."""
        height, width = (self.dims.get(side) for side in ("height", "width"))
        return (height and height.opt) or _DEFAULT_SIZE, (width and width.opt) or _DEFAULT_SIZE

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of latents of a picture in pixels."""
        return height // self.factor, width // self.factor

    @property
    def _by_many_steps(self) -> bool:
        # As diffusers' pipelines do by default.
        return self.is_distilled is False or (self.guidance_embeds and not self.is_distilled)

    def check_picture(self, name: str, height: int, width: int) -> None:
        """Raises InputError for a picture called ``name`` of a size in pixels that the engine was not compiled for."""
        self.check_dim("height", height, f"{name}height")
        self.check_dim("width", width, f"{name}width")

    def check_batch(self, rows: int) -> None:
        """Raises InputError where the engine does not run ``rows`` at once, or not one alone, as the decoder does."""
        self.check_dim("batch", rows, "the number of pictures")
        self.check_dim("batch", 1, "the number of pictures in one run of the decoder")

    def check_dim(self, name: str, size: int, what: str) -> None:
        """Raises InputError for a size that the engine was not compiled for."""
        dim = self.dims.get(name)
        if dim is not None and not dim.min <= size <= dim.max:
            raise InputError(
                f"{what} is {size}, but the engine was compiled for {dim.min} to {dim.max}; see `intaglio compile "
                f'--shapes "{name}=…"`'
            )


@dataclass(frozen=True)
class Work:
    """What runs at once, and what decides how much memory it takes.

    ``stages`` are in the order in which they run. ``pictures`` of ``height`` by ``width`` pixels are made, or as many
    rows run. ``tokens`` are the transformer's, of text, picture and reference pictures; ``encoded`` the pixels of each
    picture for the VAE's encoder. ``tiled`` None leaves the choice.
    """

    stages: tuple[str, ...]
    pictures: int = 1
    height: int = 0
    width: int = 0
    tokens: int = 0
    encoded: tuple[int, ...] = ()
    tiled: bool | None = None
    preview: bool = False

    @property
    def loaded(self) -> tuple[str, ...]:
        """The stages that it loads: previews take the decoder."""
        return tuple(dict.fromkeys([*self.stages, *(["vae_decoder"] if self.preview else [])]))


def check_stages(bundle: Bundle, path: object, needed: Sequence[str]) -> None:
    """Raises BundleError naming the stages that a bundle lacks."""
    if missing := [name for name in needed if name not in bundle.stages]:
        raise BundleError(
            f"{path}: lacks the stage {', '.join(missing)}, which this needs; it has {', '.join(bundle.stages)}. "
            "Export it again with all parts, or with --stages"
        )


def prompt_ids(tokenizer: Tokenizer, prompts: Sequence[str], length: int, *, truncate: bool) -> list[list[int]]:
    """Token ids of each prompt as a user's message in the chat template. Raises InputError for one that is longer."""
    rows = []
    for prompt in prompts:
        text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], enable_thinking=False)
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) > length and not truncate:
            raise InputError(
                f"the prompt has {len(ids)} tokens with its template, and at most {length} fit; shorten it, or "
                "have it cut with truncate"
            )
        rows.append(ids[:length])
    return rows


@dataclass(frozen=True)
class PictureRequest:
    """A checked call. Sizes are in pixels, of which a latent is ``factor`` wide; ``references`` and ``start`` are as an
    encoder takes them.

    ``noise`` is float32 ``[pictures, tokens, channels]``; None where golden tensors replace the sampling. ``seeds`` is
    None where nothing was drawn. ``negative_prompts`` is None without guidance by two runs.
    """

    prompts: tuple[str, ...]
    negative_prompts: tuple[str, ...] | None
    height: int
    width: int
    factor: int
    text_tokens: int
    guidance: float
    schedule: Schedule
    noise: np.ndarray | None
    seeds: tuple[int, ...] | None
    rng: str
    references: tuple[np.ndarray, ...]
    start: np.ndarray | None
    strength: float | None
    truncate: bool
    tiled: bool | None
    golden: Golden | None
    progress: ProgressCallback | None
    preview: Callable[[int, Image], object] | None

    @property
    def pictures(self) -> int:
        """How many are made."""
        return len(self.prompts)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of latents."""
        return self.height // self.factor, self.width // self.factor

    @property
    def image_tokens(self) -> int:
        """Tokens of the transformer, those of reference pictures included."""
        pixels = self.height * self.width + sum(r.shape[2] * r.shape[3] for r in self.references)
        return pixels // self.factor**2

    @property
    def work(self) -> Work:
        """What it runs."""
        encoded = [*self.references, *([self.start] if self.start is not None else [])]
        stages = ["text_encoder", *(["vae_encoder"] if encoded else []), "transformer", "vae_decoder"]
        replaced = self.golden.replaced if self.golden else ()
        return Work(
            tuple(name for name in stages if name not in replaced),
            self.pictures,
            self.height,
            self.width,
            self.text_tokens + self.image_tokens,
            tuple(image.shape[2] * image.shape[3] for image in encoded),
            self.tiled,
            self.preview is not None and "transformer" not in replaced,
        )


def make_request(model: PictureModel, prompt: str | Sequence[str], options: PictureOptions) -> PictureRequest:
    """Checks a call's arguments against each other and the engine, and draws its noise. Raises InputError."""
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if unknown := sorted(given.keys() - PictureOptions.__annotations__.keys()):
        raise TypeError(
            f"{unknown[0]} is no option of a picture; there are {', '.join(PictureOptions.__annotations__)}"
        )
    for name in ("progress", "preview"):
        if name in given and not callable(given[name]):
            raise InputError(f"{name} is {given[name]!r}; expected a function")
    for name in ("truncate", "tiled"):
        if name in given and not isinstance(given[name], bool):
            raise InputError(f"{name} is {given[name]!r}; expected True or False")
    copies = integer("num_images_per_prompt", given.get("num_images_per_prompt", 1), 1, 1024)
    prompts = check_texts("prompt", prompt)
    model.check_batch(len(prompts) * copies)
    golden = _golden(given, len(prompts) * copies)
    guidance = model.guidance(given.get("guidance_scale"))
    negative = _negative_prompts(model, given, guidance, len(prompts))
    if golden is not None and negative is not None:
        raise InputError("a golden folder holds a run without guidance; set guidance_scale to 1 for it")
    references, start = _pictures(given, model.factor)
    height, width = _size(model, given, start[0] if start else next(iter(references), None), golden)
    model.check_picture("", height, width)
    for i, reference in enumerate(references):
        model.check_picture(f"reference picture {i + 1}'s ", *reference.shape[2:])
    if start is not None and start[0].shape[2:] != (height, width):
        raise InputError(
            f"image is {start[0].shape[3]} by {start[0].shape[2]} pixels, and the picture to be {width} by {height}; "
            "resize it first, or leave height and width out"
        )
    grid = model.grid(height, width)
    schedule = _schedule(model, given, math.prod(grid), golden, start[1] if start else None)
    pictures = tuple(text for text in prompts for _ in range(copies))
    text_tokens = model.text_length
    if golden is not None:
        text_tokens = golden.check(model.text_length, model.embeds_width, model.channels, height, width, model.factor)
    noise, seeds, rng = _noise(model, given, len(pictures), grid, golden)
    request = PictureRequest(
        prompts=pictures,
        negative_prompts=negative and tuple(text for text in negative for _ in range(copies)),
        height=height,
        width=width,
        factor=model.factor,
        text_tokens=text_tokens,
        guidance=guidance,
        schedule=schedule,
        noise=noise,
        seeds=seeds,
        rng=rng,
        references=references,
        start=start[0] if start else None,
        strength=start[1] if start else None,
        truncate=bool(given.get("truncate", False)),
        tiled=given.get("tiled"),
        golden=golden,
        progress=given.get("progress"),
        preview=given.get("preview"),
    )
    model.check_dim("image_tokens", request.image_tokens, "the number of image tokens")
    model.check_dim("text_tokens", request.text_tokens, "the number of text tokens")
    return request


def check_texts(name: str, value: str | Sequence[str]) -> tuple[str, ...]:
    """One text or several, at least one, as a tuple. Raises InputError."""
    texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else ()
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InputError(f"{name} is {value!r:.100}; expected text, or a list of texts")
    for text in texts:
        if "\0" in text:
            raise InputError(f"{name} has a NUL character at position {text.index(chr(0))}; expected text without any")
        if len(text) > _MAX_PROMPT:
            raise InputError(f"{name} has {len(text)} characters; expected at most {_MAX_PROMPT}")
    return texts


def _negative_prompts(
    model: PictureModel, given: dict[str, Any], guidance: float, prompts: int
) -> tuple[str, ...] | None:
    if "negative_prompt" not in given:
        return None if guidance == 1 or model.guidance_embeds else ("",) * prompts
    if model.guidance_embeds:
        raise InputError("this model takes its guidance as an input and has no run for a negative prompt; leave it out")
    if guidance == 1:
        raise InputError(
            "a negative prompt has no effect without guidance; set guidance_scale above 1, or leave it out"
        )
    texts = check_texts("negative_prompt", given["negative_prompt"])
    if len(texts) not in (1, prompts):
        raise InputError(
            f"there are {len(texts)} negative prompts for {prompts} prompts; expected one, or one for each"
        )
    return texts * prompts if len(texts) == 1 else texts


def _golden(given: dict[str, Any], pictures: int) -> Golden | None:
    if "golden" not in given:
        if given.get("golden_replace"):
            raise InputError("golden_replace is given without golden, the folder to take tensors from")
        return None
    golden = Golden(given["golden"], given.get("golden_replace", ()))
    for name in ("seed", "rng", "latents", "image", "strength", "sigmas", "shift"):
        if name in given:
            raise InputError(f"{name} and golden are both given, but the golden folder brings that; leave {name} out")
    if pictures != 1:
        raise InputError(f"{pictures} pictures are asked for, but a golden folder holds one")
    return golden


def _pictures(given: dict[str, Any], factor: int) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, float] | None]:
    """Reference pictures, and the picture to start from with its strength, as an encoder takes them: of sides that
    ``factor`` divides.
    """
    strength, image = given.get("strength"), given.get("image")
    if image is None:
        if strength is not None:
            raise InputError("strength is given without image, the picture to start from")
        return (), None
    listed = list(image) if isinstance(image, list | tuple) else [image]
    if not listed:
        raise InputError("image is an empty list; give a picture, or leave it out")
    if strength is not None and len(listed) > 1:
        raise InputError(f"{len(listed)} pictures are given with strength; expected the one to start from")
    pictures = tuple(load_image(picture, factor) for picture in listed)
    return (pictures, None) if strength is None else ((), (pictures[0], strength))


def _size(
    model: PictureModel, given: dict[str, Any], picture: np.ndarray | None, golden: Golden | None
) -> tuple[int, int]:
    default = model.default_size
    if picture is not None:
        default = picture.shape[2:]
    stored = golden.grid() if golden else None
    if stored:
        default = (stored[0] * model.factor, stored[1] * model.factor)
    height, width = given.get("height", default[0]), given.get("width", default[1])
    check_size(height, width, model.factor)
    if stored and (height, width) != default:
        raise InputError(f"the golden folder holds {default[1]} by {default[0]} pixels, asked are {width} by {height}")
    return int(height), int(width)


def _schedule(
    model: PictureModel, given: dict[str, Any], tokens: int, golden: Golden | None, strength: float | None
) -> Schedule:
    steps = given.get("num_inference_steps")
    if golden is not None:
        if steps is not None and model.steps(steps) != golden.steps:
            raise InputError(f"num_inference_steps is {steps}, but the golden folder holds {golden.steps} steps")
        if golden.samples:
            return golden.schedule()
        steps = golden.steps
    if "sigmas" in given:
        if "shift" in given:
            raise InputError("sigmas and shift are both given, but sigmas by hand are taken as they are; leave one out")
        sigmas = flow_matching.given_sigmas(given["sigmas"])
        if len(sigmas) < 2:
            raise InputError("sigmas has no level above 0; expected at least one")
        if steps is not None and model.steps(steps) != len(sigmas) - 1:
            raise InputError(f"num_inference_steps is {steps}, but there are {len(sigmas) - 1} sigmas above 0")
    else:
        sigmas = flow_matching.sigmas(model.steps(steps), tokens, shift=given.get("shift", model.shift))
    first = 0 if strength is None else flow_matching.start_step(len(sigmas) - 1, strength)
    # Multiplied and divided, so that they round as in diffusers.
    timesteps = flow_matching.timesteps(sigmas) / np.float32(flow_matching.NUM_TRAIN_TIMESTEPS)
    return Schedule(sigmas, timesteps, first)


def _noise(
    model: PictureModel, given: dict[str, Any], pictures: int, grid: tuple[int, int], golden: Golden | None
) -> tuple[np.ndarray | None, tuple[int, ...] | None, str]:
    """Packed noise, the seeds that it was drawn from, and how."""
    if golden is not None:
        shape = (1, math.prod(grid), model.channels)
        return golden.tensor("tf_in_hidden_states", shape) if golden.samples else None, None, ""
    if "latents" in given:
        for name in ("seed", "rng"):
            if name in given:
                raise InputError(f"{name} and latents are both given, but latents replace what is drawn; leave one out")
        return initial_latents(given["latents"], pictures, model.channels, *grid, model.factor), None, ""
    rng = given.get("rng", "numpy")
    seeds = _seeds(given.get("seed"), pictures)
    noise = normal((pictures, model.channels, *grid), seeds, rng)
    return initial_latents(noise, pictures, model.channels, *grid, model.factor), seeds, rng


def _seeds(seed: int | Sequence[int] | None, pictures: int) -> tuple[int, ...]:
    if seed is None:
        seed = secrets.randbelow(2**31)
    if isinstance(seed, Sequence) and not isinstance(seed, str | bytes):
        if len(seed) != pictures:
            raise InputError(f"there are {len(seed)} seeds for {pictures} pictures; expected one for each")
        return tuple(seed)
    if not isinstance(seed, numbers.Integral) or isinstance(seed, bool):
        raise InputError(f"seed is {seed!r}; expected an integer from 0 to 2**64 - 1, or one for each picture")
    return tuple(int(seed) + i for i in range(pictures))
