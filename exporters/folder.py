"""Replaces a folder in one step: a killed writer leaves the old one whole, and nothing that looks whole."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from intaglio.errors import BundleError

_PARTIAL, _OLD = ".partial-", ".old"


@contextlib.contextmanager
def replaced_folder(target: Path) -> Iterator[Path]:
    """A new folder beside ``target`` to write into, which takes its place when the block ends without an error.

    What a killed writer left is removed (or, where the exchange itself was cut short, moved back) at the next
    start. Raises BundleError if nothing can be written there.
    """
    parent = target.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        recover_folder(target)
        partial = parent / f".{target.name}{_PARTIAL}{os.getpid()}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    except OSError as error:
        raise BundleError(f"{target}: cannot be written ({error.strerror})") from error
    try:
        yield partial
        try:
            _put_in_place(partial, target)
        except OSError as error:
            raise BundleError(f"{target}: cannot be replaced ({error.strerror})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def recover_folder(target: Path) -> None:
    """Moves a folder back that a cut-short exchange moved aside, and removes what dead writers left."""
    old = target.parent / f".{target.name}{_OLD}"
    if old.exists():
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(target)
    if not target.parent.is_dir():
        return
    for partial in target.parent.glob(f".{target.name}{_PARTIAL}*"):
        writer = partial.name.rpartition("-")[2]
        if writer.isdigit() and not _is_alive(int(writer)):
            shutil.rmtree(partial, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    if sys.platform == "win32":
        return True  # signal 0 would end the process there; a partial folder is then left to the user
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _put_in_place(partial: Path, target: Path) -> None:
    for file in partial.rglob("*"):
        if file.is_file():
            _sync(file)
    if not target.exists():
        partial.rename(target)
        return
    # A rename cannot replace a folder that is not empty: exchange the two, or move the old one aside.
    if not _exchange(partial, target):
        old = target.parent / f".{target.name}{_OLD}"
        target.rename(old)
        partial.rename(target)
        shutil.rmtree(old, ignore_errors=True)


def _sync(file: Path) -> None:
    fd = os.open(file, os.O_RDWR | getattr(os, "O_BINARY", 0))
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _exchange(a: Path, b: Path) -> bool:
    """Exchanges two folders atomically; False where the system or the file system cannot."""
    library = ctypes.CDLL(None) if sys.platform != "win32" else None
    first, second = os.fsencode(a), os.fsencode(b)
    if sys.platform == "linux" and hasattr(library, "renameat2"):
        at_fdcwd, rename_exchange = -100, 2
        return library.renameat2(at_fdcwd, first, at_fdcwd, second, rename_exchange) == 0  # type: ignore[union-attr]
    if sys.platform == "darwin" and hasattr(library, "renamex_np"):
        rename_swap = 2
        return library.renamex_np(first, second, rename_swap) == 0
    return False
