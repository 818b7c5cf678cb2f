"""What the header of a plain request says, remembered: the same header again means the same checks, kernel and cost.

Only the numbers differ between two requests of one shape, so a header that was checked once, and asks for nothing but
the context of query, key and value by one call of the fused kernel, is looked up the next time. A header is the one of
safetensors, or the JSON part of a request of the Open Inference Protocol whose tensors follow it in binary.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
import torch
from torch import Tensor

from attn_core.placement import ALIGNMENT_BYTES
from attn_core.prepared import PlainForm, Prepared
from attn_core.problem import AttentionOptions, AttentionProblem
from service.wire.answers import answer_info
from service.wire.inference import CheckedInference, response_parameters
from service.wire.inference_models import DATATYPE_OF, VERSION
from service.wire.requests import DecodedRequest
from service.wire.safetensors_format import CODE_OF

MAX_RECIPES = 1024
MAX_HEADER_BYTES = 2048
"""A longer header is read anew each time."""
Tensors = tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor]
"""All numbers, flat; then query, key and value of rank 4."""
QUEUE_MS, COMPUTE_MS = 314159.25, 271828.25
"""Stand in a template where numbers go that differ from answer to answer."""
_ID = re.compile(rb'[ \t\r\n]*\{[ \t\r\n]*("id"[ \t\r\n]*:[ \t\r\n]*("[ !#-\[\]-~]{0,256}")[ \t\r\n]*,[ \t\r\n]*)"')
"""An id with which a JSON part begins, in which nothing is escaped, and behind which another name comes."""


class AnswerTemplate(Protocol):
    """How an answer begins; the bytes of the context follow."""

    def beginning(self, *, queue_s: float, compute_s: float, id_text: bytes) -> bytes:
        """``id_text`` is the id of the request, as ``split_id`` gives it."""
        ...


@dataclass(frozen=True, slots=True)
class SafetensorsTemplate:
    """The length and the header."""

    header: bytes

    def beginning(self, *, queue_s: float, compute_s: float, id_text: bytes) -> bytes:
        text = self.header % (queue_s * 1e3, compute_s * 1e3)
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True, slots=True)
class InferenceTemplate:
    """The JSON part, and what else one is made of where the problem took the longer way."""

    model_name: str
    ignored: tuple[str, ...]
    members: bytes

    def beginning(self, *, queue_s: float, compute_s: float, id_text: bytes) -> bytes:
        return _with_id(id_text, self.members % (queue_s * 1e3, compute_s * 1e3))

    def written(self, form: PlainForm, info: Mapping[str, Any], id_text: bytes) -> bytes:
        """The JSON part with another ``info``."""
        members = inference_members(form, model_name=self.model_name, info=info, ignored=self.ignored)
        return _with_id(id_text, orjson.dumps(members)[1:])


def _with_id(id_text: bytes, members: bytes) -> bytes:
    return b'{"id":' + id_text + b"," + members if id_text else b"{" + members


def inference_members(
    form: PlainForm, *, model_name: str, info: Mapping[str, Any], ignored: Sequence[str]
) -> dict[str, Any]:
    """The members of an answer whose one output is the context, in binary."""
    context = {
        "name": "context",
        "datatype": DATATYPE_OF[form.dtype].name,
        "shape": list(form.result_shape),
        "parameters": {"binary_data_size": _context_bytes(form)},
    }
    return {
        "model_name": model_name,
        "model_version": VERSION,
        "parameters": response_parameters(info, ignored),
        "outputs": [context],
    }


def info_of_template(form: PlainForm, *, device: str) -> dict[str, Any]:
    """What an answer of a form says about itself, with ``QUEUE_MS`` and ``COMPUTE_MS`` in it."""
    return answer_info(
        path=form.path,
        why=form.why,
        device=device,
        dtype=form.dtype,
        queue_ms=QUEUE_MS,
        compute_ms=COMPUTE_MS,
        batch_requests=1,
        empty_rows=0,
        nonfinite_rows=0,
        peak_bytes=form.cost.peak_bytes,
        flops=form.cost.flops,
    )


def split_id(json_part: bytes) -> tuple[bytes, bytes]:
    """The id of a request, quoted as it was sent, and the rest of its JSON part; no id where it stands elsewhere."""
    found = _ID.match(json_part)
    if found is None:
        return b"", json_part
    # Told apart from a part that never had an id: both are whole objects, but not the same key.
    return found.group(2), b"id" + json_part[: found.start(1)] + json_part[found.end(1) :]


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
    answer: AnswerTemplate

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


class PlainRecipes:
    """The latest ``MAX_RECIPES`` recipes, by the bytes of their header."""

    def __init__(self, *, device: str) -> None:
        self._device = device
        self._recipes: OrderedDict[bytes, PlainRecipe] = OrderedDict()

    def get(self, header: bytes) -> PlainRecipe | None:
        return self._recipes.get(header)

    def remember(self, header: bytes, decoded: DecodedRequest, prepared: Prepared) -> None:
        """Keep what was found out about a safetensors header, if its requests are plain ones."""
        form = prepared.plain
        if form is None or len(header) > MAX_HEADER_BYTES:
            return
        entries = orjson.loads(header)
        entries.pop("__metadata__", None)
        begins = {name: entry["data_offsets"][0] for name, entry in entries.items()}
        recipe = plain_recipe(
            prepared,
            begins=begins,
            data_bytes=max(entry["data_offsets"][1] for entry in entries.values()),
            timeout_s=decoded.timeout_s,
            answer=SafetensorsTemplate(self._safetensors_header(form)),
        )
        self._keep(header, recipe)

    def remember_inference(
        self, key: bytes, sizes: Mapping[str, int], checked: CheckedInference, prepared: Prepared
    ) -> None:
        """Keep what was found out about a JSON part, if its requests are plain ones.

        ``sizes`` has the bytes of each input that follows it, in their order; every output is asked in binary.
        """
        form = prepared.plain
        if form is None or len(key) > MAX_HEADER_BYTES or checked.queue_timeout_s is not None or checked.ignored:
            # A template has marks in it, and must hold nothing that a client wrote.
            return
        begins, data_bytes = {}, 0
        for name, size in sizes.items():
            begins[name] = data_bytes
            data_bytes += size
        recipe = plain_recipe(
            prepared,
            begins=begins,
            data_bytes=data_bytes,
            timeout_s=checked.timeout_s,
            answer=self._inference_template(form, checked),
        )
        self._keep(key, recipe)

    def _keep(self, key: bytes, recipe: PlainRecipe | None) -> None:
        if recipe is None:
            return
        if len(self._recipes) >= MAX_RECIPES:
            self._recipes.popitem(last=False)
        self._recipes[key] = recipe

    def _inference_template(self, form: PlainForm, checked: CheckedInference) -> InferenceTemplate:
        name, ignored = checked.model.name, checked.ignored
        members = inference_members(
            form, model_name=name, info=info_of_template(form, device=self._device), ignored=ignored
        )
        return InferenceTemplate(name, ignored, _template(members)[1:])

    def _safetensors_header(self, form: PlainForm) -> bytes:
        header = {
            "__metadata__": {"info": orjson.dumps(info_of_template(form, device=self._device)).decode()},
            "context": {
                "dtype": CODE_OF[form.dtype],
                "shape": list(form.result_shape),
                "data_offsets": [0, _context_bytes(form)],
            },
        }
        return _template(header)


def _template(answer: dict[str, Any]) -> bytes:
    text = orjson.dumps(answer).replace(b"%", b"%%")
    return text.replace(b"%.2f" % QUEUE_MS, b"%.3f").replace(b"%.2f" % COMPUTE_MS, b"%.3f")


def _context_bytes(form: PlainForm) -> int:
    return torch.Size(form.result_shape).numel() * form.dtype.itemsize


def plain_recipe(
    prepared: Prepared,
    *,
    begins: Mapping[str, int],
    data_bytes: int,
    timeout_s: float | None,
    answer: AnswerTemplate,
) -> PlainRecipe | None:
    """``begins`` has the first byte of each tensor. None where the tensors are others, or would not lie aligned."""
    form, problem = prepared.plain, prepared.problem
    if form is None or not isinstance(problem, AttentionProblem):
        return None
    names = ("query",) if form.is_self_attention else ("query", "key", "value")
    if set(begins) != set(names) or any(begin % ALIGNMENT_BYTES for begin in begins.values()):
        return None
    itemsize = form.dtype.itemsize
    at = [begins[name] // itemsize for name in names]
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
        query_shape=tuple(problem.query.shape),
        key_shape=() if problem.key is None else tuple(problem.key.shape),
        value_shape=() if problem.value is None else tuple(problem.value.shape),
        options=problem.options,
        timeout_s=timeout_s,
        context_bytes=_context_bytes(form),
        answer=answer,
    )


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for axis in reversed(shape[1:]):
        strides.append(strides[-1] * axis)
    return tuple(reversed(strides))
