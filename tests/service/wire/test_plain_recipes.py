"""What a header says, remembered: the same tensors, and the same answer, as when it is read anew."""

from __future__ import annotations

import json
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from attn_core import Engine
from attn_core.placement import ALIGNMENT_BYTES
from attn_core.prepared import Prepared, prepare
from service.wire import plain_recipes
from service.wire.arrays import Limits
from service.wire.plain_recipes import MAX_HEADER_BYTES, MAX_RECIPES, PlainRecipe, PlainRecipes
from service.wire.requests import ATTENTION, DecodedRequest, ReadLimits
from service.wire.safetensors_format import decode
from tests.support.bodies import SAFETENSORS, read_answer, safetensors_body
from tests.support.factory import make_mask, make_tensor

LIMITS = ReadLimits(tensors=Limits(), max_timeout_s=60)


class Read:
    """A body whose data lie on a multiple of 64, read, and its header remembered if it is a plain one."""

    def __init__(self, tensors: dict[str, Tensor], options: dict[str, Any], *, device: str = "cpu") -> None:
        self.raw = safetensors_body(tensors, options)
        self.header_bytes = int.from_bytes(self.raw[:8], "little")
        self.header = self.raw[8 : 8 + self.header_bytes]
        room = torch.zeros(len(self.raw) + 2 * ALIGNMENT_BYTES, dtype=torch.uint8)
        self.start = -(room.data_ptr() + 8 + self.header_bytes) % ALIGNMENT_BYTES
        room[self.start : self.start + len(self.raw)] = torch.frombuffer(bytearray(self.raw), dtype=torch.uint8)
        self.decoded: DecodedRequest = decode(
            room.numpy().data[self.start : self.start + len(self.raw)], ATTENTION, LIMITS
        )
        self.prepared: Prepared = prepare(self.decoded.problem, device_type="cpu")
        self.recipes = PlainRecipes(device=device)
        self.recipes.remember(self.header, self.decoded, self.prepared)
        self.room = room

    @property
    def recipe(self) -> PlainRecipe | None:
        return self.recipes.get(self.header)


