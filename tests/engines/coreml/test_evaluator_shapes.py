"""Shapes, slices, indexing, creation and sorting of the evaluator, compared with NumPy and torch."""

import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from mil_packages import numbers, run

from intaglio.errors import EngineError


def t(x):
    return torch.from_numpy(np.array(x))


def equal(found, expected):
    assert len(found) == len(expected)
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_array_equal(one, np.asarray(other), err_msg=str(i))


def test_shapes(tmp_path):
    x, y = numbers(2, 3, 4), numbers(2, 1, 3, 1)

    def body(x, y):
        return [
            mb.identity(x=x), mb.shape(x=x), mb.reshape(x=x, shape=[4, -1]), mb.reshape(x=x, shape=[0, 2, -1, 0]),
            mb.reshape_like(x=x, ref_tensors=(x, y), begins=(2, 0), ends=(3, 3), end_masks=(False, False)),
            mb.expand_dims(x=x, axes=[0, -1]), mb.squeeze(x=y, axes=[1]), mb.squeeze(x=y), mb.flatten2d(x=x, axis=2),
            mb.flatten2d(x=x, axis=-2), mb.transpose(x=x, perm=[2, 0, -2]), mb.reverse(x=x, axes=[0, 2]),
            mb.reverse(x=x), mb.tile(x=x, reps=[1, 2, 3]), mb.sliding_windows(x=x, axis=2, size=2, stride=2),
            mb.sliding_windows(x=x, axis=-2, size=2),
            mb.reverse_sequence(x=x, lengths=[3, 2], seq_axis=1, batch_axis=0),
        ]  # fmt: skip

    turned = x.copy()
    turned[0], turned[1, :2] = x[0, ::-1], x[1, 1::-1]
    equal(
        run(tmp_path, body, {"x": x, "y": y}),
        [
            x, [2, 3, 4], x.reshape(4, 6), x.reshape(1, 2, 3, 4), x.reshape(4, 2, 1, 3), x[None, ..., None], y[:, 0],
            y[:, 0, :, 0], x.reshape(6, 4), x.reshape(2, 12), x.transpose(2, 0, 1), x[::-1, :, ::-1],
            x[::-1, ::-1, ::-1], np.tile(x, (1, 2, 3)), t(x).unfold(2, 2, 2),
            t(x).unfold(1, 2, 1).movedim(-1, 2), turned,
        ],
    )  # fmt: skip


def test_joining_and_splitting(tmp_path):
    x, y, z = numbers(2, 3, 4), numbers(2, 3, 4), numbers(2, 1, 4)

    def body(x, y, z):
        return [
            mb.concat(values=[x, z, y], axis=1), mb.concat(values=[x, y], axis=-2, interleave=True),
            mb.stack(values=[x, y], axis=1), *mb.split(x=x, num_splits=2, axis=-1),
            *mb.split(x=x, split_sizes=[1, 2], axis=1),
        ]  # fmt: skip

    woven = np.stack([x, y], 2).reshape(2, 6, 4)
    expected = [np.concatenate([x, z, y], 1), woven, np.stack([x, y], 1), x[..., :2], x[..., 2:], x[:, :1], x[:, 1:]]
    equal(run(tmp_path, body, {"x": x, "y": y, "z": z}), expected)


def test_slices(tmp_path):
    x, update = numbers(4, 5, 6), numbers(2, 3, 6)

    def body(x, update):
        return [
            mb.slice_by_index(x=x, begin=[1, 0, -3], end=[3, 4, 6], stride=[1, 2, 1]),
            mb.slice_by_index(
                x=x, begin=[1, 4, 0], end=[0, 0, -1], stride=[1, -2, 1], begin_mask=[False, False, True],
                end_mask=[False, True, False], squeeze_mask=[True, False, False],
            ),
            mb.slice_by_index(
                x=x, begin=[-1, 3, 9], end=[0, 0, 0], begin_mask=[False, False, True], end_mask=[False, False, True],
                squeeze_mask=[True, True, False],
            ),
            mb.slice_by_size(x=x, begin=[1, 0, 2], size=[2, -1, 3]),
            mb.slice_by_size(x=x, begin=[-3, 0, 0], size=[2, 1, 1]),
            mb.slice_update(
                x=x, update=update, begin=[0, 1, 0], end=[4, 4, 0], stride=[2, 1, 1], end_mask=[False, False, True]
            ),
            mb.band_part(x=x, lower=1, upper=0), mb.band_part(x=x, lower=-1, upper=2),
        ]  # fmt: skip

    changed = x.copy()
    changed[0:4:2, 1:4] = update
    equal(
        run(tmp_path, body, {"x": x, "update": update}),
        [
            x[1:3, 0:4:2, -3:6], x[1, 4::-2, :-1], x[-1, 3, :], x[1:3, :, 2:5], x[1:3, :1, :1], changed,
            np.triu(np.tril(x), -1), np.triu(np.tril(x, 2), -9),
        ],
    )  # fmt: skip


