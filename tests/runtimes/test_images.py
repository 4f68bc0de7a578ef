"""Pictures in and out: rounding, every kind of file and mode, damaged files, PNG text, sizes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from PIL import Image
from png_text import read_png_text

from intaglio.errors import EngineError, InputError, OutputError, RuntimeMissingError
from intaglio.runtimes import images
from intaglio.runtimes.images import (
    check_png_path,
    check_size,
    load_image,
    png_bytes,
    save_png,
    to_image,
    to_pixels,
)

HEIGHT, WIDTH = 16, 32


def random_pixels(*channels: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (HEIGHT, WIDTH, *channels), np.uint8)


def unit(image: np.ndarray) -> np.ndarray:
    """[height, width, 3] from 0 to 1, of what load_image gave."""
    assert image.dtype == np.float32 and image.ndim == 4 and image.shape[:2] == (1, 3) and image.flags.c_contiguous
    return (image[0].transpose(1, 2, 0).astype(np.float64) + 1) / 2


def assert_loads(source: Any, expected_HW3: np.ndarray, atol: float = 1e-6) -> None:
    np.testing.assert_allclose(unit(load_image(source)), expected_HW3, rtol=0, atol=atol)


# Sizes


def test_sizes() -> None:
    check_size(16, 512)
    check_size(np.int64(64), 128, multiple=64)
    with pytest.raises(InputError, match="width is 500; expected a multiple of 16, and 496 and 512 are nearest"):
        check_size(512, 500)
    with pytest.raises(InputError, match="height is 127; expected a multiple of 64, and 64 and 128 are nearest"):
        check_size(127, 128, multiple=64)
    bad: Any
    for bad in (0, -16, 15):
        with pytest.raises(InputError, match=f"height is {bad}; expected a multiple of 16, at least 16"):
            check_size(bad, 16)
    for bad in (16.0, "16", True, None):
        with pytest.raises(InputError, match=r"width is .*; expected an integer"):
            check_size(16, bad)


# Pixels


def test_to_pixels() -> None:
    values = np.array([-1.5, -1, 0, 1, 2, 0.25], np.float32)
    sample_B3HW = np.zeros((2, 3, 2, 3), np.float32)
    sample_B3HW[1, 2] = values.reshape(2, 3)
    pixels_BHW3 = to_pixels(sample_B3HW)
    assert pixels_BHW3.shape == (2, 2, 3, 3) and pixels_BHW3.dtype == np.uint8 and pixels_BHW3.flags.c_contiguous
    # 255 / 2 is halfway, and 128 is even.
    assert pixels_BHW3[1, ..., 2].ravel().tolist() == [0, 0, 128, 255, 255, 159]
    assert (pixels_BHW3[0] == 128).all() and (pixels_BHW3[1, ..., :2] == 128).all()


def test_halves_to_even() -> None:
    # x / 2 + 0.5 = k / 510 is halfway for odd k wherever float32 holds it so.
    unit_HW = (np.arange(1, 510, 2) / 510).astype(np.float32)
    sample = np.repeat((2 * unit_HW - 1)[None, None, None], 3, axis=1)
    expected = np.round(255 * np.clip(sample / 2 + np.float32(0.5), 0, 1))
    assert (255 * np.clip(sample / 2 + np.float32(0.5), 0, 1) % 1 == 0.5).sum() > 30
    np.testing.assert_array_equal(to_pixels(sample).transpose(0, 3, 1, 2), expected)


def test_every_value_comes_back() -> None:
    pixels_HW3 = np.arange(16 * 48, dtype=np.int64).reshape(16, 16, 3).astype(np.uint8)
    np.testing.assert_array_equal(to_pixels(load_image(pixels_HW3))[0], pixels_HW3)


def test_bad_samples() -> None:
    with pytest.raises(EngineError, match=r"float64 \[1, 3, 2, 2\]; expected float32"):
        to_pixels(np.zeros((1, 3, 2, 2)))
    for shape in ((3, 2, 2), (1, 4, 2, 2), (1, 2, 2, 3)):
        with pytest.raises(EngineError, match=r"expected float32 \[batch, 3, height, width\]"):
            to_pixels(np.zeros(shape, np.float32))
    for value in (np.nan, np.inf):
        sample = np.zeros((1, 3, 2, 2), np.float32)
        sample[0, 0, 0] = value
        with pytest.raises(EngineError, match="2 of 12 values of the sample are not finite"):
            to_pixels(sample)


def test_to_image() -> None:
    pixels_HW3 = random_pixels(3)
    image = to_image(pixels_HW3[:, ::-1])
    assert image.mode == "RGB" and image.size == (WIDTH, HEIGHT)
    np.testing.assert_array_equal(np.asarray(image), pixels_HW3[:, ::-1])
    for bad in (pixels_HW3[None], pixels_HW3[..., :2], pixels_HW3.astype(np.float32), pixels_HW3[:0]):
        with pytest.raises(InputError, match=r"expected uint8 \[height, width, 3\]"):
            to_image(bad)


# Pictures in


@pytest.mark.parametrize("suffix", ["png", "bmp", "tiff", "ppm", "webp"])
def test_files_without_loss(suffix: str, tmp_path: Path) -> None:
    pixels_HW3 = random_pixels(3)
    path = tmp_path / f"picture.{suffix}"
    Image.fromarray(pixels_HW3).save(path, lossless=True)
    for source in (path, str(path), Image.open(path), pixels_HW3):
        assert_loads(source, pixels_HW3 / 255)


def test_files_with_loss(tmp_path: Path) -> None:
    path = tmp_path / "picture.jpg"
    Image.fromarray(random_pixels(3)).save(path)
    with Image.open(path) as image:
        assert_loads(path, np.asarray(image) / 255)


def test_grey_and_one_bit(tmp_path: Path) -> None:
    pixels_HW = random_pixels()
    grey_HW3 = np.repeat(pixels_HW[..., None], 3, axis=2) / 255
    Image.fromarray(pixels_HW).save(tmp_path / "grey.png")
    assert_loads(tmp_path / "grey.png", grey_HW3)
    assert_loads(pixels_HW, grey_HW3)
    Image.fromarray(pixels_HW > 99).save(tmp_path / "bit.png")
    assert_loads(tmp_path / "bit.png", np.repeat((pixels_HW > 99)[..., None], 3, axis=2))


def test_16_bits_of_grey(tmp_path: Path) -> None:
    pixels_HW = np.random.default_rng(0).integers(0, 65536, (HEIGHT, WIDTH), np.uint16)
    expected = np.repeat(pixels_HW[..., None], 3, axis=2) / 65535
    for name in ("grey.png", "grey.tiff"):
        Image.fromarray(pixels_HW).save(tmp_path / name)
        assert_loads(tmp_path / name, expected, atol=1e-7)
    key = int(pixels_HW[3, 4])
    Image.fromarray(pixels_HW).save(tmp_path / "key.png", transparency=key)
    expected[pixels_HW == key] = 1
    assert_loads(tmp_path / "key.png", expected, atol=1e-7)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_32_bits(mode: str, tmp_path: Path) -> None:
    Image.new(mode, (WIDTH, HEIGHT)).save(tmp_path / "picture.tiff")
    with pytest.raises(InputError, match=r"picture.tiff: its values have 32 bits and no known range"):
        load_image(tmp_path / "picture.tiff")


@pytest.mark.parametrize("mode", ["RGBA", "LA", "La", "RGBa", "PA"])
def test_alpha_lies_on_white(mode: str) -> None:
    pixels_HW4 = random_pixels(4)
    pixels_HW4[..., 3] |= 128
    pixels_HW4[0, 0, 3], pixels_HW4[0, 1, 3] = 0, 255
    if mode in ("LA", "La", "PA"):
        pixels_HW4[..., 1] = pixels_HW4[..., 2] = pixels_HW4[..., 0]
    alpha_HW1 = pixels_HW4[..., 3:] / 255
    expected = pixels_HW4[..., :3] / 255 * alpha_HW1 + 1 - alpha_HW1
    image = Image.fromarray(pixels_HW4)
    if mode in ("LA", "La", "PA"):
        grey, alpha = image.getchannel(0), image.getchannel(3)
        image = Image.merge("LA", [grey, alpha])
        if mode == "La":
            image = image.convert("La")
        elif mode == "PA":
            image = grey.convert("P").convert("PA")
            image.putalpha(alpha)
    elif mode == "RGBa":
        image = image.convert("RGBa")
    # Premultiplied values were rounded once more.
    assert_loads(image, expected, atol=1e-6 if mode in ("RGBA", "LA", "PA") else 1 / 255)
    if mode == "RGBA":
        assert_loads(pixels_HW4, expected)
        assert load_image(image)[0, :, 0, 0].tolist() == [1, 1, 1]


def test_palettes(tmp_path: Path) -> None:
    indices_HW = (random_pixels() % 4).astype(np.uint8)
    palette = np.array([[255, 0, 0], [0, 128, 0], [0, 0, 64], [9, 9, 9]], np.uint8)
    image = Image.frombytes("P", (WIDTH, HEIGHT), indices_HW.tobytes())
    image.putpalette(palette.tobytes())
    image.save(tmp_path / "palette.png")
    image.save(tmp_path / "palette.gif")
    for name in ("palette.png", "palette.gif"):
        assert_loads(tmp_path / name, palette[indices_HW] / 255)
    # An entry that is transparent, and one that is half so.
    image.save(tmp_path / "key.gif", transparency=2)
    image.save(tmp_path / "key.png", transparency=bytes([255, 255, 0, 51]))
    expected = palette[indices_HW] / 255
    expected[indices_HW == 2] = 1
    assert_loads(tmp_path / "key.gif", expected)
    expected[indices_HW == 3] = 9 / 255 * 0.2 + 0.8
    assert_loads(tmp_path / "key.png", expected)


def test_transparent_colour(tmp_path: Path) -> None:
    pixels_HW3 = random_pixels(3)
    Image.fromarray(pixels_HW3).save(tmp_path / "key.png", transparency=tuple(pixels_HW3[5, 6].tolist()))
    expected = pixels_HW3 / 255
    expected[5, 6] = 1
    assert_loads(tmp_path / "key.png", expected)


def test_cmyk(tmp_path: Path) -> None:
    image = Image.new("CMYK", (WIDTH, HEIGHT), (255, 0, 0, 0))
    assert_loads(image, np.broadcast_to([0, 1, 1], (HEIGHT, WIDTH, 3)))
    image.save(tmp_path / "cmyk.jpg")
    assert_loads(tmp_path / "cmyk.jpg", np.broadcast_to([0, 1, 1], (HEIGHT, WIDTH, 3)), atol=2 / 255)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(orientation: int, tmp_path: Path) -> None:
    upright_HW3 = random_pixels(3)
    # How each stored picture must lie so that its tag, as EXIF 2.3 defines it, turns it upright.
    stored = {
        1: upright_HW3,
        2: upright_HW3[:, ::-1],
        3: upright_HW3[::-1, ::-1],
        4: upright_HW3[::-1],
        5: upright_HW3.transpose(1, 0, 2),
        6: np.rot90(upright_HW3),
        7: upright_HW3[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(upright_HW3, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(np.ascontiguousarray(stored)).save(tmp_path / "picture.png", exif=exif)
    assert_loads(tmp_path / "picture.png", upright_HW3 / 255)


def test_given_picture_is_left_as_it_was() -> None:
    image = Image.fromarray(random_pixels(4))
    before = image.tobytes()
    load_image(image)
    assert image.mode == "RGBA" and image.tobytes() == before


def test_size_of_a_file(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 32)).save(tmp_path / "picture.png", exif=exif)
    # As it is seen, not as it is stored.
    with pytest.raises(InputError, match=r"picture.png: height is 40; .* 32 and 48 are nearest. Resize or crop it"):
        load_image(tmp_path / "picture.png")
    with pytest.raises(InputError, match="the array: width is 32; expected a multiple of 64, at least 64"):
        load_image(np.zeros((64, 32, 3), np.uint8), multiple=64)
    with pytest.raises(InputError, match="the picture: width is 17"):
        load_image(Image.new("RGB", (17, 16)))
    assert load_image(np.zeros((8, 24, 3), np.uint8), multiple=8).shape == (1, 3, 8, 24)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (np.zeros((16, 16, 3), np.float32), r"the array is float32 \[16, 16, 3\]; expected uint8"),
        (np.zeros((16, 16), np.uint16), "the array is uint16"),
        (np.zeros((1, 16, 16, 3), np.uint8), "expected uint8 .height, width."),
        (np.zeros((16, 16, 2), np.uint8), "expected uint8 .height, width."),
        (np.zeros((0, 16, 3), np.uint8), "expected uint8 .height, width."),
        (b"\x89PNG", "the picture is a bytes; expected a file, a Pillow picture or a uint8 array"),
        (None, "the picture is a NoneType"),
        ("/nowhere/at/all.png", "/nowhere/at/all.png: there is no such file"),
        ("/", "/: it is no file"),
    ],
)
def test_bad_sources(source: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_image(source)


def test_animated(tmp_path: Path) -> None:
    frames = [Image.fromarray(random_pixels(3, seed=seed)) for seed in range(3)]
    for name in ("moving.gif", "moving.png", "moving.webp", "pages.tiff"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:])
        with pytest.raises(InputError, match=f"{name}: it holds 3 pictures; expected one"):
            load_image(tmp_path / name)
    # What phones write: the picture, and its preview.
    frames[0].save(tmp_path / "phone.jpg", "MPO", save_all=True, append_images=frames[1:])
    with Image.open(tmp_path / "phone.jpg") as image:
        assert image.format == "MPO"
        assert_loads(tmp_path / "phone.jpg", np.asarray(image) / 255)


def test_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (WIDTH, HEIGHT)).save(tmp_path / "picture.png")
    # Pillow warns above its limit and raises above twice that.
    for limit in (HEIGHT * WIDTH - 1, HEIGHT * WIDTH // 2 - 1):
        monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(InputError, match=r"picture.png: Image size \(512 pixels\) exceeds limit"):
            load_image(tmp_path / "picture.png")
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", HEIGHT * WIDTH)
    load_image(tmp_path / "picture.png")


@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp", "tiff", "gif", "webp", "ppm"])
def test_damaged_files(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"picture.{suffix}"
    Image.fromarray(random_pixels(3)).save(path)
    whole = path.read_bytes()
    for length in (0, 1, 4, 30, len(whole) // 2, len(whole) * 9 // 10):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError, match=f"picture.{suffix}: it (is damaged or no PNG, JPEG|cannot be read)"):
            load_image(path)


def test_random_damage(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for suffix in ("png", "jpg", "bmp", "tiff", "gif", "webp", "ppm"):
        path = tmp_path / f"picture.{suffix}"
        Image.fromarray(random_pixels(3)).save(path)
        whole = np.frombuffer(path.read_bytes(), np.uint8)
        for _ in range(60):
            damaged = whole.copy()
            at = rng.integers(0, min(len(whole), 400), 3)
            damaged[at] = rng.integers(0, 256, 3)
            path.write_bytes(damaged.tobytes())
            # A byte of a pixel may be anything; nothing but InputError comes out otherwise.
            try:
                found = load_image(path)
            except InputError:
                continue
            assert np.isfinite(found).all()


def test_warnings_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "picture.tiff"
    Image.fromarray(random_pixels(3)).save(path)
    content = bytearray(path.read_bytes())
    # The tag PlanarConfiguration claims more values than the file is long. Pillow skips it and reads on.
    directory = int.from_bytes(content[4:8], "little")
    entries = range(
        directory + 2, directory + 2 + 12 * int.from_bytes(content[directory : directory + 2], "little"), 12
    )
    at = next(at for at in entries if int.from_bytes(content[at : at + 2], "little") == 284)
    content[at + 4 : at + 8] = (1 << 20).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"picture.tiff: it cannot be read \(.*Skipping tag 284"):
        load_image(path)


def test_no_other_formats(tmp_path: Path) -> None:
    # Pillow would start Ghostscript for it.
    Image.fromarray(random_pixels(3)).save(tmp_path / "picture.eps")
    with pytest.raises(InputError, match="it is damaged or no PNG, JPEG, WEBP"):
        load_image(tmp_path / "picture.eps")


# PNG out

TEXT = {
    "prompt": "Grüße, ½ ©",
    "Negative prompt": "日本語 🙂",
    "seed": "42",
    "empty": "",
    "lines": "one\ntwo\r\nthree",
    "long": "x" * 70000,
}


def chunks(content: bytes) -> list[tuple[bytes, bytes]]:
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    found, at = [], 8
    while at < len(content):
        length = int.from_bytes(content[at : at + 4], "big")
        found.append((content[at + 4 : at + 8], content[at + 8 : at + 8 + length]))
        at += 12 + length
    return found


def test_png(tmp_path: Path) -> None:
    pixels_HW3 = random_pixels(3)
    path = tmp_path / "picture.PNG"
    save_png(pixels_HW3, path, TEXT)
    assert list(tmp_path.iterdir()) == [path]
    assert read_png_text(path) == TEXT and list(read_png_text(path)) == list(TEXT)
    content = path.read_bytes()
    assert content == png_bytes(pixels_HW3, TEXT) == png_bytes(to_image(pixels_HW3), TEXT)
    with Image.open(path) as image:
        assert image.mode == "RGB"
        np.testing.assert_array_equal(np.asarray(image), pixels_HW3)
    texts = [chunk for chunk in chunks(content) if chunk[0] in (b"tEXt", b"iTXt", b"zTXt")]
    assert [kind for kind, _ in texts] == [b"tEXt", b"iTXt", b"tEXt", b"tEXt", b"tEXt", b"tEXt"]
    assert texts[0][1] == b"prompt\0" + "Grüße, ½ ©".encode("latin-1")
    assert texts[1][1] == b"Negative prompt\0\0\0\0\0" + "日本語 🙂".encode()


def test_png_without_text(tmp_path: Path) -> None:
    save_png(random_pixels(3), str(tmp_path / "picture.png"))
    assert read_png_text(str(tmp_path / "picture.png")) == {}
    assert [kind for kind, _ in chunks(png_bytes(random_pixels(3)))] == [b"IHDR", b"IDAT", b"IEND"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"": "x"}, "the keyword of a PNG text is ''; expected 1 to 79 printable Latin-1 characters"),
        ({"k" * 80: "x"}, "the keyword of a PNG text"),
        ({" k": "x"}, "the keyword of a PNG text"),
        ({"k ": "x"}, "the keyword of a PNG text"),
        ({"a  b": "x"}, "the keyword of a PNG text"),
        ({"a\nb": "x"}, "the keyword of a PNG text"),
        ({"k\n": "x"}, "the keyword of a PNG text"),
        ({"日": "x"}, "the keyword of a PNG text"),
        ({"a\xa0b": "x"}, "the keyword of a PNG text"),
        ({3: "x"}, "the keyword of a PNG text is 3"),
        ({"seed": 42}, "the PNG text 'seed' is 42; expected text"),
        ({"seed": None}, "the PNG text 'seed' is None"),
        ({"prompt": "a\0b"}, "expected text without NUL characters"),
        ({"prompt": "a\ud800b"}, "the PNG text 'prompt' is no valid Unicode .surrogates not allowed at 1."),
    ],
)
def test_bad_text(text: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        save_png(random_pixels(3), tmp_path / "picture.png", text)
    assert list(tmp_path.iterdir()) == []


def test_longest_keyword() -> None:
    assert chunks(png_bytes(random_pixels(3), {"ÿ" * 79: "x"}))[1][1] == b"\xff" * 79 + b"\0x"


def test_picture_that_png_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the picture of mode CMYK cannot be a PNG .*; convert it to RGB"):
        png_bytes(Image.new("CMYK", (16, 16)))
    with pytest.raises(InputError, match="expected uint8"):
        save_png(np.zeros((16, 16, 3), np.float32), tmp_path / "picture.png")
    assert list(tmp_path.iterdir()) == []


def test_bad_paths(tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    pixels_HW3 = random_pixels(3)
    for call in (lambda path: save_png(pixels_HW3, path), check_png_path):
        with pytest.raises(InputError, match=r"out.jpg: the suffix is '.jpg'; expected .png"):
            call(tmp_path / "out.jpg")
        with pytest.raises(InputError, match=r"out: has no suffix; expected \.png"):
            call(tmp_path / "out")
        with pytest.raises(OutputError, match=r"out.png: the folder .*/none does not exist; make it first"):
            call(tmp_path / "none" / "out.png")
        with pytest.raises(OutputError, match=r"folder.png: it is a folder; expected the name of a file"):
            call(tmp_path / "folder.png")
    check_png_path(str(tmp_path / "out.png"))


def test_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The superuser may write everywhere, so the refusal is made up.
    monkeypatch.setattr(images.os, "access", lambda path, mode: not (path == tmp_path and mode == images.os.W_OK))
    with pytest.raises(OutputError, match=r"out.png: the folder .* cannot be written; choose another"):
        save_png(random_pixels(3), tmp_path / "out.png")


def test_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "picture.png"
    save_png(random_pixels(3), path, {"run": "1"})
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("intaglio.output.os.fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(OutputError, match="free space"):
            save_png(random_pixels(3, seed=1), path, {"run": "2"})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    save_png(random_pixels(3, seed=1), path, {"run": "2"})
    assert read_png_text(path) == {"run": "2"}


# Pillow


def test_pillow_is_imported_late() -> None:
    code = "import sys; import intaglio.runtimes.images; print(any(n.split('.')[0] == 'PIL' for n in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_without_pillow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(png_bytes(random_pixels(3)))
    for name in [name for name in sys.modules if name.split(".")[0] == "PIL"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "PIL", None)
    for call in (lambda: load_image(path), lambda: png_bytes(random_pixels(3))):
        with pytest.raises(RuntimeMissingError, match=r"Pillow.* cannot be imported .*: pip install pillow"):
            call()
    to_pixels(np.zeros((1, 3, 2, 2), np.float32))
    check_size(16, 16)


def test_file_objects_are_closed(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    path = tmp_path / "picture.png"
    save_png(random_pixels(3), path, TEXT)
    load_image(path)
    path.unlink()
    assert not [warning for warning in recwarn if issubclass(warning.category, ResourceWarning)]
