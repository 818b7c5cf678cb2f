"""The oracle: attention in float64, straight from the formula, one head at a time.

It shares no code with maths on purpose: a slip there would hide here too. It is slow and holds whole matrices.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_core.problem import AttentionProblem


def attend(problem: AttentionProblem) -> dict[str, Tensor]:
    """Every output of a checked problem, float64, ``[batch, num_heads, ...]`` whatever the layout; nothing is selected.

    ``top_weights`` and ``top_keys`` are there when ``top_k`` is given.
    """
    options = problem.options
    query = _in_bhtd(problem.query, options.layout, options.num_heads)
    if problem.key is None:
        key, value = query, query
    else:
        assert problem.value is not None
        kv_heads = options.num_kv_heads if options.num_kv_heads is not None else options.num_heads
        key = _in_bhtd(problem.key, options.layout, kv_heads)
        value = _in_bhtd(problem.value, options.layout, kv_heads)
    num_batch, num_heads, seq_len_q, head_dim = query.shape
    seq_len_kv, head_dim_v = value.shape[2], value.shape[3]
    group_size = num_heads // key.shape[1]
    out = {
        "scores": torch.zeros(num_batch, num_heads, seq_len_q, seq_len_kv, dtype=torch.float64),
        "logits": torch.zeros(num_batch, num_heads, seq_len_q, seq_len_kv, dtype=torch.float64),
        "weights": torch.zeros(num_batch, num_heads, seq_len_q, seq_len_kv, dtype=torch.float64),
        "logsumexp": torch.zeros(num_batch, num_heads, seq_len_q, dtype=torch.float64),
        "entropy": torch.zeros(num_batch, num_heads, seq_len_q, dtype=torch.float64),
        "context": torch.zeros(num_batch, num_heads, seq_len_q, head_dim_v, dtype=torch.float64),
        "weight_totals": torch.zeros(num_batch, num_heads, seq_len_kv, dtype=torch.float64),
    }
    scale = 1 / math.sqrt(head_dim) if options.scale is None else options.scale
    whole = (num_batch, num_heads, seq_len_q, seq_len_kv)
    for b in range(num_batch):
        num_keys = seq_len_kv if problem.key_lengths is None else int(problem.key_lengths[b])
        num_queries = seq_len_q if problem.query_lengths is None else int(problem.query_lengths[b])
        place = torch.arange(seq_len_q).unsqueeze(1)
        if problem.query_offset is not None:
            place = place + int(problem.query_offset[b if problem.query_offset.numel() > 1 else 0])
        elif options.causal == "lower_right":
            place = place + num_keys - num_queries
        j = torch.arange(seq_len_kv).unsqueeze(0)
        for h in range(num_heads):
            q, k, v = query[b, h], key[b, h // group_size], value[b, h // group_size]
            scores = (q.unsqueeze(1) * k.unsqueeze(0)).sum(-1)
            logits = scale * scores
            if options.softcap is not None:
                logits = options.softcap * torch.tanh(logits / options.softcap)
            if problem.alibi_slopes is not None:
                logits = logits - problem.alibi_slopes[h].double() * (place - j).abs()
            forbidden = torch.zeros(seq_len_q, seq_len_kv, dtype=torch.bool)
            if problem.bias is not None:
                bias = problem.bias.double().expand(whole)[b, h]
                logits = logits + bias
                forbidden |= bias == -math.inf
            if problem.allow_mask is not None:
                forbidden |= problem.allow_mask.expand(whole)[b, h].logical_not()
            if problem.block_mask is not None:
                forbidden |= problem.block_mask.expand(whole)[b, h]
            if options.causal is not False:
                forbidden |= j > place
            # A window wider than any distance is open; as it stands it might not fit an int64.
            if options.window_left is not None:
                forbidden |= j < place - min(options.window_left, 2**54)
            if options.window_right is not None:
                forbidden |= j > place + min(options.window_right, 2**54)
            forbidden |= j >= num_keys
            forbidden |= torch.arange(seq_len_q).unsqueeze(1) >= num_queries
            logits[forbidden] = -math.inf
            out["scores"][b, h] = scores
            out["logits"][b, h] = logits
            for i in range(seq_len_q):
                _one_row(out, b, h, i, logits[i], v, forbidden[i], problem.sinks)
    by_key = out["weights"].transpose(2, 3).tolist()
    totals = [[[math.fsum(own) for own in head] for head in item] for item in by_key]
    out["weight_totals"] = torch.tensor(totals, dtype=torch.float64).view(out["weight_totals"].shape)
    if options.top_k is not None:
        out["top_weights"], out["top_keys"] = _top(out["weights"], out["logits"], options.top_k)
    return out


def _one_row(
    out: dict[str, Tensor],
    b: int,
    h: int,
    i: int,
    logits: Tensor,
    value: Tensor,
    forbidden: Tensor,
    sinks: Tensor | None,
) -> None:
    sink = None if sinks is None else sinks[h].double()
    seen = (~forbidden).nonzero().flatten()
    if not seen.numel():
        out["logsumexp"][b, h, i] = -math.inf if sink is None else sink
        return
    own = logits[seen]
    column = own if sink is None else torch.cat([own, sink.reshape(1)])
    top = column.max()
    total = torch.exp(column - top).sum()
    weights = torch.exp(own - top) / total
    out["weights"][b, h, i, seen] = weights
    out["logsumexp"][b, h, i] = top + torch.log(total)
    out["context"][b, h, i] = (weights.unsqueeze(1) * value[seen]).sum(0)
    positive = weights[weights != 0]
    # Rounded once, as totals are: the sum of many equal terms would be off by more than the kernels beside it.
    out["entropy"][b, h, i] = -math.fsum((positive * torch.log(positive)).tolist())


def _top(weights: Tensor, logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The top_k weights of each row, largest first, the lower key first among equals; 0 and -1 beyond the allowed."""
    width = min(top_k, weights.shape[-1])
    top_weights, top_keys = [], []
    for row, own_logits in zip(weights.flatten(0, 2).tolist(), logits.flatten(0, 2).tolist(), strict=True):
        seen = [j for j, logit in enumerate(own_logits) if logit != -math.inf]
        best = sorted(seen, key=lambda j: (-row[j], j))[:width]
        beyond = width - len(best)
        top_weights.append([row[j] for j in best] + beyond * [0.0])
        top_keys.append(best + beyond * [-1])
    shape = (*weights.shape[:-1], width)
    return (
        torch.tensor(top_weights, dtype=torch.float64).view(shape),
        torch.tensor(top_keys, dtype=torch.int64).view(shape),
    )


def _in_bhtd(tensor: Tensor, layout: str, num_heads: int | None) -> Tensor:
    tensor = tensor.double().cpu()
    if layout == "bthd":
        return tensor.permute(0, 2, 1, 3)
    if layout == "btd":
        assert num_heads is not None
        width = tensor.shape[2] // num_heads
        return torch.stack([tensor[:, :, h * width : (h + 1) * width] for h in range(num_heads)], dim=1)
    while tensor.ndim < 4:
        tensor = tensor.unsqueeze(0)
    return tensor
