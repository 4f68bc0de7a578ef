"""What can be chosen of a TensorRT engine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from intaglio.errors import InputError

# What TensorRT for RTX compiles for: consumer GPUs from Turing to Blackwell.
RTX_CAPABILITIES = (75, 80, 86, 89, 120, 121)


class RtxOptions(BaseModel):
    """``sm`` are compute capabilities, as 86 for 8.6; none is the portable set, of every GPU from Ampere on.

    ``dtype`` narrows a float32 graph, whose attention otherwise has no fused kernel.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    sm: tuple[int, ...] = ()
    dtype: Literal["float16", "bfloat16"] | None = None

    @field_validator("sm", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        parts = [part.strip() for part in value.split(",")]
        # int() takes more than these: underscores, signs, digits of other scripts.
        if not all(re.fullmatch("[0-9]{1,4}", part) for part in parts):
            raise ValueError("expected numbers")
        return sorted({int(part) for part in parts})

    @field_validator("sm")
    @classmethod
    def _known(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if unknown := [sm for sm in value if sm not in RTX_CAPABILITIES]:
            raise ValueError(f"{unknown[0]} is unknown")
        return value


def read_rtx_options(given: Mapping[str, str]) -> RtxOptions:
    """The options of these values. Raises InputError saying what there is."""
    try:
        return RtxOptions.model_validate(dict(given))
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        if name == "dtype":
            raise InputError(f"--dtype is {given['dtype']!r}, expected float16 or bfloat16") from error
        if name != "sm":
            raise InputError(f"--{name.replace('_', '-')}: is no option of the target tensorrt-rtx") from error
        known = ", ".join(map(str, RTX_CAPABILITIES))
        raise InputError(
            f"--sm is {given['sm']!r}, expected numbers among {known}, comma-separated: 86 is compute capability 8.6. "
            "GPUs of datacentres (90, 100) take the target tensorrt"
        ) from error


class FullOptions(BaseModel):
    """Of the target ``tensorrt``: ``dtype`` as above; ``refit`` lets the weights of products be exchanged, for LoRA."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: Literal["float16", "bfloat16"] | None = None
    refit: bool = False


def read_full_options(given: Mapping[str, str]) -> FullOptions:
    """The options of these values. Raises InputError saying what there is."""
    try:
        return FullOptions.model_validate(dict(given))
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        if name == "dtype":
            raise InputError(f"--dtype is {given['dtype']!r}, expected float16 or bfloat16") from error
        if name == "refit":
            raise InputError(f"--refit is {given['refit']!r}, expected yes or no") from error
        if name == "sm":
            raise InputError(
                "--sm: the target tensorrt builds for the GPU of this machine; tensorrt-rtx takes --sm"
            ) from error
        raise InputError(f"--{name.replace('_', '-')}: is no option of the target tensorrt") from error
