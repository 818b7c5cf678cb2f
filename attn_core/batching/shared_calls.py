"""Problems that share one call of a kernel on a GPU: which do, their way there and back, and the proof that they may.

Half dtypes of mixed lengths go packed through the ragged kernel, float32 of equal shapes joined along the batch. What
may share a call takes this road alone, too, so that its bits do not depend on whether anybody shared it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn_core.batching.grouping import GroupKey, group_key, join, split
from attn_core.batching.packing import MAX_SEQUENCES, Empty, Packable, PackingKey, pack, packable, unpack
from attn_core.canonical import CanonicalProblem, canonicalize
from attn_core.kernels import fused
from attn_core.kernels.output import KernelOutput
from attn_core.kernels.ragged import RaggedKernel
from attn_core.numerics import safe_operand, safe_value
from attn_core.placement import Arrival, Staging
from attn_core.problem import AttentionOptions, AttentionProblem

MAX_CALL_BYTES = 2**25
"""Of the operands of one call. More are cut, so that a part travels while another is computed; no bit depends on it."""
MAX_UNDER_WAY = 3
"""Calls begun and not yet taken home: one on its way there, one computing, one on its way back."""


@dataclass(frozen=True, slots=True, eq=False)
class _Member:
    """A problem that may share a call, and its place among those asked about."""

    index: int
    problem: CanonicalProblem
    key: PackingKey | GroupKey
    num_sequences: int
    num_bytes: int
    rider: Packable | None


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A call under way: its arrival brings the extremes of query, key and value, the context, and maybe logsumexp."""

    members: Sequence[_Member]
    arrival: Arrival
    safe_operand: float
    safe_value: float


