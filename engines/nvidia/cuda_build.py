"""The child process that builds a stage of the target ``cuda``: a request on stdin, one line of JSON on stdout."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, RemoveUnusedFunctionsPass, RemoveUnusedOpsetsPass

from intaglio.engines.child import end_with_parent, fail, refuse
from intaglio.engines.graph_file import load_graph
from intaglio.engines.graph_stats import activation_dtype, count_nodes
from intaglio.engines.lowering.check_packed import check_packed
from intaglio.engines.lowering.decompose_attention import DecomposeAttentionPass
from intaglio.engines.lowering.external_weights import write_graph
from intaglio.engines.lowering.fuse_gather import FuseGatherPass
from intaglio.engines.lowering.fuse_nodes import attribute
from intaglio.engines.lowering.infer_shapes import infer_shapes
from intaglio.engines.lowering.matmul_n_bits import MatMulNBitsPass
from intaglio.engines.lowering.narrow_dtype import NarrowDtypePass
from intaglio.engines.lowering.widen_dtype import WidenDtypePass
from intaglio.engines.memory import peak_rss_bytes
from intaglio.engines.model_build import check_model
from intaglio.engines.nvidia.cuda_ops import runs_on_cpu
from intaglio.engines.nvidia.cuda_options import CudaOptions
from intaglio.engines.nvidia.cuda_session import CudaSession
from intaglio.engines.nvidia.lower import lower as lower_for_tensorrt
from intaglio.engines.nvidia.lower import why_not_fused
from intaglio.engines.shapes import check_finite, smallest_feeds
from intaglio.errors import CompileError, IntaglioError
from intaglio.exporters.bundle import Dim, StageInfo
from intaglio.kernels.grouped_quant import DOMAIN

GRAPH = "graph.onnx"
_BF16 = ir.DataType.BFLOAT16


def lower(model: ir.Model, options: CudaOptions) -> list[str]:
    """Lowers a portable stage for onnxruntime's provider, in place; what the report is to say of it.

    bfloat16 is widened to float32: the provider has it for some operators only, and the CPU for none that it leaves.
    Raises CompileError.
    """
    notes = []
    check_packed(model)
    if activation_dtype(model) == "bfloat16":
        notes.append(f"bfloat16 is computed in {options.dtype or 'float32'}, as some operators have no kernel for it")
    WidenDtypePass(_BF16, [DOMAIN])(model)
    if options.dtype is not None and activation_dtype(model) == "float32":
        narrow = NarrowDtypePass(ir.DataType.FLOAT16)
        narrow(model)
        notes += narrow.notes
    if options.provider == "tensorrt":
        # Without plugins, which onnxruntime has no names for: what its provider leaves, the others must run.
        notes += lower_for_tensorrt(model, "tensorrt-rtx")
    else:
        if any(value.shape is None for node in model.graph.all_nodes() for value in node.outputs):
            infer_shapes(model)
        gathers, weights, attention = FuseGatherPass(), MatMulNBitsPass(), DecomposeAttentionPass(why_not_fused)
        for each in (gathers, weights, attention):
            each(model)
        for common in (InlinePass(), RemoveUnusedFunctionsPass(), RemoveUnusedOpsetsPass()):
            common(model)
        notes += [*weights.notes, *attention.notes]
    if ours := sorted({node.op_type for node in model.graph.all_nodes() if node.domain == DOMAIN}):
        raise CompileError(f"onnxruntime has no operator {', '.join(ours)} of the domain {DOMAIN}")
    notes += [f"{count} of {name} run on the CPU: CUDA has no kernel" for name, count in runs_on_cpu(model).items()]
    return notes


def build(request: dict[str, Any]) -> dict[str, Any]:
    """Lowers and writes the graph, and runs it once on the CPU where its stage is known. Raises IntaglioError."""
    graph, folder = Path(request["graph"]), Path(request["artifact"])
    if request["stage"] is None:
        check_model(graph)
    model = load_graph(graph)
    total = count_nodes(model, "Attention")
    notes = lower(model, CudaOptions.model_validate(request["options"]))
    sizes = _weight_size(model)
    fused, dtype = count_nodes(model, "Attention"), activation_dtype(model)
    operators = dict(Counter(node.op_type for node in model.graph.all_nodes()).most_common())
    folder.mkdir()
    write_graph(model, folder / GRAPH)
    del model
    if request["stage"] is not None:
        dims = {name: Dim.model_validate(dim) for name, dim in request["dims"].items()}
        stage = StageInfo.model_validate(request["stage"])
        session = CudaSession(graph.stem, folder / GRAPH, stage, dims, [], device="cpu")
        check_finite(graph.stem, session.run(smallest_feeds(stage, dims)))
    return {
        "dtype": dtype,
        "weight_bytes": sizes[0],
        "weight_count": sizes[1],
        "attention_fused": fused,
        "attention_total": total,
        "fallbacks": {},
        "operators": operators,
        "notes": notes,
        "package_bytes": sum(file.stat().st_size for file in folder.iterdir()),
        "peak_rss_bytes": peak_rss_bytes(),
    }


def _weight_size(model: ir.Model) -> tuple[int, int]:
    """Bytes of the weights, and how many they stand for: packed ones are many in a byte, scales none."""
    graph = model.graph
    total = sum(v.const_value.nbytes for v in graph.initializers.values() if v.const_value is not None)
    bits: dict[str, int] = {}
    scales = set[str]()
    for node in graph.all_nodes():
        if node.op_type in ("MatMulNBits", "GatherBlockQuantized"):
            codes = node.inputs[1 if node.op_type == "MatMulNBits" else 0]
            # 4 is the operator's default; onnxruntime says of others, at the load, that it has none.
            bits[str(codes.name if codes is not None else "")] = attribute(node, "bits", 4) or 4
        if node.op_type in ("MatMulNBits", "GatherBlockQuantized", "DequantizeLinear"):
            scale = node.inputs[1 if node.op_type == "DequantizeLinear" else 2]
            scales.add(str(scale.name if scale is not None else ""))
    count = 0
    for name, value in graph.initializers.items():
        if value.const_value is None or name in scales:
            continue
        count += value.const_value.nbytes * 8 // bits[name] if name in bits else int(value.const_value.size)
    return int(total), int(count)


def main() -> int:
    """Builds what stdin asks for; 2 and a message on stderr if it cannot be built."""
    end_with_parent()
    request = json.load(sys.stdin)
    try:
        result = build(request)
    except (IntaglioError, OSError) as error:
        return refuse(error, Path(request["graph"]).name)
    except Exception as error:
        return fail(error)
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
