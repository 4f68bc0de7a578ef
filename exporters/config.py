"""Model configurations: keys are required, typed, and never filled in by a default that adds arithmetic."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from intaglio.errors import ConfigError

_REQUIRED = object()
# What no published model comes near, and what a lie would have us allocate or compute with.
_MAX_INTEGER, _MAX_HEAD_DIM, _MAX_LAYERS = 2**31 - 1, 65536, 10_000
_MIN_NUMBER, _MAX_NUMBER = 1e-20, 1e20


def shown(value: object) -> str:
    """A value for a message, cut where it is long."""
    text = repr(value) if not isinstance(value, int) or value.bit_length() < 1000 else "an integer of many digits"
    return text if len(text) <= 200 else f"{text[:200]}…"


def assumed_note(assumed: Sequence[str], config: Mapping[str, Any]) -> str:
    """What to say of keys that no file says; ``config`` has their values."""
    values = ", ".join(f"{key}={config.get(key, 'as built')}" for key in assumed)
    return f"no config.json says {values}: taken from the published model of these widths. --config sets another"


class ConfigKeys:
    """The keys of one configuration, under their Hugging Face names.

    ``source`` says where they come from and ``spelling`` how that file spells each, for messages; ``parent`` is
    the key that these keys lie under, if any, ``component`` the one of a bundle that they configure. ``assumed`` are
    keys that no file says, whose values are those of a published model of these widths. ``asked`` grows to the keys
    that were looked at. Every method raises ConfigError naming file and key.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        source: str,
        spelling: Mapping[str, str] | None = None,
        parent: str | None = None,
        component: str | None = None,
        assumed: Collection[str] = (),
    ) -> None:
        self.values = values
        self.source = source
        self.assumed = tuple(assumed)
        self.asked: set[str] = set()
        self._spelling = spelling or {}
        self._parent = parent
        self._component = component

    def spell(self, key: str) -> str:
        """``key`` as the file spells it."""
        return self._spelling.get(key, f"{self._parent}.{key}" if self._parent else key)

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        self.asked.add(key)
        return self.values.get(key) is not None

    def inside(self, key: str) -> ConfigKeys:
        """The keys of the object under ``key``."""
        value = self._get(key, _REQUIRED)
        if not isinstance(value, Mapping):
            raise self.wrong(key, f"is {shown(value)}, expected an object")
        under = f"{key}."
        inner = {name.removeprefix(under): text for name, text in self._spelling.items() if name.startswith(under)}
        return ConfigKeys(value, self.source, inner, key, self._component)

    def overridden(self, values: Mapping[str, Any], component: str | None = None) -> ConfigKeys:
        """These keys, of ``component``, with ``values`` added or put in place of what the file says."""
        left = [key for key in self.assumed if key not in values]
        keys = ConfigKeys({**self.values, **values}, self.source, self._spelling, self._parent, component, left)
        keys.asked = self.asked  # what is asked of the one is asked of the other
        return keys

    def only(self, *known: str) -> None:
        """Refuses any key but ``known``, since an unknown one may change the arithmetic."""
        if unknown := sorted(set(self.values) - set(known)):
            raise self.wrong(unknown[0], f"is {self.values[unknown[0]]!r}; known here are {', '.join(known)}")

    def integer_or_null(self, key: str, *, minimum: int = 1) -> int | None:
        """An integer of at least ``minimum``, or null: the key must be there, since absent is not null."""
        self.asked.add(key)
        return None if key in self.values and self.values[key] is None else self.integer(key, minimum=minimum)

    def integer(self, key: str, *, minimum: int = 1, absent: Any = _REQUIRED) -> int:
        """An integer of at least ``minimum`` that 31 bits hold."""
        value = self._get(key, absent)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= _MAX_INTEGER:
            raise self.wrong(key, f"is {shown(value)}, expected an integer from {minimum} to {_MAX_INTEGER}")
        return value

    def number(self, key: str, *, minimum: float = 0, absent: Any = _REQUIRED) -> float:
        """A number of at least ``minimum``, within what float32 arithmetic can use."""
        value = self._get(key, absent)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not _MIN_NUMBER <= value <= _MAX_NUMBER or value < minimum:
            least = f"of at least {minimum}" if minimum else f"from {_MIN_NUMBER:g} to {_MAX_NUMBER:g}"
            raise self.wrong(key, f"is {shown(value)}, expected a number {least}")
        return float(value)

    def integers(self, key: str, *, minimum: int = 1) -> tuple[int, ...]:
        """A list, not empty, of integers as :meth:`integer` takes them."""
        value = self._get(key, _REQUIRED)
        good = isinstance(value, list | tuple) and value and all(type(item) is int for item in value)
        if not good or not all(minimum <= item <= _MAX_INTEGER for item in value):
            raise self.wrong(key, f"is {shown(value)}, expected a list of integers from {minimum} to {_MAX_INTEGER}")
        return tuple(value)

    def boolean(self, key: str, *, absent: Any = _REQUIRED) -> bool:
        """A boolean."""
        value = self._get(key, absent)
        if not isinstance(value, bool):
            raise self.wrong(key, f"is {shown(value)}, expected true or false")
        return value

    def choice(self, key: str, *built: str) -> str:
        """A string that must be one of ``built``."""
        value = self._get(key, _REQUIRED)
        if value not in built:
            raise self.wrong(key, f"is {shown(value)}; built is only {' or '.join(map(repr, built))}")
        return value

    def refuse(self, key: str, *, unless: tuple[Any, ...] = ()) -> None:
        """Refuses a feature that the architecture does not build; ``unless`` are the values that mean off."""
        if self.has(key) and self.values[key] not in unless:
            only = f"; built is only {' or '.join(map(repr, unless))}" if unless else ", which is not built yet"
            raise self.wrong(key, f"is {shown(self.values[key])}{only}")

    def wrong(self, key: str, what: str) -> ConfigError:
        """The error for a key with a wrong value."""
        return ConfigError(f"{self.source}: {self.spell(key)} {what}")

    def _get(self, key: str, absent: Any) -> Any:
        if self.has(key):
            return self.values[key]
        if absent is not _REQUIRED:
            return absent
        setting = f"{self._parent}='{{\"{key}\": VALUE, …}}'" if self._parent else f"{key}=VALUE"
        setting = f"{self._component}.{setting}" if self._component else setting
        raise ConfigError(
            f"{self.source}: has no {self.spell(key)}, which the model needs. No default is taken, since a wrong "
            f"one gives wrong numbers: look it up in the model's documentation and pass --config {setting}"
        )


