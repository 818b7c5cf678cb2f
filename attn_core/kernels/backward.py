"""The backward pass in blocks: a block of query rows against all keys that any of them may see.

The weights of a block are computed anew from query and key, and whole rows of them, so nothing of the forward pass is
needed and no matrix of all pairs is held. What is summed over rows (gradients of key, value, bias and sinks) is summed
in the compute dtype and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from attn_core.canonical import CanonicalProblem
from attn_core.cut import Cut, cut_heads_first, even, even_runs, pieces, runs
from attn_core.errors import Checkpoint, never_abandoned
from attn_core.hazards import COPIED_AT_ONCE, find_hazards
from attn_core.kernels.output import KernelOutput
from attn_core.maths import gradients as maths
from attn_core.maths.masks import allowed_pairs, attends_any, bits_of, fill_forbidden_
from attn_core.maths.scores import alibi_distances
from attn_core.numerics import SIGNLESS_ZERO, largest
from attn_core.placement import ALIGNMENT_BYTES
from attn_core.problem import Dims

BLOCK_PAIRS = 2**18
SKIPPING_BLOCK_PAIRS = 2**16
"""Of a causal problem, or one with a window: a shorter block sees fewer keys."""
MAX_BLOCK_PAIRS = 2**21
MIN_BLOCK_ROWS = 64
"""Fewer rows in a block would add to the gradients of all keys too often."""
ROW_MULTIPLE = 16
KEY_MULTIPLE = 32
BLOCK_FLOPS = 2**31
"""No block takes more: 20 to 45 ms of one core."""
PAIRS_OF_A_GPU = 2**24
KEY_NUMBERS_PER_PAIR = 8
"""Of keys and values of several heads a block holds at most so many numbers for each pair that it may have."""
KEY_BYTES_AT_ONCE = 2**20
"""Of keys so much is multiplied at once, so that no more has a copy without what is not finite."""
SUMS_AT_ONCE = 2**15
"""Of so many sums is told together which are not finite."""
MARKS_AT_ONCE = 2**18
"""Of so many pairs is told together which have a key that is not finite."""
SHIFTED_AT_ONCE = 2**18
"""So many scores get their distances and their bias at once, which are whole numbers or of another dtype before."""
PAIR_BUFFERS = frozenset({"logits", "weights", "tanh"})
SAFE_PRODUCT = {torch.float32: 1e30, torch.float64: 1e290}
"""Up to this size of grad_context times value no gradient of a weight can overflow, so that 0 times it is 0."""


@dataclass(frozen=True, slots=True, eq=False)
class BackwardProblem:
    """An attention, what is known of its result's gradients, and which gradients are asked for.

    grad_context ``[batch, num_heads, seq_len_q, head_dim_v]``, grad_logsumexp ``[batch, num_heads, seq_len_q]``; one of
    them may be None. ``is_self_attention``: key = value = query, and ``grad_query`` is the sum of the three uses.
    """

    attention: CanonicalProblem
    grad_context: Tensor | None
    grad_logsumexp: Tensor | None
    asked: frozenset[str]
    is_self_attention: bool

    @property
    def dims(self) -> Dims:
        return self.attention.dims

    def wants(self, *names: str) -> bool:
        return not self.asked.isdisjoint(names)

    @property
    def needs_logits(self) -> bool:
        """Whether any gradient goes through the softmax."""
        return self.wants("grad_query", "grad_key", "grad_bias", "grad_sinks", "grad_logits")

    @property
    def needs_scores(self) -> bool:
        """Whether any gradient goes on to query and key."""
        return self.wants("grad_query", "grad_key")


def cut(dims: Dims, *, skips_keys: bool = False, device_type: str = "cpu") -> Cut:
    """How much is computed at once: a matter of shape, options and device alone, never of load.

    ``skips_keys``: later and earlier queries see other keys, so that shorter blocks have fewer of them.
    """
    flops_per_pair = 2 * (3 * dims.head_dim + 2 * dims.head_dim_v)
    if device_type == "cuda":
        usual = most = PAIRS_OF_A_GPU
    else:
        most = max(1, min(MAX_BLOCK_PAIRS, BLOCK_FLOPS // flops_per_pair))
        usual = min(SKIPPING_BLOCK_PAIRS if skips_keys else BLOCK_PAIRS, most)
    # A row has its pairs, or more numbers of its own than these; a head of few rows has its keys.
    widths = dims.head_dim + dims.head_dim_v
    per_row = max(dims.seq_len_kv, widths)
    by_keys = -(-dims.seq_len_kv * widths // (KEY_NUMBERS_PER_PAIR * per_row * dims.group_size))
    found = cut_heads_first(replace(dims, seq_len_q=max(dims.seq_len_q, by_keys), seq_len_kv=per_row), usual)
    if found.heads > 1 or dims.seq_len_q * per_row <= usual:
        return replace(found, rows=max(1, dims.seq_len_q))
    rows = max(usual // per_row, min(MIN_BLOCK_ROWS, most // per_row), 1)
    multiple = _row_multiple(rows)
    return replace(found, rows=even(dims.seq_len_q, rows // multiple * multiple, multiple=multiple))


def _row_multiple(rows: int) -> int:
    return ROW_MULTIPLE if rows >= ROW_MULTIPLE else 1


def bias_sum_dtype(attention: CanonicalProblem) -> torch.dtype:
    """The dtype in which the gradient of a bias is summed."""
    assert attention.bias is not None
    return torch.promote_types(attention.compute_dtype, attention.bias.dtype)


def sums_bias_apart(attention: CanonicalProblem) -> bool:
    """Whether the gradient of a bias is summed beside the answer, since it comes from several blocks unrounded."""
    assert attention.bias is not None
    return adds_to_bias(attention) and attention.bias.dtype != bias_sum_dtype(attention)


def adds_to_bias(attention: CanonicalProblem) -> bool:
    """Whether a number of the gradient of a bias comes from several blocks."""
    assert attention.bias is not None
    dims = attention.dims
    return tuple(attention.bias.shape[:3]) != (dims.batch, dims.num_heads, dims.seq_len_q)


def is_copied(tensor: Tensor, attention: CanonicalProblem, size: Cut) -> bool:
    """Whether query, key or value is multiplied in a copy: its dtype, its order or where a part begins is another."""
    dims = attention.dims
    if tensor.dtype != attention.compute_dtype or not tensor.is_contiguous():
        return True
    of_a_token = tensor.shape[3] * tensor.dtype.itemsize
    begins = []
    if (size.items, size.heads) != (dims.batch, dims.num_heads):
        begins.append(tensor.shape[2] * of_a_token)
    if tensor is attention.query and size.rows < dims.seq_len_q:
        begins.append(_row_multiple(size.rows) * of_a_token)
    return any(begin % ALIGNMENT_BYTES for begin in begins)


def most_seen(attention: CanonicalProblem, size: Cut) -> int:
    """How many keys a block may see at most, as far as metadata tells."""
    most, offset = attention.dims.seq_len_kv, attention.query_offset
    after = [0] if attention.causal else []
    if attention.window_right is not None:
        after.append(attention.window_right)
    if not after:
        return most
    if not isinstance(offset, Tensor):
        end = offset + attention.dims.seq_len_q + min(after)
        most = min(most, max(0, -(-end // KEY_MULTIPLE) * KEY_MULTIPLE))
    has_one_offset = not isinstance(offset, Tensor) or offset.numel() == 1 or size.items == 1
    if attention.window_left is not None and has_one_offset:
        most = min(most, attention.window_left + size.rows + min(after) + 2 * KEY_MULTIPLE)
    return most


def differentiate(problem: BackwardProblem, checkpoint: Checkpoint = never_abandoned) -> KernelOutput:
    """Every asked gradient, ``[batch, heads, ...]``, rounded once from float32 (float64 for float64)."""
    return _Backward(problem, checkpoint).run()


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Queries or their gradients as they are multiplied: their finite numbers, and all where some are not finite."""

    finite: Tensor
    whole: Tensor

    @classmethod
    def of(cls, tensor: Tensor, dtype: torch.dtype, *, is_careful: bool) -> _Rows:
        """In order, so that both lie alike: not even a bit tells what is kept out of a product."""
        tensor = _in_order(tensor, dtype)
        if not is_careful or largest(tensor) < math.inf:
            return cls(tensor, tensor)
        return cls(_finite(tensor, torch.empty_like(tensor)), tensor)

    @property
    def is_finite(self) -> bool:
        return self.finite is self.whole


