"""What TensorRT measured of its kernels, kept for the next build on the same GPU: by far most of a build's time."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from intaglio.engines.cache import cache_folder


class TimingCache:
    """The measurements of one compiler on one ``device``, in the user's cache folder."""

    def __init__(self, compiler: str, device: str) -> None:
        key = hashlib.sha256(f"{compiler}\0{device}".encode()).hexdigest()
        self.path: Path = cache_folder() / "timing" / f"{key}.cache"

    def attach(self, config: Any) -> None:
        """Gives a builder's configuration what is kept. What TensorRT does not accept is as good as nothing."""
        try:
            kept = self.path.read_bytes()
        except OSError:
            kept = b""
        # Kept measurements of another GPU would choose kernels that are slow here: no mismatch is let pass.
        made = config.create_timing_cache(kept)
        if made is None or not config.set_timing_cache(made, ignore_mismatch=False):
            config.set_timing_cache(config.create_timing_cache(b""), ignore_mismatch=False)

    def keep(self, config: Any) -> None:
        """Writes what a build measured, whole or not at all. A cache that cannot be written is left alone."""
        partial = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(bytes(config.get_timing_cache().serialize()))
            partial.replace(self.path)
        except OSError:
            partial.unlink(missing_ok=True)
