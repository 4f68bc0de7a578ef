"""How onnxruntime is found missing, or interrupted."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from intaglio.engines.onnxruntime_ import import_onnxruntime
from intaglio.errors import RuntimeMissingError


def test_a_failed_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise ImportError("no such module")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(RuntimeMissingError, match=r"no such module.*extras"):
        import_onnxruntime()


def test_ctrl_c_inside_the_import_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> Any:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise ImportError("initialization failed") from None

    monkeypatch.setattr(importlib, "import_module", interrupted)
    with pytest.raises(KeyboardInterrupt):
        import_onnxruntime()
