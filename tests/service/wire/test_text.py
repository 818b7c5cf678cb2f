"""JSON text in: both roads give the same answer, and neither takes what is not certain."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_core import InvalidProblem
from service.errors import Malformed
from service.wire import text
from service.wire.text import ListFault, NestedList, read_object

HAS_SIMDJSON = importlib.util.find_spec("simdjson") is not None
FIELDS = frozenset({"query", "bias"})
OTHERS = frozenset({"m", "n", "bad", "half", "window", "causal"})


@pytest.fixture(params=["simdjson", "orjson"])
def road(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each road by itself; without pysimdjson there is only the slower one."""
    if request.param == "orjson":
        monkeypatch.setattr(text, "simdjson", None)
    elif not HAS_SIMDJSON:
        pytest.skip("no pysimdjson for this Python")
    return str(request.param)


def numbers_of(body: bytes) -> tuple[list[float], tuple[int, ...]]:
    members, repeated = read_object(body, FIELDS, OTHERS)
    assert not repeated
    node = members["query"]
    assert isinstance(node, NestedList)
    flat, shape = node.numbers()
    return flat.tolist(), shape


@pytest.mark.parametrize(
    ("body", "flat", "shape"),
    [
        (b'{"query": [1, 2.5, -3e2]}', [1.0, 2.5, -300.0], (3,)),
        (b'{"query": [[1, 2], [3, 4], [5, 6]]}', [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], (3, 2)),
        (b'{"query": [[[[0.1]]]]}', [0.1], (1, 1, 1, 1)),
        (b'{"query": [18446744073709551615, 9007199254740993]}', [2.0**64, 2.0**53], (2,)),
        (b'{"query": [12345678901234567890123, 1]}', [12345678901234567890123.0, 1.0], (2,)),
        (b'{"query": [1e-400, 5e-324]}', [0.0, 5e-324], (2,)),
        (b'{"query": [1], "note": "brackets [ in [ a text"}', [1.0], (1,)),
        (b'{"query": [1], "window": {"left": 1, "right": null}}', [1.0], (1,)),
    ],
)
def test_numbers_and_shape_are_the_same_on_both_roads(
    road: str, body: bytes, flat: list[float], shape: tuple[int, ...]
) -> None:
    assert numbers_of(body) == (flat, shape)


def test_nan_and_infinities_are_strings(road: str) -> None:
    flat, shape = numbers_of(b'{"query": [["NaN", 1], ["Infinity", "-Infinity"]]}')
    assert shape == (2, 2)
    assert np.isnan(flat[0])
    assert flat[1:] == [1.0, np.inf, -np.inf]


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (b'{"query": [[1, 2], [3]]}', "1"),
        (b'{"query": [[[1, 2], [3, 4]], [[5, 6], [7]]]}', "1.1"),
        (b'{"query": [[1, 2], 3]}', "1"),
        (b'{"query": [[1, [2]], [3, 4]]}', "0.1"),
        (b'{"query": [1, [2]]}', "1"),
        (b'{"query": [[[1], [2]], [[3, 4]]]}', "1"),
        (b'{"query": [1, true]}', "1"),
        (b'{"query": [1, null]}', "1"),
        (b'{"query": [1, "nan"]}', "1"),
        (b'{"query": [1, {"a": 1}]}', "1"),
        (b'{"query": [[], []]}', "0"),
        (b'{"query": []}', ""),
        (b'{"query": [1, 1e400]}', "1"),
        (b'{"query": [1, ' + b"9" * 400 + b"]}", "1"),
        (b'{"query": [1.5, ' + b"9" * 5000 + b"]}", "1"),
    ],
)
def test_a_list_that_is_no_tensor_is_refused_at_its_place(road: str, body: bytes, path: str) -> None:
    members, _ = read_object(body, FIELDS, OTHERS)
    with pytest.raises(ListFault) as caught:
        members["query"].numbers()
    assert [misfit.field for misfit in caught.value.misfits] == [path]


def test_every_misfit_of_a_list_is_named_up_to_fifty(road: str) -> None:
    members, _ = read_object(b'{"query": [[1, true], [null, "x"], [2], 3], "bias": [[1], [2]]}', FIELDS, OTHERS)
    with pytest.raises(ListFault) as caught:
        members["query"].numbers()
    assert [misfit.field for misfit in caught.value.misfits] == ["0.1", "1.0", "1.1", "2", "3"]
    assert members["bias"].numbers()[1] == (2, 1)
    members, _ = read_object(json.dumps({"query": [[None] * 30] * 30}).encode(), FIELDS, OTHERS)
    with pytest.raises(ListFault) as caught:
        members["query"].numbers()
    assert len(caught.value.misfits) == 50


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"query": [1, 2}', b'{"query": 01}', b"\xff\xfe", b'{"a": "\\ud800"}', b"[" * 5000, b"{} x"],
)
def test_what_is_not_json_is_malformed(road: str, body: bytes) -> None:
    with pytest.raises(Malformed):
        read_object(body, FIELDS, OTHERS)


