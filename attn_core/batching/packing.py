"""Problems of mixed lengths in one ragged batch: who may be in it, in and out.

Everything that could choose other instructions in the kernel is part of the key, and the key follows from the problem
alone, never from its neighbours: a problem that may be packed has the same key, and with it the same bits, alone and in
any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from attn_core.canonical import CanonicalProblem
from attn_core.kernels.output import KernelOutput
from attn_core.kernels.ragged import RaggedBatch
from attn_core.numerics import EMPTY_CONTEXT, EMPTY_LOGSUMEXP

HALF_DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
MAX_SEQUENCES = 65_535
"""Of one call, and of heads too: CUDA counts no further in the second and third direction of a grid."""
MIN_SCALE = 2.0**-100
MAX_SCALE = 2.0**100
"""Beyond them the scale may become 0 or infinity in the kernel, and that times a score, or times -inf, is NaN."""

Empty = Callable[[Sequence[int], torch.dtype], Tensor]


@dataclass(frozen=True, slots=True)
class PackingKey:
    """What problems of one packed batch have in common; ``device`` is where they lie before."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window_left: int | None
    window_right: int | None
    is_decode: bool
    """One query in every sequence: the kernel then folds heads into queries, which is another order of the sums."""
    wants_logsumexp: bool


@dataclass(frozen=True, slots=True, eq=False)
class Packable:
    """A problem that may be packed: its key, and of each item the tokens that enter, from its first one on.

    An item of which no query or no key enters has 0 of both.
    """

    problem: CanonicalProblem
    key: PackingKey
    seq_lens_q: tuple[int, ...]
    seq_lens_kv: tuple[int, ...]

    @property
    def num_sequences(self) -> int:
        return sum(length > 0 for length in self.seq_lens_q)

    @property
    def num_bytes(self) -> int:
        """Of the packed query, key and value."""
        per_q, per_kv = self.key.num_heads, 2 * self.key.num_kv_heads
        numbers = (sum(self.seq_lens_q) * per_q + sum(self.seq_lens_kv) * per_kv) * self.key.head_dim
        return numbers * self.key.dtype.itemsize


def packable(problem: CanonicalProblem, *, with_logsumexp: bool = False) -> Packable | None:
    """The problem as it would be packed, or None if it may not be. Lengths and offsets are read: keep them on the host.

    ``with_logsumexp`` admits problems that ask for the log-sum-exp besides.
    """
    dims = problem.dims
    admitted = {"context", "logsumexp"} if with_logsumexp else {"context"}
    if (
        problem.query.dtype not in HALF_DTYPES
        or not admitted.issuperset(problem.outputs)
        or problem.has_pair_masks
        or problem.softcap is not None
        or problem.alibi_slopes is not None
        or problem.sinks is not None
        or dims.head_dim != dims.head_dim_v
        or dims.head_dim % 8
        or not 0 < dims.head_dim <= MAX_HEAD_DIM
        or dims.num_heads > MAX_SEQUENCES
        or not MIN_SCALE <= problem.scale <= MAX_SCALE
        or dims.num_pairs == 0
    ):
        return None
    found = _sequences(problem)
    if found is None:
        return None
    seq_lens_q, seq_lens_kv, window_left, window_right = found
    key = PackingKey(
        device=problem.device,
        dtype=problem.query.dtype,
        num_heads=dims.num_heads,
        num_kv_heads=dims.num_kv_heads,
        head_dim=dims.head_dim,
        scale=problem.scale,
        window_left=window_left,
        window_right=window_right,
        is_decode=max(seq_lens_q) == 1,
        wants_logsumexp="logsumexp" in problem.outputs,
    )
    mine = Packable(problem=problem, key=key, seq_lens_q=seq_lens_q, seq_lens_kv=seq_lens_kv)
    return mine if mine.num_sequences <= MAX_SEQUENCES else None


def cumulative(lengths: Iterable[int]) -> list[int]:
    """Where sequences of these lengths begin when they are laid end to end, and where the last one ends."""
    return list(accumulate(lengths, initial=0))


