"""Sessions over TensorRT's runtime, on a stand-in for the GPU whose engines onnxruntime runs."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from cuda_stand_in import Driver, check_nothing_is_left
from gpu_stand_in import IExecutionContext, TensorRT, write_plan

from intaglio.engines.nvidia.device import Device
from intaglio.engines.nvidia.opening import check_rtx_capability
from intaglio.engines.nvidia.plan import Plan
from intaglio.engines.nvidia.profiles import Range, profile
from intaglio.engines.nvidia.session import GpuSession
from intaglio.errors import EngineError, InputError
from intaglio.exporters.bundle import Dim, StageInfo, TensorInfo

GRAPH = """<ir_version: 10, opset_import: ["" : 21]>
g (float16[rows,3] x, int64[rows] ids) => (float16[rows,3] y, float16[rows] total)
<float16[1] two = {16384}>
{ doubled = Mul(x, two) wide = Cast<to=10>(ids) axes = Constant<value_ints=[1]>() column = Unsqueeze(wide, axes)
  y = Add(doubled, column) total = ReduceSum<keepdims=0>(y, axes) }"""
STAGE = StageInfo(
    file="double.onnx",
    sha256="0" * 64,
    inputs=(
        TensorInfo(name="x", dtype="float32", shape=("rows", 3)),
        TensorInfo(name="ids", dtype="int64", shape=("rows",)),
    ),
    outputs=(
        TensorInfo(name="y", dtype="float32", shape=("rows", 3)),
        TensorInfo(name="total", dtype="float32", shape=("rows",)),
    ),
)
# Of the constant, the bits are written: it is 2.
AGAIN = "`intaglio compile B --target tensorrt-rtx`"


nothing_is_left = pytest.fixture(check_nothing_is_left, autouse=True)


class Opened:
    """A session of ``GRAPH`` on a stand-in, built for each of some ranges of rows."""

    def __init__(self, folder: Path, rows: Sequence[tuple[int, int]] = ((1, 8),), **trt: Any) -> None:
        options = {name: trt.pop(name) for name in ("budget",) if name in trt}
        self.driver = Driver(**{name: trt.pop(name) for name in ("total", "fails_to_record") if name in trt})
        self.trt = TensorRT(self.driver, **trt)
        self.device = Device(self.driver)
        graph, self.engine = folder / "double.onnx", folder / "double.engine"
        onnx.save(onnx.parser.parse_model(GRAPH), graph)
        variants = [{"rows": Dim(min=least, max=most)} for least, most in rows]
        self.engine.write_bytes(write_plan(graph, [profile(STAGE.inputs, dims) for dims in variants]))
        spanned = {"rows": Dim(min=min(r[0] for r in rows), max=max(r[1] for r in rows))}
        plan = Plan(
            self.trt, self.device, self.engine, again=AGAIN, runtime_cache=folder / "double.runtime-cache", **options
        )
        self.session = GpuSession("double", plan, STAGE, spanned, again=AGAIN, **options)


def feeds(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng()
    return {"x": rng.integers(-8, 8, (rows, 3)).astype(np.float32), "ids": rng.integers(0, 9, rows)}


def run_at(session: GpuSession, sizes: Sequence[int]) -> None:
    for rows in sizes:
        session.run(feeds(rows))


def check(found: Mapping[str, np.ndarray], given: Mapping[str, np.ndarray]) -> None:
    expected = 2 * given["x"] + given["ids"][:, None]
    assert {array.dtype for array in found.values()} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(found["y"], expected)
    np.testing.assert_array_equal(found["total"], expected.sum(axis=1))


@pytest.mark.parametrize("is_rtx", [True, False])
def test_runs_of_one_set_of_shapes_take_memory_once_and_are_recorded(tmp_path: Path, is_rtx: bool) -> None:
    opened = Opened(tmp_path, is_rtx=is_rtx)
    for i in range(4):
        given = feeds(5)
        check(opened.session.run(given), given)
        if i == 0:
            held = opened.driver.used
    assert opened.driver.used == held
    assert (opened.trt.contexts, opened.trt.runs) == (1, 4)
    # TensorRT for RTX records its work itself.
    assert (opened.driver.recordings, opened.driver.launches) == ((0, 0) if is_rtx else (1, 3))


@pytest.mark.parametrize("is_rtx", [True, False])
def test_a_few_sets_of_shapes_stay_and_share_what_they_work_in(tmp_path: Path, is_rtx: bool) -> None:
    opened = Opened(tmp_path, is_rtx=is_rtx)
    for rows in (2, 2, 2, 8, 2, 2, 2, 1, 3, 4, 5, 2, 8, 8, 8):
        given = feeds(rows)
        check(opened.session.run(given), given)
    assert opened.trt.contexts == 3


def test_outputs_are_chosen_and_stay_where_they_are_told_to(tmp_path: Path) -> None:
    opened, given = Opened(tmp_path), feeds(4)
    first = opened.session.run(given, ["y"], resident=["y"])
    assert list(first) == ["y"]
    other = feeds(4)
    check(opened.session.run(other), other)
    # The run between has not written over it.
    again = {"x": first["y"], "ids": given["ids"]}
    found = opened.session.run(again)
    check(found, {"x": 2 * given["x"] + given["ids"][:, None], "ids": given["ids"]})
    np.testing.assert_array_equal(first["y"].numpy(), 2 * given["x"] + given["ids"][:, None])


def test_memory_goes_with_the_session(tmp_path: Path) -> None:
    opened = Opened(tmp_path, is_rtx=False)
    for _ in range(3):
        opened.session.run(feeds(5))
    assert opened.device.used > opened.driver.used > 0, "the engine is counted as well"
    del opened.session
    gc.collect()
    assert (opened.driver.used, opened.device.used, opened.driver.graphs) == (0, 0, {})


@pytest.mark.parametrize("is_rtx", [True, False])
def test_a_closed_session(tmp_path: Path, is_rtx: bool) -> None:
    opened = Opened(tmp_path, is_rtx=is_rtx)
    run_at(opened.session, (5, 5, 5))
    opened.session.close()
    opened.session.close()
    assert (opened.driver.used, opened.device.used, opened.driver.graphs) == (0, 0, {})
    with pytest.raises(EngineError, match="double: its session was closed; load the stage again"):
        opened.session.run(feeds(5))


@pytest.mark.parametrize("when", [0, 1, 2])
def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, when: int) -> None:
    opened = Opened(tmp_path, is_rtx=False)
    run_at(opened.session, [5] * when)
    opened.driver.interrupt = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        opened.session.run(feeds(5))
    for _ in range(3):
        given = feeds(5)
        check(opened.session.run(given), given)
    opened.session.close()
    assert (opened.driver.used, opened.device.used, opened.driver.graphs) == (0, 0, {})


def test_an_interrupt_while_it_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Opened(tmp_path, is_rtx=False)
    run_at(opened.session, (5,))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(IExecutionContext, "execute_async_v3", interrupt)
        with pytest.raises(KeyboardInterrupt):
            opened.session.run(feeds(5))
    assert opened.driver.recorded is None and opened.driver.destroyed == 1
    run_at(opened.session, (5, 5))
    assert (opened.driver.recordings, opened.driver.destroyed) == (1, 2)


@pytest.mark.parametrize(("owner", "name"), [(IExecutionContext, "execute_async_v3"), (Driver, "cuStreamBeginCapture")])
def test_memory_that_is_let_go_while_it_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    """As a collection of garbage may at any time."""
    opened = Opened(tmp_path, is_rtx=False)
    run_at(opened.session, (5,))
    held, call = opened.driver.used, getattr(owner, name)
    garbage = [opened.device.allocate(1000, "garbage")]

    def collect(self: Any, *arguments: Any) -> Any:
        result = call(self, *arguments)
        garbage.clear()
        return result

    monkeypatch.setattr(owner, name, collect)
    given = feeds(5)
    check(opened.session.run(given), given)
    assert (opened.driver.recordings, opened.driver.used) == (1, held)


def test_what_stays_is_read_by_another_thread_while_this_one_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, given = Opened(tmp_path, is_rtx=False), feeds(5)
    kept = opened.session.run(given, ["y"], resident=["y"])["y"]
    execute, reading = IExecutionContext.execute_async_v3, list[Future[np.ndarray]]()
    with ThreadPoolExecutor(1) as pool:

        def record(self: IExecutionContext, stream: int) -> bool:
            reading.append(pool.submit(kept.numpy))
            wait(reading, timeout=0.2)  # long enough for one that is not kept waiting
            return execute(self, stream)

        monkeypatch.setattr(IExecutionContext, "execute_async_v3", record)
        opened.session.run(given)
        np.testing.assert_array_equal(reading[0].result(), 2 * given["x"] + given["ids"][:, None])
    assert opened.driver.recordings == 1


def test_outputs_that_there_are_not(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="double: has no output 'z'; there are y, total"):
        Opened(tmp_path).session.run(feeds(2), ["y", "z"])


def test_threads_share_a_session(tmp_path: Path) -> None:
    opened = Opened(tmp_path, is_rtx=False)

    def work(rows: int) -> None:
        for _ in range(20):
            given = feeds(rows)
            check(opened.session.run(given), given)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, rows) for rows in (1, 2, 3, 4)]:
            done.result()


def test_numbers_that_are_none_go_through(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    found = opened.session.run({"x": np.array([[np.nan, 1, np.inf]], np.float32), "ids": np.array([1])})
    np.testing.assert_array_equal(found["y"], [[np.nan, 3, np.inf]])


def test_the_profile_that_fits_and_sizes_that_none_does(tmp_path: Path) -> None:
    opened = Opened(tmp_path, rows=[(1, 2), (6, 8)])
    for rows in (7, 2, 7):
        given = feeds(rows)
        check(opened.session.run(given), given)
    with pytest.raises(InputError, match=r"double: rows is 4, and the engine was compiled for 1 to 2 and 6 to 8\. .*"):
        opened.session.run(feeds(4))
    message = (
        r'rows is 9, .* compiled for 1 to 8\. Compile for it, with "rows=MIN:OPT:MAX" in --shapes: `intaglio compile'
    )
    with pytest.raises(InputError, match=message):
        opened.session.run(feeds(9))
    with pytest.raises(InputError, match="x is float64, expected float32"):
        opened.session.run({**feeds(2), "x": np.zeros((2, 3))})


def test_what_cannot_be_recorded_runs_as_well(tmp_path: Path) -> None:
    opened = Opened(tmp_path, is_rtx=False, fails_to_record=True)
    for _ in range(4):
        given = feeds(3)
        check(opened.session.run(given), given)
    assert (opened.driver.recordings, opened.trt.runs) == (0, 4)


def test_inputs_and_outputs_in_the_machine_s_memory(tmp_path: Path) -> None:
    opened = Opened(tmp_path, is_rtx=False, on_host=frozenset({"ids", "total"}))
    for _ in range(4):
        given = feeds(3)
        check(opened.session.run(given), given)
    assert opened.driver.recordings == 0, "a recording would have the first numbers"


def test_what_was_compiled_on_the_gpu_is_kept_beside_the_engine(tmp_path: Path) -> None:
    file = tmp_path / "double.runtime-cache"
    opened = Opened(tmp_path)
    opened.session.run(feeds(3))
    opened.session.close()
    first = file.read_bytes()
    opened = Opened(tmp_path)
    opened.session.run(feeds(3))
    opened.session.close()
    assert file.read_bytes() == first, "nothing new was compiled"
    opened = Opened(tmp_path)
    opened.session.run(feeds(4))
    opened.session.close()
    assert len(file.read_bytes()) > len(first)
    opened = Opened(tmp_path, gpu="another")
    opened.session.run(feeds(4))
    opened.session.close()
    assert b'"another"' in file.read_bytes(), "it takes none of another GPU"


def test_a_budget_and_a_full_gpu(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the memory budget is 1 MiB of the GPU, and double's|the engine of double"):
        Opened(tmp_path, budget=100)
    size = (tmp_path / "double.engine").stat().st_size
    worked_in, one = 64 * 12, 256
    opened = Opened(tmp_path, budget=size + worked_in + 2 * one - 1)
    message = r"of the GPU, and .* of double needs 1 MiB beside the 1 MiB that are held"
    with pytest.raises(InputError, match=message) as raised:
        opened.session.run(feeds(3))
    assert opened.driver.used == worked_in, f"not the first tensor's, though {raised} has a traceback"
    opened = Opened(tmp_path, total=600)
    with pytest.raises(EngineError, match=r"the GPU \(Stand-in GPU\) has not enough memory: .* of 1 MiB are free"):
        opened.session.run(feeds(3))
    with pytest.raises(
        EngineError, match=r"refuses it\. It needs at least 1 MiB, and 1 of 1 MiB are free: close other"
    ):
        Opened(tmp_path, total=300, refuses=True)


@pytest.mark.parametrize("is_rtx", [True, False])
def test_other_sets_of_shapes_make_room(tmp_path: Path, is_rtx: bool) -> None:
    opened = Opened(tmp_path, is_rtx=is_rtx)
    run_at(opened.session, (8,))
    opened = Opened(tmp_path, is_rtx=is_rtx, total=opened.driver.used + 256)
    for rows in (1, 2, 3, 8, 8, 8, 2):
        given = feeds(rows)
        check(opened.session.run(given), given)


def test_a_resident_output_is_within_the_budget(tmp_path: Path) -> None:
    size = Opened(tmp_path).engine.stat().st_size
    opened = Opened(tmp_path, budget=size + 2048)

    def keep() -> list[Any]:
        return [opened.session.run(feeds(2), ["y"], resident=["y"]) for _ in range(9)]

    with pytest.raises(InputError, match="y of double needs"):
        keep()


def test_engines_of_others(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"cannot load it on Stand-in GPU: the stand-in refuses it; build again"):
        Opened(tmp_path, refuses=True)
    message = "cannot run on this machine: it was built by another version of TensorRT; the driver is too old for it"
    with pytest.raises(EngineError, match=message):
        Opened(tmp_path, invalid=1 | 4)


@pytest.mark.parametrize(
    ("capability", "sm", "message"),
    [
        ((8, 6), (), None),
        ((8, 6), (86, 89), None),
        ((7, 5), (75,), None),
        ((7, 5), (), r"portable from compute capability 8.0 on, .* has 7.5; build again with --sm 75"),
        ((12, 0), (86, 89), r"compiled for compute capability 8.6, 8.9, .* has 12.0; build again with --sm 86,89,120"),
        (
            (9, 0),
            (),
            r"compute capability 9.0, and TensorRT for RTX runs on 7.5, .*: compile for the target tensorrt",
        ),
    ],
)
def test_compute_capabilities(capability: tuple[int, int], sm: tuple[int, ...], message: str | None) -> None:
    device = Device(Driver(capability=capability))
    if message is None:
        check_rtx_capability(device, sm, AGAIN)
    else:
        with pytest.raises(EngineError, match=message):
            check_rtx_capability(device, sm, AGAIN)


def test_ranges_of_a_plan(tmp_path: Path) -> None:
    opened = Opened(tmp_path, rows=[(2, 4)])
    assert opened.session._plan.profiles == [{"x": ((2, 3), (4, 3)), "ids": ((2,), (4,))}]
    assert Range((2, 3), (2, 3), (4, 3)) == profile(STAGE.inputs, {"rows": Dim(min=2, max=4)})["x"]
