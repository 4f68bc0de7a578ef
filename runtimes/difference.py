"""How far two arrays are apart, and how far they may be."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from intaglio.errors import InputError

# Measured in parts, so that a picture's widest activation needs no float64 copy of itself.
_PART = 1 << 20


@dataclass(frozen=True)
class Bounds:
    """What counts as agreement: at least this cosine and at most this relative L2 distance, both."""

    cosine: float
    relative_l2: float


@dataclass(frozen=True)
class Difference:
    """How far an output is from the reference's: cosine of the angle, ``|a - b| / |b|`` (L2), largest ``|a - b|``.

    ``problem`` says in words why nothing could be measured: shapes that differ, values that are not finite.
    """

    name: str
    cosine: float
    relative_l2: float
    max_abs: float
    stage: str = ""
    bounds: Bounds | None = None
    problem: str | None = None

    @property
    def reason(self) -> str | None:
        """Why it is no agreement; None if it is one."""
        if self.problem is not None or self.bounds is None:
            return self.problem
        reasons = []
        if not self.relative_l2 <= self.bounds.relative_l2:
            reasons.append(f"relative L2 is {self.relative_l2:.2e}, above {self.bounds.relative_l2:g}")
        if not self.cosine >= self.bounds.cosine:
            reasons.append(f"cosine is {self.cosine:.7f}, below {self.bounds.cosine:g}")
        return " and ".join(reasons) or None


def compare(name: str, found: np.ndarray, expected: np.ndarray) -> Difference:
    """Measures in float64. What is not finite is infinitely far; shapes must be equal. Raises InputError."""
    if found.shape != expected.shape:
        raise InputError(f"{name}: shapes differ, {list(found.shape)} and {list(expected.shape)}")
    flat_found, flat_expected = found.reshape(-1), expected.reshape(-1)
    dot = square_a = square_b = square_distance = largest = 0.0
    bad_found = bad_expected = 0
    for start in range(0, found.size, _PART):
        a, b = (flat[start : start + _PART].astype(np.float64) for flat in (flat_found, flat_expected))
        bad_found += int(np.count_nonzero(~np.isfinite(a)))
        bad_expected += int(np.count_nonzero(~np.isfinite(b)))
        if bad_found or bad_expected:
            continue
        distance = a - b
        dot += float(a @ b)
        square_a, square_b = square_a + float(a @ a), square_b + float(b @ b)
        square_distance += float(distance @ distance)
        largest = max(largest, float(np.abs(distance).max()))
    if bad_found or bad_expected:
        # Two equal overflows are no agreement.
        problem = f"{bad_found} of {found.size} values are not finite, and {bad_expected} of the reference's"
        return Difference(name, 0.0, np.inf, np.inf, problem=problem)
    if square_a == 0 or square_b == 0:
        relative = 0.0 if square_distance == 0 else float(np.sqrt(square_distance / square_b)) if square_b else np.inf
        return Difference(name, float(square_distance == 0), relative, largest)
    cosine = dot / float(np.sqrt(square_a) * np.sqrt(square_b))
    return Difference(name, cosine, float(np.sqrt(square_distance / square_b)), largest)


def measure(name: str, found: np.ndarray, expected: np.ndarray) -> Difference:
    """:func:`compare`, where other shapes are a problem of the output and not of the caller."""
    try:
        return compare(name, found, expected)
    except InputError:
        problem = f"has the shape {list(found.shape)}, the reference's {list(expected.shape)}"
        return Difference(name, 0.0, np.inf, np.inf, problem=problem)
