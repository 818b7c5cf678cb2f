"""What a problem costs on a kernel: flops, bytes moved, peak bytes. Metadata only; an estimate too low is a bug."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_core.canonical import MASK_BLOCK_PAIRS, CanonicalProblem
from attn_core.cut import Cut, even
from attn_core.hazards import COPIED_AT_ONCE, PAIRS_PER_BLOCK
from attn_core.kernels import asks_manual_besides, blocked, fused, isolated, manual, outputs_by_fused
from attn_core.kernels.output import named_outputs, output_dtype, output_shape
from attn_core.maths.context import PAIRS_AT_ONCE
from attn_core.numerics import compute_dtype
from attn_core.placement import ALIGNMENT_BYTES
from attn_core.problem import Dims, WeightedSumProblem

MANUAL_PASSES, MASK_PASSES = 6, 4
OUTPUT_PASSES = {"top_weights": 60, "entropy": 4, "logsumexp": 2, "weight_totals": 1}
BLOCKED_OUTPUT_PASSES = OUTPUT_PASSES | {"top_weights": 8}
"""About how often each kind of work goes over the pairs, against one exponential of the fused kernel."""
PAIR_MATRICES = frozenset({"weights", "scores", "logits"})
FIXED_BYTES = 2**20
"""What any call takes besides: the scratch of the kernel's threads, small tensors, rounding of the allocator."""


SPARE_SHARE = 8
SPARE_FROM_BYTES = 2**21
"""What huge or non-finite numbers would take is counted at once up to this part of inputs and outputs, or so much."""


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