def test_a_byte_order_mark_is_malformed(road: str) -> None:
    with pytest.raises(Malformed, match="byte order mark"):
        read_object(b'\xef\xbb\xbf{"query": [1]}', FIELDS, OTHERS)


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_bare_words_are_malformed_with_the_advice(road: str, word: str) -> None:
    with pytest.raises(Malformed) as caught:
        read_object(f'{{"query": [1, {word}]}}'.encode(), FIELDS, OTHERS)
    assert '"NaN"' in caught.value.faults[0].expected


@pytest.mark.parametrize("body", [b"[1]", b"1", b'"x"', b"null", b"true"])
def test_json_that_is_no_object_is_invalid(road: str, body: bytes) -> None:
    with pytest.raises(InvalidProblem):
        read_object(body, FIELDS, OTHERS)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"query": [1], "query": [1]}', "query"),
        (b'{"scale": 1, "query": [1], "scale": 2}', "scale"),
        (b'{"window": {"left": 1, "left": 2}}', "window.left"),
        (b'{"query": {"dtype": "float32", "shape": [1], "data": "", "data": ""}}', "query.data"),
        (b'{"a\\"b": 1, "a\\"b": 2}', 'a"b'),
        (b'{"x": {"y": {"z": 1, "z": 2}}}', "x.y.z"),
        (b'{"x": [[1], [{"z": 1, "z": 2}]]}', "x.1.0.z"),
    ],
)
def test_a_repeated_name_is_found(road: str, body: bytes, name: str) -> None:
    _, repeated = read_object(body, FIELDS, OTHERS)
    assert [fault.field for fault in repeated] == [name]


@given(st.text(), st.text(alphabet='":\\[]{}, '))
def test_names_and_texts_never_look_like_repetitions(key: str, value: str) -> None:
    body = json.dumps({"query": [1, "NaN"], f"k{key}": value, "other": [value, key]}).encode()
    assert text._read_slowly(body)[1] == []


nested = st.recursive(
    st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.integers(-(2**63), 2**63 - 1)),
    lambda children: st.lists(children, min_size=1, max_size=3),
    max_leaves=12,
)


@given(nested.filter(lambda node: isinstance(node, list)))
def test_any_nesting_is_read_alike_or_refused_alike_on_both_roads(node: Any) -> None:
    body = json.dumps({"query": node}).encode()
    outcomes: list[object] = []
    for members in (read_object(body, FIELDS, OTHERS)[0], text._read_slowly(body)[0]):
        try:
            flat, shape = members["query"].numbers()
            outcomes.append((flat.tolist(), shape))
        except ListFault as fault:
            outcomes.append(fault.misfits)
    assert outcomes[0] == outcomes[1]


def test_many_members_are_not_looked_for_one_by_one() -> None:
    members = {f"a{number}": 1 for number in range(text._MAX_FAST_NAMES + 1)}
    body = json.dumps(members).encode()
    assert text._read_fast(body, frozenset(), frozenset()) is None
    assert read_object(body, frozenset(), frozenset()) == (members, [])


def test_more_members_than_any_call_has_are_refused_by_their_number() -> None:
    body = json.dumps({f"a{number}": [] for number in range(text.MAX_MEMBERS + 1)}).encode()
    with pytest.raises(InvalidProblem, match=f"at most {text.MAX_MEMBERS} members.*received {text.MAX_MEMBERS + 1}"):
        read_object(body, frozenset(), frozenset())


def test_long_lists_take_the_fast_road() -> None:
    if not HAS_SIMDJSON:
        pytest.skip("no pysimdjson for this Python")
    body = json.dumps({"query": np.arange(600.0).reshape(2, 3, 100).tolist(), "causal": True}).encode()
    members = text._read_fast(body, FIELDS, OTHERS)
    assert members is not None
    assert members["query"].numbers()[1] == (2, 3, 100)


def test_booleans_and_whole_numbers_are_nothing_else(road: str) -> None:
    members, _ = read_object(
        b'{"m": [[true, false]], "n": [1, 2], "bad": [[true, 1]], "half": [1, 2.0]}', FIELDS, OTHERS
    )
    assert members["m"].booleans()[0].tolist() == [True, False]
    assert members["n"].whole_numbers()[0].tolist() == [1, 2]
    for name, read in (("bad", "booleans"), ("n", "booleans"), ("half", "whole_numbers"), ("m", "whole_numbers")):
        with pytest.raises(ListFault):
            getattr(members[name], read)()
