"""Other kernels on the numbers that they answer right, the manual one for the rows that attend others.

They work on a few heads at a time, so that little memory is taken however many numbers are huge or not finite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from attn_core.canonical import CanonicalProblem
from attn_core.cut import Cut, even
from attn_core.errors import Checkpoint, never_abandoned
from attn_core.hazards import Hazards, without_hazards
from attn_core.kernels import blocked, fused, manual, outputs_by_fused
from attn_core.kernels.output import KernelOutput, named_outputs, new_output
from attn_core.placement import ALIGNMENT_BYTES
from attn_core.problem import SELECTABLE_BY_HEAD, SELECTABLE_BY_ROW, Dims

PART_BYTES = 2**20
"""So much of key and value is copied at once; what one head has at least."""
EXACT_BYTES = 2**20
"""So much the logits of a block of the manual kernel take here, which counts in the memory of every problem."""
EXACT_SHARE = 12
"""Or this part of what query, key, value and context take, where that is more: in a long problem a block would have few
rows, and go over all keys and values for them."""


def part_size(problem: CanonicalProblem, *, device_type: str | None = None) -> Cut:
    """How many items and heads are answered at once, all their rows."""
    dims = problem.dims
    own = fused.cut(problem, device_type=device_type)
    is_alone = fused.is_one_task(dims) and own.items * own.heads == 1
    if (device_type or problem.device.type) != "cpu" or fused.tells_company(problem) or is_alone:
        # A head keeps its bits in the company that it has without any hazard.
        return Cut(own.items, own.heads, dims.seq_len_q)
    most = PART_BYTES // problem.query.dtype.itemsize - _numbers_between(problem)
    groups = max(1, most // max(1, dims.seq_len_kv * (dims.head_dim + dims.head_dim_v)))
    if fused.is_one_task(dims):
        # Three heads at most are two at least in the shortest of even parts, unless all are fewer.
        groups = max(groups, -(-3 // dims.group_size))
    if groups >= dims.num_kv_heads:
        return Cut(even(dims.batch, groups // dims.num_kv_heads), dims.num_heads, dims.seq_len_q)
    return Cut(1, dims.group_size * even(dims.num_kv_heads, groups), dims.seq_len_q)


def copied_numbers(problem: CanonicalProblem, size: Cut) -> int:
    """How many numbers the copies of key and value of a part take."""
    dims = problem.dims
    kv_heads = -(-size.heads // dims.group_size)
    keys = kv_heads * dims.seq_len_kv * (dims.head_dim + dims.head_dim_v)
    return size.items * (keys + _numbers_between(problem))


def _numbers_between(problem: CanonicalProblem) -> int:
    """The most that lies between the keys of an item in such copies: each begins as far from a multiple of 64 bytes as
    it did."""
    unit = ALIGNMENT_BYTES // problem.query.dtype.itemsize
    tensors = (problem.key, problem.value)
    return sum(unit * (3 if t.is_contiguous() else 1 + t.shape[2]) for t in tensors)


def exact_pairs(problem: CanonicalProblem) -> int:
    """How many pairs the manual kernel answers at once, whatever is asked and whichever rows are marked."""
    dims = problem.dims
    tokens = dims.num_heads * dims.seq_len_q + dims.num_kv_heads * dims.seq_len_kv
    held = dims.batch * tokens * (dims.head_dim + dims.head_dim_v) * problem.query.dtype.itemsize
    return min(manual.BLOCK_PAIRS, max(EXACT_BYTES, held // EXACT_SHARE) // problem.compute_dtype.itemsize)


def exact_size(dims: Dims, pairs: int) -> Cut:
    """How much the manual kernel answers at once of a part, ``pairs`` of these at most.

    Fewer where keys are few: a row has its query and some versions of its context besides.
    """
    per_row = max(dims.seq_len_kv, dims.head_dim + 3 * dims.head_dim_v)
    return manual.cut(dims, dims.seq_len_q, pairs=max(1, pairs * dims.seq_len_kv // per_row))


def attend(
    problem: CanonicalProblem,
    hazards: Hazards,
    touched: Tensor,
    checkpoint: Checkpoint = never_abandoned,
    *,
    fused_attend: Callable[..., KernelOutput] = fused.attend,
) -> KernelOutput:
    """context and, where asked, logsumexp of a problem of which the marked rows attend hazardous numbers.

    ``fused_attend`` stands for the fused kernel where another one answers in its place.
    """
    problem, dims = fused.with_unit_strides(problem), problem.dims
    size, pairs = part_size(problem), exact_pairs(problem)
    # A query and a bias make the logits of a row, and reach no other.
    of_many_rows = replace(hazards, query=False, bias=False)
    outputs: dict[str, Tensor] = {}
    empty: Tensor | None = None
    nonfinite: Tensor | None = None
    for items, heads in size.parts(dims):
        part, own = problem.part(items, heads), touched[items, heads]
        if own.all():
            output = KernelOutput(outputs={name: new_output(part, name) for name in problem.outputs})
        else:
            output = fused_attend(without_hazards(part, of_many_rows, checkpoint), checkpoint, like=problem)
        if own.any():
            nonfinite = torch.zeros_like(touched) if nonfinite is None else nonfinite
            nonfinite[items, heads] = _put_exact(output.outputs, part, hazards, own, checkpoint, pairs=pairs)
        if size.leaves_whole(dims):
            return replace(output, nonfinite=nonfinite)
        for name, found in output.outputs.items():
            if name not in outputs:
                outputs[name] = new_output(problem, name)
            outputs[name][items, heads] = found
        if output.empty is not None:
            empty = torch.zeros_like(touched) if empty is None else empty
            empty[items, heads] = output.empty
        # The old answer goes before a new one comes.
        del output, found
    return KernelOutput(outputs=outputs, empty=empty, nonfinite=nonfinite)


def _put_exact(
    outputs: dict[str, Tensor],
    problem: CanonicalProblem,
    hazards: Hazards,
    touched: Tensor,
    checkpoint: Checkpoint,
    *,
    pairs: int,
) -> Tensor:
    """Have the marked rows of the outputs by the manual kernel, and tell which of them are not finite.

    Its blocks are computed one by one, each whole if any of its rows is marked: a row has the bits that follow from the
    shape, whichever rows are marked beside it, for these may be told by keys that it may not attend.
    """
    dims = problem.dims
    nonfinite = torch.zeros_like(touched)
    for items, heads, rows in exact_size(dims, pairs).blocks(dims):
        own = touched[items, heads, rows]
        if not own.any():
            continue
        exact = manual.attend(problem.part(items, heads, rows), hazards, checkpoint)
        assert exact.nonfinite is not None
        nonfinite[items, heads, rows] = exact.nonfinite & own
        for name, found in outputs.items():
            target = found[items, heads, rows]
            target.copy_(torch.where(own if name == "logsumexp" else own.unsqueeze(-1), exact.outputs[name], target))
        # That of this block goes before the next one's comes.
        del exact
    return nonfinite


def attend_in_blocks(
    problem: CanonicalProblem,
    hazards: Hazards,
    touched: Tensor | None,
    checkpoint: Checkpoint = never_abandoned,
    *,
    fused_attend: Callable[..., KernelOutput] = fused.attend,
) -> KernelOutput:
    """Every output that the blocked kernel supports; the marked rows, None for none, attend hazardous numbers.

    The context, and the logsumexp beside it, are the fused kernel's where it serves them.
    """
    if hazards.alibi:
        # Slopes are everyone's who attends a key.
        touched = ~problem.empty_rows(checkpoint)
    outputs: dict[str, Tensor] = {}
    empty = nonfinite = None
    by_fused = outputs_by_fused(problem)
    if by_fused:
        own = replace(problem, outputs=by_fused, select_heads=None, select_rows=None)
        if touched is None:
            output = fused_attend(own, checkpoint)
        else:
            output = attend(own, hazards, touched, checkpoint, fused_attend=fused_attend)
        outputs, empty, nonfinite = dict(output.outputs), output.empty, output.nonfinite
    rest = replace(problem, outputs=tuple(name for name in problem.outputs if name not in by_fused))
    covers_all_rows = empty is not None or problem.forbids_nothing
    if rest.outputs:
        output = blocked.attend(rest, hazards, touched, checkpoint)
        outputs |= output.outputs
        empty, covers_all_rows = (output.empty, True) if output.covers_all_rows else (empty, covers_all_rows)
        if touched is not None:
            exact = _put_exact_in_blocks(output.outputs, rest, hazards, touched, checkpoint)
            nonfinite = exact if nonfinite is None else nonfinite | exact
    return KernelOutput(
        outputs={name: outputs[name] for name in named_outputs(problem)},
        empty=empty,
        nonfinite=nonfinite,
        covers_all_rows=covers_all_rows,
    )


def _put_exact_in_blocks(
    outputs: dict[str, Tensor],
    problem: CanonicalProblem,
    hazards: Hazards,
    touched: Tensor,
    checkpoint: Checkpoint,
) -> Tensor:
    """The same as ``_put_exact`` for outputs of which rows and heads may be selected; totals get the rows added."""
    dims = problem.dims
    nonfinite = torch.zeros_like(touched)
    if problem.select_rows is not None and set(problem.outputs) <= SELECTABLE_BY_ROW:
        of_any_use = torch.zeros(dims.seq_len_q, dtype=torch.bool, device=problem.device)
        of_any_use[list(problem.select_rows)] = True
        touched = touched & of_any_use
    asked = tuple(dict.fromkeys(name.replace("weight_totals", "weights") for name in problem.outputs))
    for items, heads, rows in exact_size(dims, exact_pairs(problem)).blocks(dims):
        own = touched[items, heads, rows]
        if not own.any():
            continue
        part = replace(problem.part(items, heads, rows), outputs=asked, select_heads=None, select_rows=None)
        exact = manual.attend(part, hazards, checkpoint)
        assert exact.nonfinite is not None
        nonfinite[items, heads, rows] = exact.nonfinite & own
        for name, found in outputs.items():
            by_head, by_row = name in SELECTABLE_BY_HEAD, name in SELECTABLE_BY_ROW
            by_head, by_row = by_head or name == "top_keys", by_row or name == "top_keys"
            for head in range(heads.start, heads.stop):
                selected = problem.select_heads if by_head else None
                if selected is not None and head not in selected:
                    continue
                place, at = head if selected is None else selected.index(head), head - heads.start
                if name == "weight_totals":
                    weights = exact.outputs["weights"][:, at].to(found.dtype)
                    found[items, place] += weights.masked_fill(~own[:, at].unsqueeze(-1), 0.0).sum(dim=1)
                    continue
                to_rows, of_rows = _selected(problem.select_rows if by_row else None, rows)
                marks = own[:, at][:, of_rows]
                target = found[items, place][:, to_rows]
                marks = marks.view(*marks.shape, *(1,) * (target.ndim - marks.ndim))
                found[items, place, to_rows] = torch.where(marks, exact.outputs[name][:, at][:, of_rows], target)
        # That of this block goes before the next one's comes.
        del exact
    return nonfinite


def _selected(selected: tuple[int, ...] | None, run: slice) -> tuple[slice | list[int], slice | list[int]]:
    """Where in an output the rows of a run stand, and which rows of the run these are."""
    if selected is None:
        return run, slice(None)
    pairs = [(place, row - run.start) for place, row in enumerate(selected) if run.start <= row < run.stop]
    return [place for place, _ in pairs], [row for _, row in pairs]
