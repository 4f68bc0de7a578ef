"""coremltools is imported first, and alone: after a test that brings torch it would load that beside it."""

from __future__ import annotations

from intaglio.engines.coreml.coremltools_ import import_coremltools

import_coremltools(alone=True)
