"""Peak memory of this process."""

from __future__ import annotations

import sys


def peak_rss_bytes() -> int:
    """The largest resident set of this process so far, in bytes; 0 where the system does not say."""
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
