"""ONNX's own node tests through the Core ML converter, a saved package and the evaluator.

Run as a program it prints the counts: python tests/support/coreml_node_tests.py [--write] [NAME_PART].
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests

from intaglio.engines.coreml.conversion import Converted, Port, convert
from intaglio.engines.coreml.coremltools_ import import_coremltools
from intaglio.engines.coreml.node import NotConstantError
from intaglio.engines.coreml.package import write_package
from intaglio.engines.coreml.registry import load_converters
from intaglio.errors import IntaglioError

FAILING = Path(__file__).parent.parent / "engines" / "coreml" / "failing_node_tests.txt"

# Why numbers differ, by the beginning of the test's name. Whatever else fails keeps its own reason.
_WRONG = re.compile(r"gives \d+ wrong elements")
_WHY = {
    "test_attention_4d_causal": "sums in another dtype than the test's, which rounds each step to 16 bits",
    "test_bitshift_left_int32_overflow": "shifts bits out of an int32, and Core ML multiplies instead",
    "test_bitshift_left_int32_shift_ge_width": "shifts all bits out of an int32, and Core ML multiplies instead",
    "test_bitshift_": "shifts by a negative number, which Core ML's power of two does not take",
    "test_resize_downsample_scales_": "aligns the corners of whole sizes, as onnxruntime does, and not of fractions",
}


@dataclass(frozen=True)
class Outcome:
    """What became of one test. ``bound``: the inputs that had to be given at conversion; ``reason``: why it fails."""

    name: str
    ops: tuple[str, ...]
    bound: tuple[str, ...] = ()
    reason: str = ""


class CaseError(Exception):
    """A test that cannot be passed, and why."""


def cases(part: str = "") -> Iterator[tuple[Any, tuple[str, ...]]]:
    """The node tests whose ops all have a converter, with the ops of each."""
    known = load_converters()
    with warnings.catch_warnings():
        # Some tests divide by zero on purpose when they are made.
        warnings.simplefilter("ignore")
        found = load_model_tests(kind="node")
    # coremltools collects garbage in each conversion, and would look through all the tests each time.
    gc.freeze()
    for case in sorted(found, key=lambda case: case.name):
        ops = set(_ops(case.model.graph))
        functions = {(f.domain, f.name) for f in case.model.functions}
        ops = {op for op in ops if op in known or op not in functions}
        if part in case.name and ops <= set(known):
            yield case, tuple(sorted(name for _, name in ops))


def _ops(graph: onnx.GraphProto) -> Iterator[tuple[str, str]]:
    for node in graph.node:
        yield ("" if node.domain == "ai.onnx" else node.domain), node.op_type
        for attribute in node.attribute:
            for inner in [attribute.g, *attribute.graphs]:
                yield from _ops(inner)


def run(case: Any, ops: tuple[str, ...]) -> Outcome:
    """One test: inputs that Core ML must know at conversion are bound one by one, the others are fed."""
    bound: dict[str, np.ndarray] = {}
    try:
        for given, expected in case.data_sets:
            inputs = dict(zip([value.name for value in case.model.graph.input], map(_array, given), strict=False))
            while True:
                try:
                    converted = convert(ir.from_proto(case.model), case.name, constants=bound)
                    break
                except NotConstantError as error:
                    # A value that is computed follows from sizes and flags; data is never bound for it.
                    needed = [n for n in error.inputs if n == error.value or inputs[n].dtype.kind in "ib"]
                    if not needed:
                        raise
                    bound.update((name, inputs[name]) for name in needed)
            _compare(case, converted, _evaluate(converted, inputs), [_array(value) for value in expected])
    except (CaseError, IntaglioError, AssertionError) as error:
        return Outcome(case.name, ops, tuple(bound), reason(case.name, error))
    return Outcome(case.name, ops, tuple(bound))


def reason(name: str, error: Exception) -> str:
    """Why a test fails, in words that stay the same from run to run."""
    if isinstance(error, AssertionError) and _WRONG.match(str(error)):
        return next((text for start, text in _WHY.items() if name.startswith(start)), "gives other numbers")
    return _short(name, error)


def _short(name: str, error: Exception) -> str:
    text = " ".join(str(error).removeprefix(f"{name}: ").split())
    return re.sub(r"\S*case\.mlpackage: ", "", text).partition("; change the graph")[0][:300]


def _array(value: Any) -> np.ndarray:
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    raise CaseError(f"takes or gives a {type(value).__name__}, and Core ML has only tensors")


def _evaluate(converted: Converted, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    from intaglio.engines.coreml.evaluator.evaluate import Evaluator

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.mlpackage"
        feeds = {port.mil_name: _fed(port, inputs[port.name]) for port in converted.inputs}
        if not feeds:
            raise CaseError("has no input left to feed once what Core ML must know at conversion is bound")
        write_package(converted, path)
        return Evaluator(path).run(feeds)


def _fed(port: Port, array: np.ndarray) -> np.ndarray:
    array = array.reshape(1) if array.ndim == 0 else array
    if port.mil_dtype == "int32":
        wide = np.asarray(array, dtype=np.int64)
        if np.any(wide != wide.astype(np.int32)):
            raise CaseError(f"feeds {array.dtype} values to {port.name!r} that int32 cannot hold")
        return wide.astype(np.int32)
    return array.astype(np.float16 if port.mil_dtype == "fp16" else np.float32)


def _compare(case: Any, converted: Converted, outputs: dict[str, np.ndarray], expected: list[np.ndarray]) -> None:
    for port, right in zip(converted.outputs, expected, strict=True):
        found = outputs[port.mil_name]
        if right.ndim == 0:
            found = found.reshape(())
        assert found.shape == right.shape, f"gives {port.name!r} the shape {found.shape}; expected {right.shape}"
        assert port.dtype.numpy() == right.dtype, f"gives {port.name!r} as {port.dtype}; expected {right.dtype}"
        if right.dtype.kind in "iub":
            wrong = np.count_nonzero(found.astype(np.int64) != right.astype(np.int64))
        elif right.dtype == ml_dtypes.bfloat16:
            # Core ML computes in float32 instead; what it gives is rounded, and may be one unit away.
            ours, theirs = found.astype(right.dtype).astype(np.float64), right.astype(np.float64)
            wrong = np.count_nonzero(~np.isclose(ours, theirs, rtol=2**-7, atol=case.atol, equal_nan=True))
        else:
            wide = right.astype(np.float64)
            close = np.isclose(found.astype(np.float64), wide, rtol=case.rtol, atol=case.atol, equal_nan=True)
            wrong = np.count_nonzero(~close)
        assert not wrong, f"gives {wrong} wrong elements of {right.size} in {port.name!r}"


def failing() -> dict[str, str]:
    """The tests that are known to fail, with the reason of each."""
    lines = [line for line in FAILING.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split(": ", 1) for line in lines)


def main() -> int:
    """Runs all of them and prints the counts; 1 if one fails that is not in the list or for another reason, or passes
    though it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", default="", help="only tests with this in their name")
    parser.add_argument("--write", action="store_true", help="write the list of those that fail")
    arguments = parser.parse_args()
    import_coremltools(alone=True)  # it would say what of its own it lacks off a Mac
    outcomes = [run(case, ops) for case, ops in cases(arguments.part)]
    failed = {o.name: o.reason for o in outcomes if o.reason}
    if arguments.write:
        head = (
            "# Node tests of ONNX that the Core ML target fails, and why: tests/support/coreml_node_tests.py --write.\n"
        )
        FAILING.write_text(head + "".join(f"{name}: {reason}\n" for name, reason in sorted(failed.items())))
    known = failing() if FAILING.exists() else {}
    new = sorted(set(failed) - set(known))
    healed = sorted(o.name for o in outcomes if not o.reason and o.name in known)
    passed = [o for o in outcomes if not o.reason]
    bound = sum(bool(o.bound) for o in passed)
    for name in new:
        print(f"FAILS {name}: {failed[name]}")
    changed = [name for name in sorted(failed) if name in known and failed[name] != known[name]]
    for name in changed:
        print(f"FAILS {name} for another reason than the listed one: {failed[name]}")
    for name in healed:
        print(f"PASSES, though listed as failing: {name}")
    ops = Counter(op for o in passed for op in o.ops)
    print(f"op types with a converter: {len(load_converters())}; in a passing test: {len(ops)}")
    print(f"node tests of these ops: {len(outcomes)}")
    print(f"pass: {len(passed)} ({100 * len(passed) / max(len(outcomes), 1):.1f} %)")
    print(f"  as they stand: {len(passed) - bound}; with inputs bound at conversion: {bound}")
    print(f"fail: {len(failed)}, of which in the list with a reason: {len(failed) - len(new)}")
    return int(bool(new or healed or changed))


if __name__ == "__main__":
    sys.exit(main())
