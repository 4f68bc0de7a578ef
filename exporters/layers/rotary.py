"""Rotary position embeddings (https://arxiv.org/abs/2104.09864): over one axis, with the published scalings, and
over several.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnxscript import OpBuilder

from intaglio.exporters.config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    RopeFreqs,
    RopeScaling,
    YarnScaling,
)
from intaglio.exporters.layers.dtype import DtypeModule, cast


class RotaryEmbedding(DtypeModule):
    """Cosines and sines for ``position_ids``, computed once in a graph and shared by its layers.

    They are computed rather than looked up: a table to a published context of 131072 tokens would be
    larger than some models. Angles are float32, since a far position times a frequency has no place in half of
    that; their cosines and sines are rounded once to the graph's dtype.
    """

    def __init__(self, head_dim: int, rope_theta: float, scaling: RopeScaling | None) -> None:
        super().__init__()
        # In float64: the angle of a far position is as exact as float32 can hold it.
        self._exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
        self._inv_freq = _scaled(rope_theta**-self._exponents, rope_theta, scaling).astype(np.float32)
        self._scaling = scaling

    def forward(self, op: OpBuilder, position_ids_BS: ir.Value) -> tuple[ir.Value, ir.Value]:
        """``cos`` and ``sin`` ``[B, S, E / 2]`` in the graph's dtype, of int64 ``[B, S]``."""
        inv_freq = op.initializer(ir.tensor(self._inv_freq, name="rotary_emb.inv_freq"))
        if isinstance(self._scaling, DynamicScaling):
            inv_freq = self._stretched(op, inv_freq, position_ids_BS, self._scaling)
        positions = op.Cast(op.Unsqueeze(position_ids_BS, [-1]), to=ir.DataType.FLOAT)
        angles = op.Mul(positions, inv_freq)
        cos, sin = op.Cos(angles), op.Sin(angles)
        if isinstance(self._scaling, YarnScaling) and self._scaling.attention_factor != 1:
            factor = self._scaling.attention_factor
            cos, sin = op.Mul(cos, factor), op.Mul(sin, factor)
        return cast(op, cos, self.dtype), cast(op, sin, self.dtype)

    def _stretched(
        self, op: OpBuilder, inv_freq: ir.Value, position_ids_BS: ir.Value, scaling: DynamicScaling
    ) -> ir.Value:
        """Frequencies for the sequence's length so far, the largest position of the batch plus one.

        Keys in the cache keep the frequencies of the step that made them, as in transformers. There, a length
        between the model's and the longest one seen also takes the frequencies of that longest one; a graph
        has no memory, so each length gets its own.
        """
        limit, half = scaling.max_position_embeddings, len(self._exponents)
        length = op.Cast(op.Add(op.ReduceMax(position_ids_BS, keepdims=0), 1), to=ir.DataType.FLOAT)
        beyond = op.Max(op.Sub(length, float(limit)), 0.0)
        growth = op.Add(op.Mul(beyond, scaling.factor / limit), 1.0)
        # The base grows by growth ** (E / (E - 2)); a frequency is base ** -exponent.
        powers = (-self._exponents * half / max(half - 1, 1)).astype(np.float32)
        return op.Mul(inv_freq, op.Pow(growth, op.initializer(ir.tensor(powers, name="rotary_emb.growth_powers"))))


def _scaled(inv_freq: np.ndarray, rope_theta: float, scaling: RopeScaling | None) -> np.ndarray:
    match scaling:
        case LinearScaling(factor=factor):
            return inv_freq / factor
        case Llama3Scaling():
            return _llama3(inv_freq, scaling)
        case YarnScaling():
            return _yarn(inv_freq, rope_theta, scaling)
        case RopeFreqs(factors=factors):
            return inv_freq / np.array(factors)
    return inv_freq


def _llama3(inv_freq: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """A frequency's share of the unscaled one goes from 0 at ``low_freq_factor`` turns over the original context
    to 1 at ``high_freq_factor`` turns.
    """
    turns = scaling.original_max_position_embeddings * inv_freq / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = np.clip((turns - low) / (high - low), 0, 1)
    return share * inv_freq + (1 - share) * inv_freq / scaling.factor


def _yarn(inv_freq: np.ndarray, rope_theta: float, scaling: YarnScaling) -> np.ndarray:
    """As :func:`_llama3`, with a share that is linear in the frequency's index between two bounds."""
    dim = 2 * len(inv_freq)

    def index(turns: float) -> float:
        # Which frequency makes that many turns over the original context.
        wavelength = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(rope_theta))

    low, high = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    # The upper bound is the paper's code's: an index into dimensions, not into pairs of them.
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    share = 1 - np.clip((np.arange(dim // 2) - low) / width, 0, 1)
    return share * inv_freq + (1 - share) * inv_freq / scaling.factor


def apply_rotary(op: OpBuilder, x_BHSE: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
    """Rotates the halves of each head (the layout of transformers, not the interleaved one of GGUF)."""
    return op.RotaryEmbedding(x_BHSE, cos, sin, interleaved=0)


class MultiAxisRotaryEmbedding(DtypeModule):
    """Cosines and sines for positions on several axes: axis ``a`` turns ``axes_dims[a]`` numbers of each head.

    Angles are float32; their cosines and sines are rounded once to the graph's dtype.
    """

    def __init__(self, axes_dims: Sequence[int], rope_theta: float) -> None:
        super().__init__()
        # In float64, as the angles of the one-axis embedding.
        omega = [rope_theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim) for dim in axes_dims]
        self._omega = np.concatenate(omega).astype(np.float32)
        self._axes = np.repeat(np.arange(len(axes_dims)), [dim // 2 for dim in axes_dims])

    def forward(self, op: OpBuilder, ids_BSA: ir.Value) -> tuple[ir.Value, ir.Value]:
        """``cos`` and ``sin`` ``[B, S, E / 2]`` in the graph's dtype, of int64 ``[B, S, axes]``."""
        axes = op.initializer(ir.tensor(self._axes, name="axes"))
        omega = op.initializer(ir.tensor(self._omega, name="omega"))
        # Gathered and multiplied: a product of matrices would be rounded where a GPU takes TF32 for it.
        angles = op.Mul(op.Cast(op.Gather(ids_BSA, axes, axis=-1), to=ir.DataType.FLOAT), omega)
        return cast(op, op.Cos(angles), self.dtype), cast(op, op.Sin(angles), self.dtype)


def apply_interleaved_rotary(op: OpBuilder, x_BHSE: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
    """Rotates neighbouring pairs of each head: number ``2 i`` with ``2 i + 1`` by angle ``i``."""
    return op.RotaryEmbedding(x_BHSE, cos, sin, interleaved=1)
