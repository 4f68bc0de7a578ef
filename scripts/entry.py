"""The command ``intaglio``: ready for signals before anything large is imported."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Runs the command line, see :mod:`intaglio.scripts.main`."""
    # SIGTERM ends the program as an exception, so that nothing half-written and no child is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        from intaglio.scripts.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    run()
