"""coremltools' protobuf classes."""

from __future__ import annotations

from typing import Any

from intaglio.engines.coreml.coremltools_ import import_coremltools


def model_class() -> Any:
    """The message of a Core ML model. Raises RuntimeMissingError."""
    import_coremltools()
    from coremltools.proto import Model_pb2

    return Model_pb2.Model
