"""Built stages under the user's cache folder, keyed by their identity: one changed stage rebuilds one stage."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import platformdirs

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """``INTAGLIO_CACHE``, or the platform's cache folder for intaglio."""
    override = os.environ.get("INTAGLIO_CACHE")
    return Path(os.path.expanduser(override)) if override else platformdirs.user_cache_path("intaglio")


def fetch(key: str, graph_path: Path) -> dict[str, Any] | None:
    """Copies the built graph of ``key`` to ``graph_path`` and returns its report; None if it is not there.

    A damaged entry counts as absent.
    """
    entry = cache_folder() / "engines" / key
    try:
        if not (entry / "entry.json").is_file() or not (entry / "graph.onnx").is_file():
            return None
        meta = json.loads((entry / "entry.json").read_bytes())
        data = (entry / "graph.onnx").read_bytes()
        if hashlib.sha256(data).hexdigest() != meta["sha256"]:
            return None
        report = dict(meta["report"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    graph_path.write_bytes(data)
    return report


def fetch_report(key: str) -> dict[str, Any] | None:
    """The report stored under ``key`` without a graph: of models that are built as they are. None if damaged."""
    try:
        entry = json.loads((cache_folder() / "engines" / key / "report.json").read_bytes())
        return entry["report"] if entry["sha256"] == _hash(entry["report"]) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def store_report(key: str, report: dict[str, Any]) -> None:
    """Keeps a report without a graph, as ``store`` does."""
    entry = cache_folder() / "engines" / key
    try:
        entry.mkdir(parents=True, exist_ok=True)
        partial = entry / f".partial-{os.getpid()}"
        partial.write_text(json.dumps({"sha256": _hash(report), "report": report}), "utf-8")
        partial.replace(entry / "report.json")
    except OSError:
        shutil.rmtree(entry, ignore_errors=True)


def _hash(report: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(report, sort_keys=True).encode()).hexdigest()


def store(key: str, graph_path: Path, report: dict[str, Any]) -> None:
    """Keeps a built graph. The cache only saves time, so one that cannot be written is left alone."""
    entry = cache_folder() / "engines" / key
    temporary = None
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".partial-", dir=entry.parent))
        data = graph_path.read_bytes()
        (temporary / "graph.onnx").write_bytes(data)
        meta = {"sha256": hashlib.sha256(data).hexdigest(), "report": report}
        (temporary / "entry.json").write_text(json.dumps(meta), "utf-8")
        shutil.rmtree(entry, ignore_errors=True)
        temporary.rename(entry)
    except OSError as error:
        _log.info("the cache cannot be written: %s", error)
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
