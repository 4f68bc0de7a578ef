"""``intaglio run`` with a bundle that writes text."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import intaglio
from intaglio.scripts.console import say, write


def write_text(bundle: Path, prompt: str, options: Mapping[str, Any], *, how: Mapping[str, Any], quiet: bool) -> None:
    """Streams the continuation of ``prompt`` to stdout, and says on stderr how fast it came. ``how`` is for `load`."""
    pipeline = intaglio.load(bundle, **how)
    pipeline.warm_up()
    started, times = time.monotonic(), []
    for piece in pipeline.stream(prompt, **options):
        write(piece)
        times.append(time.monotonic() - started)
    write("\n")
    # The last piece flushes what the text decoder held back; it is no token.
    tokens = len(times) - 1
    if tokens > 1 and not quiet:
        rate = (tokens - 1) / (times[-2] - times[0])
        say(f"{tokens} tokens: the first after {times[0]:.2f} s, then {rate:.1f} a second")
