"""bfloat16 for Triton's interpreter, which holds such values as 16-bit integers and would compute with the integers."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

_OPERATIONS = {"create_fadd": np.add, "create_fsub": np.subtract, "create_fmul": np.multiply}


def _numbers(handle: Any) -> np.ndarray:
    """The values of a tensor of the interpreter, those of bfloat16 as float32."""
    data = np.asarray(handle.data)
    return data.view(ml_dtypes.bfloat16).astype(np.float32) if handle.dtype.scalar == tl.bfloat16 else data


def _arithmetic(name: str, operation: Any) -> Any:
    original = getattr(interpreter.InterpreterBuilder, name)

    def compute(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.dtype.scalar != tl.bfloat16:
            return original(self, lhs, rhs)
        rounded = operation(_numbers(lhs), _numbers(rhs)).astype(ml_dtypes.bfloat16)
        return interpreter.TensorHandle(rounded.view(np.uint16), tl.bfloat16)

    return compute


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    product = np.matmul(_numbers(a), _numbers(b), dtype=d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def _cast(self: Any, src: Any, dst_type: Any) -> Any:
    if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
        rounded = np.asarray(src.data).astype(ml_dtypes.bfloat16)
        return interpreter.TensorHandle(rounded.view(np.uint16), tl.bfloat16)
    return _CAST(self, src, dst_type)


def _constant(self: Any, value: float) -> Any:
    """Triton 3.6 has none."""
    return interpreter.TensorHandle(np.array([value], ml_dtypes.bfloat16).view(np.uint16), tl.bfloat16)


_CAST = interpreter.InterpreterBuilder.create_fp_trunc


def interpret_bfloat16(patch: pytest.MonkeyPatch) -> None:
    """Sums, differences, products and matrix products of bfloat16 are computed in float32 and rounded to nearest."""
    for name, operation in _OPERATIONS.items():
        patch.setattr(interpreter.InterpreterBuilder, name, _arithmetic(name, operation))
    patch.setattr(interpreter.InterpreterBuilder, "get_bf16", _constant, raising=False)
    patch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot)
    patch.setattr(interpreter.InterpreterBuilder, "create_fp_trunc", _cast)
