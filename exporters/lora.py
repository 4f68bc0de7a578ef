"""LoRA adapters in an export: which module of which component each pair of matrices belongs to, and what becomes of it.

A dense weight is merged while it streams, in float32, and rounded to the bundle's dtype once. A quantized one keeps its
codes: the terms of all adapters become one low-rank branch beside it in the graph, its strengths folded into the second
matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from onnxscript import nn

from intaglio.errors import InputError, WeightsError
from intaglio.exporters.architecture import Architecture
from intaglio.exporters.checkpoints.lora import Adapter, LoraModule, check_finite, open_adapter
from intaglio.exporters.checkpoints.tensors import CheckpointTensor
from intaglio.exporters.layers.linear import LOW_RANK_PARTS, Linear, OutputHead

# How files begin the names of modules of each component; a language model goes by the text encoder's names too.
_TRANSFORMER = (
    "transformer.",
    "unet.",
    "diffusion_model.",
    "model.diffusion_model.",
    "lora_unet_",
    "lora_transformer_",
)
_TEXT_ENCODER = ("text_encoder.", "lora_te_", "lora_te1_", "lora_text_encoder_")
_PREFIXES = {"transformer": _TRANSFORMER, "text_encoder": _TEXT_ENCODER, "language_model": _TEXT_ENCODER}
_SHOWN = 4
# Far beyond any that is of use; much larger ones would overflow what they are multiplied with.
_MAX_STRENGTH = 10_000


@dataclass(frozen=True)
class Lora:
    """An adapter that is to be exported, and by what it is multiplied."""

    adapter: Adapter
    strength: float

    @property
    def name(self) -> str:
        """The file and its strength, as the command line spells them."""
        return f"{self.adapter.path.name}:{self.strength:g}"


@dataclass(frozen=True)
class LowRank:
    """What one pair of matrices adds to a weight ``[out, in]``: ``scale * up @ down``, the strength in ``scale``."""

    down: CheckpointTensor
    up: CheckpointTensor
    scale: float

    @property
    def rank(self) -> int:
        """The width between the two matrices."""
        return self.down.shape[0]

    def up_rows(self, start: int, stop: int) -> np.ndarray:
        """Rows of ``up`` times the scale, float32."""
        return _float32(self.up.read_rows(start, stop)) * np.float32(self.scale)


@dataclass(frozen=True)
class Claims:
    """The terms of a component's weights, by the weight's name, and the modules of each adapter that they came from."""

    terms: Mapping[str, tuple[LowRank, ...]] = field(default_factory=dict)
    modules: tuple[frozenset[str], ...] = ()
    known: tuple[str, ...] = ()


def open_loras(files: Iterable[str | Path | tuple[str | Path, float]]) -> tuple[Lora, ...]:
    """Opens adapters, each a path or a path with a strength, and reads that all their values are finite.

    Raises CheckpointError, and InputError for a strength out of range or a file that is named twice.
    """
    loras: list[Lora] = []
    for entry in files:
        path, strength = entry if isinstance(entry, tuple) else (entry, 1.0)
        if not abs(strength) <= _MAX_STRENGTH:
            raise InputError(
                f"--lora {path}: the strength is {strength}, expected a number from {-_MAX_STRENGTH} to {_MAX_STRENGTH}"
            )
        adapter = open_adapter(path)
        if any(adapter.files[0].resolve() == other.adapter.files[0].resolve() for other in loras):
            raise InputError(f"--lora {path}: is given twice; give it once, with the sum of the strengths")
        check_finite(adapter)
        loras.append(Lora(adapter, float(strength)))
    return tuple(loras)


def claim_modules(
    loras: Sequence[Lora], role: str, architecture: Architecture, config: Any, model: nn.Module
) -> Claims:
    """What of ``loras`` belongs to a component whose ``model`` is not quantized yet.

    Raises WeightsError for a matrix whose shape is not the module's, and for two that are of one module.
    """
    if not loras or role not in _PREFIXES:
        return Claims(modules=tuple(frozenset() for _ in loras))
    linears = {name: m for name, m in model.named_modules() if isinstance(m, Linear | OutputHead)}
    flat = {name.replace(".", "_"): name for name in (*linears, *architecture.spellings(config))}
    terms: dict[str, list[LowRank]] = {}
    claimed = []
    for lora in loras:
        own: dict[str, str] = {}
        for module in lora.adapter.modules.values():
            try:
                targets = _targets(module, role, linears, flat, architecture, config)
            except WeightsError as error:  # fused rows that do not come apart
                raise WeightsError(f"{lora.adapter.path}: {module.up.name}: {error}") from error
            for name, up in targets.items():
                if name in own:
                    raise WeightsError(
                        f"{lora.adapter.path}: {module.down.name} and {own[name]} are both of {name}; keep one spelling"
                    )
                own[name] = module.down.name
                _check_shape(lora, module, up, name, (linears[name].rows, linears[name].columns))
                term = LowRank(module.down, up, module.scale * lora.strength)
                terms.setdefault(f"{name}.weight", []).append(term)
        keys = {m.name for m in lora.adapter.modules.values() if m.down.name in own.values()}
        claimed.append(frozenset(keys))
    return Claims({name: tuple(group) for name, group in terms.items()}, tuple(claimed), tuple(linears))


def _targets(
    module: LoraModule,
    role: str,
    linears: Mapping[str, Any],
    flat: Mapping[str, str],
    architecture: Architecture,
    config: Any,
) -> dict[str, CheckpointTensor]:
    """The model's modules that ``module`` is of, each with its rows of ``up``: several for one that fuses them."""
    for name in _candidates(module, role):
        names = [name, f"model.{name}"]
        if module.is_flat:
            names = [flat[n] for n in (name, f"model_{name}") if n in flat]
        for candidate in names:
            if candidate in linears:
                return {candidate: module.up}
            # As rows of the weight go, so do those of what is added to it.
            found = architecture.respell({f"{candidate}.weight": module.up}, config)
            renamed = {key.removesuffix(".weight"): tensor for key, tensor in found.items()}
            if all(key in linears for key in renamed):
                return dict(renamed)
    return {}


