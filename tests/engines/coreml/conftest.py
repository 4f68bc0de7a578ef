"""coremltools is imported first, and without the frameworks that it would load beside it."""

from __future__ import annotations

from intaglio.engines.coreml.coremltools_ import import_coremltools, without_frameworks

with without_frameworks():
    import_coremltools()
