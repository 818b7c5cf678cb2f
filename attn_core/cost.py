"""What a problem costs on a kernel: flops, bytes moved, peak bytes. Metadata only; an estimate too low is a bug."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_core.canonical import MASK_BLOCK_PAIRS, CanonicalProblem
from attn_core.cut import Cut, even
from attn_core.hazards import COPIED_AT_ONCE, PAIRS_PER_BLOCK
from attn_core.kernels import backward, blocked, fused, isolated, manual, outputs_by_fused
from attn_core.kernels.output import named_outputs, output_dtype, output_shape
from attn_core.maths import gradients as backward_maths
from attn_core.maths.context import PAIRS_AT_ONCE
from attn_core.problem import WeightedSumProblem

MANUAL_PASSES, MASK_PASSES = 6, 4
OUTPUT_PASSES = {"top_weights": 60, "entropy": 4, "logsumexp": 2, "weight_totals": 1}
BLOCKED_OUTPUT_PASSES = OUTPUT_PASSES | {"top_weights": 8}
"""About how often each kind of work goes over the pairs, against one exponential of the fused kernel."""
PAIR_MATRICES = frozenset({"weights", "scores", "logits"})
FIXED_BYTES = 2**20
"""What any call takes besides: the scratch of the kernel's threads, small tensors, rounding of the allocator."""


SPARE_SHARE = 8
"""What huge or non-finite numbers would take is counted at once up to this part of inputs and outputs."""


@dataclass(frozen=True, slots=True)
class Cost:
    """``peak_bytes`` counts inputs, outputs and everything alive between them at once."""

    flops: int
    bytes_moved: int
    peak_bytes: int
    output_bytes: int
    pair_passes: float = 0.0
    """Passes over the query-key pairs besides the products: what narrow heads are bound by."""
    kernel: str | None = None
    """Whose pace counts, where that is not the path's."""
    spare_bytes: int = 0
    """What is taken besides where huge or non-finite numbers are attended; 0 where it is little, or admitted."""

    @property
    def with_spare(self) -> Cost:
        """The same with the spare bytes among those of the peak."""
        return replace(self, peak_bytes=self.peak_bytes + self.spare_bytes, spare_bytes=0)


def attention_flops(problem: CanonicalProblem) -> int:
    """2 B H T S (D + V): whole products, nothing off for masks."""
    dims = problem.dims
    return 2 * dims.num_pairs * (dims.head_dim + dims.head_dim_v)


def attention_cost(problem: CanonicalProblem, path: str, *, device_type: str | None = None) -> Cost:
    """The cost of a canonical problem on one of the kernels, on a device that its tensors may still travel to."""
    inputs = _input_bytes(problem)
    sizes = {name: _output_bytes(problem, name) for name in named_outputs(problem)}
    outputs, spare = sum(sizes.values()), 0
    if path == "fused":
        device_type = device_type or problem.device.type
        size = fused.cut(problem, device_type=device_type)
        strided = _strided_bytes(problem)
        plain = strided + _fused_scratch(problem, size, device_type)
        careful = strided + _isolated_scratch(problem, size, device_type)
        scratch, spare = _with_spare(plain, careful, held=inputs + outputs)
        if "logsumexp" in sizes and problem.query.dtype != problem.compute_dtype:
            scratch = max(scratch, _manual_scratch(problem))
    else:
        scratch = _blocked_scratch(problem, device_type) if path == "blocked" else _manual_scratch(problem)
        if problem.select_rows is not None or problem.select_heads is not None:
            # Rows that were not computed are looked at for empty ones.
            scratch = max(scratch, _empty_rows_scratch(problem))
        if not problem.query.is_contiguous():
            # The caller's layout is made in the end.
            scratch = max(scratch, sizes.get("context", 0))
    scratch += _vector_bytes(problem)
    return Cost(
        flops=attention_flops(problem),
        bytes_moved=inputs + outputs,
        peak_bytes=inputs + outputs + scratch + FIXED_BYTES,
        output_bytes=outputs,
        pair_passes=_pair_passes(problem, path),
        spare_bytes=spare,
    )


