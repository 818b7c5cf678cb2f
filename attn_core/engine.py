"""The engine: checked problems in, results out. All that the service calls of the core's arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attn_core.batching.shared_calls import SharedCalls
from attn_core.canonical import CanonicalProblem, canonicalize, refuse_empty_rows, to_callers_form
from attn_core.cost import Cost
from attn_core.cut import THREADS_FROM_FLOPS, even_runs
from attn_core.errors import AttentionError, Checkpoint, NeedsSpare, never_abandoned
from attn_core.gradients import run_gradients
from attn_core.hazards import Hazards, find_hazards, touched_rows
from attn_core.kernels import asks_manual_besides, fused, isolated, manual
from attn_core.kernels.output import KernelOutput, without_pairs
from attn_core.layer import run_layer, run_layer_gradients
from attn_core.maths.context import weighted_context
from attn_core.numerics import compute_dtype, largest
from attn_core.placement import bring_back, place
from attn_core.prepared import PlainForm, Prepared, asks_verification, prepare
from attn_core.problem import (
    AttentionProblem,
    AttentionResult,
    Dims,
    GradientsProblem,
    LayerGradientsProblem,
    LayerProblem,
    Problem,
    WeightedSumProblem,
)
from attn_core.validate import check_problem, check_values
from attn_core.verification import verify


class Engine:
    """Runs problems on one device. Not for use from two threads at once."""

    def __init__(self, *, device: str | torch.device = "cpu", max_threads: int = 1) -> None:
        self.device = torch.device(device)
        self.max_threads = max_threads
        if self.device.type == "cuda":
            # cuDNN may pick algorithms that give other bits from run to run.
            torch.backends.cuda.enable_cudnn_sdp(False)
        # Several problems in one call of a kernel, once warming up has proven that no bit depends on company.
        self._shared = SharedCalls(self.device) if self.device.type == "cuda" else None
        self.shares_calls: bool | None = None

    def attend(self, problem: Problem, checkpoint: Checkpoint | None = None) -> AttentionResult:
        """Check one problem and run it. Raises: InvalidProblem, Abandoned from the checkpoint."""
        check_problem(problem)
        check_values(problem)
        (result,) = self.run([problem], [checkpoint])
        if isinstance(result, AttentionError):
            raise result
        return result

    @torch.inference_mode()
    def run(
        self, problems: Sequence[Problem | Prepared], checkpoints: Sequence[Checkpoint | None] | None = None
    ) -> list[AttentionResult | AttentionError]:
        """Answer problems that ``check_problem`` and ``check_values`` passed, each by itself, in their order.

        Each is computed at its own shape, so its bits do not depend on its neighbours; what cannot be answered
        stands as the error in its place. Results lie on the device that their problem's tensors came from.
        ``checkpoints`` has one for each problem, called before it begins and before each of its blocks. A prepared
        problem may take the memory that its cost counts: where its numbers need more, ``NeedsSpare`` stands in its
        place, and ``with_spare`` of it can be answered.
        """
        ready = [self._ready(problem) for problem in problems]
        together = self._together(ready)
        results: list[AttentionResult | AttentionError] = []
        for index, (prepared, checkpoint) in enumerate(zip(ready, checkpoints or [None] * len(ready), strict=True)):
            try:
                results.append(self._result(prepared, self._at_work(checkpoint), together.get(index)))
            except NeedsSpare as error:
                # Whoever brings a problem that is not prepared has no memory counted.
                if isinstance(prepared, Prepared) and prepared is not problems[index]:
                    results.append(self._spared(prepared, checkpoint))
                else:
                    results.append(error.with_traceback(None))
            except AttentionError as error:
                # Without its frames, which hold the tensors of the problem.
                results.append(error.with_traceback(None))
        return results

    def _spared(self, prepared: Prepared, checkpoint: Checkpoint | None) -> AttentionResult | AttentionError:
        try:
            return self._result(prepared.with_spare, self._at_work(checkpoint), None)
        except AttentionError as error:
            return error.with_traceback(None)

    def _ready(self, problem: Problem | Prepared) -> Prepared | AttentionError:
        if isinstance(problem, Prepared):
            return problem
        try:
            return self.prepare(problem)
        except AttentionError as error:
            return error.with_traceback(None)

    def _together(self, ready: Sequence[Prepared | AttentionError]) -> dict[int, KernelOutput]:
        """What several problems got from one call of a kernel, by their place. On a GPU alone; whoever is missing is
        computed by itself."""
        if self._shared is None:
            return {}
        fit = {
            index: one.canonical
            for index, one in enumerate(ready)
            if isinstance(one, Prepared) and one.path == "fused" and one.canonical is not None
        }
        outputs = zip(fit, self._shared.attend(list(fit.values())), strict=True)
        return {index: output for index, output in outputs if output is not None}

    def _result(
        self, prepared: Prepared | AttentionError, checkpoint: Checkpoint, shared: KernelOutput | None
    ) -> AttentionResult:
        if isinstance(prepared, AttentionError):
            raise prepared
        checkpoint()
        problem = prepared.problem
        result = self._computed(problem, prepared, checkpoint, shared)
        if not isinstance(problem, WeightedSumProblem) and asks_verification(problem):
            result = replace(result, verification=verify(problem, result, checkpoint))
        return result

    def _computed(
        self, problem: Problem, prepared: Prepared, checkpoint: Checkpoint, shared: KernelOutput | None
    ) -> AttentionResult:
        match problem:
            case AttentionProblem():
                plain = self._plain(problem, prepared) if prepared.plain is not None else None
                return plain or self._attention(problem, prepared, checkpoint, shared)
            case WeightedSumProblem():
                return self._weighted_sum(problem, prepared.cost, checkpoint)
        self._use_threads(prepared.cost.flops)

        def of_inside(inside: AttentionProblem | GradientsProblem) -> Prepared:
            found = self.prepare(inside)
            return found if prepared.cost.spare_bytes else found.with_spare

        def attend(inside: AttentionProblem) -> AttentionResult:
            result = self._attention(inside, of_inside(inside), checkpoint, None)
            self._use_threads(prepared.cost.flops)
            return result

        def differentiate(inside: GradientsProblem) -> AttentionResult:
            return run_gradients(inside, of_inside(inside), device=self.device, checkpoint=checkpoint)

        match problem:
            case GradientsProblem():
                return run_gradients(problem, prepared, device=self.device, checkpoint=checkpoint)
            case LayerProblem():
                return run_layer(problem, prepared, device=self.device, attend=attend, checkpoint=checkpoint)
            case LayerGradientsProblem():
                return run_layer_gradients(
                    problem,
                    prepared,
                    device=self.device,
                    attend=attend,
                    differentiate=differentiate,
                    checkpoint=checkpoint,
                )

    def prepare(self, problem: Problem) -> Prepared:
        """Kernel and cost of a checked problem on this device. Raises: InvalidProblem."""
        return prepare(problem, device_type=self.device.type)

    def plain_context(
        self, form: PlainForm, numbers: Sequence[Tensor], query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor | None:
        """The context of a problem of a plain form, in the caller's rank; None where its numbers need more care.

        ``numbers`` are all of query, key and value, flat, in one piece or several. The bits are those that ``run``
        gives.
        """
        for piece in numbers:
            if form.dtype == torch.float32:
                # One product instead of two comparisons. NaN and infinity stay what they are in it.
                if not torch.dot(piece, piece).item() <= form.safe_square_sum:
                    return None
            elif not largest(piece) <= form.safe_number:
                return None
        self._use_threads(form.cost.flops)
        context = fused.plain(
            query, key, value, scale=form.scale, is_causal=form.is_causal, shares_heads=form.shares_heads
        )
        return context.view(form.result_shape)

    def warm_up(self) -> None:
        """Run one small problem on each kernel, so that the first caller does not pay for what is made on first use."""
        query = torch.ones(1, 1, 2, 8)
        problem = AttentionProblem(query=query)
        self.attend(problem)
        self.attend(AttentionProblem(query=query, options=replace(problem.options, outputs=("context", "weights"))))
        if self._shared is not None and self.shares_calls is None:
            self.shares_calls = self._shared.prove()

    def _at_work(self, checkpoint: Checkpoint | None) -> Checkpoint:
        """The checkpoint as kernels call it: on a GPU, once the blocks begun before it are done."""
        if checkpoint is None:
            return never_abandoned
        if self.device.type != "cuda":
            return checkpoint

        def after_the_blocks_before() -> None:
            torch.cuda.current_stream(self.device).synchronize()
            checkpoint()

        return after_the_blocks_before

    def _plain(self, problem: AttentionProblem, prepared: Prepared) -> AttentionResult | None:
        """The result of a problem of a plain form; None where its numbers need more care."""
        form = prepared.plain
        assert form is not None
        operands = (problem.query, problem.key, problem.value)
        numbers = prepared.numbers or tuple(tensor.view(-1) for tensor in operands if tensor is not None)
        query = problem.query.view(form.query_shape)
        key = query if problem.key is None else problem.key.view(form.key_shape)
        value = query if problem.value is None else problem.value.view(form.value_shape)
        context = self.plain_context(form, numbers, query, key, value)
        if context is None:
            return None
        return AttentionResult(
            outputs={"context": context.contiguous()},
            path=form.path,
            why=form.why,
            device=str(self.device),
            dtype=form.dtype,
            peak_bytes=form.cost.peak_bytes,
            flops=form.cost.flops,
        )

    def _attention(
        self, problem: AttentionProblem, prepared: Prepared, checkpoint: Checkpoint, shared: KernelOutput | None
    ) -> AttentionResult:
        path, why, cost = prepared.path, prepared.why, prepared.cost
        if shared is not None and prepared.canonical is not None:
            canonical = prepared.canonical
        else:
            canonical = self._canonical(problem, prepared)
        self._use_threads(cost.flops)
        if problem.options.empty_rows == "error":
            refuse_empty_rows(canonical, checkpoint)
        if canonical.dims.num_pairs == 0:
            output = without_pairs(canonical)
        elif shared is not None:
            output, why = shared, why + "; computed together with others"
        elif path == "fused":
            is_asked = problem.options.path is not None
            output, path, note = self._fused_beside_manual(canonical, cost, checkpoint, is_asked=is_asked)
            why = note if path == "manual" else why + note
        elif path == "blocked":
            output = self._in_blocks(canonical, cost, checkpoint)
        else:
            output = manual.attend(canonical, _admitted_hazards(canonical, cost, checkpoint), checkpoint)
        empty = output.empty if output.covers_all_rows else canonical.empty_rows(checkpoint)
        if empty is not None and canonical.query_lengths is not None:
            empty = empty & canonical.counted_rows()
        outputs = {name: to_callers_form(name, tensor, problem) for name, tensor in output.outputs.items()}
        return AttentionResult(
            outputs=bring_back(outputs, problem.query.device),
            path=path,
            why=why,
            device=str(self.device),
            dtype=problem.query.dtype,
            empty_rows=_count(empty),
            nonfinite_rows=_count(output.nonfinite),
            peak_bytes=cost.peak_bytes,
            flops=cost.flops,
        )

    def _canonical(self, problem: AttentionProblem, prepared: Prepared) -> CanonicalProblem:
        """The problem as kernels read it, on this device and at addresses that give equal bits."""
        tensors = problem.tensors()
        placed = place(tensors, self.device)
        if prepared.canonical is not None and all(placed[name] is tensor for name, tensor in tensors.items()):
            return prepared.canonical
        return canonicalize(replace(problem, **placed))  # type: ignore[arg-type]

    def _weighted_sum(self, problem: WeightedSumProblem, cost: Cost, checkpoint: Checkpoint) -> AttentionResult:
        self._use_threads(cost.flops)
        storage = problem.weights.dtype
        rank = problem.weights.ndim
        weights, value = (
            tensor.reshape((1,) * (4 - rank) + tuple(tensor.shape))
            for tensor in place(problem.tensors(), self.device).values()
        )
        context = _weighted_context_in_blocks(weights, value, checkpoint)
        nonfinite = ~torch.isfinite(context).all(dim=-1)
        context = context.reshape(*problem.weights.shape[:-1], problem.value.shape[-1])
        return AttentionResult(
            outputs=bring_back({"context": context}, problem.weights.device),
            path="manual",
            why="weights given",
            device=str(self.device),
            dtype=storage,
            nonfinite_rows=_count(nonfinite),
            peak_bytes=cost.peak_bytes,
            flops=cost.flops,
        )

    def _fused_beside_manual(
        self, problem: CanonicalProblem, cost: Cost, checkpoint: Checkpoint, *, is_asked: bool
    ) -> tuple[KernelOutput, str, str]:
        """The fused kernel, and the manual one for what the fused one gets wrong.

        Gives the path that ran, too, and what is to be said of it: "manual" where no row is left for the fused kernel
        and the caller did not insist.
        """
        hazards = _admitted_hazards(problem, cost, checkpoint)
        if not asks_manual_besides(problem):
            return self._isolated(problem, hazards, checkpoint, is_asked=is_asked)
        by_manual = manual.attend(replace(problem, outputs=("logsumexp",)), hazards, checkpoint)
        context = replace(problem, outputs=("context",))
        output, path, note = self._isolated(context, hazards, checkpoint, is_asked=is_asked)
        outputs = output.outputs | by_manual.outputs
        merged = replace(output, outputs={name: outputs[name] for name in problem.outputs})
        return merged, path, note

    def _in_blocks(self, problem: CanonicalProblem, cost: Cost, checkpoint: Checkpoint) -> KernelOutput:
        """The blocked kernel, the fused one for the context, and the manual one for rows that attend hazards."""
        hazards = _admitted_hazards(problem, cost, checkpoint)
        touched = touched_rows(problem, hazards, checkpoint) if hazards.any else None
        return isolated.attend_in_blocks(problem, hazards, touched, checkpoint, fused_attend=self._fused)

    def _isolated(
        self, problem: CanonicalProblem, hazards: Hazards, checkpoint: Checkpoint, *, is_asked: bool
    ) -> tuple[KernelOutput, str, str]:
        """The fused kernel, with the manual one for the rows that attend hazardous numbers."""
        if not hazards.any:
            return self._fused(problem, checkpoint), "fused", ""
        touched = touched_rows(problem, hazards, checkpoint)
        count = _count(touched)
        output = isolated.attend(problem, hazards, touched, checkpoint, fused_attend=self._fused)
        if count == touched.numel() and not is_asked:
            return output, "manual", "every row attends huge or non-finite numbers"
        note = f"; {count} rows that attend huge or non-finite numbers by the manual kernel" if count else ""
        return output, "fused", note

    def _fused(
        self, problem: CanonicalProblem, checkpoint: Checkpoint, *, like: CanonicalProblem | None = None
    ) -> KernelOutput:
        """The fused kernel by itself: where others of its kind share calls, the kernel of these, for the same bits."""
        found = None if self._shared is None else self._shared.attend_alone(problem)
        return fused.attend(problem, checkpoint, like=like) if found is None else found

    def _use_threads(self, flops: int) -> None:
        threads = self.max_threads if flops >= THREADS_FROM_FLOPS else 1
        # Of this thread of Python, where another engine may have been before.
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)


def _weighted_context_in_blocks(weights: Tensor, value: Tensor, checkpoint: Checkpoint) -> Tensor:
    """weights @ value of rank 4 in their dtype, with the arithmetic of it."""
    storage, width = weights.dtype, value.shape[3]
    arithmetic = compute_dtype(storage)
    batch, num_heads, seq_len_q, seq_len_kv = weights.shape
    dims = Dims(batch, num_heads, value.shape[1], seq_len_q, seq_len_kv, head_dim=0, head_dim_v=width)
    size = manual.cut_sum(dims)
    if size.leaves_whole(dims):
        return weighted_context(weights.to(arithmetic), value.to(arithmetic)).to(storage)
    context = torch.empty(batch, num_heads, seq_len_q, width, dtype=storage, device=weights.device)
    for items, heads in size.parts(dims):
        shared = slice(heads.start // dims.group_size, (heads.stop - 1) // dims.group_size + 1)
        own = value[items, shared].to(arithmetic)
        for rows in even_runs(seq_len_q, size.rows):
            checkpoint()
            context[items, heads, rows] = weighted_context(weights[items, heads, rows].to(arithmetic), own)
    return context


def _admitted_hazards(problem: CanonicalProblem, cost: Cost, checkpoint: Checkpoint) -> Hazards:
    """The hazards of a problem. Raises: NeedsSpare where there are some, and they take more than was admitted."""
    hazards = find_hazards(problem, checkpoint)
    if hazards.any and cost.spare_bytes:
        raise NeedsSpare(cost.spare_bytes)
    return hazards


def _count(marks: Tensor | None) -> int:
    # A sum of booleans would make a whole number of each first.
    return 0 if marks is None else int(torch.count_nonzero(marks).item())
