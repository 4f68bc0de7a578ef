from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from poisoned import poison


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    """Triton's interpreter with bfloat16, one thread of torch, and poisoned outputs."""
    triton = pytest.importorskip("triton", reason="Triton is only published for Linux")
    assert triton.knobs.runtime.interpret
    from triton_bfloat16 import interpret_bfloat16

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        interpret_bfloat16(patch)
        poison(patch)
        yield
    torch.set_num_threads(threads)
