"""The ``[data]`` table of a recipe, and the batch source that it describes.

``format`` says how records are stored; ``examples.kind``, for the formats that leave it open, what is made of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from intaglio.trainer.recipe import checked

if TYPE_CHECKING:
    from intaglio.runtimes.tokenizer import Tokenizer
    from intaglio.trainer.data.loader import Loader

Probability = Annotated[float, Field(ge=0, le=1)]
Length = Annotated[int, Field(ge=1)]
Names = Annotated[tuple[str, ...], Field(min_length=1)]


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _TokenExamples(_Settings):
    """Rows of ``length`` tokens: windows of what is packed, or one example each, cut or padded.

    With ``segments`` no packed document sees another.
    """

    length: Length
    packing: bool
    segments: bool


class TextExamples(_TokenExamples):
    """Documents in ``field``, each followed by EOS unless ``eos`` is false, for a language model."""

    kind: Literal["text"]
    field: str = "text"
    eos: bool = True
    packing: bool = True
    segments: bool = False


class ChatExamples(_TokenExamples):
    """Conversations, of which only the answers are learned.

    ``messages`` names the field with roles and contents; where it is empty, ``prompt`` and ``completion`` name theirs.
    """

    kind: Literal["chat"]
    messages: str = "messages"
    prompt: str = "prompt"
    completion: str = "completion"
    packing: bool = False
    segments: bool = True


class AugmentationSettings(_Settings):
    """See :class:`intaglio.trainer.data.pictures.Augmentation`."""

    horizontal_flip: Probability = 0.0
    vertical_flip: Probability = 0.0
    shift: int = Field(default=0, ge=0)
    rotation: float = Field(default=0.0, ge=0, le=180)
    crop: float = Field(default=1.0, gt=0, le=1)


class PictureExamples(_Settings):
    """Pictures of one size (pixels, one number or height and width), with a ``label`` or a ``caption``, or neither.

    See :class:`intaglio.trainer.data.pictures.PictureTransform` and ``Captions`` in ``text.py``.
    """

    kind: Literal["pictures"] = "pictures"
    size: Length | tuple[Length, Length]
    image: str = "image"
    fit: Literal["crop", "pad", "stretch"] = "crop"
    label: str | None = None
    caption: str | None = None
    caption_length: Length | None = None
    caption_dropout: Probability = 0.0
    caption_chat: bool = True
    caption_truncate: bool = False
    augmentation: AugmentationSettings = AugmentationSettings()

    @model_validator(mode="after")
    def _check(self) -> PictureExamples:
        if self.caption is not None and self.caption_length is None:
            raise ValueError("caption_length is missing; it is the number of tokens that captions are padded to")
        return self


class NumberExamples(_Settings):
    """Numbers of ``fields`` as ``inputs``, and of ``label``: a class, unless ``classes`` is false."""

    kind: Literal["numbers"]
    fields: Names
    label: str | None = None
    classes: bool = True


Examples = Annotated[TextExamples | ChatExamples | PictureExamples | NumberExamples, Field(discriminator="kind")]


class _DataSettings(_Settings):
    """What all formats have. ``batch_size`` is that of a rank."""

    batch_size: Length
    shuffle: bool = True
    workers: int = Field(default=0, ge=0)
    skip_bad: bool = False
    drop_last: bool = True


class _StreamSettings(_DataSettings):
    """``files`` are paths or patterns; ``shuffle_buffer`` counts the records that are held to draw from."""

    files: Names
    shuffle_buffer: Length = 10_000
    examples: Examples


class JsonlData(_StreamSettings):
    """An object a line; files may be compressed by gzip."""

    format: Literal["jsonl"]


class CsvData(_StreamSettings):
    """Rows under a first row with names; files may be compressed by gzip."""

    format: Literal["csv"]
    delimiter: str = Field(default=",", min_length=1, max_length=1)


class ParquetData(_StreamSettings):
    """Parquet files."""

    format: Literal["parquet"]


class ArrowData(_StreamSettings):
    """Arrow IPC files and streams, Feather 2 among them."""

    format: Literal["arrow"]


class WebDatasetData(_StreamSettings):
    """Tar shards of samples."""

    format: Literal["webdataset"]
    # Samples have pictures, which are larger than lines.
    shuffle_buffer: Length = 1000


class _ArraySettings(_DataSettings):
    """``arrays`` names the file of each field; row i of all of them is record i."""

    arrays: Annotated[dict[str, str], Field(min_length=1)]
    shuffle_buffer: Length = 10_000
    examples: Annotated[PictureExamples | NumberExamples, Field(discriminator="kind")]


class NpyData(_ArraySettings):
    """Files of ``np.save``."""

    format: Literal["npy"]


class IdxData(_ArraySettings):
    """IDX files; where they are compressed by gzip, all of them, they are read in order through a shuffle buffer."""

    format: Literal["idx"]


class _FolderSettings(_DataSettings):
    folder: str
    examples: PictureExamples


class ImageFolderData(_FolderSettings):
    """A subfolder of pictures for each class."""

    format: Literal["image-folder"]


class ImageCaptionFolderData(_FolderSettings):
    """Pictures with a text file of the same name beside each, or a ``metadata.jsonl``."""

    format: Literal["image-caption-folder"]


class TokensData(_DataSettings):
    """Flat files of little-endian tokens, in windows of ``length``; ``vocab_size`` bounds the ids."""

    format: Literal["tokens"]
    files: Names
    dtype: Literal["uint16", "uint32"]
    length: Length
    vocab_size: Length | None = None


DataSettings = Annotated[
    JsonlData
    | CsvData
    | ParquetData
    | ArrowData
    | WebDatasetData
    | NpyData
    | IdxData
    | ImageFolderData
    | ImageCaptionFolderData
    | TokensData,
    Field(discriminator="format"),
]


def parse_settings(table: Mapping[str, Any], name: str = "data") -> DataSettings:
    """The settings of a table of data, ``name`` in the recipe. Raises ConfigError naming each key that is wrong."""
    settings: DataSettings = checked(DataSettings, table, f"[{name}]", f"{name}.")  # type: ignore[arg-type]
    return settings


def token_length(settings: DataSettings) -> tuple[str, int] | None:
    """The key that says how many tokens an example has, and its value; None for examples without tokens."""
    if isinstance(settings, TokensData):
        return "length", settings.length
    match settings.examples:
        case TextExamples(length=length) | ChatExamples(length=length):
            return "examples.length", length
        case PictureExamples(caption_length=int(length)):
            return "examples.caption_length", length
    return None


def needs_tokenizer(settings: DataSettings) -> bool:
    """Whether the examples are made of text."""
    return not isinstance(settings, TokensData) and token_length(settings) is not None


def build_source(
    settings: DataSettings, *, seed: int, root: Path = Path(), tokenizer: Tokenizer | None = None
) -> Loader:
    """The batch source of a recipe; paths are relative to ``root``, the recipe's folder.

    Raises ConfigError for text without a tokenizer, DataError for data that cannot be read.
    """
    from intaglio.trainer.data.build import build

    return build(settings, seed, root, tokenizer)
