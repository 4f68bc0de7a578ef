"""Where the time of a stage goes, operator by operator: onnxruntime's own profile of one run."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from intaglio.engines.cpu_session import CpuSession
from intaglio.engines.engine import Engine
from intaglio.engines.stage_interface import runs_as
from intaglio.errors import InputError

# Groups of like nodes that a profile lists; what is beyond them is in the operators' sums.
_MOST_NODES = 20


def check_profile(target: str) -> None:
    """Raises InputError for a target without a profile."""
    if target != "cpu":
        raise InputError(f"operators are timed on the target cpu, and this one is {target}; leave the profile out")


@contextmanager
def profiled_session(engine: Engine, stage: str, *, threads: int = 0) -> Iterator[CpuSession]:
    """A session of ``stage`` that writes down every operator it runs, for :func:`read_profiles`.

    Raises InputError for a target without a profile, EngineError.
    """
    check_profile(engine.info.target)
    with tempfile.TemporaryDirectory(prefix="intaglio-profile-") as folder:
        yield CpuSession(
            stage,
            engine.artifact(stage),
            engine.bundle_path,
            runs_as(engine.bundle.stages[stage]),
            engine.info.identities[stage].shapes,
            threads=threads,
            profile=Path(folder) / stage,
        )


def read_profiles(session: CpuSession) -> list[dict[str, Any]]:
    """Ends the profile of a session; gives what :func:`summarize` says of each of its runs, in turn."""
    events = json.loads(session.end_profiling().read_text("utf-8"))
    nodes = [event for event in events if event.get("cat") == "Node" and "op_name" in event.get("args", {})]
    return [
        summarize(run["dur"], [node for node in nodes if run["ts"] <= node["ts"] < run["ts"] + run["dur"]])
        for run in events
        if run.get("name") == "model_run"
    ]


def summarize(run_us: int, nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What onnxruntime's events of the operators of one run, which took ``run_us`` microseconds, come to.

    ``seconds`` of the run; ``operators``: ``op_type``, ``count``, ``ms`` and ``share`` of the run for each kind, the
    longest first; ``nodes``: the same for nodes of one kind and one set of input shapes, at most twenty;
    ``outside_operators_ms``: what the run took beyond its operators.
    """
    kinds = _sums([(event["args"]["op_name"],) for event in nodes], nodes)
    alike = _sums([(event["args"]["op_name"], _shapes(event)) for event in nodes], nodes)

    def row(count: int, us: int) -> dict[str, Any]:
        return {"count": count, "ms": round(us / 1e3, 3), "share": round(us / run_us, 4) if run_us else 0.0}

    return {
        "seconds": round(run_us / 1e6, 6),
        "outside_operators_ms": round((run_us - sum(us for _, us in kinds.values())) / 1e3, 3),
        "operators": [{"op_type": kind, **row(*sums)} for (kind,), sums in kinds.items()],
        "nodes": [
            {"op_type": kind, "shapes": shapes, **row(*sums)}
            for (kind, shapes), sums in list(alike.items())[:_MOST_NODES]
        ],
    }


def _sums(
    keys: Sequence[tuple[str, ...]], events: Sequence[Mapping[str, Any]]
) -> dict[tuple[str, ...], tuple[int, int]]:
    """Number and microseconds of the events of each key, the longest first."""
    sums: dict[tuple[str, ...], tuple[int, int]] = {}
    for key, event in zip(keys, events, strict=True):
        count, us = sums.get(key, (0, 0))
        sums[key] = count + 1, us + event["dur"]
    return dict(sorted(sums.items(), key=lambda item: -item[1][1]))


def _shapes(event: Mapping[str, Any]) -> str:
    """``1x1536x3072, 9216x768``: an operator's inputs."""
    inputs = event["args"].get("input_type_shape", [])
    return ", ".join("x".join(map(str, shape)) or "scalar" for given in inputs for shape in given.values())