def check_heads(keys: ConfigKeys, heads: int, kv_heads: int, head_dim: int) -> None:
    """Refuses head counts and widths that attention with rotary embeddings cannot have. Raises ConfigError."""
    if heads % kv_heads:
        raise keys.wrong("num_key_value_heads", f"is {kv_heads}, which does not divide {heads} query heads")
    if head_dim > _MAX_HEAD_DIM:
        raise keys.wrong("head_dim", f"is {head_dim}, expected at most {_MAX_HEAD_DIM}")
    if head_dim % 2:
        raise keys.wrong("head_dim", f"is {head_dim}; rotary embeddings need an even one")


def split_head_dim(keys: ConfigKeys, heads: int) -> int:
    """``head_dim``, which where it is absent is ``hidden_size`` split evenly. Raises ConfigError."""
    hidden_size = keys.integer("hidden_size")
    if not keys.has("head_dim") and hidden_size % heads:
        raise keys.wrong("hidden_size", f"is {hidden_size}, which {heads} heads do not divide")
    return keys.integer("head_dim", absent=hidden_size // heads)


def window_layers(keys: ConfigKeys, layers: int) -> tuple[int | None, tuple[str, ...]]:
    """The sliding window (None is none) and the kind of each layer, as Qwen's configs spell them.

    Kinds are ``full_attention`` and ``sliding_attention``. Without ``layer_types``, the layers from
    ``max_window_layers`` on slide. Raises ConfigError.
    """
    if layers > _MAX_LAYERS:  # each gets an entry below
        raise keys.wrong("num_hidden_layers", f"is {layers}, expected at most {_MAX_LAYERS}")
    window = None
    if keys.boolean("use_sliding_window", absent=False):
        window = keys.integer_or_null("sliding_window")
    if keys.has("layer_types"):
        kinds = keys.values["layer_types"]
        known = ("full_attention", "sliding_attention")
        if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= set(known):
            raise keys.wrong("layer_types", f"is {kinds!r}, expected {layers} of {' and '.join(known)}")
        if window is None and "sliding_attention" in kinds:
            raise keys.wrong("layer_types", "has sliding_attention, but no sliding window is in use")
        return window, tuple(kinds)
    first = layers if window is None else keys.integer("max_window_layers", minimum=0)
    return window, tuple("sliding_attention" if i >= first else "full_attention" for i in range(layers))


@dataclass(frozen=True)
class RopeScaling:
    """A published way to stretch rotary embeddings; ``rope_type`` is its name. Subclasses hold its parameters."""

    rope_type: str


@dataclass(frozen=True)
class LinearScaling(RopeScaling):
    """Positions divided by ``factor`` (https://arxiv.org/abs/2306.15595)."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling(RopeScaling):
    """NTK-aware: beyond ``max_position_embeddings`` the base grows with the length of the sequence."""

    factor: float
    max_position_embeddings: int


@dataclass(frozen=True)
class YarnScaling(RopeScaling):
    """YaRN (https://arxiv.org/abs/2309.00071); ``attention_factor`` multiplies cosines and sines."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool


@dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept, those between blended."""

    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float
    high_freq_factor: float


@dataclass(frozen=True)
class RopeFreqs(RopeScaling):
    """What each frequency is divided by, as a GGUF file stores Llama 3's scaling in ``rope_freqs.weight``."""

    factors: tuple[float, ...]


def rope_parameters(keys: ConfigKeys, head_dim: int) -> tuple[float, RopeScaling | None]:
    """The base of rotary embeddings and their scaling, None where there is none.

    Both spellings are read: ``rope_parameters`` of transformers 5, and the older ``rope_theta`` and ``rope_scaling``
    (with ``rope_type``, or ``type``). Raises ConfigError for types and parameters that are not built.
    """
    keys.refuse("partial_rotary_factor", unless=(1, 1.0))
    spellings = [key for key in ("rope_parameters", "rope_scaling") if keys.has(key)]
    if len(spellings) == 2 and keys.values["rope_parameters"] != keys.values["rope_scaling"]:
        raise keys.wrong("rope_scaling", "and rope_parameters are both there and differ; keep the right one")
    inner = keys.inside(spellings[0]) if spellings else None
    theta = _agreed(keys, inner, "rope_theta")
    if keys.has("rope_freqs"):
        if inner is not None:
            raise inner.wrong("rope_type", f"is there beside {keys.spell('rope_freqs')}; only one of them is built")
        factors = keys.values["rope_freqs"]
        good = isinstance(factors, list) and all(isinstance(f, int | float) and 0 < f < math.inf for f in factors)
        if not good or len(factors) != head_dim // 2:
            raise keys.wrong("rope_freqs", f"is {factors!r}, expected {head_dim // 2} numbers above zero")
        return theta.number("rope_theta"), RopeFreqs("rope_freqs", tuple(map(float, factors)))
    return theta.number("rope_theta"), _scaling(keys, inner) if inner is not None else None


def _agreed(keys: ConfigKeys, inner: ConfigKeys | None, key: str) -> ConfigKeys:
    # A key may lie beside the rotary parameters or among them. Two values would be a guess.
    if inner is None or not inner.has(key):
        return keys
    if keys.has(key) and keys.values[key] != inner.values[key]:
        found = f"is {keys.values[key]!r}, but {inner.spell(key)} is {inner.values[key]!r}"
        raise keys.wrong(key, f"{found}; they must agree")
    return inner


_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")


def _scaling(keys: ConfigKeys, inner: ConfigKeys) -> RopeScaling | None:
    names = [key for key in ("rope_type", "type") if inner.has(key)]
    # Without a type only parameters of unscaled embeddings are let through.
    rope_type = inner.values[names[0]] if names else "default"
    if len(names) == 2 and inner.values["type"] != rope_type:
        raise inner.wrong("type", f"is {inner.values['type']!r}, but rope_type is {rope_type!r}; they must agree")
    if rope_type not in _TYPES:
        raise inner.wrong(names[0], f"is {rope_type!r}, which is not built; built are {', '.join(_TYPES)}")
    inner.refuse("partial_rotary_factor", unless=(1, 1.0))
    common = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
    match rope_type:
        case "linear":
            inner.only(*common, "factor")
            return LinearScaling("linear", inner.number("factor", minimum=1))
        case "dynamic":
            inner.only(*common, "factor")
            length = keys.integer("max_position_embeddings", minimum=2)
            return DynamicScaling("dynamic", inner.number("factor", minimum=1), length)
        case "yarn":
            return _yarn(keys, inner, common)
        case "llama3":
            return _llama3(keys, inner, common)
    inner.only(*common)
    return None


def _original_length(keys: ConfigKeys, inner: ConfigKeys) -> int:
    key = "original_max_position_embeddings"
    _agreed(keys, inner, key)
    return inner.integer(key, minimum=2)


def _yarn(keys: ConfigKeys, inner: ConfigKeys, common: tuple[str, ...]) -> YarnScaling:
    own = ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale")
    inner.only(*common, *own, "mscale_all_dim", "truncate")
    factor = inner.number("factor", minimum=1)
    if inner.has("mscale") != inner.has("mscale_all_dim"):
        raise inner.wrong("mscale", "and mscale_all_dim go together; implementations disagree about one alone")

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1

    attention_factor = magnitude(1)
    if inner.has("mscale"):
        attention_factor = magnitude(inner.number("mscale")) / magnitude(inner.number("mscale_all_dim"))
    # The two betas are the paper's constants: a file names them only where it departs from it.
    fast, slow = inner.number("beta_fast", absent=32.0), inner.number("beta_slow", absent=1.0)
    if fast < slow:
        raise inner.wrong("beta_fast", f"is {fast}, expected at least beta_slow, {slow}")
    return YarnScaling(
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=_original_length(keys, inner),
        attention_factor=inner.number("attention_factor", absent=attention_factor),
        beta_fast=fast,
        beta_slow=slow,
        truncate=inner.boolean("truncate", absent=True),
    )


def _llama3(keys: ConfigKeys, inner: ConfigKeys, common: tuple[str, ...]) -> Llama3Scaling:
    own = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    inner.only(*common, *own)
    low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
    if high <= low:
        raise inner.wrong("high_freq_factor", f"is {high}, expected more than low_freq_factor, {low}")
    return Llama3Scaling("llama3", inner.number("factor", minimum=1), _original_length(keys, inner), low, high)


def context_length(max_position_embeddings: int, scaling: RopeScaling | None) -> int:
    """The longest sequence a model is meant for: scaling that names the unscaled length says so itself."""
    match scaling:
        case DynamicScaling(factor=factor):
            return int(max_position_embeddings * factor)
        case YarnScaling(factor=factor, original_max_position_embeddings=original):
            return max(max_position_embeddings, int(original * factor))
    return max_position_embeddings
