"""The list of op types that have a converter: ``python -m intaglio.engines.coreml.supported`` writes it anew."""

from __future__ import annotations

from pathlib import Path

from intaglio.engines.coreml.registry import load_converters

LIST = Path(__file__).with_name("supported_ops.txt")


def listing() -> str:
    """One op type a line, ``domain::op`` outside ONNX's own domain. Raises RuntimeMissingError."""
    names = sorted(f"{domain}::{name}" if domain else name for domain, name in load_converters())
    return "".join(f"{name}\n" for name in names)


if __name__ == "__main__":
    LIST.write_text(listing())
