"""TLS for both doors, from files; where authorities for callers are named, nobody gets in without a certificate."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc


class UnusableCertificate(Exception):
    """Files that make no TLS; the message names them."""


def http_context(*, certificate: Path, key: Path, client_ca: Path | None) -> ssl.SSLContext:
    """What the HTTP door greets its callers with. Raises: UnusableCertificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _check_certificates(certificate, "certificate")
    try:
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except (OSError, _HasPassword) as error:
        raise UnusableCertificate(f"{key} is not the key of the certificate {certificate}: {_reason(error)}") from None
    if client_ca is not None:
        _check_certificates(client_ca, "certificate of an authority")
        context.load_verify_locations(client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def grpc_credentials(*, certificate: Path, key: Path, client_ca: Path | None) -> grpc.ServerCredentials:
    """The same for gRPC, of files that ``http_context`` has taken. Raises: UnusableCertificate."""
    try:
        return grpc.ssl_server_credentials(
            [(key.read_bytes(), certificate.read_bytes())],
            root_certificates=None if client_ca is None else client_ca.read_bytes(),
            require_client_auth=client_ca is not None,
        )
    except OSError as error:
        raise UnusableCertificate(f"{error.filename} cannot be read: {error.strerror}") from None


class _HasPassword(Exception):
    """The key is encrypted; OpenSSL would ask whoever sits at the terminal."""


def _refuse_password() -> str:
    raise _HasPassword("it is encrypted, and a password is never asked for")


def _check_certificates(file: Path, what: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(file)
    except OSError as error:
        raise UnusableCertificate(f"{file} holds no {what} in PEM: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    return getattr(error, "strerror", None) or str(error)