def pack(riders: Sequence[Packable], *, empty: Empty | None = None) -> RaggedBatch:
    """Problems of one key, end to end in their order, each one's items in theirs.

    ``empty`` makes tensors that are written here, None: on the device of the problems.
    """
    first = riders[0].key
    assert all(rider.key == first for rider in riders)
    make = _empty_on(first.device) if empty is None else empty
    lens_q = [length for rider in riders for length in rider.seq_lens_q if length]
    lens_kv = [length for rider in riders for length in rider.seq_lens_kv if length]
    cu_seqlens_q, cu_seqlens_kv = cumulative(lens_q), cumulative(lens_kv)
    assert max(cu_seqlens_q[-1], cu_seqlens_kv[-1]) < 2**31
    query = make((cu_seqlens_q[-1], first.num_heads, first.head_dim), first.dtype)
    key, value = (make((cu_seqlens_kv[-1], first.num_kv_heads, first.head_dim), first.dtype) for _ in range(2))
    at_q = at_kv = 0
    for rider in riders:
        problem = rider.problem
        at_q = _write(query, at_q, problem.query, rider.seq_lens_q)
        _write(key, at_kv, problem.key, rider.seq_lens_kv)
        at_kv = _write(value, at_kv, problem.value, rider.seq_lens_kv)
    ends = make((2, len(cu_seqlens_q)), torch.int32)
    ends.copy_(torch.tensor([cu_seqlens_q, cu_seqlens_kv], dtype=torch.int32))
    return RaggedBatch(
        query=query,
        key=key,
        value=value,
        cu_seqlens_q=ends[0],
        cu_seqlens_kv=ends[1],
        max_seq_len_q=max(lens_q),
        max_seq_len_kv=max(lens_kv),
        scale=first.scale,
        window_left=first.window_left,
        window_right=first.window_right,
        wants_logsumexp=first.wants_logsumexp,
    )


def unpack(riders: Sequence[Packable], context: Tensor, logsumexp: Tensor | None) -> list[KernelOutput]:
    """The answers of packed problems, in memory of their own, laid out in it as their queries are.

    ``context`` ``[total_tokens, num_heads, head_dim]``, ``logsumexp`` ``[num_heads, total_tokens]``. What did not enter
    is an empty row: 0 and -inf.
    """
    found = []
    at = 0
    for rider in riders:
        problem, lens = rider.problem, rider.seq_lens_q
        own = torch.empty_like(problem.query, device=context.device)
        end = _read(own, at, context, lens, padding=EMPTY_CONTEXT)
        outputs = {"context": own}
        if logsumexp is not None:
            lse = torch.empty(own.shape[:3], dtype=logsumexp.dtype, device=logsumexp.device)
            _read(lse.unsqueeze(-1), at, logsumexp.t().unsqueeze(-1), lens, padding=EMPTY_LOGSUMEXP)
            outputs["logsumexp"] = lse
        at = end
        outputs = {name: outputs[name] for name in problem.outputs}
        found.append(KernelOutput(outputs=outputs, empty=None if problem.forbids_nothing else problem.empty_rows()))
    return found


