"""What a loaded stage takes and gives, on every target."""

from __future__ import annotations

from intaglio.exporters.bundle import StageInfo, TensorInfo


def runs_as(stage: StageInfo) -> StageInfo:
    """What a loaded stage takes and gives: float32 in place of bfloat16.

    A widened graph takes its cache in float32 too: at the edges there would be a cast of the whole cache at every
    token, and neither NumPy nor onnxruntime's Python face has a bfloat16 of its own.
    """

    def widened(tensors: tuple[TensorInfo, ...]) -> tuple[TensorInfo, ...]:
        return tuple(t.model_copy(update={"dtype": "float32"}) if t.dtype == "bfloat16" else t for t in tensors)

    return stage.model_copy(update={"inputs": widened(stage.inputs), "outputs": widened(stage.outputs)})
