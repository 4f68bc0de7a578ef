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

from intaglio.engines.artifact import digest
from intaglio.engines.leftovers import remove_leftovers

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """``INTAGLIO_CACHE``, or the platform's cache folder for intaglio."""
    override = os.environ.get("INTAGLIO_CACHE")
    return Path(os.path.expanduser(override)) if override else platformdirs.user_cache_path("intaglio")


def fetch(key: str, artifact: Path) -> dict[str, Any] | None:
    """Puts what was built under ``key``, a file or a folder, at ``artifact`` and returns its report; None if it is not
    there. A damaged entry counts as absent.
    """
    entry = cache_folder() / "engines" / key
    try:
        held = entry / "artifact"
        meta = json.loads((entry / "entry.json").read_bytes())
        report = dict(meta["report"])
        _copy(held, artifact)
        # Of the copy: another process may have been replacing the entry.
        if meta["sha256"] != digest(artifact):
            remove(artifact)
            return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        remove(artifact)
        return None
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


def store(key: str, artifact: Path, report: dict[str, Any]) -> None:
    """Keeps what was built. The cache only saves time, so one that cannot be written is left alone."""
    entry = cache_folder() / "engines" / key
    temporary = None
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(entry.parent, ".partial-")
        temporary = Path(tempfile.mkdtemp(prefix=".partial-", dir=entry.parent))
        _copy(artifact, temporary / "artifact")
        meta = {"sha256": digest(temporary / "artifact"), "report": report}
        (temporary / "entry.json").write_text(json.dumps(meta), "utf-8")
        shutil.rmtree(entry, ignore_errors=True)
        temporary.rename(entry)
    except OSError as error:
        _log.info("the cache cannot be written: %s", error)
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    """Copies a file or a folder. Gigabytes are links where the system has them: the hash tells if one was changed."""
    if not source.is_dir():
        shutil.copyfile(source, target)
        return

    def link(file: str, into: str) -> None:
        try:
            os.link(file, into)
        except OSError:  # another file system, or one without hard links
            shutil.copyfile(file, into)

    shutil.copytree(source, target, copy_function=link)


def remove(artifact: Path) -> None:
    """Takes away what :func:`fetch` put there, if it did."""
    if artifact.is_dir():
        shutil.rmtree(artifact, ignore_errors=True)
    else:
        artifact.unlink(missing_ok=True)
