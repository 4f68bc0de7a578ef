"""What can be chosen of an engine of the target ``cuda``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from intaglio.errors import InputError


class CudaOptions(BaseModel):
    """``provider`` is the one of onnxruntime that runs the graph, with CUDA's behind TensorRT's.

    ``dtype`` float16 narrows a graph of float32, or of bfloat16.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    provider: Literal["cuda", "tensorrt"] = "cuda"
    dtype: Literal["float16"] | None = None


def read_cuda_options(given: Mapping[str, str]) -> CudaOptions:
    """The options of these values. Raises InputError saying what there is."""
    try:
        return CudaOptions.model_validate(dict(given))
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        if name == "provider":
            raise InputError(f"--provider is {given['provider']!r}, expected cuda or tensorrt") from error
        if name == "dtype":
            raise InputError(f"--dtype is {given['dtype']!r}, expected float16") from error
        raise InputError(f"--{name.replace('_', '-')}: is no option of the target cuda") from error