def test_gather(tmp_path):
    rng = np.random.default_rng()
    x = numbers(4, 5, 6)
    indices = rng.integers(0, 4, (2, 3)).astype(np.int32)
    along = rng.integers(0, 5, (4, 7, 6)).astype(np.int32)
    batched = rng.integers(0, 5, (4, 2)).astype(np.int32)
    vectors = rng.integers(0, 4, (3, 7, 2)).astype(np.int32)

    def body(x, indices, along, batched, vectors):
        return [
            mb.gather(x=x, indices=indices, axis=0), mb.gather(x=x, indices=indices, axis=-1),
            mb.gather(x=x, indices=np.int32(3), axis=1), mb.gather(x=x, indices=batched, axis=1, batch_dims=1),
            mb.gather(x=x, indices=batched, axis=2, batch_dims=1),
            mb.gather_along_axis(x=x, indices=along, axis=1), mb.gather_nd(x=x, indices=vectors),
            mb.gather_nd(x=x, indices=mb.expand_dims(x=batched, axes=[-1]), batch_dims=1),
        ]  # fmt: skip

    rows = np.arange(4)[:, None]
    expected = [
        x[indices], x[..., indices], x[:, 3], x[rows, batched],
        np.stack([x[i][:, batched[i]] for i in range(4)]), torch.gather(t(x), 1, t(along).long()),
        x[vectors[..., 0], vectors[..., 1]], x[rows, batched],
    ]  # fmt: skip
    feeds = {"x": x, "indices": indices, "along": along, "batched": batched, "vectors": vectors}
    equal(run(tmp_path, body, feeds), expected)


def test_an_index_out_of_range_is_an_error(tmp_path):
    x = numbers(3, 2)
    for i, indices in enumerate(([0, 3], [-1, 2])):
        with pytest.raises(EngineError, match=r"gather.*has the index (3|-1) for a dim of 3"):
            run(tmp_path / str(i), lambda x, i: mb.gather(x=x, indices=i), {"x": x, "i": np.array(indices, np.int32)})


def test_scatter(tmp_path):
    rng = np.random.default_rng()
    data = rng.integers(1, 9, (4, 5)).astype(np.float32)
    rows, updates = np.array([2, 0, 2], np.int32), rng.choice([1, 2, 4], (3, 5)).astype(np.float32)
    along = np.array([[0, 3, 1, 2, 0], [1, 2, 0, 3, 2]], np.int32)
    values = rng.choice([1, 2, 4], (2, 5)).astype(np.float32)
    cells = np.array([[0, 1], [3, 4], [0, 1]], np.int32)
    three = rng.choice([1, 2, 4], 3).astype(np.float32)
    modes = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}

    def body(data, rows, updates, along, values, cells, three):
        return [
            *[mb.scatter(data=data, indices=rows, updates=updates, axis=0, mode=mode) for mode in modes],
            *[mb.scatter_along_axis(data=data, indices=along, updates=values, axis=0, mode=mode) for mode in modes],
            mb.scatter_along_axis(data=data, indices=along, updates=values, axis=0, mode="update"),
            mb.scatter(data=data, indices=[1, 3], updates=mb.transpose(x=mb.slice_by_size(
                x=updates, begin=[0, 0], size=[2, 4]), perm=[1, 0]), axis=1, mode="update"),
            mb.scatter_nd(data=data, indices=cells, updates=three, mode="add"),
            mb.scatter_nd(data=data, indices=cells, updates=three, mode="sub"),
            mb.scatter_nd(data=data, indices=cells, updates=three, mode="div"),
            mb.scatter_nd(data=data, indices=mb.expand_dims(x=rows, axes=[-1]), updates=updates, mode="mul"),
        ]  # fmt: skip

    def reduced(indices, values, mode):
        return torch.scatter_reduce(t(data), 0, t(indices).long(), t(values), modes[mode])

    everywhere = np.broadcast_to(rows[:, None], updates.shape).copy()
    columns, added, quotient, product = data.copy(), data.copy(), data.copy(), data.copy()
    columns[:, [1, 3]] = updates[:2, :4].T
    for (row, column), value in zip(cells, three, strict=True):
        added[row, column] += value
        quotient[row, column] /= value
    for row, values_ in zip(rows, updates, strict=True):
        product[row] *= values_
    expected = [
        *[reduced(everywhere, updates, mode) for mode in modes], *[reduced(along, values, mode) for mode in modes],
        torch.scatter(t(data), 0, t(along).long(), t(values)), columns, added, 2 * data - added, quotient, product,
    ]  # fmt: skip
    feeds = {"data": data, "rows": rows, "updates": updates, "along": along, "values": values, "cells": cells}
    equal(run(tmp_path, body, {**feeds, "three": three}), expected)


