"""Graphs of one operator, ours and onnxruntime's own, over weights that they share: what ``bench --kernels`` runs.

Shape suffixes: M rows of activations, K inputs, N outputs, G groups of a row of weights.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from intaglio.engines.onnxruntime_ import import_onnxruntime
from intaglio.errors import EngineError
from intaglio.kernels.cpu.library import library_path
from intaglio.kernels.grouped_quant import (
    DOMAIN,
    DOMAIN_VERSION,
    GroupedQuantFormat,
    GroupedQuantRows,
    pack_codes,
    unpack_codes,
)

_MICROSOFT = "com.microsoft"
_OPSETS = {"": 23, _MICROSOFT: 1, DOMAIN: DOMAIN_VERSION}


@dataclass(frozen=True)
class Weight:
    """A grouped-quantized weight ``[N, K]``.

    ``integer_zero_points`` ``[N, G]`` say the same as its offsets, which are ``-scale`` times these: what onnxruntime's
    own operator can hold.
    """

    rows: GroupedQuantRows
    quantization: GroupedQuantFormat
    integer_zero_points: np.ndarray | None

    @property
    def shape(self) -> tuple[int, int]:
        """``N``, ``K``."""
        outputs, packed = self.rows.codes.shape
        return outputs, packed * 8 // self.quantization.bits

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and offsets."""
        return self.rows.codes.nbytes + self.rows.scales.nbytes + self.rows.offsets.nbytes


def random_weight(
    shape: tuple[int, int], quantization: GroupedQuantFormat, has_offsets: bool, rng: np.random.Generator
) -> Weight:
    """Codes of all values (of a ternary format 0, 1, 2), float16 scales of four bits.

    Such a scale times a small integer is a float16 too, so that offsets and integer zero points say exactly the same.
    """
    bits = quantization.bits
    codes = rng.integers(0, 3 if bits == 2 else 1 << bits, shape, dtype=np.uint8)
    groups = quantization.groups_shape(shape)
    scales = (rng.integers(8, 16, groups) / (128 << bits)).astype(np.float16)
    zero_points = rng.integers(0, 1 << bits, groups, dtype=np.uint8) if has_offsets else None
    offsets = np.zeros((), np.float16) if zero_points is None else (-scales * zero_points).astype(np.float16)
    return Weight(GroupedQuantRows(pack_codes(codes, bits), scales, offsets), quantization, zero_points)


class Runner:
    """A graph in onnxruntime, over fixed inputs. Raises EngineError where it cannot be loaded."""

    def __init__(
        self,
        nodes: Sequence[ir.Node],
        feeds: Mapping[str, np.ndarray],
        weights: Mapping[str, np.ndarray],
        *,
        threads: int,
        inputs: Sequence[ir.Value],
        initializers: Sequence[ir.Value],
        outputs: Sequence[ir.Value],
    ) -> None:
        ort = import_onnxruntime()
        graph = ir.Graph(
            inputs, outputs, nodes=nodes, initializers=initializers, opset_imports=_OPSETS, name="benchmark"
        )
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4
        # Threads that wait for the next run by turning round take the cores of whoever's turn it is.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        # The session copies them; they may go with whoever made them.
        options.add_external_initializers(
            list(weights), [ort.OrtValue.ortvalue_from_numpy(w) for w in weights.values()]
        )
        try:
            options.register_custom_ops_library(str(library_path()))
            data = ir.serde.serialize_model(ir.Model(graph, ir_version=11)).SerializeToString()
            self._session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"], enable_fallback=0)
        except Exception as error:  # onnxruntime's errors have no common base of their own
            raise EngineError(f"onnxruntime cannot load the graph of a benchmark: {error}") from error
        self._binding = self._session.io_binding()
        self._feeds: dict[str, np.ndarray] = {}
        self.feed(feeds)
        for output in outputs:
            self._binding.bind_output(str(output.name), "cpu")

    def feed(self, feeds: Mapping[str, np.ndarray]) -> None:
        """Inputs of the runs that follow."""
        self._feeds |= feeds  # the binding keeps addresses only
        for name, value in feeds.items():
            self._binding.bind_cpu_input(name, value)

    def run(self) -> np.ndarray:
        """The first output of a run."""
        self._session.run_with_iobinding(self._binding)
        result: np.ndarray = self._binding.copy_outputs_to_cpu()[0]
        return result

    def seconds(self) -> float:
        """Of one run."""
        started = time.perf_counter()
        self._session.run_with_iobinding(self._binding)
        return time.perf_counter() - started


