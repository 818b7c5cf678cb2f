"""JSON both ways: numbers are rounded once, and answers give the same bits back in the fewest digits."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attn_core import InvalidProblem
from attn_core.validate import dtype_text
from service.wire import arrays, json_arrays
from service.wire.arrays import FlatTensor, Limits
from service.wire.json_format import decode, encode
from service.wire.requests import ATTENTION, WEIGHTED_SUM, ReadLimits
from service.wire.tensors import tensor_of
from tests.support.bodies import as_lists, read_tensor, strict_json

HALF_TYPES = (torch.float16, torch.bfloat16)
LIMITS = ReadLimits()


def round_numbers(
    numbers: np.ndarray[tuple[int, ...], np.dtype[np.float64]], dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    name = dtype_text(dtype)
    return tensor_of(FlatTensor(name, shape, arrays.round_numbers(numbers, name)))


def nearest(number: float, dtype: torch.dtype) -> float:
    """Half to even by exact fractions, over every number of a half type."""
    finite = all_halves(dtype)
    index = int(np.searchsorted(finite, number))
    around = finite[max(0, index - 1) : index + 1]
    distances = [abs(Fraction(float(candidate)) - Fraction(number)) for candidate in around]
    if len(around) == 2 and distances[0] == distances[1]:
        bits = torch.tensor(around).to(dtype).view(torch.int16)
        return float(around[0] if int(bits[0]) % 2 == 0 else around[1])
    return (
        float(around[int(np.argmin([float(d) for d in distances]))])
        if len(around) == 1
        else float(around[0] if distances[0] < distances[1] else around[1])
    )


def all_halves(dtype: torch.dtype) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).double().numpy()
    return np.unique(every[np.isfinite(every)])


@pytest.mark.parametrize("dtype", HALF_TYPES)
@given(number=st.floats(-60000, 60000))
def test_numbers_are_rounded_once(dtype: torch.dtype, number: float) -> None:
    (rounded,) = round_numbers(np.array([number]), dtype, (1,)).double().tolist()
    assert rounded == nearest(number, dtype)


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_numbers_beside_a_tie_are_not_rounded_by_way_of_float32(dtype: torch.dtype) -> None:
    finite = all_halves(dtype)
    finite = finite[(finite > 1e-3) & (finite < 1e3)]
    ties = (finite[:-1] + finite[1:]) / 2
    for numbers in (np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf)):
        rounded = round_numbers(numbers.copy(), dtype, numbers.shape).double().numpy()
        wanted = np.where(numbers > ties, finite[1:], finite[:-1])
        assert (rounded == wanted).all()


@pytest.mark.parametrize(
    ("dtype", "largest", "beyond"),
    [("float16", 65519.99, 65520.0), ("bfloat16", 3.3961775e38, 3.3962e38), ("float32", 3.4028235e38, 3.5e38)],
)
def test_a_number_that_would_round_to_infinity_is_refused(dtype: str, largest: float, beyond: float) -> None:
    decode(json.dumps({"query": [[largest, -largest]], "dtype": dtype}).encode(), ATTENTION, LIMITS)
    with pytest.raises(InvalidProblem) as caught:
        decode(json.dumps({"query": [[1.0, -beyond]], "dtype": dtype}).encode(), ATTENTION, LIMITS)
    assert [fault.field for fault in caught.value.faults] == ["query.0.1"]


def listed(tensor: Tensor) -> str:
    content = b"".join(encode({"context": tensor}, {}, "list"))
    strict_json(content)
    return content.decode().removeprefix('{"context":').removesuffix(',"info":{}}')


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_every_half_number_comes_back_with_the_same_bits(dtype: torch.dtype) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = every[torch.isfinite(every)]
    numbers = np.array(json.loads(listed(finite)), dtype=np.float64)
    back = round_numbers(numbers, dtype, numbers.shape)
    assert torch.equal(back.view(torch.int16), finite.view(torch.int16))


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_no_shorter_decimal_gives_a_half_number_back(dtype: torch.dtype) -> None:
    every = torch.arange(1, 2**15, 37, dtype=torch.int16).view(dtype)
    finite = every[torch.isfinite(every)]
    for exact, written in zip(finite.double().tolist(), json.loads(listed(finite)), strict=True):
        digits = len(repr(written).replace(".", "").replace("-", "").lstrip("0").split("e")[0].rstrip("0")) or 1
        if digits > 1:
            shorter = float(f"{exact:.{digits - 2}e}")
            (rounded,) = round_numbers(np.array([shorter]), dtype, (1,)).double().tolist()
            assert rounded != exact or len(repr(shorter)) >= len(repr(written))


def test_a_number_no_longer_than_its_shortest_form_is_written_exactly() -> None:
    assert listed(torch.tensor([65504.0, 0.1, 2048.0], dtype=torch.float16)) == "[65504.0,0.1,2048.0]"


@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_float32_comes_back_with_the_same_bits(numbers: list[float]) -> None:
    tensor = torch.tensor(numbers, dtype=torch.float32)
    back = read_tensor(json.loads(listed(tensor)), torch.float32)
    assert torch.equal(back.isnan(), tensor.isnan())
    assert torch.equal(back.nan_to_num(0.0).view(torch.int32), tensor.nan_to_num(0.0).view(torch.int32))


def test_what_json_cannot_say_is_said_in_order() -> None:
    tensor = torch.tensor([[math.nan, 1.0, math.inf], [-math.inf, -math.inf, math.nan]])
    assert listed(tensor) == '[["NaN",1.0,"Infinity"],["-Infinity","-Infinity","NaN"]]'
    assert listed(torch.tensor([-math.inf, -0.0])) == '["-Infinity",-0.0]'
    assert listed(torch.tensor([0, -1])) == "[0,-1]"


def test_long_tensors_are_written_in_pieces_to_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = {"a": torch.randn(3, 4, 50, generator=generator), "b": torch.randn(7, dtype=torch.float64)}
    for encoding in ("list", "base64"):
        whole = b"".join(encode(outputs, {"x": 1}, encoding))
        monkeypatch.setattr(json_arrays, "LIST_PIECE_ELEMENTS", 16)
        monkeypatch.setattr(json_arrays, "BASE64_PIECE_BYTES", 12)
        monkeypatch.setattr(json_arrays, "SHORT_TEXT_BYTES", 1)
        pieces = encode(outputs, {"x": 1}, encoding)
        monkeypatch.undo()
        assert len(pieces) > 10
        assert b"".join(pieces) == whole


def test_a_shape_with_a_zero_is_written_as_an_object() -> None:
    answer = strict_json(b"".join(encode({"context": torch.empty(1, 2, 0, 3)}, {}, "list")))
    assert answer["context"] == {"dtype": "float32", "shape": [1, 2, 0, 3], "data": ""}


OBJECT = {"dtype": "float32", "shape": [1, 2], "data": "AAAAAAAAgD8="}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"dtype": "float8"}, "query.dtype"),
        ({"dtype": None}, "query.dtype"),
        ({"shape": [1, 2.0]}, "query.shape"),
        ({"shape": [True, 2]}, "query.shape"),
        ({"shape": "x"}, "query.shape"),
        ({"shape": [-1, -2]}, "query.shape"),
        ({"shape": [1] * 5}, "query.shape"),
        ({"shape": [2**40, 2**40]}, "query.shape"),
        ({"shape": [1, 3]}, "query.data"),
        ({"shape": [1, 0]}, "query.data"),
        ({"data": "AAAAAAAAgD8"}, "query.data"),
        ({"data": "AAAA*AAAgD8="}, "query.data"),
        ({"data": "AAAAAAAAgD-_"}, "query.data"),
        ({"data": "AAAA AAAAgD8="}, "query.data"),
        ({"data": "AAAAAAAAgD9="}, "query.data"),
        ({"data": 1}, "query.data"),
        ({"extra": 1}, "query.extra"),
    ],
)
def test_a_bad_tensor_object_is_refused_at_its_member(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidProblem) as caught:
        decode(json.dumps({"query": OBJECT | changes}).encode(), ATTENTION, LIMITS)
    assert field in [fault.field for fault in caught.value.faults]


def test_a_boolean_byte_is_zero_or_one() -> None:
    members = {"query": OBJECT, "allow_mask": {"dtype": "bool", "shape": [1], "data": "Ag=="}}
    with pytest.raises(InvalidProblem) as caught:
        decode(json.dumps(members).encode(), ATTENTION, LIMITS)
    assert [fault.field for fault in caught.value.faults] == ["allow_mask.data"]


def test_limits_on_elements_and_axes_hold_for_lists_too() -> None:
    body = json.dumps({"query": as_lists(torch.zeros(2, 5))}).encode()
    for limits in (Limits(max_tensor_elements=9), Limits(max_axis=4)):
        with pytest.raises(InvalidProblem) as caught:
            decode(body, ATTENTION, ReadLimits(tensors=limits))
        assert caught.value.faults[0].field == "query"


def test_weighted_sum_takes_its_own_names_alone() -> None:
    good = {"weights": [[0.5, 0.5]], "value": [[1.0], [3.0]]}
    decoded = decode(json.dumps(good).encode(), WEIGHTED_SUM, LIMITS)
    assert decoded.encoding == "list"
    with pytest.raises(InvalidProblem) as caught:
        decode(json.dumps(good | {"causal": True, "query": [[1.0]]}).encode(), WEIGHTED_SUM, LIMITS)
    assert [fault.field for fault in caught.value.faults] == ["causal", "query"]
