"""Products, convolutions, pooling, norms, recurrent layers of the evaluator, compared with torch in float64."""

import itertools

import mil_packages
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from mil_packages import numbers, run, t

from intaglio.errors import EngineError

F = torch.nn.functional
# float32 against float64: rounding of sums.
BOUND = 3e-6


def agree(found, expected, bound=BOUND):
    mil_packages.agree(found, expected, bound)


def test_products(tmp_path):
    x, y, w = numbers(2, 3, 4), numbers(5, 1, 4, 6), numbers(7, 4)
    bias, p, q = numbers(7), numbers(2, 3, 4, 5), numbers(2, 5, 4, 6)
    i = np.random.default_rng().integers(-9, 9, (3, 4)).astype(np.int32)

    def body(x, y, p, q, i):
        return [
            mb.linear(x=x, weight=w, bias=bias), mb.matmul(x=x, y=y), mb.matmul(x=x, y=x, transpose_y=True),
            mb.matmul(x=x, y=x, transpose_x=True),
            mb.einsum(values=(p, q), equation="nchw,nwhu->nchu"), mb.matmul(x=i, y=i, transpose_y=True),
            mb.einsum(values=(mb.squeeze(x=mb.slice_by_size(x=p, begin=[0, 0, 0, 0], size=[1, -1, -1, -1])),
                mb.squeeze(x=mb.slice_by_size(x=q, begin=[0, 0, 0, 0], size=[1, -1, -1, -1]))),
                equation="chw,whr->chr"),
        ]  # fmt: skip

    product = torch.einsum("nchw,nwhu->nchu", t(p), t(q))
    expected = [
        F.linear(t(x), t(w), t(bias)), t(x) @ t(y), t(x) @ t(x).mT, t(x).mT @ t(x),
        product, i.astype(np.int64) @ i.T, product[0],
    ]  # fmt: skip
    agree(run(tmp_path, body, {"x": x, "y": y, "p": p, "q": q, "i": i}), expected)


def test_attention(tmp_path):
    q, k, v = numbers(2, 3, 4, 8), numbers(2, 3, 5, 8), numbers(2, 3, 5, 6)
    added = numbers(4, 5)
    allowed = np.random.default_rng().random((2, 1, 4, 5)) < 0.6
    allowed[..., 0] = True

    def body(q, k, v, added, allowed):
        sdpa = mb.scaled_dot_product_attention
        boolean = mb.greater(x=allowed, y=0)
        return [
            sdpa(query=q, key=k, value=v),
            sdpa(query=q, key=k, value=v, attn_mask=added),
            sdpa(query=q, key=k, value=v, attn_mask=boolean),
        ]

    expected = [
        F.scaled_dot_product_attention(t(q), t(k), t(v), mask) for mask in (None, t(added), torch.from_numpy(allowed))
    ]
    agree(run(tmp_path, body, {"q": q, "k": k, "v": v, "added": added, "allowed": allowed.astype(np.int32)}), expected)


