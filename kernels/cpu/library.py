"""Where the compiled custom-op library lies."""

from __future__ import annotations

import pathlib

import intaglio.kernels.cpu as package
from intaglio.errors import EngineError

_NAMES = ("intaglio_cpu.so", "intaglio_cpu.dylib", "intaglio_cpu.dll")


def library_path() -> pathlib.Path:
    """The custom-op library, to give to ``SessionOptions.register_custom_ops_library``.

    Raises EngineError if it is not installed.
    """
    # An editable install redirects imports to the sources and leaves what was compiled in
    # site-packages: both are entries of the package's path.
    folders = [pathlib.Path(entry) for entry in package.__path__]
    for folder in folders:
        for name in _NAMES:
            if (folder / name).is_file():
                return folder / name
    raise EngineError(
        f"the CPU kernels are not installed: found none of {', '.join(_NAMES)} in "
        f"{', '.join(map(str, folders))}; install them with `pip install --force-reinstall intaglio`"
    )
