"""What every process of a load test does first."""

from __future__ import annotations

import resource
import signal


def prepare_process() -> None:
    """Leave signals to whoever started it, who decides when it stops, and may have as many files open as it is let."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