def _with_spare(plain: int, careful: int, *, held: int) -> tuple[int, int]:
    """Of what a kernel takes besides for plain numbers, and for huge or non-finite ones: what is counted at once, which
    is little beside the bytes held anyhow, and what only where such numbers are met."""
    scratch = max(plain, min(careful, held // SPARE_SHARE))
    return scratch, max(careful - scratch, 0)


def _pair_passes(problem: CanonicalProblem, path: str) -> float:
    """What is done for each pair besides the products, as so many exponentials of the fused kernel."""
    passes = MASK_PASSES * (not problem.forbids_nothing) + (path == "fused" or MANUAL_PASSES)
    of_outputs = BLOCKED_OUTPUT_PASSES if path == "blocked" else OUTPUT_PASSES
    passes += sum(count for name, count in of_outputs.items() if name in problem.outputs)
    passes += MASK_PASSES * ((problem.softcap is not None) + (problem.alibi_slopes is not None))
    # Exponentials in float64 have no short form.
    passes *= 4 if problem.compute_dtype == torch.float64 else 1
    return passes * problem.dims.num_pairs


def weighted_sum_cost(problem: WeightedSumProblem) -> Cost:
    weights, value = problem.weights, problem.value
    numbers = math.prod(weights.shape[:-1]) * value.shape[-1]
    inputs = weights.nbytes + value.nbytes
    output_bytes = numbers * weights.dtype.itemsize
    # The check for finite numbers makes |context| and three marks of each.
    scratch = numbers * (weights.dtype.itemsize + 3)
    if weights.dtype in (torch.float16, torch.bfloat16):
        scratch += 4 * (weights.numel() + value.numel() + numbers)
    elif not (weights.is_contiguous() and value.is_contiguous()):
        scratch += inputs
    return Cost(
        flops=2 * weights.numel() * value.shape[-1],
        bytes_moved=inputs + output_bytes,
        peak_bytes=inputs + output_bytes + scratch + FIXED_BYTES,
        output_bytes=output_bytes,
    )


def _input_bytes(problem: CanonicalProblem) -> int:
    masks = (m for m in (problem.allow_mask, problem.block_mask, problem.bias) if m is not None)
    return _operand_bytes(problem) + sum(mask.nbytes for mask in masks)


def _operand_bytes(problem: CanonicalProblem) -> int:
    operands = [problem.query] if problem.key is problem.query else [problem.query, problem.key, problem.value]
    return sum(tensor.nbytes for tensor in operands)


def _vector_bytes(problem: CanonicalProblem) -> int:
    """Places of queries and keys, a few versions of each at once, and marks and sums of each row."""
    dims = problem.dims
    items = dims.batch if problem.is_ragged else 1
    places = torch.int64.itemsize * (4 * items * dims.seq_len_q + 2 * dims.seq_len_kv)
    return places + dims.num_rows * (problem.compute_dtype.itemsize + 6)


def _output_bytes(problem: CanonicalProblem, name: str) -> int:
    return math.prod(output_shape(problem, name)) * output_dtype(problem, name).itemsize


def _strided_bytes(problem: CanonicalProblem) -> int:
    """Copies for the fused kernel of what does not lie as it reads."""
    return sum(t.nbytes for t in (problem.query, problem.key, problem.value) if t.stride(-1) != 1)


def _fused_scratch(problem: CanonicalProblem, size: Cut, device_type: str) -> int:
    return _fused_block(problem, size, device_type, is_part=not size.leaves_whole(problem.dims))


def _fused_block(problem: CanonicalProblem, size: Cut, device_type: str, *, is_part: bool) -> int:
    """What one call takes, and the making of its mask."""
    dims, itemsize, wide = problem.dims, problem.query.dtype.itemsize, problem.compute_dtype.itemsize
    # One tile of queries against a run of keys.
    tile = min(size.rows, 256) * (min(dims.seq_len_kv, 512) * (wide + itemsize) + (2 + dims.head_dim_v) * wide)
    if min(dims.seq_len_q, dims.seq_len_kv) >= fused.PACKED_FROM and fused.packs(problem.query.dtype):
        # Keys and values are laid out for the processor's tiles first.
        tile += size.items * size.heads * (dims.seq_len_kv + 64) * (dims.head_dim + dims.head_dim_v + 2) * itemsize
    rows = size.items * size.heads * size.rows
    # Its answer before it is put in its place, or a context that nobody asked for.
    answer = rows * (dims.head_dim_v * itemsize + 2 * wide) if is_part or "context" not in problem.outputs else 0
    if not fused.needs_mask(problem):
        return tile + answer
    if fused.is_band(problem) and size.rows < dims.seq_len_q and device_type == "cpu":
        # The queries turned round, and the answer too; the distances along one row.
        turned = rows * (dims.head_dim + dims.head_dim_v) * itemsize + rows * wide
        return tile + answer + turned + (size.rows + dims.seq_len_kv) * (3 * torch.int64.itemsize + itemsize)
    by_item, by_head = problem.masks_apart
    pairs = (
        (size.items if by_item else 1)
        * (size.heads if by_head else 1)
        * (size.rows if _masks_by_row(problem) else 1)
        * dims.seq_len_kv
    )
    if problem.bias is not None or "logsumexp" in problem.outputs:
        # The mask as booleans and their negation, and as numbers; a bias of few axes in the dtype of these.
        bias = problem.bias
        copied = 0 if bias is None or bias.dtype == problem.query.dtype else _numbers_of_block(bias, size)
        return tile + answer + pairs * (2 + itemsize) + (copied < pairs) * copied * itemsize
    # Two masks of booleans being combined, or one and SDPA's own copy of it in numbers.
    return tile + answer + pairs * max(3, 1 + itemsize)


def _masks_by_row(problem: CanonicalProblem) -> bool:
    """Whether the mask differs between queries."""
    masks = (m for m in (problem.allow_mask, problem.block_mask, problem.bias) if m is not None)
    return (
        problem.causal
        or problem.window_left is not None
        or problem.window_right is not None
        or problem.query_lengths is not None
        or any(mask.shape[2] > 1 for mask in masks)
    )


def _isolated_scratch(problem: CanonicalProblem, own: Cut, device_type: str) -> int:
    """What is taken where numbers are huge or not finite: marks, copies without them, the manual kernel beside."""
    dims, itemsize, wide = problem.dims, problem.query.dtype.itemsize, problem.compute_dtype.itemsize
    size = isolated.part_size(problem, device_type=device_type)
    kv_heads = -(-size.heads // dims.group_size)
    copies = isolated.copied_numbers(problem, size) * itemsize
    # Of a piece: |number|, whether it is sound, and what stands for it.
    at_once = min(COPIED_AT_ONCE, max(t.numel() for t in (problem.query, problem.key, problem.value)))
    piece = at_once * (2 * itemsize + 4)
    marked = max(PAIRS_PER_BLOCK, dims.batch * dims.num_heads * dims.seq_len_kv)
    marks = min(dims.num_pairs, marked) * 5
    if (bias := problem.bias) is not None:
        marks += min(bias.numel(), marked) * (bias.dtype.itemsize + wide + 4)
    call = Cut(min(own.items, size.items), min(own.heads, size.heads), own.rows)
    by_fused = copies + max(piece, _fused_block(problem, call, device_type, is_part=True))
    axes = replace(dims, batch=size.items, num_heads=size.heads, num_kv_heads=kv_heads)
    exact = isolated.exact_size(axes, isolated.exact_pairs(problem))
    # The rows of the block as they are, and both chosen from.
    rows = exact.items * exact.heads * exact.rows
    by_manual = _manual_block(problem, exact) + rows * 2 * (dims.head_dim_v * itemsize + 2 * wide)
    answer = 0
    if not size.leaves_whole(dims):
        answer = size.items * size.heads * dims.seq_len_q * (dims.head_dim_v * itemsize + 2 * wide + 2)
    return max(marks, piece, answer + max(by_fused, by_manual))


def _manual_scratch(problem: CanonicalProblem) -> int:
    only = manual.computed_rows(problem)
    axes = problem.dims if only is None else replace(problem.dims, seq_len_q=len(only))
    size = manual.cut(axes, axes.seq_len_q)
    return _manual_block(problem, size, is_whole=size.leaves_whole(axes))


def _manual_block(problem: CanonicalProblem, size: Cut, *, is_whole: bool = True) -> int:
    """What the manual kernel takes for one block beside its outputs.

    Of a block that is all of its problem these are made one after the other, and the most may be taken before them.
    """
    dims, itemsize, wide = problem.dims, problem.query.dtype.itemsize, problem.compute_dtype.itemsize
    block = replace(problem, dims=replace(dims, batch=size.items, num_heads=size.heads, seq_len_q=size.rows))
    pairs, num_rows, half = block.dims.num_pairs, block.dims.num_rows, itemsize != wide
    lists_rows = manual.computed_rows(problem) is not None
    found = {name: _output_bytes(block, name) if is_whole else 0 for name in named_outputs(problem)}
    held = pairs * wide
    if manual.computes_in_place(problem):
        held = found["weights"] = 0
    masks, booleans, making = _masks_of_block(problem, size, lists_rows=lists_rows)
    # Queries of the block alone, in another dtype, below each other.
    copies = max(lists_rows * itemsize, wide * (not problem.query.is_contiguous())) + half * wide
    scores = num_rows * dims.head_dim * copies + _copied_keys(problem, problem.key, size)
    selected = _taken_out(problem, size)
    # Where a part of what was computed is kept, both are there for a while.
    is_selected = problem.select_heads is not None or selected > 0
    kept_beside = {
        name: num_bytes * (name in PAIR_MATRICES or (is_selected and name not in ("context", "logsumexp")))
        for name, num_bytes in found.items()
    }
    mask = booleans + masks * wide
    # That of the block before is there until its own is made.
    before = held + mask * (not is_whole)
    steps = [((), before + scores), (("scores",), before + selected), ((), held + making)]
    held += mask
    steps.append(((), held + _beside_logits(problem, size, masks, lists_rows=lists_rows)))
    steps.append((("logits",), held + selected))
    # Exponentials, or terms.
    steps += [((name,), held + pairs * wide) for name in ("logsumexp", "entropy") if name in found]
    if "context" in found:
        steps.append((("context",), held + _manual_context(problem, size)))
    if "weight_totals" in found:
        steps.append((("weight_totals",), held + size.items * size.heads * dims.seq_len_kv * wide))
    if "top_weights" in found:
        # Of the rows ranked at once the sorted values and indices; of all rows those kept.
        ranked = min(pairs, max(manual.SORTED_PAIRS, dims.seq_len_kv)) * (itemsize * (1 + half) + torch.int64.itemsize)
        kept = num_rows * min(problem.top_k or 0, dims.seq_len_kv) * (itemsize + torch.int64.itemsize + 1)
        steps.append((("top_weights", "top_keys"), held + kept + max(ranked, masks * wide)))
    steps.append((("weights",), held + selected))
    later, most = sum(found.values()), 0
    for names, taken in steps:
        most = max(most, taken + sum(kept_beside.get(name, 0) for name in names) - later)
        later -= sum(found.get(name, 0) for name in names)
    # And sums of each row.
    return most + num_rows * 4 * wide


def _masks_of_block(problem: CanonicalProblem, size: Cut, *, lists_rows: bool) -> tuple[int, int, int]:
    """Pairs of which a block's mask is made, what it takes as booleans, and the most that is taken in the making.

    ``lists_rows`` where its rows are no run, and of tensors a copy.
    """
    if problem.forbids_nothing:
        return 0, 0, 0
    by_item, by_head = problem.masks_apart
    places = (size.items if by_item else 1) * (size.heads if by_head else 1)
    pairs = places * (size.rows if _masks_by_row(problem) else 1) * problem.dims.seq_len_kv
    of_distance = (problem.causal, problem.window_left is not None, problem.window_right is not None)
    given = [tensor for tensor in (problem.allow_mask, problem.block_mask, problem.bias) if tensor is not None]
    num_rules = sum(of_distance) + (problem.key_lengths is not None) + (problem.query_lengths is not None) + len(given)
    copied = sum(_numbers_of_block(tensor, size) * tensor.dtype.itemsize for tensor in given) if lists_rows else 0
    if num_rules > 1:
        # Two masks and what both allow; the window's sides beside the causal mask.
        return pairs, pairs, copied + pairs * (4 if all(of_distance) else 3)
    if problem.allow_mask is not None:
        return pairs, copied, copied
    return pairs, pairs, copied + pairs * (1 + (problem.bias is not None))


def _empty_rows_scratch(problem: CanonicalProblem) -> int:
    """The mask of as many rows as are looked at at once for what they may attend."""
    dims = problem.dims
    if not problem.has_pair_masks or dims.num_pairs == 0:
        return 0
    rows = min(dims.seq_len_q, max(1, MASK_BLOCK_PAIRS * dims.seq_len_q // dims.num_pairs))
    lists_rows = rows < dims.seq_len_q or problem.select_rows is not None
    return _masks_of_block(problem, Cut(dims.batch, dims.num_heads, rows), lists_rows=lists_rows)[2]


def _numbers_of_block(per_pair: Tensor, size: Cut) -> int:
    """How many numbers of a mask or bias belong to a block."""
    whole = (size.items, size.heads, size.rows)
    return math.prod(min(axis, own) for axis, own in zip(per_pair.shape, whole, strict=False)) * per_pair.shape[-1]


def _copied_keys(problem: CanonicalProblem, keys: Tensor, size: Cut) -> int:
    """What the manual kernel copies at once of the keys, or the values, of a block."""
    of_a_key, run = _key_run(problem, keys, size)
    is_cut = run < problem.dims.seq_len_kv
    apart = keys.dtype != problem.compute_dtype or not keys.is_contiguous() or (is_cut and of_a_key > keys.shape[3])
    return of_a_key * run * problem.compute_dtype.itemsize if apart else 0


def _key_run(problem: CanonicalProblem, keys: Tensor, size: Cut) -> tuple[int, int]:
    """Numbers of one key in all heads of a block, and how many keys the manual kernel multiplies at once."""
    of_a_key = size.items * -(-size.heads // problem.dims.group_size) * keys.shape[3]
    return of_a_key, even(problem.dims.seq_len_kv, max(1, manual.KEY_NUMBERS // of_a_key))


def _beside_logits(problem: CanonicalProblem, size: Cut, masks: int, *, lists_rows: bool) -> int:
    """What is taken between scores and logits: distances, which are whole numbers first, then bias and mask."""
    wide, bias = problem.compute_dtype.itemsize, problem.bias
    most = held = 0
    if problem.alibi_slopes is not None:
        pairs = (size.items if problem.is_ragged else 1) * size.rows * problem.dims.seq_len_kv
        held = pairs * size.heads * wide
        most = pairs * max(2 * torch.int64.itemsize, wide * (1 + size.heads))
    of_bias = 0 if bias is None else _numbers_of_block(bias, size)
    if bias is not None and lists_rows:
        held += of_bias * bias.dtype.itemsize
    is_other = bias is not None and bias.dtype != problem.compute_dtype
    return max(most, held + max(of_bias * wide if is_other else 0, masks * wide))


def _manual_context(problem: CanonicalProblem, size: Cut) -> int:
    """What the manual kernel takes for the context of a block, values that are not finite among it."""
    dims, itemsize, wide = problem.dims, problem.query.dtype.itemsize, problem.compute_dtype.itemsize
    of_a_key, run = _key_run(problem, problem.value, size)
    lines = size.items * size.heads
    context = lines * size.rows * dims.head_dim_v
    # Their finite part, or where they are of one kind, as numbers; of pairs those beside them, and whether they count.
    of_values = of_a_key * run * (wide + 1)
    of_pairs = min(lines * size.rows * run, max(PAIRS_AT_ONCE, lines * run)) * (3 * wide + 2)
    of_context = min(context, max(PAIRS_AT_ONCE, lines * dims.head_dim_v)) * (wide + 4)
    sums = context * wide * (1 + (run < dims.seq_len_kv))
    product = _copied_keys(problem, problem.value, size) + of_values + of_pairs + of_context + sums
    return max(product, context * (wide + itemsize * (itemsize != wide)))


def _taken_out(problem: CanonicalProblem, size: Cut) -> int:
    """Copies of the selected rows of a matrix of pairs, where more than these are computed."""
    if problem.select_rows is None or manual.computed_rows(problem) is not None:
        return 0
    heads = size.heads if problem.select_heads is None else 1
    pairs = size.items * heads * min(size.rows, len(problem.select_rows)) * problem.dims.seq_len_kv
    return pairs * (problem.compute_dtype.itemsize + problem.query.dtype.itemsize)


def _blocked_scratch(problem: CanonicalProblem, device_type: str | None) -> int:
    """The most that is taken at once: by the fused kernel, by a sweep, or by the manual one for hazards."""
    if problem.dims.num_pairs == 0:
        return 0
    device_type = device_type or problem.device.type
    by_fused = outputs_by_fused(problem, device_type=device_type)
    found = [0]
    if by_fused:
        of_fused = replace(problem, outputs=by_fused, select_heads=None, select_rows=None)
        size = fused.cut(of_fused, device_type=device_type)
        strided = _strided_bytes(problem)
        found.append(strided + _fused_scratch(of_fused, size, device_type))
        found.append(strided + _isolated_scratch(of_fused, size, device_type))
    rest = replace(problem, outputs=tuple(name for name in problem.outputs if name not in by_fused))
    found.extend(_sweep_scratch(rest, sweep) for sweep in blocked.sweeps(rest))
    if rest.outputs:
        dims, exact = problem.dims, isolated.exact_size(problem.dims, isolated.exact_pairs(problem))
        pairs = exact.items * exact.heads * exact.rows * dims.seq_len_kv
        # Its weights, from which totals are added up; before it, marks of rows.
        weights = pairs * (problem.query.dtype.itemsize + problem.compute_dtype.itemsize)
        found.append(_manual_block(rest, exact) + weights)
        found.append(5 * min(dims.num_pairs, max(PAIRS_PER_BLOCK, dims.batch * dims.num_heads * dims.seq_len_kv)))
    return max(found)


def _sweep_scratch(problem: CanonicalProblem, sweep: blocked.Sweep) -> int:
    """What the blocked kernel takes for one sweep over a problem."""
    dims, size = problem.dims, sweep.cut(problem)
    itemsize, wide = problem.query.dtype.itemsize, problem.compute_dtype.itemsize
    num_rows = size.items * size.heads * size.rows
    pairs = num_rows * dims.seq_len_kv
    # Logits and weights, and which pairs are forbidden.
    scratch = pairs * (2 * wide + (not problem.forbids_nothing))
    keys = size.items * -(-size.heads // dims.group_size) * dims.seq_len_kv
    width = dims.head_dim + ("context" in sweep.names) * dims.head_dim_v
    # Copies of another form, or without numbers that are not finite.
    scratch += keys * width * (max(wide, itemsize) if not blocked.copies_keys(problem) else wide + itemsize)
    scratch += num_rows * (dims.head_dim * (wide + itemsize) + ("context" in sweep.names) * dims.head_dim_v * wide)
    tile = num_rows * min(dims.seq_len_kv, max(1, blocked.TILE_PAIRS // num_rows))
    beside = [0 if problem.forbids_nothing else 3 * tile]
    if problem.alibi_slopes is not None:
        beside.append(tile * (2 * torch.int64.itemsize + 2 * wide))
    if problem.bias is not None:
        beside.append(tile * (problem.bias.dtype.itemsize + 2 * wide + 4))
    if "weight_totals" in sweep.names:
        beside.append(2 * size.items * size.heads * dims.seq_len_kv * wide)
    if "top_weights" in sweep.names:
        beside.append(_ranking_scratch(problem, num_rows))
    return scratch + max(beside)


def _ranking_scratch(problem: CanonicalProblem, num_rows: int) -> int:
    """Weights and keys among which the largest are, as one whole number each, and the answer of a block."""
    num_keys, itemsize = problem.dims.seq_len_kv, problem.query.dtype.itemsize
    count = min(problem.top_k or 0, num_keys)
    group = blocked.group_size(num_keys, count)
    width = num_keys if group is None else count * group + num_keys % group
    at_once = min(num_rows, max(1, blocked.RANKED_AT_ONCE // width))
    per_candidate = problem.compute_dtype.itemsize + itemsize + 4 * torch.int64.itemsize
    return at_once * width * per_candidate + num_rows * count * (itemsize + torch.int64.itemsize + 1)


GRADIENT_PASSES = 16
"""About how often a backward pass goes over the pairs besides its five products."""


def gradients_cost(
    problem: CanonicalProblem,
    asked: Collection[str],
    *,
    grad_bytes: int,
    sinks_bytes: int,
    is_self_attention: bool,
    refuses_empty_rows: bool = False,
    device_type: str | None = None,
) -> Cost:
    """The cost of a backward pass; ``grad_bytes`` are those of the gradients that came in, ``sinks_bytes`` those of
    the sinks as they came, in whose dtype their gradient leaves. Both paths are one kernel.

    flops 2 B H T S (3 D + 2 V): five whole products, nothing off for masks or for what is not asked.
    """
    dims = problem.dims
    inputs = _input_bytes(problem) + grad_bytes
    outputs = sum(sinks_bytes if name == "grad_sinks" else _gradient_bytes(problem, name) for name in asked)
    device_type = device_type or problem.device.type
    size = backward.cut(dims, skips_keys=backward.skips_keys(problem), device_type=device_type)
    scratch = outputs + _backward_block(problem, size, asked, is_self_attention=is_self_attention)
    if "grad_bias" in asked and backward.sums_bias_apart(problem):
        assert problem.bias is not None
        scratch += problem.bias.numel() * backward.bias_sum_dtype(problem).itemsize
    # Marks of rows, and which of them are padding.
    scratch += 3 * dims.num_rows + (0 if problem.query_lengths is None else torch.int64.itemsize * dims.seq_len_q)
    if refuses_empty_rows:
        scratch = max(scratch, _search_scratch(problem))
    passes = GRADIENT_PASSES + MASK_PASSES * (not problem.forbids_nothing)
    passes += MASK_PASSES * ((problem.softcap is not None) + (problem.alibi_slopes is not None))
    passes *= 4 if problem.compute_dtype == torch.float64 else 1
    return Cost(
        flops=2 * dims.num_pairs * (3 * dims.head_dim + 2 * dims.head_dim_v),
        bytes_moved=inputs + outputs,
        peak_bytes=inputs + scratch + FIXED_BYTES,
        output_bytes=outputs,
        pair_passes=passes * dims.num_pairs,
    )


def _gradient_bytes(problem: CanonicalProblem, name: str) -> int:
    dims, wide = problem.dims, problem.compute_dtype.itemsize
    match name:
        case "grad_query":
            return problem.query.nbytes
        case "grad_key":
            return problem.key.nbytes
        case "grad_value":
            return problem.value.nbytes
        case "grad_bias":
            return 0 if problem.bias is None else problem.bias.nbytes
        case _:
            return dims.num_pairs * wide


def _search_scratch(problem: CanonicalProblem) -> int:
    """What the search for empty rows takes."""
    dims, marks = problem.dims, 2 * problem.dims.num_rows
    if not problem.has_pair_masks:
        return marks + _vector_bytes(problem)
    rows = min(dims.seq_len_q, max(1, MASK_BLOCK_PAIRS // max(1, dims.batch * dims.num_heads * dims.seq_len_kv)))
    return marks + _vector_bytes(problem) + 4 * _masked_pairs(problem, Cut(dims.batch, dims.num_heads, rows))


def _masked_pairs(problem: CanonicalProblem, size: Cut, num_keys: int | None = None) -> int:
    """How many booleans tell what is forbidden in a block."""
    by_item, by_head = problem.masks_apart
    pairs = (size.items if by_item else 1) * (size.heads if by_head else 1)
    return pairs * (size.rows if _masks_by_row(problem) else 1) * (num_keys or problem.dims.seq_len_kv)


def _numbers_within(per_pair: Tensor, size: Cut, num_keys: int) -> int:
    """How many numbers of a mask or bias of rank 4 belong to a block."""
    axes = zip(per_pair.shape, (size.items, size.heads, size.rows, num_keys), strict=True)
    return math.prod(min(own, most) for own, most in axes)


def _backward_block(problem: CanonicalProblem, size: Cut, asked: Collection[str], *, is_self_attention: bool) -> int:
    """What the backward kernel takes for one block, and for the keys that it adds to."""
    dims, wide = problem.dims, problem.compute_dtype.itemsize
    rows = size.items * size.heads * size.rows
    seen = backward.most_seen(problem, size)
    pairs = rows * seen
    keys = size.items * -(-size.heads // dims.group_size) * dims.seq_len_kv
    widths, widest = dims.head_dim + dims.head_dim_v, max(dims.head_dim, dims.head_dim_v)
    # Of keys: what they get, summed; copies in another form; which are not finite.
    summed = {"grad_key": dims.head_dim, "grad_value": dims.head_dim_v}
    if is_self_attention:
        summed = {"grad_query": dims.head_dim}
    operands = [problem.key] if is_self_attention else [problem.key, problem.value]
    copied = sum(tensor.shape[3] for tensor in operands if backward.is_copied(tensor, problem, size))
    held = keys * ((sum(width for name, width in summed.items() if name in asked) + copied) * wide + 1)
    # Logits, which gradients take the place of, and weights; tanh.
    held += pairs * wide * (2 + (problem.softcap is not None))
    # Of rows: copies in another form, copies without what is not finite, and the query's gradient.
    forms = 1 + backward.is_copied(problem.query, problem, size)
    held += rows * (forms * widths + ("grad_query" in asked) * dims.head_dim) * wide
    if "grad_query" in asked:
        # A copy of some keys without what is not finite.
        of_a_key = dims.head_dim * wide
        held += min(keys * of_a_key, max(backward.KEY_BYTES_AT_ONCE, backward.KEY_MULTIPLE * of_a_key))
    # One after the other. Products of pairs that are summed by rows; what infinite numbers add to some sums.
    few = max(backward_maths.PAIRS_AT_ONCE, seen)
    some = max(backward.SUMS_AT_ONCE, widest)
    runs = backward.shifted_runs(size.items, size.heads, size.rows, seen)
    shifted = replace(size, rows=max((run.stop - run.start for run in runs), default=0))
    steps = [few * wide, min(pairs, few) * (wide + 4) + min(keys * widest, few) * (wide + 3) + some * (2 * wide + 5)]
    if not problem.forbids_nothing:
        # Booleans, as bits too.
        masked = _masked_pairs(problem, size, seen)
        held += masked * (1 + wide)
        steps[1] += pairs
        steps.append(_masked_pairs(problem, shifted, seen) * wide + 3 * seen * torch.int64.itemsize)
    if problem.alibi_slopes is not None:
        # Distances are whole numbers first, one for all heads.
        places = (size.items if problem.is_ragged else 1) * shifted.rows * seen
        steps.append(places * max(2 * torch.int64.itemsize, wide * (1 + size.heads)) + 3 * seen * torch.int64.itemsize)
    if (bias := problem.bias) is not None:
        if bias.dtype != problem.compute_dtype:
            steps.append(_numbers_within(bias, shifted, seen) * wide)
        if "grad_bias" in asked:
            # The sums of a block, and these in the dtype of all.
            exact = backward.bias_sum_dtype(problem)
            of_number = wide + (exact != problem.compute_dtype and backward.adds_to_bias(problem)) * exact.itemsize
            steps.append(_numbers_within(bias, size, seen) * of_number)
    return held + max(steps)
