"""An evaluator of saved Core ML packages: see :mod:`intaglio.engines.coreml.evaluator.evaluate`."""

from intaglio.engines.coreml.evaluator.evaluate import Evaluator

__all__ = ["Evaluator"]
