"""Files and folders that appear in one step: a killed writer leaves the old one whole, and nothing that looks whole."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from intaglio.errors import OutputError

_PARTIAL, _OLD = ".partial-", ".old"


@contextlib.contextmanager
def replaced_folder(target: Path) -> Iterator[Path]:
    """A new folder beside ``target`` to write into, which takes its place when the block ends without an error.

    What a killed writer left is removed (or, where the exchange itself was cut short, moved back) when the next one
    starts; writers that are alive hold a lock and are left alone, so several may work on one target and the last to
    finish stays. A link is followed. Raises OutputError for whatever the operating system refuses in the block.
    """
    target = target.resolve()
    if target.exists() and not target.is_dir():
        raise OutputError(f"{target}: is a file; expected a folder or nothing there")
    partial = None
    try:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _clear_up(target)
            partial, lock = _new_partial(target)
            with lock:
                yield partial
                _put_in_place(partial, target)
        finally:
            if partial is not None:
                _remove(partial)
    except OSError as error:
        raise _refused(target, error) from error


@contextlib.contextmanager
def replaced_file(path: Path) -> Iterator[BinaryIO]:
    """A file beside ``path`` to write into, renamed to it when the block ends without an error.

    A link is followed. Raises OutputError.
    """
    partial = None
    try:
        path = path.resolve()
        # Named shorter than any name that the folder takes.
        fd, name = tempfile.mkstemp(prefix=".", suffix=f"{_PARTIAL}file", dir=path.parent)
        partial = Path(name)
        with open(fd, "wb") as file:
            partial.chmod(0o666 & ~_umask())
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise _refused(path, error) from error
    finally:
        if partial is not None:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


def _refused(path: Path, error: OSError) -> OutputError:
    if error.filename and not os.fsdecode(error.filename).startswith(str(path.parent)):
        return OutputError(f"{os.fsdecode(error.filename)}: {error.strerror}, while {path} was being written")
    full = error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", None))
    advice = "free space or choose another disk" if full else "check the path"
    return OutputError(f"{path}: cannot be written ({error.strerror or error}); {advice}")


def interrupted(target: Path) -> Path | None:
    """The old folder, where replacing ``target`` was cut short after it had been moved aside."""
    old = target.parent / f".{target.name}{_OLD}"
    return old if old.exists() and not target.exists() else None


def _new_partial(target: Path) -> tuple[Path, contextlib.ExitStack]:
    # Locked under a name that nobody clears up, then named: it is never seen without its lock.
    created = Path(tempfile.mkdtemp(prefix=f".{target.name}.new-", dir=target.parent))
    created.chmod(0o777 & ~_umask())
    lock = _lock(created)
    partial = target.parent / created.name.replace(".new-", _PARTIAL)
    created.rename(partial)
    assert lock is not None, "a folder made just now is locked by nobody"
    return partial, lock


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _clear_up(target: Path) -> None:
    """Moves a folder back that a cut-short exchange moved aside, and removes what dead writers left."""
    if (old := target.parent / f".{target.name}{_OLD}").exists() and (lock := _lock(old)) is not None:
        with lock:
            if target.exists():
                _remove(old)
            else:
                old.rename(target)
    if sys.platform == "win32":
        return  # nothing there tells a dead writer's folder from a living one's
    for partial in target.parent.glob(f".{target.name}{_PARTIAL}*"):
        with contextlib.suppress(FileNotFoundError):
            if (lock := _lock(partial)) is not None:
                with lock:
                    _remove(partial)


def _remove(folder: Path) -> None:
    def unlock_and_retry(function: Callable[[str], object], name: str, _: object) -> None:
        # A folder that was made read-only keeps what lies in it.
        with contextlib.suppress(OSError):
            os.chmod(os.path.dirname(name), 0o700)
            os.chmod(name, 0o700)
            function(name)

    shutil.rmtree(folder, onerror=unlock_and_retry)


def _lock(folder: Path) -> contextlib.ExitStack | None:
    """Holds ``folder`` until the stack is closed; None if somebody else holds it."""
    stack = contextlib.ExitStack()
    if sys.platform == "win32":
        return stack
    import fcntl

    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        pass  # a file system without locks
    stack.callback(os.close, fd)
    return stack


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
        with _lock(target) or contextlib.ExitStack():
            target.rename(old)
            partial.rename(target)
            _remove(old)


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
