"""A tokenizer, sources of tables, and a folder with a corpus of every format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import training_data as data

from intaglio.runtimes.tokenizer import Tokenizer
from intaglio.trainer.data.loader import Loader
from intaglio.trainer.data.settings import build_source, parse_settings
from intaglio.trainer.data.text import open_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(data.write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def build(tokenizer: Tokenizer) -> Callable[..., Loader]:
    """A source of a table, its files relative to a folder."""

    def source(root: Path, table: dict[str, Any], seed: int = 3) -> Loader:
        return build_source(parse_settings(table), seed=seed, root=root, tokenizer=tokenizer)

    return source


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the tables of `training_data.TABLES` are about."""
    root = tmp_path_factory.mktemp("corpora")
    data.write_corpora(root)
    return root