def _input(name: str, value: np.ndarray) -> ir.Value:
    dtype = ir.DataType.from_numpy(value.dtype)
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(value.shape))


def _named(outputs: Sequence[ir.Value]) -> Sequence[ir.Value]:
    for index, output in enumerate(outputs):
        output.name, output.type = f"y{index}", ir.TensorType(ir.DataType.FLOAT)
    return outputs


class _Weights:
    """Initializers whose values are handed to the session, and are no part of the graph."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self.values: list[ir.Value] = []

    def add(self, name: str, array: np.ndarray) -> ir.Value:
        value = _input(name, array)
        dtype = ir.DataType.from_numpy(array.dtype)
        if array.ndim == 0 or array.nbytes < 1024:
            value.const_value = ir.tensor(array, name=name)
        else:
            # The file is never opened: the session has the values already.
            value.const_value = ir.ExternalTensor(
                "given", 0, array.nbytes, dtype, shape=ir.Shape(array.shape), name=name
            )
            self.arrays[name] = array
        self.values.append(value)
        return value


def _runner(
    x: np.ndarray,
    nodes: Sequence[ir.Node],
    weights: _Weights,
    outputs: Sequence[ir.Value],
    given: ir.Value,
    threads: int,
) -> Runner:
    return Runner(
        nodes,
        {"x": x},
        weights.arrays,
        threads=threads,
        inputs=[given],
        initializers=weights.values,
        outputs=_named(outputs),
    )


def ours(x: np.ndarray, matrices: Sequence[Weight], *, fast: bool, threads: int) -> Runner:
    """``x`` ``[M, K]`` float32 times each of the matrices, by our kernel, one after the other.

    It reads weights where they lie: here they are inputs, which no session copies, and which several sessions share.
    """
    feeds, values, nodes = {"x": x}, {"x": _input("x", x)}, []
    for index, matrix in enumerate(matrices):
        for name in ("codes", "scales", "offsets"):
            feeds[f"{name}{index}"] = array = getattr(matrix.rows, name)
            values[f"{name}{index}"] = _input(f"{name}{index}", array)
        attributes = {
            "bits": matrix.quantization.bits,
            "group_size": matrix.quantization.group_size,
            "zero_point": matrix.quantization.zero_point,
            "fast": int(fast),
        }
        inputs = [values[name] for name in ("x", f"codes{index}", f"scales{index}", f"offsets{index}")]
        nodes.append(ir.node("GroupedQuantMatMul", inputs, attributes=attributes, domain=DOMAIN))
    outputs = _named([node.outputs[0] for node in nodes])
    return Runner(nodes, feeds, {}, threads=threads, inputs=list(values.values()), initializers=[], outputs=outputs)


def takes_matmulnbits(quantization: GroupedQuantFormat) -> bool:
    """Whether onnxruntime's MatMulNBits has blocks of this size."""
    size = quantization.group_size
    return size >= 16 and size & (size - 1) == 0