def attention_cost(
    problem: CanonicalProblem,
    path: str,
    *,
    refuses_empty_rows: bool = False,
    lies_by_heads: bool = False,
    device_type: str | None = None,
) -> Cost:
    """The cost of a canonical problem on one of the kernels, on a device that its tensors may still travel to.

    ``lies_by_heads``: the caller wants the context in the order of heads, whatever the order of the query.
    """
    inputs = input_bytes(problem)
    sizes = {name: _output_bytes(problem, name) for name in named_outputs(problem)}
    outputs = sum(sizes.values())
    if path == "fused":
        device_type = device_type or problem.device.type
        size = fused.cut(problem, device_type=device_type)
        strided = _strided_bytes(problem)
        plain = strided + _fused_scratch(problem, size, device_type)
        careful = strided + _isolated_scratch(problem, size, device_type)
        if "logsumexp" in sizes and problem.query.dtype != problem.compute_dtype:
            # By the manual kernel, which is asked for nothing else.
            plain = max(plain, _manual_scratch(replace(problem, outputs=("logsumexp",)), is_careful=False))
    else:
        plain, careful = (
            _blocked_scratch(problem, device_type, is_careful=is_careful)
            if path == "blocked"
            else _manual_scratch(problem, is_careful=is_careful)
            for is_careful in (False, True)
        )
        if _leaves_rows(problem, path, device_type):
            # Those that were not computed are looked at for empty ones.
            plain = max(plain, _empty_rows_scratch(problem))
    if not problem.query.is_contiguous() and (path == "manual" or lies_by_heads):
        # It lies as the query does, or by heads; the caller's layout is made in the end.
        plain = max(plain, sizes.get("context", 0))
    if refuses_empty_rows:
        plain = max(plain, _empty_rows_scratch(problem))
    # Marks and sums of each row besides.
    plain += vector_bytes(problem)
    careful += vector_bytes(problem) + problem.dims.num_rows * (problem.compute_dtype.itemsize + 4)
    # What huge or non-finite numbers take is counted at once where it is little beside what is held anyhow.
    scratch = max(plain, min(careful, max((inputs + outputs) // SPARE_SHARE, SPARE_FROM_BYTES)))
    spare = max(careful - scratch, 0)
    return Cost(
        flops=attention_flops(problem),
        bytes_moved=inputs + outputs,
        peak_bytes=inputs + outputs + scratch + FIXED_BYTES,
        output_bytes=outputs,
        pair_passes=_pair_passes(problem, path),
        spare_bytes=spare,
    )


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
    scratch = max(_sum_block(problem), numbers * (weights.dtype.itemsize + 3))
    return Cost(
        flops=2 * weights.numel() * value.shape[-1],
        bytes_moved=inputs + output_bytes,
        peak_bytes=inputs + output_bytes + scratch + FIXED_BYTES,
        output_bytes=output_bytes,
    )


def _sum_block(problem: WeightedSumProblem) -> int:
    """What a block of a weighted sum takes beside the output."""
    weights, value = problem.weights, problem.value
    batch, num_heads, seq_len_q, seq_len_kv = (1,) * (4 - weights.ndim) + tuple(weights.shape)
    num_kv_heads, width = value.shape[-3] if value.ndim > 2 else 1, value.shape[-1]
    dims = Dims(batch, num_heads, num_kv_heads, seq_len_q, seq_len_kv, head_dim=0, head_dim_v=width)
    size = manual.cut_sum(dims)
    itemsize, wide = weights.dtype.itemsize, compute_dtype(weights.dtype).itemsize
    num_rows = size.items * size.heads * size.rows
    values = size.items * -(-size.heads // dims.group_size) * seq_len_kv * width
    is_whole, half = size.leaves_whole(dims), itemsize != wide
    # In another dtype, or below each other; values of the block before are there until its own are.
    copied = num_rows * seq_len_kv * wide * (half or not weights.is_contiguous())
    copied += values * wide * (half * (1 if is_whole else 2) or not value.is_contiguous())
    context = num_rows * width * wide
    if not is_whole:
        return copied + context
    return max(copied + context - num_rows * width * itemsize, context * half)


def input_bytes(problem: CanonicalProblem) -> int:
    masks = (m for m in (problem.allow_mask, problem.block_mask, problem.bias) if m is not None)
    return _operand_bytes(problem) + sum(mask.nbytes for mask in masks)


def _operand_bytes(problem: CanonicalProblem) -> int:
    operands = [problem.query] if problem.key is problem.query else [problem.query, problem.key, problem.value]
    return sum(tensor.nbytes for tensor in operands)


def vector_bytes(problem: CanonicalProblem) -> int:
    """Where something is forbidden or measured: places of queries and keys, a few versions of each at once, marks of
    rows."""
    if problem.forbids_nothing and problem.alibi_slopes is None:
        return 0
    dims = problem.dims
    items = dims.batch if problem.is_ragged else 1
    places = torch.int64.itemsize * (4 * items * dims.seq_len_q + 2 * dims.seq_len_kv)
    return places + 2 * dims.num_rows


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
    places = (size.items if by_item else 1) * (size.heads if by_head else 1)
    places *= size.rows if _masks_by_row(problem) else 1
    pairs, booleans = places * dims.seq_len_kv, places * (dims.seq_len_kv if _masks_by_key(problem) else 1)
    gives_logsumexp = "logsumexp" in problem.outputs and not asks_manual_besides(problem, device_type=device_type)
    if problem.bias is not None or gives_logsumexp:
        # The mask as booleans and their negation, and as numbers; a bias of few axes in the dtype of these.
        bias = problem.bias
        copied = 0 if bias is None or bias.dtype == problem.query.dtype else numbers_of_block(bias, size)
        return tile + answer + booleans + pairs * (1 + itemsize) + (copied < pairs) * copied * itemsize
    # Two masks of booleans being combined, or one and SDPA's own copy of it in numbers.
    return tile + answer + max(3 * booleans, booleans + pairs * itemsize)


def _masks_by_row(problem: CanonicalProblem) -> bool:
    """Whether the mask differs between queries."""
    return problem.forbids_by_distance or problem.query_lengths is not None or _masks_have(problem, axis=2)


def _masks_by_key(problem: CanonicalProblem) -> bool:
    """Whether it differs between keys."""
    return problem.forbids_by_distance or problem.key_lengths is not None or _masks_have(problem, axis=3)


def _masks_have(problem: CanonicalProblem, *, axis: int) -> bool:
    masks = (problem.allow_mask, problem.block_mask, problem.bias)
    return any(mask.shape[axis] > 1 for mask in masks if mask is not None)


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


def _manual_scratch(problem: CanonicalProblem, *, is_careful: bool) -> int:
    only = manual.computed_rows(problem)
    axes = problem.dims if only is None else replace(problem.dims, seq_len_q=len(only))
    size = manual.cut(axes, axes.seq_len_q)
    return _manual_block(problem, size, is_whole=size.leaves_whole(axes), is_careful=is_careful)


def _manual_block(problem: CanonicalProblem, size: Cut, *, is_whole: bool = True, is_careful: bool = True) -> int:
    """What the manual kernel takes for one block beside its outputs; ``is_careful`` where hazards are among these.

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
    # Queries of the block alone, and in another dtype or below each other.
    copies = lists_rows * itemsize + wide * (half or not (lists_rows or problem.query.is_contiguous()))
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
        steps.append((("context",), held + _manual_context(problem, size, is_careful=is_careful)))
    if "weight_totals" in found:
        steps.append((("weight_totals",), held + size.items * size.heads * dims.seq_len_kv * wide))
    if "top_weights" in found:
        # Of the rows ranked at once the sorted values and indices, of which a sort has two; of all rows those kept.
        per_pair = itemsize * (1 + half) + 2 * torch.int64.itemsize
        ranked = min(pairs, max(manual.SORTED_PAIRS, dims.seq_len_kv)) * per_pair
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
    places *= size.rows if _masks_by_row(problem) else 1
    pairs = places * (problem.dims.seq_len_kv if _masks_by_key(problem) else 1)
    of_distance = (problem.causal, problem.window_left is not None, problem.window_right is not None)
    given = [tensor for tensor in (problem.allow_mask, problem.block_mask, problem.bias) if tensor is not None]
    num_rules = sum(of_distance) + (problem.key_lengths is not None) + (problem.query_lengths is not None) + len(given)
    copied = sum(numbers_of_block(tensor, size) * tensor.dtype.itemsize for tensor in given) if lists_rows else 0
    if num_rules > 1:
        # Two masks and what both allow; the window's sides beside the causal mask.
        return pairs, pairs, copied + pairs * (4 if all(of_distance) else 3)
    if problem.allow_mask is not None:
        return pairs, copied, copied
    return pairs, pairs, copied + pairs * (1 + (problem.bias is not None))


def _leaves_rows(problem: CanonicalProblem, path: str, device_type: str | None) -> bool:
    """Whether a kernel sees some rows of a problem only."""
    if path == "manual":
        return manual.computed_rows(problem) is not None
    if outputs_by_fused(problem, device_type=device_type):
        return False
    return all(sweep.rows is not None or sweep.heads is not None for sweep in blocked.sweeps(problem))


def _empty_rows_scratch(problem: CanonicalProblem) -> int:
    """The mask of as many rows as are looked at at once for what they may attend."""
    dims = problem.dims
    if not problem.has_pair_masks or dims.num_pairs == 0:
        return 0
    rows = min(dims.seq_len_q, max(1, MASK_BLOCK_PAIRS * dims.seq_len_q // dims.num_pairs))
    return _masks_of_block(problem, Cut(dims.batch, dims.num_heads, rows), lists_rows=False)[2]


def numbers_of_block(per_pair: Tensor, size: Cut, num_keys: int | None = None) -> int:
    """How many numbers of a mask or bias of rank 4 belong to a block, of all its keys or of so many."""
    whole = (size.items, size.heads, size.rows, per_pair.shape[3] if num_keys is None else num_keys)
    return math.prod(min(own, most) for own, most in zip(per_pair.shape, whole, strict=True))


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
    of_bias = 0 if bias is None else numbers_of_block(bias, size)
    if bias is not None and lists_rows:
        held += of_bias * bias.dtype.itemsize
    is_other = bias is not None and bias.dtype != problem.compute_dtype
    return max(most, held + max(of_bias * wide if is_other else 0, masks * wide))


def _manual_context(problem: CanonicalProblem, size: Cut, *, is_careful: bool) -> int:
    """What the manual kernel takes for the context of a block."""
    dims, itemsize, wide = problem.dims, problem.query.dtype.itemsize, problem.compute_dtype.itemsize
    of_a_key, run = _key_run(problem, problem.value, size)
    lines = size.items * size.heads
    context = lines * size.rows * dims.head_dim_v
    # Of values that are not finite the finite part, or where they are of one kind, as numbers; of pairs those beside
    # them, and whether they count.
    of_values = of_a_key * run * (wide + 1)
    of_pairs = min(lines * size.rows * run, max(PAIRS_AT_ONCE, lines * run)) * (3 * wide + 2)
    of_context = min(context, max(PAIRS_AT_ONCE, lines * dims.head_dim_v)) * (wide + 4)
    sums = context * wide * (1 + (run < dims.seq_len_kv))
    product = _copied_keys(problem, problem.value, size) + sums + is_careful * (of_values + of_pairs + of_context)
    return max(product, context * (wide + itemsize * (itemsize != wide)))


def _taken_out(problem: CanonicalProblem, size: Cut) -> int:
    """Copies of the selected rows of a matrix of pairs, where more than these are computed."""
    if problem.select_rows is None or manual.computed_rows(problem) is not None:
        return 0
    heads = size.heads if problem.select_heads is None else 1
    pairs = size.items * heads * min(size.rows, len(problem.select_rows)) * problem.dims.seq_len_kv
    return pairs * (problem.compute_dtype.itemsize + problem.query.dtype.itemsize)


def _blocked_scratch(problem: CanonicalProblem, device_type: str | None, *, is_careful: bool) -> int:
    """The most that is taken at once: by the fused kernel or a sweep, or by the manual one for hazards."""
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
        if is_careful:
            found.append(strided + _isolated_scratch(of_fused, size, device_type))
    rest = replace(problem, outputs=tuple(name for name in problem.outputs if name not in by_fused))
    found.extend(_sweep_scratch(rest, sweep, is_careful=is_careful) for sweep in blocked.sweeps(rest))
    if rest.outputs and is_careful:
        found.append(_exact_scratch(rest))
        found.append(_touched_scratch(problem))
    if problem.alibi_slopes is not None and is_careful:
        found.append(_empty_rows_scratch(problem))
    return max(found)


def _touched_scratch(problem: CanonicalProblem) -> int:
    """What is taken to find the rows that attend a hazard."""
    dims, wide = problem.dims, problem.compute_dtype.itemsize
    marked = max(PAIRS_PER_BLOCK, dims.batch * dims.num_heads * dims.seq_len_kv)
    of_bias = 0 if (bias := problem.bias) is None else min(bias.numel(), marked) * (bias.dtype.itemsize + wide + 4)
    return min(dims.num_pairs, marked) * 5 + of_bias


def _exact_scratch(problem: CanonicalProblem) -> int:
    """What the manual kernel takes beside the blocked one, for rows that attend hazards, with its outputs."""
    itemsize, wide = problem.query.dtype.itemsize, problem.compute_dtype.itemsize
    size = isolated.exact_size(problem.dims, isolated.exact_pairs(problem))
    # Totals are added up from weights.
    names = tuple(dict.fromkeys(name.replace("weight_totals", "weights") for name in problem.outputs))
    asked = replace(problem, outputs=names, select_heads=None, select_rows=None)
    dims = replace(problem.dims, batch=size.items, num_heads=size.heads, seq_len_q=size.rows)
    outputs = sum(_output_bytes(replace(asked, dims=dims), name) for name in named_outputs(asked))
    # Of a head at a time both what was there and what is chosen from them.
    chosen = dims.batch * dims.seq_len_q * dims.seq_len_kv * (itemsize + 2 * wide) * ("weights" in names)
    return outputs + max(_manual_block(asked, size), chosen)


def _sweep_scratch(problem: CanonicalProblem, sweep: blocked.Sweep, *, is_careful: bool) -> int:
    """What the blocked kernel takes for one sweep over a problem."""
    dims, size = problem.dims, sweep.cut(problem)
    itemsize, wide = problem.query.dtype.itemsize, problem.compute_dtype.itemsize
    half, lists_rows = itemsize != wide, sweep.rows is not None
    lines = size.items * size.heads
    num_rows = lines * size.rows
    pairs = num_rows * dims.seq_len_kv
    # Logits and weights, and which pairs are forbidden.
    held = pairs * (2 * wide + (not problem.forbids_nothing))
    keys = size.items * -(-size.heads // dims.group_size) * dims.seq_len_kv
    # One head of several items is no run of memory.
    is_picked = sweep.heads is not None and size.items > 1
    of_keys, of_values = (
        blocked.copies(problem, tensor) or (is_picked and dims.num_kv_heads > 1)
        for tensor in (problem.key, problem.value)
    )
    held += keys * dims.head_dim * wide * of_keys
    cleaned = 0
    if "context" in sweep.names:
        values = keys * dims.head_dim_v
        # Without hazards in pieces: these with and without, and what is beyond the limit.
        cleaned = min(values, blocked.CLEANED_AT_ONCE) * (3 * itemsize + 1)
        if of_values:
            held += values * wide
        elif values > pairs:
            # They fit into no buffer of the block.
            cleaned += values * wide
    run = even(dims.seq_len_kv, max(1, blocked.TILE_PAIRS // num_rows))
    tile = replace(problem, dims=replace(dims, seq_len_kv=run))
    masks, booleans, making = _masks_of_block(tile, size, lists_rows=lists_rows)
    is_apart = is_picked or not problem.query.is_contiguous() or (size.rows < dims.seq_len_q and lines > 1)
    is_apart |= bool(min(dims.seq_len_q, size.rows) * dims.head_dim * itemsize % ALIGNMENT_BYTES)
    query = num_rows * dims.head_dim * (lists_rows * itemsize + (half or (is_apart and not lists_rows)) * wide)
    steps = [query + max(making, booleans + masks, _beside_logits(tile, size, 0, lists_rows=lists_rows))]
    if "context" in sweep.names:
        steps.append(cleaned * is_careful + num_rows * dims.head_dim_v * wide)
    if "weight_totals" in sweep.names:
        steps.append(lines * dims.seq_len_kv * wide)
    if "top_weights" in sweep.names:
        steps.append(_ranking_scratch(problem, num_rows))
    sums = 1
    if problem.sinks is not None or not {"entropy", "logsumexp"}.isdisjoint(sweep.names):
        sums += 5 + 4 * (problem.sinks is not None)
    return held + max(steps) + num_rows * sums * wide


def _ranking_scratch(problem: CanonicalProblem, num_rows: int) -> int:
    """Weights and keys among which the largest are, as one whole number each, and the answer of a block."""
    num_keys, itemsize, wide = problem.dims.seq_len_kv, problem.query.dtype.itemsize, problem.compute_dtype.itemsize
    index, half = torch.int64.itemsize, itemsize != wide
    count = min(problem.top_k or 0, num_keys)
    group = blocked.group_size(num_keys, count)
    width = num_keys if group is None else count * group + num_keys % group
    at_once = min(num_rows, max(1, blocked.RANKED_AT_ONCE // width))
    # What they are ranked by: a whole number made from float32, or of float64 sorted copies and their places.
    ranked = half * wide + index * (1 if itemsize < index else 2)
    kept = num_rows * count * (itemsize + index + 1)
    if group is None:
        chosen = itemsize + (2 * index if itemsize < index else 0)
        return kept + at_once * (num_keys * (half * itemsize + ranked) + count * chosen)
    first = num_keys // group * (wide + half * itemsize + ranked)
    each = max(itemsize + index + ranked, 2 * index + wide, index + wide + half * itemsize)
    return kept + at_once * (max(first, width * each) + count * 4 * index)


def search_scratch(problem: CanonicalProblem) -> int:
    """What the search for empty rows takes, marks and all."""
    return 2 * problem.dims.num_rows + vector_bytes(problem) + _empty_rows_scratch(problem)


def masked_pairs(problem: CanonicalProblem, size: Cut, num_keys: int | None = None) -> int:
    """How many booleans tell what is forbidden in a block."""
    by_item, by_head = problem.masks_apart
    pairs = (size.items if by_item else 1) * (size.heads if by_head else 1)
    return pairs * (size.rows if _masks_by_row(problem) else 1) * (num_keys or problem.dims.seq_len_kv)
