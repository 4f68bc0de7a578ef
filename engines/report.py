"""What a build did, said openly: ``report.json``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StageReport(BaseModel):
    """One built stage. ``dtype`` is what activations have, and in brackets what the graph asks for where that differs
    or which ops differ. ``weight_bytes`` are those the engine reads, packed; ``bits_per_weight`` follows from them;
    ``widened_bytes`` are those of the float32 copies of half-precision weights that are made at load and kept.

    ``attention_fused`` of ``attention_total`` ran as one kernel; ``operators`` counts what ran in the smallest run;
    ``fallbacks`` names ops of ours that ran as their body of standard ops instead of as a kernel; ``exact_products``
    counts the products that stay exact in a ``fast`` engine, by the format that no fast kernel reads. What kernels ran
    on is ``instruction_set``: the best of the building machine, and another machine takes its own. ``peak_rss_bytes``
    is that of the building process. Of what is built ahead of time ``package_bytes`` is the size, and
    ``quantized_bits_per_weight`` those of the weights that are stored packed, tables and scales included. Of a Core ML
    package, ``deployment_target`` is the oldest system that it runs on, and ``functions`` one for each set of sizes,
    whose operators are counted together; of an engine of TensorRT, these are ``profiles``. Of a model that others
    wrote, ``trial_sizes`` are those of the smallest run. ``notes`` say what else there is to know, such as why there
    was no trial run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: str
    accuracy: str
    weight_bytes: int
    weight_count: int
    bits_per_weight: float
    widened_bytes: int = 0
    attention_fused: int
    attention_total: int
    fallbacks: dict[str, int]
    exact_products: dict[str, int] = {}
    instruction_set: str = ""
    deployment_target: str = ""
    package_bytes: int = 0
    quantized_bits_per_weight: float = 0.0
    functions: tuple[str, ...] = ()
    profiles: int = 0
    operators: dict[str, int]
    seconds: float
    peak_rss_bytes: int
    from_cache: bool = False
    trial_sizes: dict[str, int] = {}
    notes: tuple[str, ...] = ()


def bits_per_weight(weight_bytes: int, weight_count: int) -> float:
    """As the report says it; 0 where there are no weights."""
    return round(8 * weight_bytes / weight_count, 3) if weight_count else 0.0


class Report(BaseModel):
    """``report.json`` of an engine. ``notes`` are of the engine as a whole."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    compiler: str
    stages: dict[str, StageReport]
    notes: tuple[str, ...] = ()
