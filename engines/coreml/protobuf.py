"""coremltools' protobuf classes, without coremltools: reading a package needs neither its libraries nor the frameworks
that it looks for.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

from intaglio.engines.coreml.coremltools_ import MISSING
from intaglio.errors import RuntimeMissingError

# Under a name of its own: importing coremltools.proto would import coremltools.
_PACKAGE = "_intaglio_coremltools_proto"


@cache
def model_class() -> Any:
    """The message of a Core ML model, which is that of coremltools too. Raises RuntimeMissingError."""
    try:
        folder = _folder()
        spec = importlib.util.spec_from_file_location(
            _PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        # Not executed: it would only import more of its modules.
        sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)
        return importlib.import_module(f"{_PACKAGE}.Model_pb2").Model
    except (ImportError, OSError) as error:
        raise RuntimeMissingError(MISSING.format(reason=error)) from error


def _folder() -> Path:
    # Finding a package does not import it.
    found = importlib.util.find_spec("coremltools")
    if found is None or not found.submodule_search_locations:
        raise ImportError("No module named 'coremltools'")
    return Path(found.submodule_search_locations[0]) / "proto"
