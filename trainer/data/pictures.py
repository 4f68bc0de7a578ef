"""Pictures for training: decoded, laid on white, brought to one size, and augmented."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from intaglio.errors import DataError
from intaglio.trainer.data.fields import field_of
from intaglio.trainer.data.making import PIXELS, Arrays, Example, RandomSource, stacked
from intaglio.trainer.data.records import Record
from intaglio.trainer.data.text import Captions

_WHITE = (255, 255, 255)


@dataclass(frozen=True)
class Augmentation:
    """What is drawn anew for each picture and epoch.

    ``horizontal_flip`` and ``vertical_flip`` are probabilities, ``shift`` the largest way (pixels of the result, each
    axis), ``rotation`` the largest angle (degrees), ``crop`` the smallest part of the picture's sides that a random
    crop keeps (1 for none). What comes in at the borders is white.
    """

    horizontal_flip: float = 0.0
    vertical_flip: float = 0.0
    shift: int = 0
    rotation: float = 0.0
    crop: float = 1.0


@dataclass(frozen=True)
class PictureTransform:
    """``pixel_values`` of a picture, and its ``labels`` or the ``input_ids`` and ``attention_mask`` of its caption.

    ``image`` names the field with an encoded picture, or with an array uint8 ``[H, W]``, ``[H, W, 3]`` or
    ``[H, W, 4]``; ``size`` is height and width. ``fit`` crop keeps the middle, pad lays all of it on white, stretch
    changes its proportions.
    """

    size: tuple[int, int]
    image: str = "image"
    fit: str = "crop"
    label: str | None = None
    captions: Captions | None = None
    augmentation: Augmentation = field(default_factory=Augmentation)

    def __call__(self, record: Record, random: RandomSource) -> Example:
        drawn = random()
        image = decode(field_of(record, self.image))
        box = _crop_box(image, self.augmentation.crop, drawn) if self.augmentation.crop < 1 else None
        image = _sized(image, self.size, self.fit, box)
        if self.augmentation != Augmentation():
            image = _augmented(image, self.augmentation, drawn)
        example: Example = {PIXELS: np.asarray(image)}
        if self.label is not None:
            example["labels"] = _class(field_of(record, self.label))
        if self.captions is not None:
            example |= self.captions(record, drawn)
        return example

    def collate(self, examples: Sequence[Example]) -> Arrays:
        return stacked(examples)


def decode(value: Any) -> Image.Image:
    """The RGB picture of an encoded file, of ``{"bytes": …}`` as Hugging Face's datasets store it, or of an array.

    Its EXIF orientation is applied and what is transparent laid on white. Raises DataError.
    """
    if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
        value = value["bytes"]
    try:
        with warnings.catch_warnings():
            # It reads on after damage in a header, and says so in a warning.
            warnings.simplefilter("error")
            if isinstance(value, np.ndarray) and value.dtype == np.uint8:
                image = Image.fromarray(np.ascontiguousarray(value))
            elif isinstance(value, bytes):
                image = ImageOps.exif_transpose(Image.open(io.BytesIO(value)))
            else:
                raise DataError(f"the picture is a {_kind(value)}; expected the bytes of a file, or a uint8 array")
            return _on_white(image)
    except DataError:
        raise
    except Exception as error:  # its readers raise whatever a damaged file makes of them
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"the picture does not decode ({reason})") from error


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        return Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise DataError("the picture has values of 32 bits and no known range; expected 8 or 16 bits")
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        image = image.convert("LA") if image.mode == "La" else image
        white = Image.new("RGBA", image.size, (*_WHITE, 255))
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def _crop_box(image: Image.Image, smallest: float, drawn: np.random.Generator) -> tuple[float, float, float, float]:
    scale, x, y = drawn.uniform(smallest, 1), drawn.random(), drawn.random()
    width, height = image.width * scale, image.height * scale
    left, top = x * (image.width - width), y * (image.height - height)
    return left, top, left + width, top + height


def _sized(
    image: Image.Image, size: tuple[int, int], fit: str, box: tuple[float, float, float, float] | None
) -> Image.Image:
    """``box`` of the picture (left, top, right, bottom; None for all of it) at ``size``."""
    height, width = size
    left, top, right, bottom = box or (0.0, 0.0, float(image.width), float(image.height))
    if box is None and (image.height, image.width) == size:
        return image
    if fit == "stretch":
        return image.resize((width, height), Image.Resampling.LANCZOS, box=(left, top, right, bottom))
    ratios = width / (right - left), height / (bottom - top)
    if fit == "crop":
        cut_x, cut_y = (right - left - width / max(ratios)) / 2, (bottom - top - height / max(ratios)) / 2
        inner = (left + cut_x, top + cut_y, right - cut_x, bottom - cut_y)
        return image.resize((width, height), Image.Resampling.LANCZOS, box=inner)
    scale = min(ratios)
    inside = max(1, round((right - left) * scale)), max(1, round((bottom - top) * scale))
    small = image.resize(inside, Image.Resampling.LANCZOS, box=(left, top, right, bottom))
    sheet = Image.new("RGB", (width, height), _WHITE)
    sheet.paste(small, ((width - inside[0]) // 2, (height - inside[1]) // 2))
    return sheet


def _augmented(image: Image.Image, augmentation: Augmentation, drawn: np.random.Generator) -> Image.Image:
    # All is drawn whether it is used or not, so that one setting does not change what another draws.
    flip, upside_down = drawn.random(2)
    x, y = (int(n) for n in drawn.integers(-augmentation.shift, augmentation.shift, 2, endpoint=True))
    angle = drawn.uniform(-1, 1) * augmentation.rotation
    if flip < augmentation.horizontal_flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if upside_down < augmentation.vertical_flip:
        image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    if augmentation.rotation:
        return image.rotate(angle, Image.Resampling.BICUBIC, translate=(x, y), fillcolor=_WHITE)
    if x or y:
        sheet = Image.new("RGB", image.size, _WHITE)
        sheet.paste(image, (x, y))
        return sheet
    return image


def _class(value: Any) -> np.ndarray:
    try:
        if isinstance(value, float) and not value.is_integer():
            raise ValueError("no whole number")
        return np.asarray(int(value), np.int64)
    except (TypeError, ValueError) as error:
        raise DataError(f"the label is {value!r}; expected the number of a class") from error


def _kind(value: Any) -> str:
    return f"{value.dtype} array {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
