"""Keys: one of them lets its bearer in, and nothing is ever said about another."""

from __future__ import annotations

import hmac
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.authentication import Authentication
from service.errors import Unauthenticated

KEYS = ("first-key", "second:key=", "~third")
KEY_CHARACTERS = "".join(sorted(set(string.printable) - set(string.whitespace) - {","}))


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "bEaReR"])
def test_each_key_lets_in_by_either_header(key: str, scheme: str) -> None:
    authentication = Authentication(KEYS)
    authentication.check(f"{scheme} {key}", None)
    authentication.check(f"{scheme}   {key} ", None)
    authentication.check(None, key)


def test_one_known_key_is_enough() -> None:
    authentication = Authentication(KEYS)
    authentication.check("Bearer wrong", KEYS[0])
    authentication.check(f"Bearer {KEYS[1]}", "wrong")
    authentication.check("Basic dXNlcjpwYXNz", KEYS[2])


@pytest.mark.parametrize(
    ("authorization", "api_key"),
    [
        ("Bearer wrong", None),
        ("Bearer", None),
        ("Bearer ", None),
        ("Bearer first-ke", None),
        ("Bearer first-keyy", None),
        ("Bearer FIRST-KEY", None),
        ("Bearer first-key,second:key=", None),
        ("Bearer Bearer first-key", None),
        ("Bearer\tfirst-key", None),
        ("first-key", None),
        ("Basic first-key", None),
        ("Token first-key", None),
        (None, ""),
        (None, " first-key"),
        (None, "Bearer first-key"),
        ("", ""),
        ("Bearer k\xe9y", "\xff\xfe"),
        ("Bearer \ud800", "\udfff"),
        ("Bearer " + "a" * 100_000, "b" * 100_000),
    ],
)
def test_whatever_is_no_key_is_refused(authorization: str | None, api_key: str | None) -> None:
    with pytest.raises(Unauthenticated):
        Authentication(KEYS).check(authorization, api_key)


@pytest.mark.parametrize("nothing", [(None, None), ("", None), ("Basic dXNlcjpwYXNz", None)])
def test_a_refusal_tells_no_key_from_a_wrong_one_and_how_to_send_one(nothing: tuple[str | None, str | None]) -> None:
    authentication = Authentication(KEYS)
    with pytest.raises(Unauthenticated, match=r"^no key was sent: .*Bearer.*x-api-key"):
        authentication.check(*nothing)
    with pytest.raises(Unauthenticated, match=r"^the key that was sent is not known: .*Bearer.*x-api-key"):
        authentication.check("Bearer wrong", None)


@given(st.text(KEY_CHARACTERS, min_size=1), st.text(max_size=40), st.text(max_size=40))
def test_only_a_key_lets_in_and_none_is_ever_shown(key: str, authorization: str, api_key: str) -> None:
    key = f"secret-{key}"
    authentication = Authentication([key])
    authentication.check(f"Bearer {key}", api_key)
    with pytest.raises(Unauthenticated) as caught:
        authentication.check(authorization, api_key)
    assert key not in str(caught.value)
    assert key not in repr(vars(authentication))


def test_without_keys_everybody_may_call() -> None:
    authentication = Authentication(())
    assert not authentication.is_required
    authentication.check(None, None)
    authentication.check("Bearer whatever", "whatever")


@pytest.mark.parametrize("key", [*KEYS, "wrong"])
def test_a_key_is_compared_with_all_of_them_in_constant_time(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def counted(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return real(one, other)

    authentication = Authentication(KEYS)
    monkeypatch.setattr(hmac, "compare_digest", counted)
    try:
        authentication.check(f"Bearer {key}", None)
    except Unauthenticated:
        assert key == "wrong"
    assert compared == [(32, 32)] * len(KEYS)
