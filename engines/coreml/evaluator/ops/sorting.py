"""Sorting. Of equal values the first comes first, which Core ML does not promise."""

from __future__ import annotations

import numpy as np

from intaglio.engines.coreml.evaluator.registry import Tensor, op


def _order(x: Tensor, axis: int, ascending: bool) -> Tensor:
    if ascending:
        return np.argsort(x, axis, kind="stable")
    # Sorting the reversed axis and turning it round keeps the first of equal values first.
    order = np.flip(np.argsort(np.flip(x, axis), axis, kind="stable"), axis)
    return x.shape[axis] - 1 - order


@op
def argsort(x: Tensor, axis: int = -1, ascending: bool = False) -> Tensor:
    return _order(x, axis, ascending)


@op
def topk(
    x: Tensor,
    k: int = 1,
    axis: int = -1,
    ascending: bool = False,
    sort: bool = True,
    return_indices: bool = True,
    output_indices_dtype: str = "int32",
) -> tuple[Tensor, ...]:
    """The greatest ``k`` values (with ``ascending`` the least) and their indices; -1 takes all."""
    count = x.shape[axis] if k == -1 else k
    if count > x.shape[axis]:
        raise ValueError(f"takes {count} of {x.shape[axis]} values")
    indices = np.take(_order(x, axis, ascending), np.arange(count), axis)
    if not sort:
        indices = np.sort(indices, axis)
    values = np.take_along_axis(x, indices, axis)
    return (values, indices) if return_indices else (values,)


@op
def non_maximum_suppression(
    boxes: Tensor, scores: Tensor, iou_threshold: float, max_boxes: int, per_class_suppression: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The form of iOS 17: ``boxes`` ``[N, 4, B]`` (centre x, centre y, width, height), ``scores`` ``[N, K, B]``.

    Results that are not filled hold zeros, their indices -1.
    """
    if per_class_suppression:
        raise ValueError("suppresses per class, which the evaluator does not do")
    batch, classes, _ = scores.shape
    kept_boxes = np.zeros((batch, 4, max_boxes), boxes.dtype)
    kept_scores = np.zeros((batch, classes, max_boxes), scores.dtype)
    kept_indices = np.full((batch, max_boxes), -1, np.int32)
    for row in range(batch):
        chosen = _suppress(boxes[row], scores[row].max(axis=0), iou_threshold, max_boxes)
        kept_boxes[row, :, : len(chosen)] = boxes[row][:, chosen]
        kept_scores[row, :, : len(chosen)] = scores[row][:, chosen]
        kept_indices[row, : len(chosen)] = chosen
    return kept_boxes, kept_scores, kept_indices


def _suppress(boxes: Tensor, scores: Tensor, threshold: float, limit: int) -> list[int]:
    low, high = boxes[:2] - boxes[2:] / 2, boxes[:2] + boxes[2:] / 2
    area = np.prod(boxes[2:], axis=0)
    chosen: list[int] = []
    for index in _order(scores, 0, ascending=False):
        overlap = np.maximum(
            np.minimum(high[:, chosen], high[:, [index]]) - np.maximum(low[:, chosen], low[:, [index]]), 0
        ).prod(axis=0)
        if len(chosen) < limit and np.all(overlap <= threshold * (area[chosen] + area[index] - overlap)):
            chosen.append(int(index))
    return chosen
