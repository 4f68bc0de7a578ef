"""Control flow, states and lists."""

from __future__ import annotations

from typing import Any

import numpy as np

from intaglio.engines.coreml.evaluator.registry import Call, State, Tensor, op


@op(widen=False)
def cond(call: Call, pred: bool) -> tuple[Any, ...]:
    """The first block if ``pred``, else the second."""
    return tuple(call.run_block(call.operation.blocks[0 if pred else 1], ()))


@op(widen=False)
def while_loop(call: Call, loop_vars: list[Tensor]) -> tuple[Any, ...]:
    """The second block for as long as the first gives true."""
    condition, body = call.operation.blocks
    values: list[Any] = list(loop_vars)
    while bool(call.run_block(condition, values)[0]):
        values = call.run_block(body, values)
    return tuple(values)


@op(widen=False)
def read_state(input: State) -> Tensor:  # noqa: A002
    return input.array.copy()


@op(widen=False)
def write_state(input: State, data: Tensor) -> None:  # noqa: A002
    if data.shape != input.array.shape or data.dtype != input.array.dtype:
        raise ValueError(f"writes {data.dtype}{list(data.shape)} into {input.array.dtype}{list(input.array.shape)}")
    input.array[...] = data


@op(widen=False)
def make_list(elem_shape: Any = None, init_length: int = 1, dynamic_length: bool = True, dtype: str = "fp32") -> list:
    """A list whose places are empty."""
    return [None] * init_length


@op(widen=False)
def list_length(ls: list) -> Tensor:
    return np.array(len(ls), np.int32)


@op(widen=False)
def list_write(ls: list, index: int, value: Tensor) -> list:
    result = [*ls, *[None] * (index + 1 - len(ls))]
    result[index] = value
    return result


def _read(ls: list, index: int) -> Tensor:
    if not 0 <= index < len(ls) or ls[index] is None:
        raise ValueError(f"reads the place {index} of a list of {len(ls)}, where nothing was written")
    return ls[index]


@op(widen=False)
def list_read(ls: list, index: int) -> Tensor:
    return _read(ls, index)


@op(widen=False)
def list_gather(ls: list, indices: list[int]) -> Tensor:
    return np.stack([_read(ls, index) for index in indices])


@op(widen=False)
def list_scatter(ls: list, indices: list[int], value: Tensor) -> list:
    result = [*ls, *[None] * (max(indices, default=-1) + 1 - len(ls))]
    for index, row in zip(indices, value, strict=True):
        result[index] = row
    return result