class SharedCalls:
    """Answers of a device to problems that share calls. Nothing does before ``prove``. Not for two threads at once."""

    def __init__(
        self,
        device: torch.device,
        *,
        kernel: RaggedKernel | None = None,
        with_logsumexp: bool = False,
        max_call_bytes: int = MAX_CALL_BYTES,
    ) -> None:
        self.packs = False
        """Whether half dtypes go packed."""
        self.groups = False
        """Whether float32 is joined."""
        self.staging = Staging(device)
        self._kernel = RaggedKernel() if kernel is None else kernel
        self._with_logsumexp = with_logsumexp
        self._max_call_bytes = max_call_bytes

    def prove(self) -> bool:
        """Try on the device itself whether neighbours change a bit, and share calls where they do not.

        Gives whether half dtypes go packed from now on. A version of torch that cannot be told to keep a sequence's
        keys in one piece does not, nor a device on which the kernel is missing.
        """
        self.packs = self._kernel.has_num_splits and self._holds(_half_trials())
        self.groups = self._holds(_float_trials())
        return self.packs

    def attend(self, problems: Sequence[CanonicalProblem]) -> list[KernelOutput | None]:
        """The answers in memory of their own, where their problems lie, for the problems that may share calls.

        None for the others, for those beside huge or non-finite numbers, and for those whose call failed: these are to
        be answered one by one, with ``attend_alone`` in the fused kernel's place.
        """
        found: list[KernelOutput | None] = [None] * len(problems)
        under_way: deque[_Call] = deque()
        num_failed = 0
        for members in self._calls(problems):
            try:
                under_way.append(self._begin(members))
            except RuntimeError:
                # It is met again where each is answered alone, and told to the one whom it concerns.
                self.staging.forget()
                num_failed += 1
            if len(under_way) == MAX_UNDER_WAY:
                num_failed += not self._take_home(under_way.popleft(), found)
        while under_way:
            num_failed += not self._take_home(under_way.popleft(), found)
        if num_failed and self.staging.device.type == "cuda":
            # Likeliest it was memory.
            torch.cuda.empty_cache()
        return found

    def _take_home(self, call: _Call, found: list[KernelOutput | None]) -> bool:
        """Put the answers of a call in their places; False if it failed."""
        try:
            outputs = self._finish(call)
        except RuntimeError:
            return False
        if outputs is not None:
            for member, output in zip(call.members, outputs, strict=True):
                found[member.index] = output
        return True

    def attend_alone(self, problem: CanonicalProblem) -> KernelOutput | None:
        """The answer of one problem without hazards, with the bits that it has in company; None if it never has any."""
        member = self._member(0, problem)
        if member is None:
            return None
        outputs = self._finish(self._begin([member]), is_clean=True)
        assert outputs is not None
        return outputs[0]

    def _member(self, index: int, problem: CanonicalProblem) -> _Member | None:
        if not fused.cut(problem, device_type=self.staging.device.type).leaves_whole(problem.dims):
            # Large enough to be answered in blocks, between which it can be given up: it gains nothing by company.
            return None
        rider = packable(problem, with_logsumexp=self._with_logsumexp) if self.packs else None
        if rider is not None:
            return _Member(index, problem, rider.key, rider.num_sequences, rider.num_bytes, rider)
        key = group_key(problem) if self.groups else None
        if key is not None:
            num_bytes = problem.query.nbytes + problem.key.nbytes + problem.value.nbytes
            return _Member(index, problem, key, problem.dims.batch, num_bytes, None)
        return None

    def _calls(self, problems: Sequence[CanonicalProblem]) -> Iterator[list[_Member]]:
        """Members of one key in their order, as many as one call takes."""
        by_key: dict[PackingKey | GroupKey, list[_Member]] = {}
        for index, problem in enumerate(problems):
            member = self._member(index, problem)
            if member is not None:
                by_key.setdefault(member.key, []).append(member)
        for members in by_key.values():
            call: list[_Member] = []
            for member in members:
                num_bytes = sum(other.num_bytes for other in call) + member.num_bytes
                num_sequences = sum(other.num_sequences for other in call) + member.num_sequences
                if call and (num_bytes > self._max_call_bytes or num_sequences > MAX_SEQUENCES):
                    yield call
                    call = []
                call.append(member)
            yield call

    def _begin(self, members: Sequence[_Member]) -> _Call:
        """Send and compute, and wait for nothing."""
        is_on_host = members[0].problem.device.type == "cpu"
        empty = self.staging.empty if is_on_host else None
        riders = [member.rider for member in members if member.rider is not None]
        if riders:
            operands, results, longest = self._packed(riders, empty)
        else:
            operands, results, longest = self._joined([member.problem for member in members], empty)
        tensors = [_extremes(operands), *results]
        first = members[0].problem
        return _Call(
            members=members,
            arrival=self.staging.fetch(tensors) if is_on_host else Arrival(tensors),
            safe_operand=safe_operand(first.query.dtype, head_dim=first.dims.head_dim, scale=first.scale),
            safe_value=safe_value(first.query.dtype, seq_len_kv=longest),
        )

    def _packed(self, riders: Sequence[Packable], empty: Empty | None) -> tuple[list[Tensor], list[Tensor], int]:
        batch = pack(riders, empty=empty)
        if empty is not None:
            query, key, value, cu_seqlens_q, cu_seqlens_kv = self.staging.send(
                (batch.query, batch.key, batch.value, batch.cu_seqlens_q, batch.cu_seqlens_kv)
            )
            batch = replace(
                batch, query=query, key=key, value=value, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv
            )
        context, lse = self._kernel.attend(batch)
        results = [context] if lse is None else [context, lse]
        return [batch.query, batch.key, batch.value], results, batch.max_seq_len_kv

    def _joined(
        self, problems: Sequence[CanonicalProblem], empty: Empty | None
    ) -> tuple[list[Tensor], list[Tensor], int]:
        whole = join(problems, empty=empty)
        operands = [whole.query, whole.key, whole.value]
        if empty is not None:
            operands = self.staging.send(operands)
            query, key, value = operands
            whole = replace(whole, query=query, key=key, value=value)
        return operands, [fused.attend(whole).outputs["context"]], whole.dims.seq_len_kv

    def _finish(self, call: _Call, *, is_clean: bool = False) -> list[KernelOutput] | None:
        """Wait, and take the answers; None if a number was met that the kernels answer wrongly, be it of one alone."""
        with call.arrival as (extremes, context, *more):
            if not (is_clean or _are_safe(extremes, call)):
                return None
            riders = [member.rider for member in call.members if member.rider is not None]
            if riders:
                return unpack(riders, context, more[0] if more else None)
            return split([member.problem for member in call.members], context)

    def _holds(self, trials: Iterable[Sequence[CanonicalProblem]]) -> bool:
        """Whether each problem has the same finite bits alone and among all of its trial."""
        was = self.packs, self.groups
        self.packs = self.groups = True
        try:
            for problems in trials:
                found = (self._member(index, problem) for index, problem in enumerate(problems))
                members = [member for member in found if member is not None]
                assert len(members) == len(problems) and len({member.key for member in members}) == 1
                together = self._finish(self._begin(members))
                alone = [self.attend_alone(problem) for problem in problems]
                if together is None or not all(
                    first is not None and _same_finite_bits(first, second)
                    for first, second in zip(alone, together, strict=True)
                ):
                    return False
        except RuntimeError:
            self.staging.forget()
            return False
        finally:
            self.packs, self.groups = was
        return True


