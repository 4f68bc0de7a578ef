"""The kernels compiled for each architecture, with no GPU: what they take of a multiprocessor."""

from __future__ import annotations

import pytest
from cuda_kernels import compiled

from intaglio.errors import CompileError
from intaglio.kernels.cuda.ahead_of_time import ARCHITECTURES, PORTABLE_SHARED_BYTES, compile_kernel
from intaglio.kernels.cuda.variants import attention_variant

# Bytes of shared memory that a block may have.
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_kernels_fit(sm: int) -> None:
    kernels = compiled(sm)
    assert len(kernels) >= 11
    for figures in kernels:
        name = figures["kernel"]
        assert figures["stack"] == 0, f"{name} spills registers"
        assert figures["tensor_ops"] > 0, f"{name} has no matrix instruction"
        limit = PORTABLE_SHARED_BYTES if name.startswith("plugin") else SHARED_BYTES[sm]
        assert figures["shared"] <= limit, name
        assert figures["target"] == (f"sm_{sm}a" if sm >= 90 else f"sm_{sm}")


def test_an_interpreted_kernel_is_not_compiled() -> None:
    with pytest.raises(CompileError, match="TRITON_INTERPRET=1 says"):
        compile_kernel(attention_variant(64, "fp16", 80), 80)