CONVS = [F.conv1d, F.conv2d, F.conv3d]
TRANSPOSED = [F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d]


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolution(tmp_path, dims):
    x = numbers(2, 4, *[9, 8, 7][:dims])
    kernel, strides, dilations = [3, 2, 2][:dims], [2, 1, 2][:dims], [1, 2, 1][:dims]
    pad = [1, 1, 2, 2, 0, 0][: 2 * dims]
    weight, grouped, bias = numbers(6, 4, *kernel), numbers(6, 2, *kernel), numbers(6)

    def body(x):
        return [
            mb.conv(x=x, weight=weight, bias=bias),
            mb.conv(x=x, weight=grouped, groups=2, strides=strides, pad_type="custom", pad=pad, dilations=dilations),
            mb.conv(x=x, weight=weight, pad_type="same", dilations=dilations),
            mb.conv(x=x, weight=weight, pad_type="same_lower", dilations=dilations),
            mb.conv(x=x, weight=weight, pad_type="same", strides=strides),
        ]

    conv = CONVS[dims - 1]

    def same(lower, strides, dilations):
        pads = []
        for size, k, s, d in zip(x.shape[2:], kernel, strides, dilations, strict=True):
            total = max(0, (-(-size // s) - 1) * s + (k - 1) * d + 1 - size)
            halves = (total - total // 2, total // 2) if lower else (total // 2, total - total // 2)
            pads = [*halves, *pads]
        return conv(F.pad(t(x), pads), t(weight), stride=strides, dilation=dilations)

    ones = [1] * dims
    expected = [
        conv(t(x), t(weight), t(bias)),
        conv(t(x), t(grouped), None, strides, pad[::2], dilations, 2),
        same(False, ones, dilations), same(True, ones, dilations), same(False, strides, ones),
    ]  # fmt: skip
    agree(run(tmp_path, body, {"x": x}), expected)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_transposed_convolution(tmp_path, dims):
    x = numbers(2, 4, *[5, 4, 3][:dims])
    kernel, strides, dilations = [3, 2, 3][:dims], [2, 3, 1][:dims], [1, 2, 1][:dims]
    weight, grouped, bias = numbers(4, 3, *kernel), numbers(4, 2, *kernel), numbers(3)
    pad = [1, 1, 0, 0, 1, 1][: 2 * dims]
    full = TRANSPOSED[dims - 1](t(x), t(weight), stride=strides, dilation=dilations)
    more = [stride - 1 for stride in strides]
    longer = [2, 3, *[size + extra - 2 * p for size, extra, p in zip(full.shape[2:], more, pad[::2], strict=True)]]
    doubled = [size * stride for size, stride in zip(x.shape[2:], strides, strict=True)]

    def body(x):
        return [
            mb.conv_transpose(x=x, weight=weight, bias=bias),
            mb.conv_transpose(x=x, weight=grouped, groups=2, strides=strides, pad_type="custom", pad=pad),
            mb.conv_transpose(
                x=x, weight=weight, strides=strides, dilations=dilations, pad_type="custom", pad=pad,
                output_shape=longer,
            ),
            mb.conv_transpose(x=x, weight=weight, strides=strides, dilations=dilations, pad_type="same"),
        ]  # fmt: skip

    transposed = TRANSPOSED[dims - 1]
    cut = full
    for axis, (size, wanted) in enumerate(zip(full.shape[2:], doubled, strict=True), 2):
        if size >= wanted:
            cut = cut.narrow(axis, (size - wanted) // 2, wanted)
        else:
            cut = F.pad(cut, [0, 0] * (dims + 1 - axis) + [0, wanted - size])
    expected = [
        transposed(t(x), t(weight), t(bias)),
        transposed(t(x), t(grouped), None, strides, pad[::2], 0, 2),
        # torch wants less output padding than stride or dilation, and pads the full result's end.
        transposed(t(x), t(weight), None, strides, pad[::2], more, 1, dilations), cut,
    ]  # fmt: skip
    agree(run(tmp_path, body, {"x": x}), expected)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_pooling(tmp_path, dims):
    x = numbers(2, 3, *[9, 8, 7][:dims])
    kernel, strides, half = [3, 2, 3][:dims], [2, 3, 1][:dims], [1, 1, 0][:dims]
    pad = [p for each in half for p in (each, each)]
    padded = {"kernel_sizes": kernel, "strides": strides, "pad_type": "custom", "pad": pad}
    ceils = [False, True] if dims < 3 else [False]

    def body(x):
        results = [mb.max_pool(x=x, kernel_sizes=kernel, pad_type="valid")]
        for ceil_mode in ceils:
            results.append(mb.max_pool(x=x, **padded, ceil_mode=ceil_mode))
            for exclude in (False, True):
                results.append(mb.avg_pool(x=x, **padded, ceil_mode=ceil_mode, exclude_padding_from_average=exclude))
        results.append(
            mb.avg_pool(x=x, kernel_sizes=kernel, strides=strides, pad_type="same", exclude_padding_from_average=True)
        )
        if dims < 3:
            results.append(mb.l2_pool(x=x, kernel_sizes=kernel, strides=strides, pad_type="valid"))
        return results

    largest = [F.max_pool1d, F.max_pool2d, F.max_pool3d][dims - 1]
    average = [F.avg_pool1d, F.avg_pool2d, F.avg_pool3d][dims - 1]
    expected = [largest(t(x), kernel, 1)]
    for ceil_mode in ceils:
        expected.append(largest(t(x), kernel, strides, half, ceil_mode=ceil_mode))
        expected += [average(t(x), kernel, strides, half, ceil_mode, include) for include in (True, False)]
    pads = []
    for size, k, s in zip(x.shape[2:], kernel, strides, strict=True):
        total = max(0, (-(-size // s) - 1) * s + k - size)
        pads = [total // 2, total - total // 2, *pads]
    ones = torch.ones_like(t(x))
    expected.append(average(F.pad(t(x), pads), kernel, strides) / average(F.pad(ones, pads), kernel, strides))
    if dims < 3:
        expected.append(torch.sqrt(average(t(x) ** 2, kernel, strides) * np.prod(kernel)))
    agree(run(tmp_path, body, {"x": x}), expected)


def test_normalizations(tmp_path):
    x, gamma, beta, mean = numbers(2, 6, 4, 5), numbers(6), numbers(6), numbers(6)
    variance, plane, other = np.abs(numbers(6)) + 0.1, numbers(6, 5), numbers(6, 5)

    def body(x):
        return [
            mb.batch_norm(x=x, mean=mean, variance=variance, gamma=gamma, beta=beta, epsilon=1e-3),
            mb.batch_norm(x=x, mean=mean, variance=variance),
            mb.instance_norm(x=x, gamma=gamma, beta=beta, epsilon=1e-2), mb.instance_norm(x=x),
            mb.layer_norm(x=x, axes=[-1], epsilon=1e-3), mb.layer_norm(x=x, axes=[0, 1, 2, 3]),
            mb.layer_norm(x=x, axes=[1, 3], gamma=plane, beta=other), mb.l2_norm(x=x, epsilon=0.1),
            mb.local_response_norm(x=x, size=3, alpha=0.5, beta=0.6, k=1.5),
        ]  # fmt: skip

    moved = F.layer_norm(t(x).permute(0, 2, 1, 3), [6, 5], t(plane), t(other), 1e-5).permute(0, 2, 1, 3)
    expected = [
        F.batch_norm(t(x), t(mean), t(variance), t(gamma), t(beta), eps=1e-3),
        F.batch_norm(t(x), t(mean), t(variance)),
        F.instance_norm(t(x), weight=t(gamma), bias=t(beta), eps=1e-2), F.instance_norm(t(x)),
        F.layer_norm(t(x), [5], eps=1e-3), F.layer_norm(t(x), x.shape), moved,
        t(x) / torch.sqrt((t(x) ** 2).sum((1, 2, 3), keepdim=True) + 0.1),
        F.local_response_norm(t(x), 3, 0.5, 0.6, 1.5),
    ]  # fmt: skip
    agree(run(tmp_path, body, {"x": x}), expected)


def gates(weights, order):
    """The gates of a torch layer's weight in another order."""
    parts = np.split(weights, len(order))
    return np.concatenate([parts[i] for i in order])


@pytest.mark.parametrize(("direction", "sequence"), list(itertools.product(["forward", "reverse"], [True, False])))
def test_recurrent_layers(tmp_path, direction, sequence):
    steps, batch, width, hidden = 4, 2, 3, 5
    x, h, c = numbers(steps, batch, width), numbers(batch, hidden), numbers(batch, hidden)
    weights = {
        n: (numbers(n * hidden, width), numbers(n * hidden, hidden), numbers(n * hidden), numbers(n * hidden))
        for n in (1, 3, 4)
    }
    settings = {"direction": direction, "output_sequence": sequence}

    def body(x, h, c):
        ih, hh, bi, bh = weights[1]
        results = [*mb.rnn(x=x, initial_h=h, weight_ih=ih, weight_hh=hh, bias=bi + bh, activation="relu", **settings)]
        # torch: reset, update, new; here reset, output, update.
        ih, hh, bi, bh = (gates(array, (0, 2, 1)) for array in weights[3])
        results += mb.gru(
            x=x, initial_h=h, weight_ih=ih, weight_hh=hh, bias=bh, input_bias=bi, reset_after=True, **settings
        )
        # torch: input, forget, cell, output; here input, forget, output, cell.
        ih, hh, bi, bh = (gates(array, (0, 1, 3, 2)) for array in weights[4])
        results += mb.lstm(x=x, initial_h=h, initial_c=c, weight_ih=ih, weight_hh=hh, bias=bi + bh, **settings)
        return results

    walked = t(x).flip(0) if direction == "reverse" else t(x)
    expected = []
    layers = {
        1: torch.nn.RNN(width, hidden, nonlinearity="relu"),
        3: torch.nn.GRU(width, hidden),
        4: torch.nn.LSTM(width, hidden),
    }
    for n, layer in layers.items():
        layer = layer.double()
        names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        layer.load_state_dict({name: t(array) for name, array in zip(names, weights[n], strict=True)})
        with torch.no_grad():
            outputs, state = layer(walked, (t(h)[None], t(c)[None]) if n == 4 else t(h)[None])
        state = state if isinstance(state, tuple) else (state,)
        expected += [outputs if sequence else outputs[-1:], *[one[0] for one in state]]
    agree(run(tmp_path, body, {"x": x, "h": h, "c": c}), expected)


def test_bidirectional_lstm(tmp_path):
    steps, batch, width, hidden = 4, 2, 3, 5
    x, h, c = numbers(steps, batch, width), numbers(batch, 2 * hidden), numbers(batch, 2 * hidden)
    layer = torch.nn.LSTM(width, hidden, bidirectional=True).double()
    state = {name: value.detach().numpy().astype(np.float32) for name, value in layer.state_dict().items()}
    layer.load_state_dict({name: t(value) for name, value in state.items()})

    def body(x, h, c):
        given = {}
        for suffix, back in (("", ""), ("_reverse", "_back")):
            for kind in ("ih", "hh"):
                given[f"weight_{kind}{back}"] = gates(state[f"weight_{kind}_l0{suffix}"], (0, 1, 3, 2))
            bias = state[f"bias_ih_l0{suffix}"] + state[f"bias_hh_l0{suffix}"]
            given[f"bias{back}"] = gates(bias, (0, 1, 3, 2))
        results = []
        for sequence in (True, False):
            results += mb.lstm(
                x=x, initial_h=h, initial_c=c, direction="bidirectional", output_sequence=sequence, **given
            )
        return results

    halves = [torch.stack([t(s)[:, :hidden], t(s)[:, hidden:]]) for s in (h, c)]
    with torch.no_grad():
        outputs, (hn, cn) = layer(t(x), tuple(halves))
    hn, cn = torch.cat([*hn], -1), torch.cat([*cn], -1)
    agree(run(tmp_path, body, {"x": x, "h": h, "c": c}), [outputs, hn, cn, hn[None], hn, cn])


def test_lstm_with_peepholes_and_clip_and_gru_that_resets_before(tmp_path):
    steps, batch, width, hidden = 3, 2, 3, 4
    x, h, c = numbers(steps, batch, width), numbers(batch, hidden), numbers(batch, hidden)
    ih, hh, bias, peephole = numbers(16, width), numbers(16, hidden), numbers(16), numbers(12)
    gih, ghh, gbias = numbers(12, width), numbers(12, hidden), numbers(12)

    def body(x, h, c):
        lstm = mb.lstm(
            x=x, initial_h=h, initial_c=c, weight_ih=ih, weight_hh=hh, bias=bias, peephole=peephole, clip=0.4,
            cell_activation="relu", recurrent_activation="hard_sigmoid", activation="linear", output_sequence=True,
        )  # fmt: skip
        return [*lstm, *mb.gru(x=x, initial_h=h, weight_ih=gih, weight_hh=ghh, bias=gbias)]

    hard = lambda v: torch.clamp(0.2 * v + 0.5, 0, 1)  # noqa: E731
    pi, pf, po = t(peephole).chunk(3)
    hidden_state, cell, outputs = t(h), t(c), []
    for step in t(x):
        i, f, o, z = (step @ t(ih).T + hidden_state @ t(hh).T + t(bias)).chunk(4, -1)
        cell = torch.clamp(hard(f + pf * cell) * cell + hard(i + pi * cell) * torch.relu(z), -0.4, 0.4)
        hidden_state = hard(o + po * cell) * cell
        outputs.append(hidden_state)
    r_, o_, z_ = (list(pieces) for pieces in zip(*[t(w).chunk(3) for w in (gih, ghh, gbias)], strict=True))
    state = t(h)
    for step in t(x):
        r = torch.sigmoid(step @ r_[0].T + state @ r_[1].T + r_[2])
        z = torch.sigmoid(step @ z_[0].T + state @ z_[1].T + z_[2])
        o = torch.tanh(step @ o_[0].T + (r * state) @ o_[1].T + o_[2])
        state = (1 - z) * o + z * state
    expected = [torch.stack(outputs), hidden_state, cell, state[None], state]
    agree(run(tmp_path, body, {"x": x, "h": h, "c": c}), expected)


def test_what_is_not_defined_is_an_error(tmp_path):
    x = numbers(1, 4, 3)
    with pytest.raises(EngineError, match=r"local_response_norm.*even size 2"):
        run(tmp_path / "a", lambda x: mb.local_response_norm(x=x, size=2), {"x": x})
    i = np.ones((2, 2), np.int32)
    with pytest.raises(EngineError, match=r"real_div.*divides integers"):
        run(tmp_path / "b", lambda i: mb.real_div(x=i, y=i), {"i": i})
