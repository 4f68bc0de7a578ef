"""What can be chosen of a Core ML package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from intaglio.errors import InputError

DeploymentTarget = Literal["iOS18", "iOS26"]
Weights = Literal["lut", "lut-compact", "lut-fp16", "int4"]


class Options(BaseModel):
    """``deployment_target`` is the oldest system a package runs on: iOS18 stands for macOS 15 and its contemporaries,
    iOS26 for macOS 26 and its.

    ``dtype`` float16 narrows a float32 graph; as it is otherwise. ``weights`` is how ternary weights are stored, as
    :mod:`intaglio.engines.coreml.ops.packed_weights` tells.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    deployment_target: DeploymentTarget = "iOS18"
    dtype: Literal["float16"] | None = None
    weights: Weights = "lut"


_VALUES = {"deployment_target": get_args(DeploymentTarget), "dtype": ("float16",), "weights": get_args(Weights)}


def read_options(given: Mapping[str, str]) -> Options:
    """The options of these values. Raises InputError saying what there is."""
    try:
        return Options.model_validate(dict(given))
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        flag = f"--{name.replace('_', '-')}"
        if name not in _VALUES:
            raise InputError(f"{flag}: is no option of the target coreml") from error
        raise InputError(f"{flag} is {given[name]!r}, expected {' or '.join(_VALUES[name])}") from error