def _extremes(operands: Iterable[Tensor]) -> Tensor:
    """The least and the largest number of each, float32 ``[2 * operands]``; NaN where any number is NaN."""
    return torch.stack([bound for tensor in operands for bound in torch.aminmax(tensor)]).float()


def _are_safe(extremes: Tensor, call: _Call) -> bool:
    bounds = extremes.tolist()
    limits = (call.safe_operand, call.safe_operand, call.safe_value)
    # NaN compares as False.
    return all(
        -limit <= low and high <= limit for low, high, limit in zip(bounds[::2], bounds[1::2], limits, strict=True)
    )


def _same_finite_bits(first: KernelOutput, second: KernelOutput) -> bool:
    return first.outputs.keys() == second.outputs.keys() and all(
        bool(torch.isfinite(tensor).all()) and torch.equal(_bits(tensor), _bits(second.outputs[name]))
        for name, tensor in first.outputs.items()
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32)


def _half_trials() -> Iterator[list[CanonicalProblem]]:
    """Three of mixed lengths each; the keys of the longest are worth splitting where nobody forbids it."""
    prompts, cached = ((17, 17), (300, 300), (33, 33)), ((17, 90), (300, 1100), (2, 64))
    steps = ((1, 4000), (1, 5), (1, 700))
    for dtype in (torch.float16, torch.bfloat16):
        yield _trial(prompts, dtype=dtype)
        yield _trial(cached, dtype=dtype, num_kv_heads=2, causal="lower_right")
        yield _trial(cached, dtype=dtype, causal="lower_right", window_left=40)
        yield _trial(steps, dtype=dtype, num_kv_heads=2, head_dim=128)


def _float_trials() -> Iterator[list[CanonicalProblem]]:
    yield _trial(((70, 90),) * 3, dtype=torch.float32)
    yield _trial(((300, 300),) * 3, dtype=torch.float32, causal="upper_left")


def _trial(
    lengths: Iterable[tuple[int, int]],
    *,
    dtype: torch.dtype,
    num_heads: int = 4,
    num_kv_heads: int = 4,
    head_dim: int = 64,
    **options: Any,
) -> list[CanonicalProblem]:
    """Problems on the host of these lengths of query and key, with normal numbers from a fixed seed."""
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, tokens: int) -> Tensor:
        return torch.randn((1, heads, tokens, head_dim), generator=generator).to(dtype)

    return [
        canonicalize(
            AttentionProblem(
                query=draw(num_heads, seq_len_q),
                key=draw(num_kv_heads, seq_len_kv),
                value=draw(num_kv_heads, seq_len_kv),
                options=AttentionOptions(**options),
            )
        )
        for seq_len_q, seq_len_kv in lengths
    ]