def _candidates(module: LoraModule, role: str) -> Iterator[str]:
    """The module's name without a prefix that is the component's, else as it is."""
    for prefix in _PREFIXES.get(role, ()):
        if module.name.startswith(prefix):
            yield module.name.removeprefix(prefix)
    if not module.is_flat:
        yield module.name


def _check_shape(lora: Lora, module: LoraModule, up: CheckpointTensor, name: str, shape: tuple[int, int]) -> None:
    rows, columns = up.shape[0], module.down.shape[1]
    if (rows, columns) != shape:
        tensor = module.down if columns != shape[1] else module.up
        raise WeightsError(
            f"{lora.adapter.path}: {tensor.name} is {list(tensor.shape)}; it adds [{rows}, {columns}] to {name}, which "
            f"is {list(shape)}. The adapter is of another model"
        )


def check_claims(loras: Sequence[Lora], claims: Mapping[str, Claims], *, allow_unused: bool) -> None:
    """Looks over what the components, by role, took of each adapter.

    Raises WeightsError for an adapter that matches nothing, for modules that match nothing unless ``allow_unused``, and
    for a module that two components have.
    """
    for index, lora in enumerate(loras):
        path, modules = lora.adapter.path, lora.adapter.modules
        taken = [(role, name) for role, claim in claims.items() for name in sorted(claim.modules[index])]
        names = [name for _, name in taken]
        if twice := [name for name in names if names.count(name) > 1]:
            roles = " and ".join(role for role, name in taken if name == twice[0])
            raise WeightsError(
                f"{path}: {modules[twice[0]].down.name} fits {roles}; the file does not say which it means"
            )
        unmatched = unmatched_keys(lora, names)
        known = [name for claim in claims.values() for name in claim.known]
        if not taken:
            raise WeightsError(
                f"{path}: none of its {len(modules)} modules is one of the model's. It has {_few(unmatched)}; the "
                f"model ({', '.join(claims)}) has {_few(known)}. The adapter is of another model"
            )
        if unmatched and not allow_unused:
            raise WeightsError(
                f"{path}: {len(modules) - len(taken)} of {len(modules)} modules are unknown to the model "
                f"({', '.join(claims)}): {_few(unmatched)}. --allow-unused goes on without them"
            )


def unmatched_keys(lora: Lora, matched: Iterable[str]) -> list[str]:
    """The keys of the first matrices of the modules that are not among ``matched``."""
    found = set(matched)
    return [module.down.name for name, module in lora.adapter.modules.items() if name not in found]


def apply_terms(
    weights: Mapping[str, CheckpointTensor], terms: Mapping[str, Sequence[LowRank]]
) -> tuple[dict[str, CheckpointTensor], dict[str, int]]:
    """The weights with the terms in them or beside them, and the rank of the branch of each quantized one."""
    result: dict[str, CheckpointTensor] = {}
    ranks: dict[str, int] = {}
    for name, tensor in weights.items():
        own = tuple(terms.get(name, ()))
        if not own:
            result[name] = tensor
        elif tensor.layout is None:
            result[name] = MergedTensor(tensor.name, tensor.shape, tensor.storage, tensor, own)
        else:
            result[name] = tensor
            ranks[name] = sum(term.rank for term in own)
            down, up = (f"{name.removesuffix('.weight')}.{part}" for part in LOW_RANK_PARTS)
            result[down] = JoinedDown(down, (ranks[name], tensor.shape[1]), "F32", own)
            result[up] = JoinedUp(up, (tensor.shape[0], ranks[name]), "F32", own)
    return result, ranks


def source_tensors(weights: Iterable[CheckpointTensor]) -> Iterator[CheckpointTensor]:
    """The model's own tensors among those of :func:`apply_terms`, as they are stored."""
    for tensor in weights:
        if isinstance(tensor, MergedTensor):
            yield tensor.source
        elif not isinstance(tensor, _Joined):
            yield tensor


@dataclass(frozen=True)
class MergedTensor(CheckpointTensor):
    """A dense weight with the terms added, float32."""

    source: CheckpointTensor
    terms: tuple[LowRank, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(np.float32))

    @property
    def row_bytes(self) -> int:
        return self.source.row_bytes

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        merged = _float32(self.source.read_rows(start, stop)).copy()
        for term in self.terms:
            merged += term.up_rows(start, stop) @ _float32(term.down.read())
        return merged


@dataclass(frozen=True)
class _Joined(CheckpointTensor):
    """A matrix of a branch: those of all terms side by side along the rank, float32."""

    terms: tuple[LowRank, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(np.float32))

    @property
    def row_bytes(self) -> int:
        return 4 * self.shape[1]


class JoinedDown(_Joined):
    """``[rank, in]``."""

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        return np.concatenate([_float32(term.down.read()) for term in self.terms])[start:stop]


class JoinedUp(_Joined):
    """``[out, rank]``, times the scales."""

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        return np.concatenate([term.up_rows(start, stop) for term in self.terms], axis=1)


def _float32(rows: Any) -> np.ndarray:
    assert isinstance(rows, np.ndarray), "only dense matrices are added"
    return rows.astype(np.float32, copy=False)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
