"""Whether a call is tried again, and after how long: decided from what happened, with neither a clock nor a wire.

Tried again are 429, 503 and broken connections. Everything else would end the same: a 4xx is to be mended, after a 504
the time is over, a 500 is a mistake that another try repeats. A broken connection may have carried the request to its
end; where doing it twice could show (deleting or replacing a layer) it is tried again only if nothing was sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

RETRIED_STATUSES = frozenset({429, 503})
BASE_WAIT_S = 0.1
MAX_WAIT_S = 5.0
DEFAULT_MAX_RETRIES = 4
_MAX_DOUBLINGS = 16


class Broken(Enum):
    """How far a try came that ended without an answer."""

    BEFORE_SENDING = "no connection came about"
    SOMEWHERE = "the request may have been served"
    FOR_GOOD = "another try would end the same"


@dataclass(frozen=True, slots=True)
class Retries:
    """``max_retries`` are those behind the first try."""

    max_retries: int = DEFAULT_MAX_RETRIES

    def wait_s(
        self,
        outcome: int | Broken,
        *,
        tries: int,
        left_s: float | None,
        draw: float,
        retry_after_s: float | None = None,
        may_repeat: bool = True,
    ) -> float | None:
        """Seconds until the next try, None where there is none.

        ``outcome`` is the status of a refusal or how the connection broke, ``tries`` how many there were, ``left_s``
        the time until the deadline. Full jitter: ``draw``, a random number in [0, 1), is a share of a bound that
        doubles with each try, on top of what Retry-After asks for and never beyond the deadline.
        Source: Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
        """
        if tries > self.max_retries or not self._is_worth_it(outcome, may_repeat):
            return None
        bound = min(MAX_WAIT_S, BASE_WAIT_S * 2.0 ** min(tries - 1, _MAX_DOUBLINGS))
        asked = retry_after_s or 0.0
        if left_s is not None:
            if left_s <= asked:
                return None
            bound = min(bound, left_s - asked)
        return asked + draw * bound

    def _is_worth_it(self, outcome: int | Broken, may_repeat: bool) -> bool:
        if isinstance(outcome, Broken):
            return outcome is Broken.BEFORE_SENDING or (outcome is Broken.SOMEWHERE and may_repeat)
        return outcome in RETRIED_STATUSES


def read_retry_after(text: str | None) -> float | None:
    """Seconds of a Retry-After header; None where it is absent or, as proxies may write it, a date."""
    try:
        seconds = float(text) if text is not None else math.nan
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
