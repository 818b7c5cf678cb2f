"""What a safetensors header says, remembered: the same header again means the same checks, kernel and cost.

Only the numbers differ between two requests of one shape, so a header that was checked once, and asks for nothing but
the context of query, key and value by one call of the fused kernel, is looked up the next time.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import orjson
import torch
from torch import Tensor

from attn_core.placement import ALIGNMENT_BYTES
from attn_core.prepared import PlainForm, Prepared
from attn_core.problem import AttentionOptions, AttentionProblem
from service.wire.answers import answer_info
from service.wire.requests import DecodedRequest
from service.wire.safetensors_format import CODE_OF

MAX_RECIPES = 1024
MAX_HEADER_BYTES = 2048
"""A longer header is read anew each time."""
Tensors = tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor]
"""All numbers, flat; then query, key and value of rank 4."""
_QUEUE_MS, _COMPUTE_MS = 314159.25, 271828.25
"""Stand in a template where numbers go that differ from answer to answer."""


@dataclass(frozen=True, slots=True, eq=False)
class PlainRecipe:
    """Where query, key and value lie behind a header, in elements, and how the answer begins."""

    form: PlainForm
    data_bytes: int
    num_elements: int
    query_at: int
    key_at: int
    value_at: int
    query_strides: tuple[int, ...]
    key_strides: tuple[int, ...]
    value_strides: tuple[int, ...]
    query_shape: tuple[int, ...]
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    options: AttentionOptions
    timeout_s: float | None
    context_bytes: int
    answer_header: bytes

    def tensors(self, flat: Tensor, start: int) -> Tensors:
        """All numbers, query, key and value, as views of ``flat`` whose data begin at element ``start``."""
        form = self.form
        query = flat.as_strided(form.query_shape, self.query_strides, start + self.query_at)
        numbers = (flat[start : start + self.num_elements],)
        if form.is_self_attention:
            return numbers, query, query, query
        key = flat.as_strided(form.key_shape, self.key_strides, start + self.key_at)
        value = flat.as_strided(form.value_shape, self.value_strides, start + self.value_at)
        return numbers, query, key, value

    def prepared(self, tensors: Tensors) -> Prepared:
        """The problem as the engine takes it: what the same header led to the last time, with these numbers."""
        form, (numbers, query, key, value) = self.form, tensors
        problem = AttentionProblem(
            query.view(self.query_shape),
            None if form.is_self_attention else key.view(self.key_shape),
            None if form.is_self_attention else value.view(self.value_shape),
            options=self.options,
        )
        return Prepared(problem, form.path, form.why, form.cost, plain=form, numbers=numbers)

    def head_of_answer(self, *, compute_s: float) -> bytes:
        """The length and the header of an answer that was computed at once; the context's bytes follow."""
        text = self.answer_header % (0.0, compute_s * 1e3)
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


class PlainRecipes:
    """The latest ``MAX_RECIPES`` recipes, by the bytes of their header."""

    def __init__(self, *, device: str) -> None:
        self._device = device
        self._recipes: OrderedDict[bytes, PlainRecipe] = OrderedDict()

    def get(self, header: bytes) -> PlainRecipe | None:
        return self._recipes.get(header)

    def remember(self, header: bytes, decoded: DecodedRequest, prepared: Prepared) -> None:
        """Keep what was found out about a header, if its requests are plain ones."""
        recipe = self._recipe(header, decoded, prepared)
        if recipe is None:
            return
        if len(self._recipes) >= MAX_RECIPES:
            self._recipes.popitem(last=False)
        self._recipes[header] = recipe

    def _recipe(self, header: bytes, decoded: DecodedRequest, prepared: Prepared) -> PlainRecipe | None:
        form = prepared.plain
        if form is None or not isinstance(decoded.problem, AttentionProblem) or len(header) > MAX_HEADER_BYTES:
            return None
        entries = orjson.loads(header)
        entries.pop("__metadata__", None)
        names = ("query",) if form.is_self_attention else ("query", "key", "value")
        if set(entries) != set(names):
            return None
        begins = [entries[name]["data_offsets"][0] for name in names]
        if any(begin % ALIGNMENT_BYTES for begin in begins):
            return None
        itemsize = form.dtype.itemsize
        data_bytes = max(entry["data_offsets"][1] for entry in entries.values())
        at = [begin // itemsize for begin in begins]
        context_bytes = torch.Size(form.result_shape).numel() * itemsize
        return PlainRecipe(
            form=form,
            data_bytes=data_bytes,
            num_elements=data_bytes // itemsize,
            query_at=at[0],
            key_at=at[-2] if len(at) > 1 else 0,
            value_at=at[-1],
            query_strides=_strides(form.query_shape),
            key_strides=_strides(form.key_shape),
            value_strides=_strides(form.value_shape),
            query_shape=tuple(entries["query"]["shape"]),
            key_shape=tuple(entries[names[-2]]["shape"]) if len(names) > 1 else (),
            value_shape=tuple(entries[names[-1]]["shape"]) if len(names) > 1 else (),
            options=decoded.problem.options,
            timeout_s=decoded.timeout_s,
            context_bytes=context_bytes,
            answer_header=self._answer_header(form, context_bytes),
        )

    def _answer_header(self, form: PlainForm, context_bytes: int) -> bytes:
        info = answer_info(
            path=form.path,
            why=form.why,
            device=self._device,
            dtype=form.dtype,
            queue_ms=_QUEUE_MS,
            compute_ms=_COMPUTE_MS,
            batch_requests=1,
            empty_rows=0,
            nonfinite_rows=0,
            peak_bytes=form.cost.peak_bytes,
            flops=form.cost.flops,
        )
        header = {
            "__metadata__": {"info": orjson.dumps(info).decode()},
            "context": {
                "dtype": CODE_OF[form.dtype],
                "shape": list(form.result_shape),
                "data_offsets": [0, context_bytes],
            },
        }
        text = orjson.dumps(header).replace(b"%", b"%%")
        return text.replace(b"%.2f" % _QUEUE_MS, b"%.3f").replace(b"%.2f" % _COMPUTE_MS, b"%.3f")


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for axis in reversed(shape[1:]):
        strides.append(strides[-1] * axis)
    return tuple(reversed(strides))
