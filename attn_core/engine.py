"""The engine: checked problems in, results out. All that the service calls of the core's arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attn_core.canonical import CanonicalProblem, canonicalize, to_callers_form
from attn_core.cost import Cost
from attn_core.errors import AttentionError, Fault, InvalidProblem
from attn_core.hazards import Hazards, find_hazards, isolate
from attn_core.kernels import fused, logsumexp_by_operator, manual
from attn_core.kernels.output import KernelOutput, without_pairs
from attn_core.maths.context import weighted_context
from attn_core.numerics import compute_dtype, largest
from attn_core.placement import bring_back, place
from attn_core.prepared import PlainForm, Prepared, Problem, prepare
from attn_core.problem import AttentionProblem, AttentionResult, WeightedSumProblem
from attn_core.validate import check_problem, check_values

THREADS_FROM_FLOPS = 500_000_000
"""From this size on a problem is worth a team of threads; below it the team costs more than it brings."""


class Engine:
    """Runs problems on one device. Not for use from two threads at once."""

    def __init__(self, *, device: str | torch.device = "cpu", max_threads: int = 1) -> None:
        self.device = torch.device(device)
        self.max_threads = max_threads
        self._threads = 0
        if self.device.type == "cuda":
            # cuDNN may pick algorithms that give other bits from run to run.
            torch.backends.cuda.enable_cudnn_sdp(False)

    def attend(self, problem: Problem) -> AttentionResult:
        """Check one problem and run it. Raises: InvalidProblem."""
        check_problem(problem)
        check_values(problem)
        (result,) = self.run([problem])
        if isinstance(result, AttentionError):
            raise result
        return result

    @torch.inference_mode()
    def run(self, problems: Sequence[Problem | Prepared]) -> list[AttentionResult | AttentionError]:
        """Answer problems that ``check_problem`` and ``check_values`` passed, each by itself, in their order.

        Each is computed at its own shape, so its bits do not depend on its neighbours; what cannot be answered
        stands as the error in its place. Results lie on the device that their problem's tensors came from.
        """
        results: list[AttentionResult | AttentionError] = []
        for problem in problems:
            try:
                prepared = problem if isinstance(problem, Prepared) else self.prepare(problem)
                if isinstance(prepared.problem, WeightedSumProblem):
                    results.append(self._weighted_sum(prepared.problem, prepared.cost))
                else:
                    results.append(self._attention(prepared.problem, prepared))
            except AttentionError as error:
                results.append(error)
        return results

    def prepare(self, problem: Problem) -> Prepared:
        """Kernel and cost of a checked problem on this device. Raises: InvalidProblem."""
        return prepare(problem, device_type=self.device.type)

    def plain_context(
        self, form: PlainForm, numbers: Tensor, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor | None:
        """The context of a problem of a plain form, in the caller's rank; None where its numbers need more care.

        ``numbers`` are all of query, key and value, flat. The bits are those that ``run`` gives.
        """
        if numbers.dtype == torch.float32:
            # One product instead of two comparisons. NaN and infinity stay what they are in it.
            if not torch.dot(numbers, numbers).item() <= form.safe_square_sum:
                return None
        elif not largest(numbers) <= form.safe_number:
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

    def _attention(self, problem: AttentionProblem, prepared: Prepared) -> AttentionResult:
        path, why, cost = prepared.path, prepared.why, prepared.cost
        canonical = self._canonical(problem, prepared)
        self._use_threads(cost.flops)
        if problem.options.empty_rows == "error":
            _refuse_empty_rows(canonical)
        if canonical.dims.num_pairs == 0:
            output = without_pairs(canonical)
        elif path == "fused":
            output, path, note = _fused_beside_manual(canonical, is_asked=problem.options.path is not None)
            why = note if path == "manual" else why + note
        else:
            output = manual.attend(canonical, find_hazards(canonical))
        empty = output.empty if output.covers_all_rows else canonical.empty_rows()
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

    def _weighted_sum(self, problem: WeightedSumProblem, cost: Cost) -> AttentionResult:
        self._use_threads(cost.flops)
        storage = problem.weights.dtype
        arithmetic = compute_dtype(storage)
        rank = problem.weights.ndim
        placed = place(problem.tensors(), self.device)
        weights, value = (
            placed[name].to(arithmetic).reshape((1,) * (4 - rank) + tuple(placed[name].shape))
            for name in ("weights", "value")
        )
        context = weighted_context(weights, value).to(storage)
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

    def _use_threads(self, flops: int) -> None:
        threads = self.max_threads if flops >= THREADS_FROM_FLOPS else 1
        if threads != self._threads:
            torch.set_num_threads(threads)
            self._threads = threads


def estimate(problem: Problem, *, device_type: str) -> Cost:
    """What a checked problem will cost on the kernel that will be chosen for it, from metadata alone.

    Raises: InvalidProblem when the asked path cannot serve it.
    """
    return prepare(problem, device_type=device_type).cost


def _fused_beside_manual(problem: CanonicalProblem, *, is_asked: bool) -> tuple[KernelOutput, str, str]:
    """The fused kernel, and the manual one for what the fused one gets wrong.

    Gives the path that ran, too, and what is to be said of it: "manual" where no row is left for the fused kernel
    and the caller did not insist.
    """
    hazards = find_hazards(problem)
    if "logsumexp" not in problem.outputs or logsumexp_by_operator(problem):
        return _isolated(problem, hazards, is_asked=is_asked)
    by_manual = manual.attend(replace(problem, outputs=("logsumexp",)), hazards)
    output, path, note = _isolated(replace(problem, outputs=("context",)), hazards, is_asked=is_asked)
    outputs = output.outputs | by_manual.outputs
    merged = replace(output, outputs={name: outputs[name] for name in problem.outputs})
    return merged, path, "; logsumexp by the manual kernel" + note


def _isolated(problem: CanonicalProblem, hazards: Hazards, *, is_asked: bool) -> tuple[KernelOutput, str, str]:
    """The fused kernel on the numbers it answers right, the manual one for the rows that attend others."""
    if not hazards.any:
        return fused.attend(problem), "fused", ""
    clean, touched = isolate(problem, hazards)
    count = _count(touched)
    if count == touched.numel() and not is_asked:
        return manual.attend(problem, hazards), "manual", "every row attends huge or non-finite numbers"
    output = fused.attend(clean)
    if not count:
        return output, "fused", ""
    exact = manual.attend(problem, hazards)
    merged = {
        name: torch.where(touched if name == "logsumexp" else touched.unsqueeze(-1), exact.outputs[name], tensor)
        for name, tensor in output.outputs.items()
    }
    nonfinite = None if exact.nonfinite is None else exact.nonfinite & touched
    note = f"; {count} rows that attend huge or non-finite numbers by the manual kernel"
    return KernelOutput(outputs=merged, empty=output.empty, nonfinite=nonfinite), "fused", note


def _refuse_empty_rows(problem: CanonicalProblem) -> None:
    empty = problem.empty_rows()
    if empty.any():
        first = ",".join(str(index) for index in empty.nonzero()[0].tolist())
        expected = "at least one key that every query may attend"
        raise InvalidProblem([Fault("empty_rows", expected, f"none for query [{first}]")])


def _count(marks: Tensor | None) -> int:
    return 0 if marks is None else int(marks.sum().item())