def _empty_on(device: torch.device) -> Empty:
    def make(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    return make


def _write(packed: Tensor, at: int, tensor: Tensor, lengths: Sequence[int]) -> int:
    """Lay the first tokens of each item of ``[batch, heads, tokens, width]`` end to end; gives where they end."""
    batch, heads, tokens, width = tensor.shape
    if all(length == tokens for length in lengths):
        end = at + batch * tokens
        packed[at:end].view(batch, tokens, heads, width).copy_(tensor.transpose(1, 2))
        return end
    for item, length in enumerate(lengths):
        packed[at : at + length].copy_(tensor[item, :, :length].transpose(0, 1))
        at += length
    return at


def _read(own: Tensor, at: int, packed: Tensor, lengths: Sequence[int], *, padding: float) -> int:
    """Undo ``_write`` into ``[batch, heads, tokens, width]``; tokens that were not packed become ``padding``."""
    batch, heads, tokens, width = own.shape
    if all(length == tokens for length in lengths):
        end = at + batch * tokens
        own.copy_(packed[at:end].reshape(batch, tokens, heads, width).transpose(1, 2))
        return end
    for item, length in enumerate(lengths):
        own[item, :, :length].copy_(packed[at : at + length].transpose(0, 1))
        own[item, :, length:].fill_(padding)
        at += length
    return at


def _sequences(problem: CanonicalProblem) -> tuple[tuple[int, ...], tuple[int, ...], int | None, int | None] | None:
    """The tokens of each item that enter, and the one window that says of all of them who attends whom; None if none.

    The kernel measures from the lower right corner, we from ``query_offset``. So keys behind the last one that any
    query may attend are left away, and what then lies between the two corners is added to the window.
    """
    dims = problem.dims
    all_q = _per_item(problem.query_lengths, dims.seq_len_q, dims.batch)
    all_kv = _per_item(problem.key_lengths, dims.seq_len_kv, dims.batch)
    offsets = _per_item(problem.query_offset, 0, dims.batch)
    right = 0 if problem.causal else problem.window_right
    lens_q, lens_kv, lefts, rights = [], [], [], []
    for len_q, whole_kv, offset in zip(all_q, all_kv, offsets, strict=True):
        len_kv = whole_kv if right is None else max(0, min(whole_kv, len_q + offset + right))
        if not len_q or not len_kv:
            lens_q.append(0)
            lens_kv.append(0)
            continue
        lens_q.append(len_q)
        lens_kv.append(len_kv)
        shift = offset - (len_kv - len_q)
        lefts.append(None if problem.window_left is None else problem.window_left - shift)
        rights.append(None if right is None else right + shift)
    if not lefts:
        return None
    live_q, live_kv = (tuple(length for length in lengths if length) for lengths in (lens_q, lens_kv))
    bounds = window_bounds(live_q, live_kv, lefts, rights)
    return None if bounds is None else (tuple(lens_q), tuple(lens_kv), *bounds)


def window_bounds(
    lens_q: Sequence[int], lens_kv: Sequence[int], lefts: Sequence[int | None], rights: Sequence[int | None]
) -> tuple[int | None, int | None] | None:
    """The window, None for an open side, that says the same of every sequence as its own; None if there is none.

    A side is open where it forbids nothing. FlashAttention opens a side that is at least as wide as the longest keys
    of the batch, and turns an open one beside a bounded one into that width. From the corner that is wrong where
    queries outnumber keys, and elsewhere it must not depend on neighbours; so it must never change who attends whom.
    """
    left = _one_bound(lefts, [length - 1 for length in lens_kv])
    right = _one_bound(rights, [length - 1 for length in lens_q])
    if left is None or right is None:
        return None
    longest_q, longest_kv = max(lens_q), max(lens_kv)
    if longest_kv <= right < _OPEN:
        return None
    if left < _OPEN and right == _OPEN and longest_q - 1 > longest_kv:
        return None
    return None if left == _OPEN else left, None if right == _OPEN else right


_OPEN = 2**62


def _one_bound(bounds: Sequence[int | None], enough: Sequence[int]) -> int | None:
    """The bound that all sequences can share, ``_OPEN`` if none needs one; None if they cannot share any.

    From ``enough`` on a sequence's bound forbids nothing, so that any other such bound will do for it.
    """
    wide = [_OPEN if bound is None else bound for bound in bounds]
    needed = {bound for bound, least in zip(wide, enough, strict=True) if bound < least}
    if not needed:
        return _OPEN
    bound = needed.pop()
    is_shared = not needed and all(bound >= least for own, least in zip(wide, enough, strict=True) if own != bound)
    return bound if is_shared and bound >= 0 else None


def _per_item(given: Tensor | int | None, default: int, batch: int) -> list[int]:
    if isinstance(given, Tensor):
        values: list[int] = given.tolist()
        return values * batch if len(values) == 1 else values
    return [default if given is None else given] * batch
