"""Model configurations: keys are required, typed, and never filled in by a default that adds arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from intaglio.errors import ConfigError

_REQUIRED = object()


class ConfigKeys:
    """The keys of one configuration, under their Hugging Face names.

    ``source`` says where they come from and ``spelling`` how that file spells each, for messages. Every
    method raises ConfigError naming file and key.
    """

    def __init__(self, values: Mapping[str, Any], source: str, spelling: Mapping[str, str] | None = None) -> None:
        self.values = values
        self.source = source
        self._spelling = spelling or {}

    def spell(self, key: str) -> str:
        """``key`` as the file spells it."""
        return self._spelling.get(key, key)

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def integer(self, key: str, *, minimum: int = 1, absent: Any = _REQUIRED) -> int:
        """An integer of at least ``minimum``."""
        value = self._get(key, absent)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.wrong(key, f"is {value!r}, expected an integer of at least {minimum}")
        return value

    def number(self, key: str, *, absent: Any = _REQUIRED) -> float:
        """A finite number above zero."""
        value = self._get(key, absent)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.wrong(key, f"is {value!r}, expected a number above zero")
        return float(value)

    def boolean(self, key: str, *, absent: Any = _REQUIRED) -> bool:
        """A boolean."""
        value = self._get(key, absent)
        if not isinstance(value, bool):
            raise self.wrong(key, f"is {value!r}, expected true or false")
        return value

    def refuse(self, key: str, *, unless: tuple[Any, ...] = ()) -> None:
        """Refuses a feature that the architecture does not build; ``unless`` are the values that mean off."""
        if self.has(key) and self.values[key] not in unless:
            only = f"; built is only {' or '.join(map(repr, unless))}" if unless else ", which is not built yet"
            raise self.wrong(key, f"is {self.values[key]!r}{only}")

    def wrong(self, key: str, what: str) -> ConfigError:
        """The error for a key with a wrong value."""
        return ConfigError(f"{self.source}: {self.spell(key)} {what}")

    def _get(self, key: str, absent: Any) -> Any:
        if self.has(key):
            return self.values[key]
        if absent is not _REQUIRED:
            return absent
        raise ConfigError(
            f"{self.source}: has no {self.spell(key)}, which the model needs. No default is taken, since a wrong "
            f"one gives wrong numbers: look it up in the model's documentation and pass --config {key}=VALUE"
        )


def rope_theta(keys: ConfigKeys) -> float:
    """The base of unscaled rotary embeddings, from ``rope_theta`` or transformers 5's ``rope_parameters``."""
    parameters = keys.values.get("rope_parameters")
    if parameters is None:
        keys.refuse("rope_scaling")
        return keys.number("rope_theta")
    if not isinstance(parameters, Mapping):
        raise keys.wrong("rope_parameters", f"is {parameters!r}, expected an object")
    inner = ConfigKeys(parameters, f"{keys.source}: {keys.spell('rope_parameters')}")
    for name in ("rope_type", "type"):
        inner.refuse(name, unless=("default",))
    inner.refuse("partial_rotary_factor", unless=(1, 1.0))
    return inner.number("rope_theta") if inner.has("rope_theta") else keys.number("rope_theta")
