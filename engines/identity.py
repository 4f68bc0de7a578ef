"""What an engine was built from. Loading compares it with what is there now; the cache is keyed by it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from intaglio.engines.target import target_module
from intaglio.engines.wanted import Wanted
from intaglio.exporters.bundle import Bundle, Dim


class Identity(BaseModel):
    """Everything that decides what a built stage looks like.

    ``shapes`` are the dims and their bounds; where an engine was built for several sets of them, those are the
    ``variants``, and ``shapes`` holds them all. ``options`` are those of the target.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str
    graph_sha256: str
    weights_sha256: str
    dtype: str
    accuracy: str
    shapes: dict[str, Dim]
    variants: tuple[dict[str, Dim], ...] = ()
    options: dict[str, str] = {}
    compiler: str
    lowering_sha256: str
    device: str

    @property
    def wanted(self) -> Wanted:
        """The part that a user chose."""
        return Wanted(self.target, self.accuracy, self.shapes, self.variants, self.options)

    def key(self) -> str:
        """The identity as one hash, with the versions of what builds and is not needed to run."""
        tools = [f"{tool} {_version(tool)}" for tool in target_module(self.target).BUILD_TOOLS]
        return hashlib.sha256("\n".join([self.model_dump_json(), *tools]).encode()).hexdigest()

    def differences(self, other: Identity) -> list[str]:
        """What differs, as ``field: mine, other's``."""
        return [
            f"{name}: {_short(value)}, now {_short(getattr(other, name))}"
            for name, value in self
            if value != getattr(other, name)
        ]


def stage_identity(bundle: Bundle, stage: str, wanted: Wanted) -> Identity:
    """The identity that ``stage`` of ``bundle`` has on this machine. No weight is read: hashes are the bundle's."""
    return make_identity(bundle.stages[stage].sha256, bundle.weights.sha256, bundle.dtype, wanted)


def make_identity(graph_sha256: str, weights_sha256: str, dtype: str, wanted: Wanted) -> Identity:
    """An identity on this machine and with these lowering passes."""
    target = target_module(wanted.target)
    return Identity(
        target=wanted.target,
        graph_sha256=graph_sha256,
        weights_sha256=weights_sha256,
        dtype=dtype,
        accuracy=wanted.accuracy,
        shapes=wanted.shapes,
        variants=wanted.variants,
        options=wanted.options,
        compiler=target.compiler(),
        lowering_sha256=_lowering_hash(wanted.target),
        device=target.device(),
    )


@cache
def _lowering_hash(target: str) -> str:
    # A change of the target or its passes changes engines without changing any version.
    folder, digest = Path(__file__).parent, hashlib.sha256()
    shared = ("lowering/*.py", "graph_*.py", "kv_cache.py", "shapes.py", "stage_interface.py")
    patterns = (*shared, *target_module(target).SOURCES)
    for file in sorted({file for pattern in patterns for file in folder.glob(pattern)}):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def compile_command(source: Path, target: str, identity: Identity | None = None, shapes: Sequence[str] = ()) -> str:
    """The command that compiles ``source`` for ``target``, with the options that an identity has, unquoted.

    ``shapes`` are what was given to each ``--shapes``.
    """
    command = f"intaglio compile {shlex.quote(str(source))} --target {target}"
    for each in shapes:
        # Names of dims that others wrote may be anything.
        command += f' --shapes "{each}"' if re.fullmatch(r"[\w.,:= -]*", each) else f" --shapes {shlex.quote(each)}"
    for name, value in identity.options.items() if identity is not None else ():
        # Of a switch, the name is all.
        command += f" --{name.replace('_', '-')}" + ("" if value == "yes" else f" {shlex.quote(value)}")
    if identity is not None and identity.accuracy != "exact":
        command += f" --accuracy {identity.accuracy}"
    return command


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:12]}…"
