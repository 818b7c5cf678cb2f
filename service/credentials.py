"""What a command shows a service, and by what it knows it; imports neither torch nor an HTTP library."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path


class CommandError(Exception):
    """Why a command cannot do what was asked, in one sentence."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a service may want to see, and by what it is known itself; ``ca`` None: by what this machine trusts."""

    key: str | None = None
    ca: Path | None = None
    certificate: Path | None = None
    certificate_key: Path | None = None

    def headers(self) -> dict[str, str]:
        """Raises: CommandError, which does not show the key."""
        key = (self.key or "").strip()
        if not key:
            return {}
        if not (key.isascii() and key.isprintable()):
            raise CommandError("the key has characters that no key has: keys are printable ASCII")
        return {"authorization": f"Bearer {key}"}

    def tls(self) -> ssl.SSLContext | bool:
        """As httpx takes it. Raises: CommandError naming the file."""
        if self.certificate_key is not None and self.certificate is None:
            raise CommandError("--cert-key needs --cert")
        if self.ca is None and self.certificate is None:
            return True
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except OSError as error:
            raise CommandError(f"--ca {self.ca}: {error.strerror or error}") from None
        if self.certificate is not None:
            try:
                context.load_cert_chain(self.certificate, self.certificate_key, password="")
            except OSError as error:
                files = f"--cert {self.certificate}" + (
                    f" --cert-key {self.certificate_key}" * bool(self.certificate_key)
                )
                raise CommandError(f"{files}: {error.strerror or error}") from None
        return context


NOBODY = Credentials()
