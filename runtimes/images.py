"""Pictures: between a decoder's output and pixels, from files and arrays to an encoder's input, and PNG with text.

Shape suffixes: B batch, H rows, W columns; 3 is red, green and blue. Pixels are taken as sRGB and colour profiles are
not applied. Pillow is imported where it is first needed.
"""

from __future__ import annotations

import importlib
import io
import numbers
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from intaglio.errors import EngineError, InputError, IntaglioError, OutputError, RuntimeMissingError
from intaglio.output import replaced_file
from intaglio.runtimes.latents import FACTOR

if TYPE_CHECKING:
    from PIL.Image import Image

# None of these starts another program to decode a file, as EPS does.
_FORMATS = ("PNG", "JPEG", "WEBP", "AVIF", "TIFF", "BMP", "GIF", "PPM")


def check_size(height: int, width: int, multiple: int = FACTOR) -> None:
    """Raises InputError, naming the nearest sizes, unless both are positive multiples of ``multiple`` (pixels)."""
    for name, size in (("height", height), ("width", width)):
        if not isinstance(size, numbers.Integral) or isinstance(size, bool):
            raise InputError(f"{name} is {size!r}; expected an integer, a multiple of {multiple}")
        below = int(size) // multiple * multiple
        if size < multiple:
            raise InputError(f"{name} is {size}; expected a multiple of {multiple}, at least {multiple}")
        if below != size:
            raise InputError(
                f"{name} is {size}; expected a multiple of {multiple}, and {below} and {below + multiple} are nearest"
            )


def to_pixels(sample_B3HW: np.ndarray) -> np.ndarray:
    """Uint8 ``[batch, height, width, 3]`` from a decoder's float32 ``[batch, 3, height, width]``, where -1 is black.

    ``round(255 * clip(x / 2 + 0.5, 0, 1))``, halves to even. Raises EngineError for another shape or dtype and for
    values that are not finite.
    """
    if sample_B3HW.ndim != 4 or sample_B3HW.shape[1] != 3 or sample_B3HW.dtype != np.float32:
        raise EngineError(
            f"the sample is {sample_B3HW.dtype} {list(sample_B3HW.shape)}; expected float32 [batch, 3, height, width]"
        )
    finite = np.isfinite(sample_B3HW)
    if not finite.all():
        raise EngineError(
            f"{finite.size - np.count_nonzero(finite)} of {finite.size} values of the sample are not finite. The "
            "engine overflowed or its weights are damaged: compare it with `intaglio parity`, or compile in float32"
        )
    unit_B3HW = np.clip(sample_B3HW / 2 + np.float32(0.5), 0, 1)
    pixels_B3HW = np.rint(255 * unit_B3HW).astype(np.uint8)
    return np.ascontiguousarray(pixels_B3HW.transpose(0, 2, 3, 1))


def to_image(pixels_HW3: np.ndarray) -> Image:
    """The Pillow picture of uint8 ``[height, width, 3]``. Raises InputError."""
    if pixels_HW3.ndim != 3 or pixels_HW3.shape[2] != 3 or pixels_HW3.dtype != np.uint8 or 0 in pixels_HW3.shape:
        raise InputError(
            f"the pixels are {pixels_HW3.dtype} {list(pixels_HW3.shape)}; expected uint8 [height, width, 3]"
        )
    return _pillow("Image").fromarray(np.ascontiguousarray(pixels_HW3))


def load_image(source: str | os.PathLike[str] | Image | np.ndarray, multiple: int = FACTOR) -> np.ndarray:
    """An encoder's input, float32 ``[1, 3, height, width]`` with black at -1 and white at 1: ``2 * value / 255 - 1``.

    source: a file (PNG, JPEG, WebP, AVIF, TIFF, BMP, GIF or PPM of one picture), a Pillow picture, or a uint8 array
    ``[height, width]``, ``[height, width, 3]`` or ``[height, width, 4]``. An orientation in its EXIF data is applied,
    what is transparent is laid on white, palettes and grey become colours, and 16 bits of grey are kept. Nothing is
    resized or cropped. Raises InputError for what is missing, damaged, too large for Pillow's `MAX_IMAGE_PIXELS`,
    animated, or not a multiple of ``multiple`` in size.
    """
    if isinstance(source, np.ndarray):
        name, image = "the array", _from_array(source)
    elif isinstance(source, str | os.PathLike):
        name, image = os.fspath(source), _opened(Path(source))
    elif isinstance(source, _pillow("Image").Image):
        name, image = "the picture", source
    else:
        raise InputError(
            f"the picture is a {type(source).__name__}; expected a file, a Pillow picture or a uint8 array"
        )
    with _reading(name):
        image = _pillow("ImageOps").exif_transpose(image)
        try:
            check_size(image.height, image.width, multiple)
        except InputError as error:
            raise InputError(f"{name}: {error}. Resize or crop it first") from error
        unit_HW3 = _unit_rgb(name, image)
    return np.ascontiguousarray((2 * unit_HW3 - 1).transpose(2, 0, 1))[None]


def _from_array(pixels: np.ndarray) -> Image:
    shaped = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4))
    if not shaped or pixels.dtype != np.uint8 or 0 in pixels.shape:
        raise InputError(
            f"the array is {pixels.dtype} {list(pixels.shape)}; expected uint8 [height, width], [height, width, 3] or "
            "[height, width, 4]"
        )
    return _pillow("Image").fromarray(np.ascontiguousarray(pixels))


