"""TLS from files: whatever makes none is refused at the start, by the file's name."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from service.doors.tls import UnusableCertificate, grpc_credentials, http_context
from tests.support.certificates import Authority, Certificate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder)


@pytest.fixture(scope="module")
def certificate(authority: Authority) -> Certificate:
    return authority.sign("server")


def test_callers_show_a_certificate_only_where_authorities_for_them_are_set(
    authority: Authority, certificate: Certificate
) -> None:
    files = {"certificate": certificate.file, "key": certificate.key_file}
    assert http_context(**files, client_ca=None).verify_mode is ssl.CERT_NONE
    assert http_context(**files, client_ca=authority.file).verify_mode is ssl.CERT_REQUIRED
    assert grpc_credentials(**files, client_ca=authority.file)


def test_nothing_older_than_tls_1_2_is_spoken(certificate: Certificate) -> None:
    context = http_context(certificate=certificate.file, key=certificate.key_file, client_ca=None)
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize("which", ["certificate", "key", "client_ca"])
@pytest.mark.parametrize("wrong", ["empty", "noise", "gone", "another"])
def test_a_file_that_is_none_is_named(
    folder: Path, authority: Authority, certificate: Certificate, which: str, wrong: str
) -> None:
    files = {"certificate": certificate.file, "key": certificate.key_file, "client_ca": authority.file}
    other = folder / "other.pem"
    other.unlink(missing_ok=True)
    if wrong == "another":
        other.write_bytes(certificate.pem if which == "key" else certificate.key_pem)
    elif wrong != "gone":
        other.write_bytes(b"" if wrong == "empty" else b"\xff\x00noise")
    with pytest.raises(UnusableCertificate) as caught:
        http_context(**files | {which: other})
    assert str(other) in str(caught.value)


def test_the_key_of_another_certificate_is_refused(authority: Authority, certificate: Certificate) -> None:
    other = authority.sign("other")
    with pytest.raises(UnusableCertificate, match="key values mismatch"):
        http_context(certificate=certificate.file, key=other.key_file, client_ca=None)


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(authority: Authority) -> None:
    locked = authority.sign("locked", password=b"secret")
    with pytest.raises(UnusableCertificate, match="encrypted"):
        http_context(certificate=locked.file, key=locked.key_file, client_ca=None)


def test_a_file_that_went_is_named_for_grpc_too(folder: Path, certificate: Certificate) -> None:
    with pytest.raises(UnusableCertificate, match=r"gone\.pem"):
        grpc_credentials(certificate=folder / "gone.pem", key=certificate.key_file, client_ca=None)
