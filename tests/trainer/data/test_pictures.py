"""Pictures: against Pillow, NumPy and the runtime's own reading; augmentation within its bounds and drawn anew."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training_data as data
from PIL import Image

from intaglio.errors import DataError
from intaglio.runtimes.images import load_image
from intaglio.runtimes.picture_request import prompt_ids
from intaglio.runtimes.tokenizer import Tokenizer
from intaglio.trainer.data.loader import Loader
from intaglio.trainer.data.pictures import Augmentation, PictureTransform, decode
from intaglio.trainer.data.text import Captions


def _encoded(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return file.getvalue()


def _random(seed: int = 0) -> Callable[[], np.random.Generator]:
    return lambda: np.random.default_rng(seed)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "L", "P", "1", "I;16", "transparent"])
def test_decodes_as_the_runtime_reads(mode: str) -> None:
    """Within half a step of 8 bits of `load_image`, which blends in float32."""
    rng = np.random.default_rng(1)
    if mode == "I;16":
        image = Image.fromarray(rng.integers(0, 65536, (9, 7), np.uint16))
    elif mode == "transparent":
        image = Image.fromarray(rng.integers(0, 256, (9, 7, 3), np.uint8)).convert("P")
    else:
        image = Image.fromarray(rng.integers(0, 256, (9, 7, 4), np.uint8), "RGBA").convert(mode)
    options = {"transparency": 3} if mode == "transparent" else {}
    content = _encoded(image, **options)
    expected = load_image(Image.open(io.BytesIO(content)), multiple=1)[0].transpose(1, 2, 0)
    found = np.asarray(decode(content), np.float32) / 127.5 - 1
    # alpha_composite rounds twice.
    bound = 1.01 if mode in ("RGBA", "LA") else 0.51
    assert np.abs(found - expected).max() <= bound / 127.5


def test_orientation_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = data.picture(0)
    assert np.array_equal(np.asarray(decode(_encoded(Image.fromarray(pixels), exif=exif))), np.rot90(pixels, -1))


@pytest.mark.parametrize("value", [b"", b"GIF89a", data.png(data.picture(0))[:-30], "a.png", 3, np.zeros((2, 2))])
def test_what_does_not_decode(value: Any) -> None:
    with pytest.raises(DataError, match=r"the picture (does not decode|is a)"):
        decode(value)


@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
@pytest.mark.parametrize("size", [(8, 8), (6, 20), (20, 6)])
def test_brings_pictures_to_their_size(fit: str, size: tuple[int, int]) -> None:
    """A black picture, twice as wide as high, so that white is padding and the middle is known."""
    transform = PictureTransform(size, fit=fit)
    black = Image.new("RGB", (24, 12))
    pixels = transform({"image": _encoded(black)}, _random())["pixel_values"]
    assert pixels.shape == (*size, 3)
    white = int((pixels[..., 0] > 127).sum())
    inside = min(size[1] / 24, size[0] / 12)
    padding = size[0] * size[1] - round(24 * inside) * round(12 * inside)
    assert white == (padding if fit == "pad" else 0)
    if fit == "crop" and size == (8, 8):
        half = data.picture(3)
        wide = np.concatenate([np.zeros((12, 6, 3), np.uint8), half, np.zeros((12, 6, 3), np.uint8)], axis=1)
        found = transform({"image": _encoded(Image.fromarray(wide))}, _random())["pixel_values"]
        alone = np.asarray(Image.fromarray(half).resize((8, 8), Image.Resampling.LANCZOS), np.int64)
        assert np.abs(found[:, 2:-2] - alone[:, 2:-2]).max() <= 1


def test_flips_and_shifts_are_those_of_numpy() -> None:
    pixels = data.picture(1, 10)
    record = {"image": data.png(pixels)}
    seen = set()
    for seed in range(60):
        transform = PictureTransform((10, 10), augmentation=Augmentation(0.5, 0.5, shift=2))
        found = transform(record, _random(seed))["pixel_values"]
        matches = [
            (flip, upside, x, y)
            for flip in (0, 1)
            for upside in (0, 1)
            for x in range(-2, 3)
            for y in range(-2, 3)
            if np.array_equal(found, _moved(pixels[:: 1 - 2 * upside, :: 1 - 2 * flip], x, y))
        ]
        assert len(matches) == 1
        seen.add(matches[0])
    assert {match[:2] for match in seen} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert {match[2] for match in seen} == {match[3] for match in seen} == {-2, -1, 0, 1, 2}
    always = PictureTransform((10, 10), augmentation=Augmentation(horizontal_flip=1))
    assert np.array_equal(always(record, _random())["pixel_values"], pixels[:, ::-1])


def _moved(pixels: np.ndarray, x: int, y: int) -> np.ndarray:
    sheet = np.full((14, 14, 3), 255, np.uint8)
    sheet[2 + y : 12 + y, 2 + x : 12 + x] = pixels
    return sheet[2:12, 2:12]


def test_rotations_stay_within_their_angle_and_come_in_white() -> None:
    """The direction of a black bar on white, from its second moments, before and after."""
    bar = np.full((65, 65, 3), 255, np.uint8)
    bar[30:35, 10:55] = 0
    angles = []
    for seed in range(40):
        transform = PictureTransform((65, 65), augmentation=Augmentation(rotation=30))
        pixels = transform({"image": data.png(bar)}, _random(seed))["pixel_values"]
        assert (pixels[[0, 0, -1, -1], [0, -1, 0, -1]] == 255).all()
        y, x = np.nonzero(pixels[..., 0] < 128)
        angles.append(np.degrees(0.5 * np.arctan2(2 * np.cov(x, y)[0, 1], np.var(x) - np.var(y))))
    assert -31 < min(angles) < -20
    assert 20 < max(angles) < 31


def test_random_crops_keep_their_part() -> None:
    """Of a horizontal ramp a crop keeps a range, whose width says how large it was."""
    ramp = np.repeat(np.linspace(0, 255, 256).astype(np.uint8)[None, :, None], 256, axis=0).repeat(3, axis=2)
    kept, starts = [], []
    for seed in range(40):
        transform = PictureTransform((64, 64), augmentation=Augmentation(crop=0.5))
        line = transform({"image": data.png(ramp)}, _random(seed))["pixel_values"][32, :, 0].astype(int)
        kept.append((line[-1] - line[0]) / 255)
        starts.append(line[0])
    assert 0.48 < min(kept) < 0.6
    assert 0.9 < max(kept) <= 1
    assert len(set(starts)) > 20


def test_augmentation_is_drawn_anew_each_epoch_and_alike_in_each_run(
    build: Callable[..., Loader], corpora: Path
) -> None:
    table = {**data.TABLES["image-folder"], "batch_size": 61, "shuffle": False}
    source, again = build(corpora, table), build(corpora, table)
    first, second = next(iter(source))["pixel_values"], next(iter(source))["pixel_values"]
    assert first.dtype == torch.float32
    assert first.min() >= -1
    assert first.max() <= 1
    assert not any(torch.equal(mine, other) for mine, other in zip(first, second, strict=True))
    assert torch.equal(next(iter(again))["pixel_values"], first)
    assert not torch.equal(next(iter(build(corpora, table, seed=4)))["pixel_values"], first)


def test_captions_are_the_prompts_of_a_picture_pipeline(tokenizer: Tokenizer) -> None:
    captions = Captions(tokenizer, "text", 24)
    for text in ("ink on paper", "é🙂", ""):
        example = captions({"text": text}, np.random.default_rng(0))
        (expected,) = prompt_ids(tokenizer, [text], 24, truncate=False)
        assert example["input_ids"][: len(expected)].tolist() == expected
        assert (example["input_ids"][len(expected) :] == tokenizer.pad_token_id).all()
        assert example["attention_mask"].tolist() == [1] * len(expected) + [0] * (24 - len(expected))
    long = {"text": "press " * 40}
    with pytest.raises(DataError, match="and caption_length is 24"):
        captions(long, np.random.default_rng(0))
    assert Captions(tokenizer, "text", 24, truncate=True)(long, np.random.default_rng(0))["attention_mask"].all()
    plain = Captions(tokenizer, "text", 24, chat=False)({"text": "ink"}, np.random.default_rng(0))
    ids = tokenizer.encode("ink")
    assert plain["input_ids"][: len(ids)].tolist() == ids


def test_caption_dropout_and_choice(tokenizer: Tokenizer) -> None:
    captions = Captions(tokenizer, "text", 24, dropout=0.25)
    empty = Captions(tokenizer, "text", 24)({"text": ""}, np.random.default_rng(0))["input_ids"].tolist()
    found = [captions({"text": ["ink", "paper"]}, np.random.default_rng(i))["input_ids"].tolist() for i in range(800)]
    dropped = sum(ids == empty for ids in found) / 800
    # Four standard deviations.
    assert abs(dropped - 0.25) < 0.062
    assert len({tuple(ids) for ids in found}) == 3
