"""Arrays of every kind to bytes and back."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from service.client.arrays import LISTS, NUMPY, Flat, TorchKind, exact_flat, flat_of, is_torch, kind_of, shape_of

DTYPES = ("float64", "float32", "float16", "bfloat16", "bool", "int64", "int32")
CPU = TorchKind(torch.device("cpu"))


def numbers(*shape: int, dtype: str) -> np.ndarray[Any, Any]:
    whole = np.arange(int(np.prod(shape))) % 7
    return whole.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype).reshape(shape)


def tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


@pytest.mark.parametrize("shape", [(2, 3, 4), (1,), (), (2, 0, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_numbers_have_the_same_bytes_in_numpy_and_torch(dtype: str, shape: tuple[int, ...]) -> None:
    array = numbers(*shape, dtype=dtype)
    one, other = flat_of("x", array), flat_of("x", tensor_of(array))
    assert one.dtype == other.dtype == dtype and one.shape == other.shape == shape
    assert bytes(one.data) == bytes(other.data) == array.tobytes()


@pytest.mark.parametrize("shape", [(2, 3, 4), (1,), (), (2, 0, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_travels_comes_back_as_it_was(dtype: str, shape: tuple[int, ...]) -> None:
    array = numbers(*shape, dtype=dtype)
    room = memoryview(bytearray(array.tobytes()))
    back = NUMPY.made(dtype, shape, room)
    assert back.dtype == array.dtype and back.shape == shape and np.array_equal(back, array)
    tensor = CPU.made(dtype, shape, room)
    assert torch.equal(tensor, tensor_of(array)) and tensor.dtype == tensor_of(array).dtype
    assert LISTS.made(dtype, shape, room) == array.tolist()


def test_a_contiguous_array_is_sent_from_where_it_lies() -> None:
    array, tensor = np.zeros(6, dtype=np.float32), torch.zeros(2, 3)
    for flat, change in ((flat_of("x", array), array), (flat_of("x", tensor), tensor)):
        change.reshape(-1)[0] = 1.0
        assert bytes(flat.data[:4]) == np.float32(1.0).tobytes()


def test_an_answer_is_a_view_of_what_was_received_and_may_be_written_to() -> None:
    room = bytearray(16)
    array, tensor = NUMPY.made("float32", (4,), memoryview(room)), CPU.made("float32", (4,), memoryview(room))
    array[0] = 1.0
    tensor[1] = 1.0
    assert array.tolist() == tensor.tolist() == [1.0, 1.0, 0.0, 0.0]


def strided(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [
        tensor.transpose(0, 1),
        tensor.permute(2, 0, 1),
        tensor[:, ::2],
        tensor[..., 1:],
        tensor[:1].expand(5, -1, -1),
        tensor.unfold(2, 2, 1),
        tensor.flip(0),
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.int32])
@pytest.mark.parametrize("place", range(7))
def test_strides_of_a_tensor_change_nothing(dtype: torch.dtype, place: int) -> None:
    tensor = strided(torch.arange(24).reshape(2, 3, 4).to(dtype))[place]
    flat = flat_of("x", tensor)
    assert torch.equal(CPU.made(flat.dtype, flat.shape, memoryview(bytearray(flat.data))), tensor)


@pytest.mark.parametrize("change", [lambda a: a.T, lambda a: a[::-1], lambda a: a[:, ::2], np.asfortranarray])
@pytest.mark.parametrize("dtype", [*DTYPES, ">f4", ">i8"])
def test_strides_and_byte_order_of_an_array_change_nothing(dtype: str, change: Any) -> None:
    array = change(numbers(4, 6, dtype=dtype))
    flat = flat_of("x", array)
    assert flat.dtype == array.dtype.name and flat.shape == array.shape
    assert NUMPY.made(flat.dtype, flat.shape, memoryview(bytearray(flat.data))).tolist() == array.tolist()


def test_views_that_negate_by_a_bit_and_tensors_with_gradients_are_sent_as_they_show() -> None:
    negated = torch.view_as_complex(torch.ones(3, 2)).conj().imag
    whole = torch._neg_view(torch.ones(3))
    assert negated.is_neg() and whole.is_neg() and whole.is_contiguous()
    for tensor in (
        negated,
        whole,
        torch.full((3,), -1.0, requires_grad=True),
        torch.nn.Parameter(torch.full((3,), -1.0)),
    ):
        assert bytes(flat_of("x", tensor).data) == np.full(3, -1.0, dtype=np.float32).tobytes()


@pytest.mark.cuda
def test_tensors_leave_from_and_come_back_to_their_device() -> None:
    tensor = torch.arange(24.0, device="cuda").reshape(2, 3, 4).transpose(0, 2)
    flat, kind = flat_of("x", tensor), kind_of("x", tensor)
    back = kind.made(flat.dtype, flat.shape, memoryview(bytearray(flat.data)))
    assert back.device == tensor.device and torch.equal(back, tensor)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "query: a numpy array, a torch tensor or nested lists, not NoneType"),
        (1.5, "not float"),
        (np.float32(1), "not float32"),
        ({1, 2}, "not set"),
        (np.array(["a"]), "str32 does not travel"),
        (np.array([object()]), "object does not travel"),
        (np.zeros(2, dtype=np.complex128), "complex128 does not travel"),
        (np.ma.masked_array([1.0], [True]), "a masked array; give its numbers"),
        (torch.zeros(2, device="meta"), "a tensor on meta; give a dense one"),
        (torch.eye(2).to_sparse(), "a tensor with layout torch.sparse_coo"),
        (torch.zeros(2, dtype=torch.complex128), "complex128 does not travel"),
    ],
)
def test_what_is_no_array_is_told_before_anything_is_sent(value: Any, said: str) -> None:
    with pytest.raises(TypeError) as caught:
        kind_of("query", value) and flat_of("query", value)
    assert said in str(caught.value)


def test_the_kind_that_came_is_the_kind_that_goes_back() -> None:
    assert kind_of("x", np.zeros(1)) is NUMPY
    assert kind_of("x", [[1.0]]) is kind_of("x", (1.0,)) is LISTS
    assert kind_of("x", torch.zeros(1)) == CPU


@pytest.mark.parametrize(
    ("lists", "shape"),
    [([[1, 2, 3]], (1, 3)), ([], (0,)), ([[], []], (2, 0)), (((1, 2), (3, 4)), (2, 2)), ([[1], 2], (2, 1))],
)
def test_lists_have_the_shape_of_their_first_members(lists: Any, shape: tuple[int, ...]) -> None:
    assert shape_of("x", lists) == shape


def as_flat(value: Any, *, is_mask: bool) -> Flat:
    flat = exact_flat(value, is_mask=is_mask)
    assert flat is not None
    return flat


def test_lists_that_say_a_mask_or_whole_numbers_exactly_become_arrays() -> None:
    mask = as_flat([[True, False], [np.False_, True]], is_mask=True)
    assert (mask.dtype, mask.shape, bytes(mask.data)) == ("bool", (2, 2), b"\1\0\0\1")
    lengths = as_flat([3, np.int32(5), -(2**63)], is_mask=False)
    assert (lengths.dtype, lengths.shape) == ("int64", (3,))
    assert np.frombuffer(lengths.data, np.int64).tolist() == [3, 5, -(2**63)]


@pytest.mark.parametrize(
    ("value", "is_mask"),
    [
        ([[True], [True, False]], True),
        ([[True], True], True),
        ([True, 1], True),
        ([0, 1], True),
        ([], True),
        ([[[]]], False),
        ([1.0], False),
        ([True], False),
        ([2**63], False),
        ([2**70], False),
        (["1"], False),
        ([None], False),
    ],
)
def test_lists_that_do_not_are_left_for_the_service_to_name_the_place(value: Any, is_mask: bool) -> None:
    assert exact_flat(value, is_mask=is_mask) is None


def test_a_tensor_is_recognised_without_importing_torch() -> None:
    program = (
        "import sys, numpy as np\n"
        "from service.client.arrays import is_torch, flat_of\n"
        "assert not is_torch(np.zeros(1)) and flat_of('x', np.zeros(1)).dtype == 'float64'\n"
        "assert 'torch' not in sys.modules and 'ml_dtypes' not in sys.modules\n"
        "sys.modules['torch'] = object()\n"
        "assert not is_torch(np.zeros(1))\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert is_torch(torch.zeros(1)) and is_torch(torch.nn.Parameter(torch.zeros(1)))