def matmulnbits(x: np.ndarray, matrices: Sequence[Weight], *, threads: int) -> Runner:
    """The same products by onnxruntime's MatMulNBits, with 8-bit activations (``accuracy_level`` 4)."""
    weights, given = _Weights(), _input("x", x)
    nodes = []
    for index, matrix in enumerate(matrices):
        quantization, (outputs, width) = matrix.quantization, matrix.shape
        bits, groups = quantization.bits, width // quantization.group_size
        codes, zero_points = matrix.rows.codes, matrix.integer_zero_points
        middle = 1 << bits - 1
        if zero_points is None and quantization.zero_point != middle:
            # Ternary codes become those around the middle, which needs no zero points of its own and is faster.
            codes = codes + np.uint8(sum((middle - quantization.zero_point) << shift for shift in range(0, 8, bits)))
        inputs = [
            given,
            weights.add(f"codes{index}", codes.reshape(outputs, groups, quantization.group_size * bits // 8)),
            weights.add(f"scales{index}", matrix.rows.scales.astype(np.float32)),
        ]
        if zero_points is not None:
            pad = -groups % (8 // bits)
            packed = pack_codes(np.pad(zero_points, ((0, 0), (0, pad))), bits)
            inputs.append(weights.add(f"zero_points{index}", packed))
        attributes = {
            "K": width, "N": outputs, "bits": bits, "block_size": quantization.group_size, "accuracy_level": 4,
        }  # fmt: skip
        nodes.append(ir.node("MatMulNBits", inputs, attributes=attributes, domain=_MICROSOFT))
    return _runner(x, nodes, weights, [node.outputs[0] for node in nodes], given, threads)


def matmulinteger(x: np.ndarray, matrix: Weight, *, threads: int) -> Runner:
    """A product of that size by DynamicQuantizeLinear and MatMulInteger, with one scale for all activations.

    It cannot hold scales of groups: weights are the codes as signed integers, with one scale for all.
    """
    weights, given = _Weights(), _input("x", x)
    codes = unpack_codes(matrix.rows.codes, matrix.quantization.bits).astype(np.int16)
    signed = np.ascontiguousarray((codes - matrix.quantization.zero_point).clip(-128, 127).astype(np.int8).T)
    quantize = ir.node("DynamicQuantizeLinear", [given], num_outputs=3)
    quantized, x_scale, x_zero = quantize.outputs
    for value, dtype in ((quantized, ir.DataType.UINT8), (x_scale, ir.DataType.FLOAT), (x_zero, ir.DataType.UINT8)):
        value.type = ir.TensorType(dtype)
    product = ir.node(
        "MatMulInteger",
        [quantized, weights.add("weight", signed), x_zero, weights.add("zero", np.zeros((), np.int8))],
    )
    cast = ir.node("Cast", product.outputs, attributes={"to": ir.DataType.FLOAT.value})
    factor = ir.node("Mul", [x_scale, weights.add("scale", np.full((), 0.01, np.float32))])
    scaled = ir.node("Mul", [cast.outputs[0], factor.outputs[0]])
    return _runner(x, [quantize, product, cast, factor, scaled], weights, scaled.outputs, given, threads)


def attention(operator: str, tensors: Mapping[str, np.ndarray], *, fast: bool = False, threads: int) -> Runner:
    """Attention over ``query``, ``key`` and ``value`` ``[batch, heads, tokens, head_dim]`` float32.

    ``operator`` is ``Attention``, onnxruntime's of the ONNX standard, or ``FusedAttention``, ours, also ``fast``.
    """
    inputs = [_input(name, value) for name, value in tensors.items()]
    heads = tensors["query"].shape[1]
    attributes: dict[str, Any] = {}
    if operator == "FusedAttention":
        attributes = {"q_num_heads": heads, "kv_num_heads": heads, "fast": int(fast)}
        attributes |= {f"{name}_heads_first": 1 for name in ("query", "key", "value", "output")}
    node = ir.node(operator, inputs, attributes=attributes, domain="" if operator == "Attention" else DOMAIN)
    output = node.outputs[0]
    output.name, output.type = "y", ir.TensorType(ir.DataType.FLOAT)
    return Runner([node], tensors, {}, threads=threads, inputs=inputs, initializers=[], outputs=[output])
