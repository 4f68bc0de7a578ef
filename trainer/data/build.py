"""From settings to a batch source: the reader of the format, and the transform of the examples."""

from __future__ import annotations

import hashlib
from pathlib import Path

from intaglio.errors import ConfigError
from intaglio.runtimes.tokenizer import Tokenizer
from intaglio.trainer.data.arrays import ArrayReader, GzipIdxReader, TokenReader
from intaglio.trainer.data.columnar import ArrowReader, ParquetReader
from intaglio.trainer.data.fields import NumberTransform
from intaglio.trainer.data.folders import CaptionFolderReader, ImageFolderReader
from intaglio.trainer.data.lines import CsvReader, JsonlReader
from intaglio.trainer.data.loader import Loader, Packing, Plan
from intaglio.trainer.data.making import Maker, Transform
from intaglio.trainer.data.pictures import Augmentation, PictureTransform
from intaglio.trainer.data.records import IndexedReader, StreamReader, find_files, is_gzip
from intaglio.trainer.data.settings import (
    ArrowData,
    ChatExamples,
    CsvData,
    DataSettings,
    IdxData,
    ImageCaptionFolderData,
    ImageFolderData,
    JsonlData,
    NpyData,
    NumberExamples,
    ParquetData,
    PictureExamples,
    TextExamples,
    TokensData,
    WebDatasetData,
)
from intaglio.trainer.data.tars import WebDatasetReader
from intaglio.trainer.data.text import Captions, ChatTransform, DocumentTransform, TokenTransform, pad_id, with_eos

# What changes how fast batches come, or how many examples each has, and not which examples come in which order.
_NOT_IDENTITY = {"batch_size", "workers", "drop_last"}
# Names and contents of files are in the fingerprint themselves; the folder that they lie in may be another.
_FILES = {"files", "folder", "arrays"}


def build(settings: DataSettings, seed: int, root: Path, tokenizer: Tokenizer | None) -> Loader:
    """See ``build_source`` in ``settings.py``."""
    root = root.resolve()
    transform, packing = _transform(settings, tokenizer)
    identity = {**settings.model_dump(mode="json", exclude=_NOT_IDENTITY | _FILES), "seed": seed}
    # Leaving damaged records out does not move the others: a run that met one may go on without it.
    identity["skip_bad"] = False
    if isinstance(settings, NpyData | IdxData):
        identity["fields"] = list(settings.arrays)
    if tokenizer is not None and not isinstance(settings, TokensData):
        identity["tokenizer"] = _tokenizer_identity(tokenizer)
    maker = Maker(_reader(settings, root), transform, seed, settings.skip_bad, collated=packing is None)
    plan = Plan(
        maker,
        settings.batch_size,
        settings.shuffle,
        root,
        settings.format,
        buffer=getattr(settings, "shuffle_buffer", 1),
        workers=settings.workers,
        drop_last=settings.drop_last,
        packing=packing,
        identity=identity,
    )
    return Loader(plan)


def _reader(settings: DataSettings, root: Path) -> IndexedReader | StreamReader:
    match settings:
        case JsonlData():
            return JsonlReader(find_files(root, settings.files))
        case CsvData():
            return CsvReader(find_files(root, settings.files), settings.delimiter)
        case ParquetData():
            return ParquetReader(find_files(root, settings.files), _columns(settings.examples))
        case ArrowData():
            return ArrowReader(find_files(root, settings.files), _columns(settings.examples))
        case WebDatasetData():
            return WebDatasetReader(find_files(root, settings.files))
        case NpyData() | IdxData():
            arrays = {name: find_files(root, [pattern])[0] for name, pattern in settings.arrays.items()}
            if isinstance(settings, IdxData) and any(is_gzip(path) for path in arrays.values()):
                return GzipIdxReader(arrays)
            return ArrayReader(arrays)
        case ImageFolderData():
            return ImageFolderReader(root / settings.folder)
        case ImageCaptionFolderData():
            return CaptionFolderReader(root / settings.folder)
        case TokensData():
            return TokenReader(find_files(root, settings.files), settings.dtype, settings.length)


def _columns(examples: TextExamples | ChatExamples | PictureExamples | NumberExamples) -> tuple[str, ...]:
    """The columns that the examples are made of."""
    match examples:
        case TextExamples():
            return (examples.field,)
        case ChatExamples():
            return (examples.messages,) if examples.messages else (examples.prompt, examples.completion)
        case PictureExamples():
            names = [examples.image, examples.label, examples.caption]
        case NumberExamples():
            names = [*examples.fields, examples.label]
    return tuple(name for name in names if name is not None)


def _transform(settings: DataSettings, tokenizer: Tokenizer | None) -> tuple[Transform, Packing | None]:
    if isinstance(settings, TokensData):
        vocab_size = settings.vocab_size or (None if tokenizer is None else tokenizer.vocab_size)
        return TokenTransform(vocab_size), None
    match settings.examples:
        case TextExamples() | ChatExamples() as examples:
            packing = Packing(examples.length, examples.segments) if examples.packing else None
            return _text(examples, tokenizer), packing
        case PictureExamples() as examples:
            return _pictures(settings, examples, tokenizer), None
        case NumberExamples() as examples:
            return NumberTransform(examples.fields, examples.label, examples.classes), None


def _text(examples: TextExamples | ChatExamples, tokenizer: Tokenizer | None) -> DocumentTransform | ChatTransform:
    tokenizer = _needed(tokenizer, "text" if isinstance(examples, TextExamples) else "chats")
    padded_to = None if examples.packing else examples.length
    if padded_to is not None:
        pad_id(tokenizer)
    if isinstance(examples, TextExamples):
        if examples.eos:
            with_eos([], tokenizer)
        return DocumentTransform(tokenizer, examples.field, examples.eos, padded_to)
    return ChatTransform(tokenizer, examples.messages or None, examples.prompt, examples.completion, padded_to)


def _pictures(settings: DataSettings, examples: PictureExamples, tokenizer: Tokenizer | None) -> PictureTransform:
    captions = None
    label, caption = examples.label, examples.caption
    # The folder formats have these fields and no others.
    if isinstance(settings, ImageFolderData) and label is None:
        label = "label"
    if isinstance(settings, ImageCaptionFolderData) and caption is None and examples.caption_length is not None:
        caption = "text"
    if caption is not None:
        tokenizer = _needed(tokenizer, "captions")
        pad_id(tokenizer)
        assert examples.caption_length is not None, "it was checked"
        captions = Captions(
            tokenizer,
            caption,
            examples.caption_length,
            examples.caption_dropout,
            examples.caption_chat,
            examples.caption_truncate,
        )
    size = examples.size if isinstance(examples.size, tuple) else (examples.size, examples.size)
    augmentation = Augmentation(**examples.augmentation.model_dump())
    return PictureTransform(size, examples.image, examples.fit, label, captions, augmentation)


def _tokenizer_identity(tokenizer: Tokenizer) -> list[object]:
    content = hashlib.sha256((tokenizer.folder / "tokenizer.json").read_bytes()).hexdigest()
    return [content, tokenizer.chat_template, list(tokenizer.eos_token_ids), tokenizer.pad_token_id]


def _needed(tokenizer: Tokenizer | None, what: str) -> Tokenizer:
    if tokenizer is None:
        raise ConfigError(f"the data has {what} and no tokenizer is given; name the folder of one, or of its model")
    return tokenizer