def test_creation(tmp_path):
    rng = np.random.default_rng()
    x = numbers(2, 3)
    i = rng.integers(0, 4, (2, 3)).astype(np.int32)
    i[0, 0] = 9
    sizes = np.array([2, 5], np.int32)

    def body(x, i, sizes):
        end = mb.reduce_max(x=i)
        return [
            mb.fill(shape=sizes, value=1.5), mb.fill(shape=sizes), mb.fill_like(ref_tensor=x, value=np.int32(7)),
            mb.range_1d(start=1, end=end, step=3), mb.range_1d(start=end, end=2, step=-2),
            mb.one_hot(indices=i, one_hot_vector_size=4), mb.one_hot(
                indices=i, one_hot_vector_size=4, axis=1, on_value=2.5, off_value=-1.0),
            mb.non_zero(x=mb.greater(x=i, y=1)), mb.pad(x=x, pad=[1, 2], constant_val=0.5),
            mb.pad(x=x, pad=[1, 0, 0, 2], mode="reflect"), mb.pad(x=x, pad=[2, 1, 1, 3], mode="replicate"),
        ]  # fmt: skip

    hot = (i[..., None] == np.arange(4)).astype(np.int32)
    expected = [
        np.full((2, 5), 1.5), np.zeros((2, 5)), np.full((2, 3), 7), np.arange(1, 9, 3), np.arange(9, 2, -2), hot,
        np.moveaxis(np.where(hot, 2.5, -1), -1, 1), np.argwhere(i > 1),
        np.pad(x, ((0, 0), (1, 2)), constant_values=0.5), np.pad(x, ((1, 0), (0, 2)), mode="reflect"),
        np.pad(x, ((2, 1), (1, 3)), mode="edge"),
    ]  # fmt: skip
    equal(run(tmp_path, body, {"x": x, "i": i, "sizes": sizes}), expected)


def test_sorting(tmp_path):
    x = np.random.default_rng().integers(0, 6, (3, 8)).astype(np.int32)

    def body(x):
        return [
            mb.argsort(x=x, axis=1, ascending=True), mb.argsort(x=x, axis=0),
            *mb.topk(x=x, k=3, axis=-1), *mb.topk(x=x, k=2, axis=0, ascending=True),
            mb.topk(x=x, k=4, return_indices=False), *mb.topk(x=x, k=3, sort=False),
        ]  # fmt: skip

    def first(x, k, axis, ascending):
        values, indices = torch.sort(t(x), dim=axis, descending=not ascending, stable=True)
        return [values.narrow(axis, 0, k).numpy(), indices.narrow(axis, 0, k).numpy()]

    greatest = first(x, 3, 1, False)
    unsorted = np.sort(greatest[1], 1)
    expected = [
        np.argsort(x, 1, kind="stable"), np.argsort(-x, 0, kind="stable"), *greatest, *first(x, 2, 0, True),
        first(x, 4, 1, False)[0], np.take_along_axis(x, unsorted, 1), unsorted,
    ]  # fmt: skip
    equal(run(tmp_path, body, {"x": x}), expected)


def test_values_of_other_dtypes_are_moved_exactly(tmp_path):
    x = np.random.default_rng().standard_normal((2, 3)).astype(np.float16)

    def body(x):
        flags = mb.greater(x=x, y=np.float16(0))
        return [mb.concat(values=[x, x], axis=0), mb.transpose(x=flags, perm=[1, 0]), mb.gather(x=x, indices=[1, 0])]

    equal(run(tmp_path, body, {"x": x}), [np.concatenate([x, x]), (x > 0).T, x[::-1]])


def test_boxes_that_overlap_are_suppressed(tmp_path):
    """A kept box overlaps no better kept one; any other overlaps a better kept one. No other result does so."""
    rng = np.random.default_rng()
    boxes = np.concatenate([rng.uniform(0, 10, (2, 20)), rng.uniform(2, 6, (2, 20))])[None].astype(np.float32)
    scores = rng.permutation(20).astype(np.float32).reshape(1, 1, 20)

    def body(boxes, scores):
        return mb.non_maximum_suppression(boxes=boxes, scores=scores, iou_threshold=0.3, max_boxes=20)

    def overlap(i, j):
        (xi, yi, wi, hi), (xj, yj, wj, hj) = boxes[0, :, i].tolist(), boxes[0, :, j].tolist()
        width = min(xi + wi / 2, xj + wj / 2) - max(xi - wi / 2, xj - wj / 2)
        height = min(yi + hi / 2, yj + hj / 2) - max(yi - hi / 2, yj - hj / 2)
        both = max(width, 0) * max(height, 0)
        return both / (wi * hi + wj * hj - both)

    found_boxes, found_scores, indices = run(tmp_path, body, {"boxes": boxes, "scores": scores})
    kept = [i for i in indices[0].tolist() if i >= 0]
    assert 1 < len(kept) < 20
    assert kept == sorted(kept, key=lambda i: -scores[0, 0, i])
    for i in range(20):
        overlapping = [overlap(i, j) > 0.3 for j in kept if scores[0, 0, j] > scores[0, 0, i]]
        assert any(overlapping) == (i not in kept)
    np.testing.assert_array_equal(found_boxes[0][:, : len(kept)], boxes[0][:, kept])
    np.testing.assert_array_equal(found_scores[0][:, : len(kept)], scores[0][:, kept])
