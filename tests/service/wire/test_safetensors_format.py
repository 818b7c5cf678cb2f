"""safetensors both ways: read in place, bytes, offsets and sizes in agreement, or refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from attn_core import AttentionProblem, InvalidProblem
from service.errors import Malformed
from service.wire.requests import ATTENTION, ReadLimits
from service.wire.safetensors_format import decode, encode
from tests.support.bodies import safetensors_body

LIMITS = ReadLimits()
QUERY = {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}


def file_of(header: Any, data: bytes = bytes(8)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def with_options(options: Any) -> bytes:
    text = options if isinstance(options, str) else json.dumps(options)
    return file_of({"query": QUERY, "__metadata__": {"options": text, "format": "pt"}})


def query_of(body: bytes | bytearray | memoryview) -> torch.Tensor:
    problem = decode(body, ATTENTION, LIMITS).problem
    assert isinstance(problem, AttentionProblem)
    return problem.query


def test_tensors_are_read_where_they_lie() -> None:
    body = np.frombuffer(safetensors_body({"query": torch.arange(8.0).view(2, 4)}, {}), dtype=np.uint8).copy()
    query = query_of(body.data)
    assert query.tolist() == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
    begin = body.ctypes.data
    assert begin < query.data_ptr() < begin + body.size


def test_tensors_at_odd_addresses_are_copied_and_equal() -> None:
    data = np.arange(2, dtype="<f4").tobytes()
    header = json.dumps({"query": QUERY}).encode()
    for padding in range(8):
        assert query_of(file_of(header + b" " * padding, data)).tolist() == [[0.0, 1.0]]


def test_every_dtype_and_a_shape_with_a_zero_travel() -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        tensors = {
            "query": torch.ones(2, 1, 3, 4, dtype=dtype),
            "key": torch.ones(2, 1, 0, 4, dtype=dtype),
            "value": torch.ones(2, 1, 0, 4, dtype=dtype),
            "key_lengths": torch.zeros(2, dtype=torch.int32),
            "allow_mask": torch.ones(1, 1, 3, 1, dtype=torch.bool),
        }
        problem = decode(safetensors_body(tensors, {}), ATTENTION, LIMITS).problem
        for name, tensor in tensors.items():
            assert torch.equal(getattr(problem, name), tensor)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        bytes(7),
        (100).to_bytes(8, "little") + b"{}",
        (2**62).to_bytes(8, "little") + b"{}",
        file_of(b"{"),
        file_of(b"[]"),
        file_of(b"\xff\xff"),
        file_of(b'{"query": NaN}'),
        file_of(b"[" * 3000),
        file_of({"query": QUERY}, bytes(9)),
        file_of({"query": QUERY}, bytes(7)),
        file_of({"query": QUERY | {"data_offsets": [0, 4]}}, bytes(4)),
        file_of({"query": QUERY | {"data_offsets": [4, 12]}}, bytes(12)),
        file_of({"query": QUERY | {"data_offsets": [8, 0]}}),
        file_of({"query": QUERY | {"data_offsets": [-8, 0]}}),
        file_of({"query": QUERY | {"data_offsets": [0]}}),
        file_of({"query": QUERY | {"data_offsets": [0, 8.0]}}),
        file_of({"query": QUERY | {"shape": [1, -2]}}),
        file_of({"query": QUERY | {"shape": [1, True]}}),
        file_of({"query": QUERY | {"shape": [4611686018427387906]}}),
        file_of({"query": QUERY | {"dtype": 1}}),
        file_of({"query": QUERY | {"more": 1}}),
        file_of({"query": [1]}),
        file_of({"query": QUERY, "key": QUERY}),
        file_of(b' {"query": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}}'),
        file_of({"query": QUERY, "__metadata__": {"options": 1}}),
        file_of({"query": QUERY, "__metadata__": []}),
        with_options("{"),
        with_options('{"scale": NaN}'),
    ],
)
def test_what_is_not_safetensors_is_malformed(body: bytes) -> None:
    with pytest.raises(Malformed):
        decode(body, ATTENTION, LIMITS)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (file_of({"query": QUERY, "__metadata__": {"note": "x"}}), "__metadata__.note"),
        (file_of(b'{"query": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}, "query": null}'), "query"),
        (file_of(b'{"query": {"dtype": "F32", "dtype": "F32"}}'), "query.dtype"),
        (file_of({"query": QUERY | {"dtype": "F8_E4M3", "shape": [8]}}), "query.dtype"),
        (file_of({"query": QUERY | {"dtype": "XX"}}), "query.dtype"),
        (file_of({"query": QUERY, "scale": QUERY | {"shape": [2], "data_offsets": [8, 16]}}, bytes(16)), "scale"),
        (file_of({"quary": QUERY}), "quary"),
        (with_options("[]"), "options"),
        (with_options('{"scale": 1, "scale": 2}'), "scale"),
        (with_options({"key": [[1.0]]}), "key"),
        (with_options({"query_offset": 1.0}), "query_offset"),
        (with_options({"dtype": "float32"}), "dtype"),
        (with_options({"encoding": "list"}), "encoding"),
        (with_options({"is_causal": True}), "is_causal"),
    ],
)
def test_a_readable_file_without_meaning_is_refused(body: bytes, field: str) -> None:
    with pytest.raises(InvalidProblem) as caught:
        decode(body, ATTENTION, LIMITS)
    assert field in [fault.field for fault in caught.value.faults]


def test_query_offset_may_be_a_number_among_the_options() -> None:
    problem = decode(with_options({"query_offset": 3, "causal": True}), ATTENTION, LIMITS).problem
    assert isinstance(problem, AttentionProblem)
    assert problem.query_offset is not None
    assert problem.query_offset.tolist() == [3]


def test_bytes_of_a_mask_are_zero_or_one() -> None:
    header = {"query": QUERY, "allow_mask": {"dtype": "BOOL", "shape": [1], "data_offsets": [8, 9]}}
    with pytest.raises(InvalidProblem) as caught:
        decode(file_of(header, bytes(8) + b"\x02"), ATTENTION, LIMITS)
    assert [fault.field for fault in caught.value.faults] == ["allow_mask"]


@given(st.binary(max_size=200), st.integers(0, 60), st.integers(0, 255))
def test_no_bytes_do_anything_but_be_refused(noise: bytes, place: int, byte: int) -> None:
    damaged = bytearray(safetensors_body({"query": torch.ones(1, 2)}, {"causal": True}))
    damaged[place] = byte
    for body in (noise, bytes(damaged), bytes(damaged[: len(damaged) - place])):
        try:
            decode(body, ATTENTION, LIMITS)
        except (Malformed, InvalidProblem) as error:
            assert error.faults


def test_answers_are_read_by_the_format_s_own_library() -> None:
    outputs = {
        "context": torch.randn(2, 3, dtype=torch.float64),
        "weights": torch.randn(2, 2).to(torch.bfloat16),
        "top_keys": torch.tensor([[1, -1]]),
        "scores": torch.empty(0, 4),
    }
    pieces = encode(outputs, {"path": "manual"})
    content = b"".join(pieces)
    back = safetensors.torch.load(content)
    assert back.keys() == outputs.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in outputs.items())
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    assert json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["info"]) == {"path": "manual"}


def test_answers_are_not_copied() -> None:
    context = torch.randn(4, 8)
    data = encode({"context": context}, {})[1]
    assert np.frombuffer(data, dtype=np.uint8).ctypes.data == context.data_ptr()