def _opened(path: Path) -> Image:
    pillow = _pillow("Image")
    if not path.is_file():
        raise InputError(f"{path}: {'it is no file' if path.exists() else 'there is no such file'}; expected a picture")
    pillow.init()
    # Some formats are missing from some builds of Pillow.
    known = [name for name in _FORMATS if name in pillow.OPEN]
    with _reading(str(path), known), pillow.open(path, formats=known) as image:
        # The second picture of an MPO is a preview or the other eye's.
        if getattr(image, "is_animated", False) and image.format != "MPO":
            raise InputError(f"{path}: it holds {image.n_frames} pictures; expected one. Save one of them first")
        image.load()
        return image


@contextmanager
def _reading(name: str, formats: Sequence[str] = _FORMATS) -> Iterator[None]:
    """Turns whatever Pillow raises into an InputError."""
    try:
        with warnings.catch_warnings():
            # It reads on after damage in a header, and says so in a warning.
            warnings.simplefilter("error", UserWarning)
            warnings.simplefilter("error", _pillow("Image").DecompressionBombWarning)
            yield
    except IntaglioError:
        raise
    except (_pillow("Image").DecompressionBombWarning, _pillow("Image").DecompressionBombError) as error:
        raise InputError(f"{name}: {error}. Make it smaller first") from error
    except _pillow("Image").UnidentifiedImageError as error:
        raise InputError(f"{name}: it is damaged or no {', '.join(formats)} file") from error
    except Exception as error:  # its readers raise whatever a damaged file makes of them
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{name}: it cannot be read ({reason}). Is the file damaged?") from error


def _unit_rgb(name: str, image: Image) -> np.ndarray:
    """Float32 ``[height, width, 3]`` from 0 to 1."""
    if image.mode.startswith("I;16"):
        grey_HW = np.asarray(image).astype(np.float32) / np.float32(65535)
        if (key := image.info.get("transparency")) is not None:
            grey_HW[np.asarray(image) == key] = 1
        return np.repeat(grey_HW[..., None], 3, axis=2)
    if image.mode in ("I", "F"):
        raise InputError(f"{name}: its values have 32 bits and no known range; expected 8 or 16 bits. Convert it first")
    if image.mode == "La":
        image = image.convert("LA")
    if not (image.mode in ("LA", "PA", "RGBA", "RGBa") or "transparency" in image.info):
        return np.asarray(image.convert("RGB")).astype(np.float32) / np.float32(255)
    rgba_HW4 = np.asarray(image.convert("RGBA")).astype(np.float32) / np.float32(255)
    alpha_HW1 = rgba_HW4[..., 3:]
    return rgba_HW4[..., :3] * alpha_HW1 + (1 - alpha_HW1)


def png_bytes(image: Image | np.ndarray, text: Mapping[str, str] | None = None) -> bytes:
    """A PNG file of a Pillow picture or of uint8 ``[height, width, 3]``, with ``text`` as keyword and value.

    Text that Latin-1 holds becomes tEXt, any other iTXt (PNG specification, section 11.3.3). Raises InputError for a
    keyword that PNG does not allow, for text with a NUL or a lone surrogate, and for a picture that PNG cannot hold.
    """
    if isinstance(image, np.ndarray):
        image = to_image(image)
    chunks = _pillow("PngImagePlugin").PngInfo()
    for keyword, value in (text or {}).items():
        _check_text(keyword, value)
        chunks.add_text(keyword, value)
    file = io.BytesIO()
    try:
        image.save(file, "PNG", pnginfo=chunks)
    except (OSError, ValueError, SystemError) as error:
        raise InputError(f"the picture of mode {image.mode} cannot be a PNG ({error}); convert it to RGB") from error
    return file.getvalue()


def save_png(image: Image | np.ndarray, path: str | os.PathLike[str], text: Mapping[str, str] | None = None) -> None:
    """Writes `png_bytes` to ``path`` in one step: the file is whole or as it was.

    Raises InputError for a suffix other than .png and what `png_bytes` raises it for, OutputError for a folder that
    does not exist or cannot be written.
    """
    path = Path(path)
    check_png_path(path)
    content = png_bytes(image, text)
    with replaced_file(path) as file:
        file.write(content)


def check_png_path(path: str | os.PathLike[str]) -> None:
    """Raises what `save_png` would for this path, so that it can be known before a picture is made."""
    path = Path(path)
    if path.suffix.lower() != ".png":
        found = f"the suffix is {path.suffix!r}" if path.suffix else "has no suffix"
        raise InputError(f"{path}: {found}; expected .png, the format that is written")
    if path.is_dir():
        raise OutputError(f"{path}: it is a folder; expected the name of a file")
    if not path.parent.is_dir():
        raise OutputError(f"{path}: the folder {path.parent} does not exist; make it first")
    if not os.access(path.parent, os.W_OK):
        raise OutputError(
            f"{path}: the folder {path.parent} cannot be written; choose another or change its permissions"
        )


# 1 to 79 printable Latin-1 characters, single spaces between others.
_KEYWORD = re.compile(r"(?=.{1,79}\Z)[!-~¡-ÿ]+( [!-~¡-ÿ]+)*\Z")


def _check_text(keyword: object, value: object) -> None:
    if not isinstance(keyword, str) or not _KEYWORD.match(keyword):
        raise InputError(
            f"the keyword of a PNG text is {keyword!r}; expected 1 to 79 printable Latin-1 characters, with single "
            "spaces between words"
        )
    if not isinstance(value, str) or "\0" in value:
        raise InputError(f"the PNG text {keyword!r} is {value!r}; expected text without NUL characters")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"the PNG text {keyword!r} is no valid Unicode ({error.reason} at {error.start})") from error


def _pillow(module: str) -> Any:
    """A module of Pillow. Raises RuntimeMissingError saying how to install it."""
    try:
        return importlib.import_module(f"PIL.{module}")
    except ImportError as error:
        raise RuntimeMissingError(
            f"Pillow, which reads and writes pictures, cannot be imported ({error}). Install it: pip install pillow"
        ) from error