@dataclass(frozen=True, slots=True, eq=False)
class _Keys:
    """Keys as they are multiplied, and which of them hold a number that is not finite; None where none does."""

    numbers: Tensor
    nonfinite: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor, dtype: torch.dtype, *, is_careful: bool) -> _Keys:
        tensor = _in_order(tensor, dtype)
        marks = maths.nonfinite_rows(tensor) if is_careful else None
        return cls(tensor, marks if marks is not None and marks.any() else None)

    def part(self, *at: slice) -> _Keys:
        """Those of some items, heads and keys."""
        return _Keys(self.numbers[at], None if self.nonfinite is None else self.nonfinite[at])


class _Backward:
    """One backward pass: its answer, its sums, its buffers."""

    def __init__(self, problem: BackwardProblem, checkpoint: Checkpoint) -> None:
        attention, dims = problem.attention, problem.dims
        self._problem = problem
        self._checkpoint = checkpoint
        self._dtype = attention.compute_dtype
        self._is_careful = _needs_care(problem, checkpoint)
        self._size = cut(dims, skips_keys=attention.forbids_by_distance, device_type=attention.device.type)
        self._found = {name: self._new(name) for name in sorted(problem.asked)}
        self._bias_sum: Tensor | None = None
        if "grad_bias" in self._found:
            self._bias_sum = self._found["grad_bias"]
            if sums_bias_apart(attention):
                self._bias_sum = torch.zeros_like(self._bias_sum, dtype=bias_sum_dtype(attention))
        marks = (dims.batch, dims.num_heads, dims.seq_len_q)
        self._empty: Tensor | None = None
        if dims.num_pairs == 0:
            self._empty = attention.empty_rows()
        elif not attention.forbids_nothing:
            self._empty = torch.ones(marks, dtype=torch.bool, device=attention.device)
        self._nonfinite = torch.zeros(marks, dtype=torch.bool, device=attention.device)
        self._pairs_at_once = self._size.items * self._size.heads * self._size.rows
        self._pairs_at_once *= most_seen(attention, self._size)
        self._buffers: dict[str, Tensor] = {}

    def run(self) -> KernelOutput:
        problem = self._problem
        attention, dims = problem.attention, problem.dims

        def shared(part: tuple[slice, slice]) -> tuple[slice, slice]:
            items, heads = part
            return items, slice(heads.start // dims.group_size, (heads.stop - 1) // dims.group_size + 1)

        for (items, kv_heads), parts in groupby(self._size.parts(dims), key=shared):
            self._checkpoint()
            key = _Keys.of(attention.key[items, kv_heads], self._dtype, is_careful=self._is_careful)
            value = key.numbers
            if attention.value is not attention.key:
                value = _in_order(attention.value[items, kv_heads], self._dtype)
            sums = self._key_sums(key.numbers.shape, value.shape)
            for _, heads in parts:
                part = attention.part(items, heads)
                for rows in even_runs(dims.seq_len_q, self._size.rows, multiple=_row_multiple(self._size.rows)):
                    self._block(part, (items, heads, rows), key, value, sums)
            self._round_key_sums(items, kv_heads, sums)
            # Before there are those of the next heads.
            del key, value, sums
        if "grad_bias" in self._found and self._bias_sum is not self._found["grad_bias"]:
            assert self._bias_sum is not None
            self._found["grad_bias"].copy_(self._bias_sum)
        return KernelOutput(outputs=self._found, empty=self._empty, nonfinite=self._nonfinite)

    def _operand(self, tensor: Tensor) -> _Rows:
        return _Rows.of(tensor, self._dtype, is_careful=self._is_careful)

    def _new(self, name: str) -> Tensor:
        attention, dims = self._problem.attention, self._problem.dims
        match name:
            case "grad_query" | "grad_key" | "grad_value":
                like = getattr(attention, name.removeprefix("grad_"))
                return _lying_like(like)
            case "grad_bias":
                assert attention.bias is not None
                return torch.zeros_like(attention.bias, memory_format=torch.contiguous_format)
            case "grad_sinks":
                return torch.zeros(dims.num_heads, dtype=self._dtype, device=attention.device)
            case _:
                shape = (dims.batch, dims.num_heads, dims.seq_len_q, dims.seq_len_kv)
                return torch.zeros(shape, dtype=self._dtype, device=attention.device)

    def _key_sums(self, key: torch.Size, value: torch.Size) -> dict[str, Tensor]:
        """Where the gradients of some shared heads are summed up; of key = value = query all three in one."""
        problem = self._problem
        wanted = {name: shape for name, shape in (("key", key), ("value", value)) if problem.wants(f"grad_{name}")}
        if problem.is_self_attention:
            wanted = {"query": key} if problem.wants("grad_query") else {}
        sums = {name: self._buffer(f"sum of {name}", shape).zero_() for name, shape in wanted.items()}
        return {"key": sums["query"], "value": sums["query"], "query": sums["query"]} if "query" in sums else sums

    def _round_key_sums(self, items: slice, kv_heads: slice, sums: dict[str, Tensor]) -> None:
        for name, total in sums.items():
            if f"grad_{name}" not in self._found:
                continue
            found = self._found[f"grad_{name}"][items, kv_heads]
            found.copy_(total.add_(SIGNLESS_ZERO))
            if name == "query" and not self._is_careful:
                # Rounded to infinity; what a row gets as a key of others is told by these.
                self._nonfinite[items, kv_heads] = _nonfinite_rows(found, total)

    def _block(
        self,
        part: CanonicalProblem,
        at: tuple[slice, slice, slice],
        key: _Keys,
        value: Tensor,
        sums: dict[str, Tensor],
    ) -> None:
        """One block of rows: its own gradients, and what it adds to those of the keys, the bias and the sinks."""
        problem = self._problem
        items, heads, rows = at
        seen = _seen_keys(part, rows)
        if seen is None:
            if "grad_query" in self._found and not problem.is_self_attention:
                self._found["grad_query"][items, heads, rows] = 0.0
            return
        keys = slice(*seen)
        self._checkpoint()
        allowed = _allowed(part, rows, keys)
        bits = none_allowed = None
        if allowed is not None:
            none_allowed = ~attends_any(allowed)
            assert self._empty is not None
            self._empty[items, heads, rows] = none_allowed
            bits = bits_of(allowed, self._dtype)
        key, value = key.part(slice(None), slice(None), keys), value[:, :, keys]
        query = self._operand(part.query[:, :, rows])
        weights, sink_weights, tanh = self._weights(part, rows, keys, query.whole, key.numbers, bits)
        pairs = _Pairs(allowed, weights.shape)
        grad_context = None
        if problem.grad_context is not None:
            grad_context = self._operand(problem.grad_context[items, heads, rows])
        if grad_context is not None and "value" in sums:
            self._checkpoint()
            total = sums["value"][:, :, keys]
            maths.grad_value(weights, grad_context.finite, part.dims.num_kv_heads, out=total, adds=True)
            pairs.add_infinite_to_keys(total, weights, grad_context)
        # Which rows are not finite is told by the gradients of their logits, asked or not.
        needs_logits = problem.needs_logits or self._is_careful
        if not (needs_logits or problem.wants("grad_weights")):
            return
        grad_weights = None
        if grad_context is not None:
            self._checkpoint()
            grad_weights = maths.grad_weights(grad_context.whole, value, out=self._buffer("logits", weights.shape))
            if self._is_careful or problem.wants("grad_weights"):
                _forbid(grad_weights, bits)
            if problem.wants("grad_weights"):
                self._found["grad_weights"][items, heads, rows, keys] = grad_weights
        if not needs_logits:
            return
        grad_logsumexp = None
        if problem.grad_logsumexp is not None:
            grad_logsumexp = problem.grad_logsumexp[items, heads, rows].to(self._dtype)
            if none_allowed is not None:
                grad_logsumexp = grad_logsumexp.masked_fill(none_allowed, 0.0)
        shift = maths.row_shift(weights, grad_weights, grad_logsumexp)
        if "grad_sinks" in self._found:
            assert sink_weights is not None
            self._found["grad_sinks"][heads] += maths.grad_sinks(sink_weights, shift)
        if not (self._is_careful or problem.needs_scores or problem.wants("grad_bias", "grad_logits")):
            return
        grad = maths.grad_logits(weights, grad_weights, shift, out=self._buffer("logits", weights.shape))
        if self._is_careful or problem.wants("grad_logits"):
            _forbid(grad, bits)
        if problem.wants("grad_logits"):
            self._found["grad_logits"][items, heads, rows, keys] = grad
        if self._is_careful:
            self._nonfinite[at] |= maths.nonfinite_rows(grad)
            self._mark_infinite_keys(at, key, allowed)
        if self._bias_sum is not None:
            self._add_to_bias(grad, at, keys)
        if not problem.needs_scores:
            return
        if tanh is not None:
            grad = maths.grad_through_softcap(grad, tanh, out=grad)
            if self._is_careful:
                _forbid(grad, bits)
        grad = maths.grad_scores(grad, part.scale, out=grad)
        if "key" in sums:
            self._checkpoint()
            total = sums["key"][:, :, keys]
            maths.grad_key(grad, query.finite, part.dims.num_kv_heads, out=total, adds=True)
            pairs.add_infinite_to_keys(total, grad, query)
        if problem.wants("grad_query"):
            self._checkpoint()
            of_rows = self._grad_query(grad, key)
            pairs.add_infinite_to_rows(of_rows, grad, key)
            of_rows.add_(SIGNLESS_ZERO)
            if "query" in sums:
                sums["query"][:, :, rows] += of_rows
            else:
                found = self._found["grad_query"][items, heads, rows]
                found.copy_(of_rows)
                self._nonfinite[at] |= _nonfinite_rows(found, of_rows)

    def _weights(
        self,
        part: CanonicalProblem,
        rows: slice,
        keys: slice,
        query: Tensor,
        key: Tensor,
        bits: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The weights of a block, those of the sinks ``[.., rows, 1]``, and tanh of the softcap; each where there is
        one."""
        shape = (*query.shape[:3], key.shape[2])
        scores = self._buffer("logits", shape)
        scale = part.scale
        maths.scaled_scores(query, key, scale, out=scores)
        tanh = None
        if part.softcap is not None:
            tanh = torch.div(scores, part.softcap, out=self._buffer("tanh", shape)).tanh_()
            torch.mul(tanh, part.softcap, out=scores)
        for few in shifted_runs(*shape):
            _shift(scores[:, :, few], part, slice(rows.start + few.start, rows.start + few.stop), keys)
            if bits is not None:
                fill_forbidden_(scores[:, :, few], bits if bits.shape[2] == 1 else bits[:, :, few], -math.inf)
        self._checkpoint()
        weights = self._buffer("weights", shape)
        sink_weights = None
        if part.sinks is None:
            torch.softmax(scores, dim=-1, out=weights)
        else:
            _, sink_weights = maths.softmax_with_sinks(scores, part.sinks, out=weights)
        # Empty rows come out of softmax as NaN, and so do the forbidden pairs of a NaN row.
        _forbid(weights, bits)
        return weights, sink_weights, tanh

    def _add_to_bias(self, grad: Tensor, at: tuple[slice, slice, slice], keys: slice) -> None:
        total = self._bias_sum
        assert total is not None
        where = zip((*at, keys), total.shape, strict=True)
        own = total[tuple(run if size > 1 else slice(None) for run, size in where)]
        of_block = maths.grad_bias(grad, own.shape)
        if adds_to_bias(self._problem.attention):
            own.add_(of_block)
        else:
            own.copy_(of_block).add_(SIGNLESS_ZERO)

    def _grad_query(self, grad: Tensor, key: _Keys) -> Tensor:
        """grad @ key, with 0 for what is not finite among the keys, in the same runs of these whether there is any."""
        batch, num_kv_heads, num_keys, width = key.numbers.shape
        of_rows = self._buffer("grad_query", (*grad.shape[:3], width))
        at_once = max(KEY_MULTIPLE, KEY_BYTES_AT_ONCE // (width * grad.dtype.itemsize) // KEY_MULTIPLE * KEY_MULTIPLE)
        # Keys of several heads lie as far apart as all keys of one.
        of_a_head = num_keys if batch * num_kv_heads == 1 else self._problem.dims.seq_len_kv
        if batch * num_kv_heads * of_a_head <= at_once:
            return maths.grad_query(grad, self._finite_keys(key), out=of_rows)
        group_size = grad.shape[1] // num_kv_heads
        for items, heads in pieces((batch, num_kv_heads), max(1, at_once // of_a_head)):
            first, last, _ = heads.indices(num_kv_heads)
            own = slice(first * group_size, last * group_size)
            for keys in runs(num_keys, at_once):
                few = self._finite_keys(key.part(items, heads, keys))
                maths.grad_query(grad[items, own, :, keys], few, out=of_rows[items, own], adds=keys.start > 0)
        return of_rows

    def _finite_keys(self, key: _Keys) -> Tensor:
        """The keys with 0 for what is not finite, in a copy that lies alike where there is any.

        BLAS picks its instructions by address and strides.
        """
        numbers = key.numbers
        if key.nonfinite is None or not key.nonfinite.any():
            return numbers
        begin = numbers.data_ptr() % ALIGNMENT_BYTES // numbers.dtype.itemsize
        span = 1 + sum((size - 1) * stride for size, stride in zip(numbers.shape, numbers.stride(), strict=True))
        copy = self._buffer("finite keys", (begin + span,)).as_strided(numbers.shape, numbers.stride(), begin)
        return _finite(numbers, copy)

    def _mark_infinite_keys(self, at: tuple[slice, slice, slice], key: _Keys, allowed: Tensor | None) -> None:
        """Of the rows that attend a key which is not finite: even a gradient of 0 times it is none."""
        if key.nonfinite is None:
            return
        found = self._nonfinite[at]
        marks = key.nonfinite.repeat_interleave(found.shape[1] // key.nonfinite.shape[1], dim=1).unsqueeze(-2)
        if allowed is None or allowed.shape[2] == 1:
            found |= attends_any(marks if allowed is None else marks & allowed)
            return
        for rows in runs(found.shape[2], max(1, MARKS_AT_ONCE // marks.numel())):
            found[:, :, rows] |= attends_any(marks & allowed[:, :, rows])

    def _buffer(self, name: str, shape: Sequence[int]) -> Tensor:
        """Memory that is used again from block to block; what it holds is what it held."""
        numbers = math.prod(shape)
        held = self._buffers.pop(name, None)
        if held is None or held.numel() < numbers:
            if name in PAIR_BUFFERS:
                numbers = max(numbers, self._pairs_at_once)
            # The shorter one is let go before there is another.
            del held
            held = torch.empty(numbers, dtype=self._dtype, device=self._problem.attention.device)
        self._buffers[name] = held
        return held[: math.prod(shape)].view(tuple(shape))


class _Pairs:
    """Which pairs of a block are allowed, as products read it; made where numbers are not finite."""

    def __init__(self, allowed: Tensor | None, shape: torch.Size) -> None:
        self._allowed = allowed
        self._shape = shape

    def add_infinite_to_rows(self, sums: Tensor, coefficients: Tensor, key: _Keys) -> None:
        """What the numbers that are not finite add to coefficients @ key, ``[batch, num_heads, rows, width]``."""
        if key.nonfinite is None:
            return
        num_kv_heads = key.numbers.shape[1]
        _add_infinite(
            maths.stack_rows(sums, num_kv_heads),
            maths.stack_rows(coefficients, num_kv_heads),
            key.numbers.flatten(0, 1),
            self._stacked(num_kv_heads),
        )

    def add_infinite_to_keys(self, sums: Tensor, coefficients: Tensor, factor: _Rows) -> None:
        """What they add to coefficients^T @ factor, ``[batch, num_kv_heads, keys, width]``."""
        if factor.is_finite:
            return
        num_kv_heads = sums.shape[1]
        allowed = self._stacked(num_kv_heads)
        _add_infinite(
            sums.view(-1, *sums.shape[2:]),
            maths.stack_rows(coefficients, num_kv_heads).transpose(1, 2),
            maths.stack_rows(factor.whole, num_kv_heads),
            None if allowed is None else allowed.transpose(1, 2),
        )

    def _stacked(self, num_kv_heads: int) -> Tensor | None:
        return None if self._allowed is None else maths.stack_rows(self._allowed.expand(self._shape), num_kv_heads)


def _add_infinite(sums: Tensor, coefficients: Tensor, factors: Tensor, allowed: Tensor | None) -> None:
    """``maths.infinite_part`` added to ``sums``, some of them at once."""
    for some in pieces(sums.shape[:2], max(1, SUMS_AT_ONCE // sums.shape[2])):
        own = None if allowed is None else allowed[some]
        sums[some].add_(maths.infinite_part(coefficients[some], factors[some[0]], own))


def _finite(tensor: Tensor, copy: Tensor) -> Tensor:
    """Writes the tensor with 0 for every NaN and infinity, and gives it."""
    return torch.nan_to_num(tensor, nan=0.0, posinf=0.0, neginf=0.0, out=copy)


def _nonfinite_rows(found: Tensor, numbers: Tensor) -> Tensor:
    """Of which rows not all is finite in ``found``, which holds ``numbers``, rounded; what these were is used up."""
    if found.dtype != numbers.dtype:
        numbers.copy_(found)
    return maths.nonfinite_rows(numbers)


def shifted_runs(items: int, heads: int, rows: int, keys: int) -> Iterator[slice]:
    """The rows of a block in runs that get what is added to their scores one after the other."""
    return runs(rows, max(1, SHIFTED_AT_ONCE // max(1, items * heads * keys)))


def _shift(scores: Tensor, part: CanonicalProblem, rows: slice, keys: slice) -> None:
    """Add ALiBi and bias of these queries and keys, in place."""
    if part.alibi_slopes is not None:
        places = part.positions(torch.arange(rows.start, rows.stop, device=part.device))
        listed = torch.arange(keys.start, keys.stop, device=part.device)
        scores.sub_(alibi_distances(part.alibi_slopes, places, listed))
    if part.bias is not None:
        scores.add_(_of_pairs(part.bias, rows, keys).to(scores.dtype))


def _forbid(pairs: Tensor, bits: Tensor | None) -> None:
    if bits is not None:
        fill_forbidden_(pairs, bits, 0.0)


def _allowed(part: CanonicalProblem, rows: slice, keys: slice) -> Tensor | None:
    """Which of these keys these queries may attend, ``[.., rows, keys]``; None when all."""
    lengths = part.key_lengths
    return allowed_pairs(
        rows=torch.arange(rows.start, rows.stop, device=part.device),
        # The keys are counted from the first of them.
        seq_len_kv=keys.stop - keys.start,
        query_offset=part.query_offset - keys.start,
        causal=part.causal,
        window_left=part.window_left,
        window_right=part.window_right,
        key_lengths=None if lengths is None else lengths - keys.start,
        query_lengths=part.query_lengths,
        allow_mask=None if part.allow_mask is None else _of_pairs(part.allow_mask, rows, keys),
        block_mask=None if part.block_mask is None else _of_pairs(part.block_mask, rows, keys),
        bias=None if part.bias is None else _of_pairs(part.bias, rows, keys),
    )


def _of_pairs(mask: Tensor, rows: slice, keys: slice) -> Tensor:
    """The part of a mask or a bias of rank 4 that is for these queries and keys."""
    of_rows = mask if mask.shape[-2] == 1 else mask[:, :, rows]
    return of_rows if mask.shape[-1] == 1 else of_rows[..., keys]


def _in_order(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``[batch, heads, tokens, width]`` as a copy of it lies: BLAS picks its instructions by address and strides."""
    # Strides of axes of length 1 too, by which a product is told from a transposed one.
    lies_so = tensor.is_contiguous() and tensor.stride()[2:] == (tensor.shape[3], 1)
    if tensor.dtype == dtype and lies_so and tensor.data_ptr() % ALIGNMENT_BYTES == 0:
        return tensor
    return tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _lying_like(tensor: Tensor) -> Tensor:
    """An empty tensor that lies in memory as the caller's does, so that it leaves uncopied."""
    if not tensor.is_contiguous() and tensor.transpose(1, 2).is_contiguous():
        return torch.empty_like(tensor.transpose(1, 2)).transpose(1, 2)
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _needs_care(problem: BackwardProblem, checkpoint: Checkpoint) -> bool:
    """Whether a product of a forbidden pair could be anything but 0: numbers that are not finite, or that overflow.

    On a GPU this waits for the stream.
    """
    attention, dims = problem.attention, problem.dims
    if find_hazards(attention, checkpoint).any:
        return True
    limit = SAFE_PRODUCT[attention.compute_dtype]
    for tensor, factor in (
        (problem.grad_context, 1.0 if problem.grad_context is None else dims.head_dim_v * _largest(attention.value)),
        (problem.grad_logsumexp, 1.0),
    ):
        if tensor is not None:
            checkpoint()
            size = _largest(tensor)
            # Written so that NaN, which compares as False, needs care.
            if not (size <= limit and size * factor <= limit):
                return True
    return False


def _largest(tensor: Tensor) -> float:
    """``largest`` of a tensor that may lie in any order: torch copies what is not contiguous."""
    by_token = tensor.transpose(1, 2)
    tensor = by_token if by_token.is_contiguous() else tensor
    if tensor.is_contiguous():
        return largest(tensor)
    found = [largest(tensor[piece]) for piece in pieces(tensor.shape, COPIED_AT_ONCE)]
    return math.nan if any(math.isnan(one) for one in found) else max(found)


def _seen_keys(part: CanonicalProblem, rows: slice) -> tuple[int, int] | None:
    """The run of keys outside of which none of these queries may attend any; None where there is none.

    What lies on a GPU is not looked at.
    """
    first, end = 0, part.dims.seq_len_kv
    offset = _extent(part.query_offset)
    if offset is not None:
        if part.causal:
            end = min(end, offset[1] + rows.stop)
        if part.window_right is not None:
            end = min(end, offset[1] + rows.stop + part.window_right)
        if part.window_left is not None:
            first = max(first, offset[0] + rows.start - part.window_left)
    if part.key_lengths is not None and (lengths := _extent(part.key_lengths)) is not None:
        end = min(end, lengths[1])
    if part.query_lengths is not None and (lengths := _extent(part.query_lengths)) is not None:
        end = end if rows.start < lengths[1] else 0
    if first >= end:
        return None
    return first // KEY_MULTIPLE * KEY_MULTIPLE, min(part.dims.seq_len_kv, -(-end // KEY_MULTIPLE) * KEY_MULTIPLE)


def _extent(places: Tensor | int) -> tuple[int, int] | None:
    if not isinstance(places, Tensor):
        return places, places
    if places.is_cuda or places.numel() == 0:
        return None
    low, high = torch.aminmax(places)
    return int(low.item()), int(high.item())
