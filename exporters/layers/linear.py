"""Linear and embedding layers, dense or grouped-quantized."""

from __future__ import annotations

import onnx_ir as ir
from onnxscript import OpBuilder, nn

from intaglio.exporters.checkpoints.tensors import QuantizedLayout
from intaglio.exporters.layers.dtype import DtypeModule, cast
from intaglio.kernels.functions import grouped_quant_dequantize, grouped_quant_matmul
from intaglio.kernels.grouped_quant import GroupedQuantFormat

# How the three parts of a quantized weight are named after the weight.
QUANTIZED_PARTS = ("codes", "scales", "offsets")
# How the two matrices of a low-rank branch are named after their module, as peft names an adapter's.
LOW_RANK_PARTS = ("lora_A.weight", "lora_B.weight")


class WeightModule(DtypeModule):
    """A module with a ``weight`` ``[out, in]`` that may turn out to be quantized in the checkpoint."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = nn.Parameter([rows, columns], name="weight")
        self.rows, self.columns = rows, columns
        self.layout: QuantizedLayout | None = None
        self.rank = 0

    def quantize(self, layout: QuantizedLayout) -> None:
        """Replaces ``weight`` by ``weight.codes``, ``weight.scales`` and ``weight.offsets``."""
        shape = (self.rows, self.columns)
        groups = layout.format.groups_shape(shape)
        scale_dtype = ir.DataType.from_numpy(layout.scale_dtype)
        self._parameters.pop("weight")  # type: ignore[attr-defined]
        self.weight, self.layout = None, layout
        self.codes = nn.Parameter(layout.format.codes_shape(shape), ir.DataType.UINT8, "weight.codes")
        self.scales = nn.Parameter(groups, scale_dtype, "weight.scales")
        self.offsets = nn.Parameter(groups if layout.has_offsets else [], scale_dtype, "weight.offsets")

    def add_low_rank(self, rank: int) -> None:
        """Adds ``x @ lora_A.T @ lora_B.T`` to the product with a quantized weight, which is left as it is."""
        down, up = LOW_RANK_PARTS
        self.rank = rank
        self.lora_A = nn.Parameter([rank, self.columns], self.dtype, down)
        self.lora_B = nn.Parameter([self.rows, rank], self.dtype, up)

    def project(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """``x`` ``[..., in]`` times the transposed weight: ``[..., out]``, in the dtype of ``x``."""
        if self.layout is None:
            return op.MatMul(x, op.Transpose(self.weight, perm=[1, 0]))
        y = op.call(
            grouped_quant_matmul(),
            x,
            self.codes,
            self.scales,
            self.offsets,
            **_attributes(self.layout.format),
        )
        # Shape inference does not look into functions.
        y.dtype = x.dtype
        y.shape = ir.Shape([*(x.shape or ())[:-1], self.rows])
        return op.Add(y, self._low_rank(op, x)) if self.rank else y

    def _low_rank(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        dtype = x.dtype
        assert dtype is not None, "an activation has a dtype"
        for matrix in (self.lora_A, self.lora_B):
            x = op.MatMul(x, op.Transpose(cast(op, matrix, dtype), perm=[1, 0]))
        return x

    def logits(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """``x`` projected to float32 ``[..., out]``, whatever its dtype.

        The product with a quantized weight is float32 anyway and is not rounded; a dense one is, as its weight is.
        """
        if self.layout is not None:
            return self.project(op, cast(op, x, ir.DataType.FLOAT))
        return cast(op, self.project(op, x), ir.DataType.FLOAT)


class Linear(WeightModule):
    """``y = x @ weight.T + bias``, as ``torch.nn.Linear``."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__(out_features, in_features)
        self.bias = nn.Parameter([out_features], name="bias") if bias else None

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        y = self.project(op, x)
        return y if self.bias is None else op.Add(y, self.bias)


class OutputHead(WeightModule):
    """The projection of hidden states to logits, which are float32: see :meth:`WeightModule.logits`."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__(vocab_size, hidden_size)

    def forward(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        return self.logits(op, x)


class Embedding(WeightModule):
    """A table ``[num_embeddings, embedding_dim]``; a quantized one gathers rows, then dequantizes them.

    Rows come in the graph's dtype.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__(num_embeddings, embedding_dim)

    def forward(self, op: OpBuilder, ids_BS: ir.Value) -> ir.Value:
        if self.layout is None:
            return op.Gather(self.weight, ids_BS)
        flat = op.Reshape(ids_BS, [-1])
        offsets = op.Gather(self.offsets, flat) if self.layout.has_offsets else self.offsets
        rows = op.call(
            grouped_quant_dequantize(),
            op.Gather(self.codes, flat),
            op.Gather(self.scales, flat),
            offsets,
            **_attributes(self.layout.format),
        )
        rows.dtype = ir.DataType.FLOAT
        rows.shape = ir.Shape([None, self.columns])
        rows = cast(op, rows, self.dtype)
        x_BSD = op.Reshape(rows, op.Concat(op.Shape(ids_BS), [self.columns], axis=0))
        x_BSD.shape = ir.Shape([*(ids_BS.shape or ()), self.columns])
        return x_BSD

    def as_linear(self, op: OpBuilder, x: ir.Value) -> ir.Value:
        """The table as the weight of a tied output head: float32 logits."""
        return self.logits(op, x)


def _attributes(quantization: GroupedQuantFormat) -> dict[str, int]:
    return {
        "bits": quantization.bits,
        "group_size": quantization.group_size,
        "zero_point": quantization.zero_point,
    }
