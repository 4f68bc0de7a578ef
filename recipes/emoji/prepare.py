"""Makes the emoji painter's data: pictures with captions, and a tokenizer trained on the captions.

    python recipes/emoji/prepare.py runs/emoji

Pictures: Microsoft's Fluent flat emoji (MIT), by way of @iconify-json/fluent-emoji-flat, drawn at 64x64 on white.
Captions: the English labels of emojibase-data (MIT). Kept are animals, plants, food, places, vehicles, weather,
clothes and tools; people, faces, letters, flags, symbols and clocks are left out. Needs the extra `train`, resvg-py,
and npm for the two packages.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import resvg_py
from PIL import Image
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SIZE = 64
VOCABULARY = 1024
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# A prompt is never empty, so that a picture without one has something to look at.
CHAT_TEMPLATE = f"{START}{{{{ messages[-1].content }}}}{END}"
# Subgroups of emojibase, by number (meta/groups.json of the package).
SUBGROUPS = {
    34: "mammals",
    35: "birds",
    36: "amphibians",
    37: "reptiles",
    38: "marine animals",
    39: "bugs",
    40: "flowers",
    41: "plants",
    42: "fruit",
    43: "vegetables",
    44: "dishes",
    45: "Asian dishes",
    46: "sweets",
    47: "drinks",
    48: "dishware",
    50: "landscapes",
    51: "buildings",
    53: "places",
    54: "vehicles",
    55: "ships",
    56: "aircraft",
    59: "sky and weather",
    60: "events",
    62: "sport",
    65: "clothes",
    68: "musical instruments",
    71: "light and video",
    78: "tools",
    81: "household",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where data/ and tokenizer/ are written")
    folder = parser.parse_args().folder
    captions = write_pictures(folder / "data")
    write_tokenizer(folder / "tokenizer", captions)
    print(f"{len(captions)} pictures in {folder / 'data'}", file=sys.stderr)
    return 0


def emoji() -> Iterator[tuple[str, str]]:
    """Caption and SVG of each emoji that is kept, in the order of emojibase."""
    fetch = _fetcher()
    icons = json.loads(fetch("fluent-icons").read_text(encoding="utf-8"))
    names = json.loads(fetch("fluent-characters").read_text(encoding="utf-8"))
    for entry in json.loads(fetch("emojibase").read_text(encoding="utf-8")):
        # Packages differ in whether they write the variation selector.
        code = "-".join(part for part in entry["hexcode"].lower().split("-") if part != "fe0f")
        name = names.get(entry["hexcode"].lower()) or names.get(code)
        if entry.get("subgroup") in SUBGROUPS and name is not None:
            yield entry["label"], _svg(icons, name)


def _svg(icons: dict[str, Any], name: str) -> str:
    """The icon in the middle of a square."""
    icon = icons["icons"][name]
    width, height = (icon.get(side, icons.get(side, 32)) for side in ("width", "height"))
    side = max(width, height)
    box = f"{(width - side) / 2} {(height - side) / 2} {side} {side}"
    space = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<svg {space} viewBox="{box}">{icon["body"]}</svg>'


def write_pictures(folder: Path) -> list[str]:
    """Writes the pictures and ``metadata.jsonl``; returns the captions."""
    folder.mkdir(parents=True, exist_ok=True)
    captions = []
    with (folder / "metadata.jsonl").open("w", encoding="utf-8") as metadata:
        for caption, svg in emoji():
            png = resvg_py.svg_to_bytes(svg_string=svg, width=SIZE, height=SIZE)
            drawn = Image.open(io.BytesIO(bytes(png))).convert("RGBA")
            picture = Image.new("RGBA", drawn.size, "white")
            picture.alpha_composite(drawn)
            name = f"{len(captions):04}.png"
            picture.convert("RGB").save(folder / name)
            metadata.write(json.dumps({"file_name": name, "text": caption}, ensure_ascii=False) + "\n")
            captions.append(caption)
    return captions


def write_tokenizer(folder: Path, captions: list[str]) -> None:
    """A byte-level BPE of lower-case text, as Qwen's files spell one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([f"a {caption}" for caption in captions] + captions, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": END,
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _fetcher() -> Any:
    path = Path(__file__).resolve().parents[2] / "tools" / "fetch.py"
    spec = importlib.util.spec_from_file_location("fetch", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.fetch


if __name__ == "__main__":
    sys.exit(main())