def operands(
    *shape: int, num_kv_heads: int | None = None, seq_len_kv: int | None = None, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    batch, num_heads, tokens, width = shape
    kv_shape = (batch, num_kv_heads or num_heads, seq_len_kv or tokens, width)
    shapes = {"query": shape, "key": kv_shape, "value": kv_shape}
    return {name: make_tensor(*size, seed=number, dtype=dtype) for number, (name, size) in enumerate(shapes.items())}


PLAIN: list[tuple[dict[str, Tensor], dict[str, Any]]] = [
    (operands(1, 2, 3, 16), {}),
    (operands(2, 4, 5, 64, num_kv_heads=2, seq_len_kv=8), {}),
    (operands(2, 4, 8, 16), {"causal": True}),
    (operands(1, 1, 8, 32, dtype=torch.float64), {"scale": -0.5}),
    (operands(1, 2, 16, 32, dtype=torch.float16), {"outputs": ["context"]}),
    (operands(1, 2, 16, 32, dtype=torch.bfloat16), {"layout": "bhtd"}),
    ({"query": make_tensor(2, 3, 4, 16)}, {}),
    ({"query": make_tensor(4, 16)}, {}),
    ({name: tensor[0] for name, tensor in operands(1, 2, 4, 16).items()}, {}),
    (operands(1, 2, 3, 16), {"timeout_ms": 500}),
]


@pytest.mark.parametrize(("tensors", "options"), PLAIN)
def test_a_recipe_finds_the_same_tensors(tensors: dict[str, Tensor], options: dict[str, Any]) -> None:
    read = Read(tensors, options)
    recipe = read.recipe
    assert recipe is not None
    assert recipe.timeout_s == (0.5 if "timeout_ms" in options else None)
    assert recipe.data_bytes == len(read.raw) - 8 - read.header_bytes
    dtype = recipe.form.dtype
    data_at = read.start + 8 + read.header_bytes
    memory = read.room[: read.room.numel() // 8 * 8]
    offset = -memory.data_ptr() % ALIGNMENT_BYTES
    flat = memory[offset:][: (memory.numel() - offset) // 8 * 8].view(dtype)
    numbers, *views = recipe.tensors(flat, (data_at - offset) // dtype.itemsize)
    assert sum(part.nbytes for part in numbers) == recipe.data_bytes
    sent = list(tensors.values()) if len(tensors) == 3 else [tensors["query"]] * 3
    for view, tensor in zip(views, sent, strict=True):
        assert view.dtype == tensor.dtype
        assert torch.equal(view, tensor.view(view.shape))
        assert view.data_ptr() % ALIGNMENT_BYTES == 0
        assert view.is_contiguous()


@pytest.mark.parametrize(("tensors", "options"), PLAIN)
@pytest.mark.parametrize("compute_s", [0.0, 1e-6, 1.23456e-3, 9.9999999, 1234.5])
def test_an_answer_begins_as_if_it_were_written_anew(
    tensors: dict[str, Tensor], options: dict[str, Any], compute_s: float
) -> None:
    read = Read(tensors, options)
    recipe = read.recipe
    assert recipe is not None
    result = Engine(device="cpu", max_threads=1).run([read.prepared])[0]
    assert not isinstance(result, Exception)
    context = result.outputs["context"]
    beginning = recipe.answer.beginning(queue_s=0.0, compute_s=compute_s, id_text=b"")
    assert len(beginning) % 8 == 0
    answer = beginning + context.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    outputs, info = read_answer(answer, SAFETENSORS, {})
    assert torch.equal(outputs["context"], context) and outputs["context"].shape == context.shape
    assert len(safetensors.torch.load(answer)) == 1
    assert len(answer) - len(beginning) == recipe.context_bytes
    assert info == {
        "path": result.path,
        "why": result.why,
        "device": "cpu",
        "dtype": str(recipe.form.dtype).removeprefix("torch."),
        "queue_ms": 0.0,
        "compute_ms": pytest.approx(compute_s * 1e3, abs=5e-4),
        "batch_requests": 1,
        "empty_rows": 0,
        "nonfinite_rows": 0,
        "peak_bytes": read.prepared.cost.peak_bytes,
        "flops": result.flops,
    }
    assert list(info) == [
        "path", "why", "device", "dtype", "queue_ms", "compute_ms", "batch_requests", "empty_rows", "nonfinite_rows",
        "peak_bytes", "flops",
    ]  # fmt: skip


def test_a_sign_of_percent_stays_one() -> None:
    recipe = Read(operands(1, 2, 3, 16), {}, device="100% %s %d").recipe
    assert recipe is not None
    answer = recipe.answer.beginning(queue_s=0.0, compute_s=1.0, id_text=b"") + bytes(recipe.context_bytes)
    assert read_answer(answer, SAFETENSORS, {})[1]["device"] == "100% %s %d"


@pytest.mark.parametrize(
    ("tensors", "options"),
    [
        (operands(1, 2, 3, 16) | {"allow_mask": make_mask(1, 1, 3, 3)}, {}),
        (operands(1, 2, 3, 16) | {"bias": make_tensor(1, 1, 3, 3)}, {}),
        (operands(1, 2, 3, 16) | {"sinks": make_tensor(2)}, {}),
        (operands(1, 2, 3, 16) | {"key_lengths": torch.tensor([2])}, {}),
        (operands(1, 2, 3, 16), {"outputs": ["context", "weights"]}),
        (operands(1, 2, 3, 16), {"outputs": ["logsumexp"]}),
        (operands(1, 2, 3, 16), {"path": "manual"}),
        (operands(1, 2, 3, 16), {"softcap": 2.0}),
        (operands(1, 2, 3, 16), {"window": {"left": 1}}),
        (operands(1, 2, 3, 16), {"layout": "bthd"}),
        (operands(1, 2, 3, 16, seq_len_kv=5), {"query_offset": 2, "causal": True}),
        # Data that would not begin where kernels want them.
        (operands(1, 1, 3, 7), {}),
        (operands(1, 1, 1, 8), {}),
        ({"query": torch.zeros(1, 2, 0, 16)}, {}),
    ],
)
def test_what_is_not_plain_is_read_anew_each_time(tensors: dict[str, Tensor], options: dict[str, Any]) -> None:
    assert Read(tensors, options).recipe is None


def test_a_long_header_is_read_anew_each_time() -> None:
    tensors = operands(1, 2, 3, 16)
    read = Read(tensors, {})
    for length, is_kept in ((MAX_HEADER_BYTES, True), (MAX_HEADER_BYTES + 1, False)):
        header = read.header + b" " * (length - len(read.header))
        read.recipes.remember(header, read.decoded, read.prepared)
        assert (read.recipes.get(header) is not None) == is_kept


def test_every_byte_of_a_header_counts() -> None:
    read = Read(operands(1, 2, 3, 16), {})
    assert read.recipe is not None
    assert read.recipes.get(read.header + b" ") is None
    assert read.recipes.get(read.header[:-1]) is None
    assert read.recipes.get(b"") is None
    assert json.loads(read.header)


def test_the_oldest_recipes_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_RECIPES >= 256
    monkeypatch.setattr(plain_recipes, "MAX_RECIPES", 3)
    read = Read(operands(1, 2, 3, 16), {})
    headers = [read.header + b" " * count for count in range(6)]
    for header in headers:
        read.recipes.remember(header, read.decoded, read.prepared)
    assert [read.recipes.get(header) is not None for header in headers] == [False] * 3 + [True] * 3
