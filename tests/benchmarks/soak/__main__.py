"""Every form of soak with its defaults: ``make soak``; exit code 1 when a law is broken."""

from __future__ import annotations

import sys

from tests.benchmarks.soak import bits, disconnects, fuzz, overload, peaks, text
from tests.benchmarks.soak.outcome import run_forms

FORMS = (bits.FORM, overload.FORM, disconnects.FORM, text.FORM, fuzz.FORM, peaks.FORM)

if __name__ == "__main__":
    sys.exit(run_forms(FORMS, prog="python -m tests.benchmarks.soak", description=__doc__ or ""))
