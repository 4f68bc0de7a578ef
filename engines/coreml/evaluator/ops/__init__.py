"""The ops by group. Importing this package registers them all.

Each function is the MIL op of its name, with that op's arguments, as coremltools' op definitions (iOS 15 to iOS 18)
document them. What is said here is what those leave open, taken from coremltools' own tests on Macs where they show it.
"""

from intaglio.engines.coreml.evaluator.ops import (
    activations,
    constants,
    control,
    convolutions,
    creation,
    elementwise,
    indexing,
    joining,
    normalization,
    pooling,
    products,
    quantization,
    recurrent,
    reductions,
    resizing,
    sampling,
    shapes,
    slicing,
    sorting,
    spatial,
)

__all__ = [
    "activations",
    "constants",
    "control",
    "convolutions",
    "creation",
    "elementwise",
    "indexing",
    "joining",
    "normalization",
    "pooling",
    "products",
    "quantization",
    "recurrent",
    "reductions",
    "resizing",
    "sampling",
    "shapes",
    "slicing",
    "sorting",
    "spatial",
]
