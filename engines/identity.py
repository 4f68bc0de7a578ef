"""What an engine was built from. Loading compares it with what is there now; the cache is keyed by it."""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from intaglio.exporters.bundle import Bundle, Dim


class Identity(BaseModel):
    """Everything that decides what a built stage looks like."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    graph_sha256: str
    weights_sha256: str
    dtype: str
    accuracy: str
    shapes: dict[str, Dim]
    compiler: str
    lowering_sha256: str
    device: str

    def key(self) -> str:
        """The identity as one hash."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def differences(self, other: Identity) -> list[str]:
        """What differs, as ``field: mine, other's``."""
        return [
            f"{name}: {_short(value)}, now {_short(getattr(other, name))}"
            for name, value in self
            if value != getattr(other, name)
        ]


def stage_identity(
    bundle: Bundle, stage: str, target: str, compiler: str, accuracy: str, dims: dict[str, Dim]
) -> Identity:
    """The identity that ``stage`` of ``bundle`` has on this machine. No weight is read: hashes are the bundle's."""
    return make_identity(
        target=target,
        graph_sha256=bundle.stages[stage].sha256,
        weights_sha256=bundle.weights.sha256,
        dtype=bundle.dtype,
        accuracy=accuracy,
        dims=dims,
        compiler=compiler,
    )


def make_identity(
    *,
    target: str,
    graph_sha256: str,
    weights_sha256: str,
    dtype: str,
    accuracy: str,
    dims: dict[str, Dim],
    compiler: str,
) -> Identity:
    """An identity on this machine and with these lowering passes."""
    return Identity(
        target=target,
        graph_sha256=graph_sha256,
        weights_sha256=weights_sha256,
        dtype=dtype,
        accuracy=accuracy,
        shapes=dims,
        compiler=compiler,
        lowering_sha256=_lowering_hash(target),
        device=f"{platform.system()} {platform.machine()}",
    )


@cache
def _lowering_hash(target: str) -> str:
    # A change of the target or its passes changes engines without changing any version.
    folder, digest = Path(__file__).parent, hashlib.sha256()
    for file in [folder / f"{target}.py", *sorted((folder / "lowering").glob("*.py"))]:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:12]}…"
