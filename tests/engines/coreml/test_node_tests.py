"""ONNX's own node tests through converter, saved package and evaluator."""

from __future__ import annotations

import pytest
from coreml_node_tests import cases, failing, reason, run

from intaglio.errors import CompileError


def test_a_node_test_of_each_op() -> None:
    """The first of each op type that is not listed as failing. All of them: tests/support/coreml_node_tests.py."""
    known = failing()
    seen: set[str] = set()
    failed = {}
    for case, ops in cases():
        if case.name in known or seen.issuperset(ops) or case.name.endswith("_expanded"):
            continue
        seen.update(ops)
        if reason := run(case, ops).reason:
            failed[case.name] = reason
    assert not failed
    assert len(seen) >= 100


def test_the_reason_of_a_failure_is_what_failed() -> None:
    name = "test_attention_4d_causal_bf16"
    assert reason(name, AssertionError("gives 3 wrong elements of 8 in 'Y'")) == failing()[name]
    assert reason(name, AssertionError("gives 'Y' the shape (1,)")) == "gives 'Y' the shape (1,)"
    assert reason(name, CompileError(f"{name}: the node 'a' breaks")) == "the node 'a' breaks"


@pytest.mark.full_size
def test_all_node_tests() -> None:
    """Those that fail are the listed ones, for the listed reasons, and at least 85 % pass."""
    outcomes = [run(case, ops) for case, ops in cases()]
    failed = {o.name: o.reason for o in outcomes if o.reason}
    assert failed == failing()
    assert len(failed) <= 0.15 * len(outcomes)
