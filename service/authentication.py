"""Who may call: whoever brings one of the keys, where keys are set. The same for every door."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from service.errors import Unauthenticated

_ADVICE = "send one as `Authorization: Bearer KEY` or `x-api-key: KEY`"


class Authentication:
    """Without keys everybody may call. Of the keys only digests are kept, so that none can get into a message."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = tuple(_digest(key) for key in dict.fromkeys(keys))

    @property
    def is_required(self) -> bool:
        return bool(self._digests)

    def check(self, authorization: str | None, api_key: str | None) -> None:
        """Let whoever brings a known key in either header pass. Raises: Unauthenticated."""
        if not self._digests:
            return
        sent = [key for key in (_bearer_of(authorization), api_key) if key is not None]
        if not any(self._is_known(key) for key in sent):
            what = "the key that was sent is not known" if sent else "no key was sent"
            raise Unauthenticated(f"{what}: {_ADVICE}")

    def _is_known(self, key: str) -> bool:
        """In a time that depends neither on which key it is nor on how much of one was guessed."""
        digest = _digest(key)
        is_known = False
        for known in self._digests:
            is_known |= hmac.compare_digest(digest, known)
        return is_known


def _digest(key: str) -> bytes:
    # What a header brings need not be text that can be written as UTF-8.
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _bearer_of(authorization: str | None) -> str | None:
    """The key in ``Bearer KEY``; None where the header is not there or says something else."""
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip(" ") if scheme.lower() == "bearer" else None
