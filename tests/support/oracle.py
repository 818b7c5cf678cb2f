"""What a result must be: the float64 reference in the caller's form, and how far from it a kernel may be."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_core import AttentionProblem, AttentionResult
from attn_core.kernels import reference
from attn_core.problem import SELECTABLE_BY_HEAD, SELECTABLE_BY_ROW
from tests.support.factory import in_layout


def expected_outputs(problem: AttentionProblem, exact: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The asked outputs of the reference, float64, selected and in the caller's layout and rank."""
    found = reference.attend(problem) if exact is None else exact
    return {name: as_asked(name, found[name], problem) for name in asked_outputs(problem)}


def allowed_error(problem: AttentionProblem, exact: dict[str, Tensor], *, strict: bool = False) -> dict[str, float]:
    """For each asked output: twice the error of the plain formula in its dtype, or one unit in the last place.

    In a small problem the plain formula is right by luck. So, unless ``strict``, its error counts as one rounding of
    each number at least, taken at the size of the terms that are added up, and carried through to the output.
    """
    plain = plain_formula(problem, exact)
    least = {} if strict else _one_rounding(problem, exact)
    limits = {}
    for name in asked_outputs(problem):
        if name == "top_keys":
            continue
        source = "weights" if name == "top_weights" else name
        truth, rough = exact[source], plain[source].double()
        error, size = _largest(truth - rough), _largest(truth)
        unit = _unit_in_the_last_place(size, _rounded_to(name, problem.query.dtype))
        limits[name] = max(2 * error, 2 * least.get(source, 0.0), unit)
    return limits


def _one_rounding(problem: AttentionProblem, exact: dict[str, Tensor]) -> dict[str, float]:
    eps = torch.finfo(problem.query.dtype).eps
    query, key, value = (t.double().abs().nan_to_num(posinf=0.0) for t in _operands(problem))
    score = eps * _largest(query @ key.transpose(-1, -2))
    scale = 1 / math.sqrt(query.shape[-1]) if problem.options.scale is None else abs(problem.options.scale)
    logit = scale * score + eps * _largest(exact["logits"])
    if problem.bias is not None:
        logit += eps * _largest(problem.bias)
    if problem.alibi_slopes is not None:
        logit += eps * _largest(problem.alibi_slopes) * _largest(_distances(problem, exact["logits"].shape))
    # Of a sum of exponentials: the relative error of the sum is the absolute error of its logarithm.
    relative = logit + eps
    return {
        "scores": score,
        "logits": logit,
        "logsumexp": relative,
        "weights": relative * _largest(exact["weights"]),
        "entropy": relative * (1 + _largest(exact["entropy"])),
        "context": relative * _largest(exact["weights"] @ value),
        "weight_totals": relative * _largest(exact["weight_totals"]),
    }


def _largest(tensor: Tensor) -> float:
    """The largest |number| that is finite, 0 if none is."""
    finite = tensor[tensor.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0


def assert_matches_reference(problem: AttentionProblem, result: AttentionResult, *, strict: bool = False) -> None:
    """Every asked output is there, of the right shape and dtype, and as near to the reference as promised."""
    exact = reference.attend(problem)
    limits = allowed_error(problem, exact, strict=strict)
    expected = expected_outputs(problem, exact)
    assert set(result.outputs) == set(expected)
    for name, error in limits.items():
        own = result.outputs[name]
        assert own.dtype == _rounded_to(name, problem.query.dtype), name
        assert own.is_contiguous(), name
        assert_close(own, expected[name], error=error, name=name)
    if "top_keys" in expected:
        _assert_top(problem, result, exact, error=limits["top_weights"])


def assert_close(result: Tensor, truth: Tensor, *, error: float, name: str = "") -> None:
    own = result.double().cpu()
    assert own.shape == truth.shape, (name, own.shape, truth.shape)
    assert torch.equal(own.isnan(), truth.isnan()), f"{name}: NaN stands elsewhere"
    infinite = truth.isinf()
    assert torch.equal(own[infinite], truth[infinite]), f"{name}: infinities differ"
    finite = truth.isfinite()
    if finite.any():
        off = (own - truth)[finite].abs().max().item()
        assert off <= error, f"{name}: off by {off}, allowed {error}"


def assert_same_bits(first: AttentionResult, second: AttentionResult) -> None:
    assert first.outputs.keys() == second.outputs.keys()
    for name, tensor in first.outputs.items():
        other = second.outputs[name]
        assert tensor.dtype == other.dtype
        assert same_bits(tensor, other), name


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Equality that counts NaN equal to NaN."""
    return first.shape == second.shape and bool(((first == second) | (first.isnan() & second.isnan())).all())


def plain_formula(problem: AttentionProblem, exact: dict[str, Tensor]) -> dict[str, Tensor]:
    """The formula written down without care, in the dtype of the query throughout: ``[batch, num_heads, ...]``."""
    options = problem.options
    dtype = problem.query.dtype
    forbidden = _forbidden(problem, exact["weights"].shape)
    query, key, value = (t.to(dtype) for t in _operands(problem))
    scale = 1 / math.sqrt(query.shape[-1]) if options.scale is None else options.scale
    scores = query @ key.transpose(-1, -2)
    logits = scores * scale
    if options.softcap is not None:
        logits = torch.tanh(logits / options.softcap) * options.softcap
    if problem.alibi_slopes is not None:
        shift = problem.alibi_slopes.double().view(1, -1, 1, 1) * _distances(problem, logits.shape)
        logits = logits - shift.to(dtype)
    if problem.bias is not None:
        logits = logits + problem.bias.to(dtype)
    logits = logits.masked_fill(forbidden, -math.inf)
    columns = logits
    if problem.sinks is not None:
        sink = problem.sinks.to(dtype).view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        columns = torch.cat([logits, sink], dim=-1)
    weights = torch.softmax(columns, dim=-1)[..., : logits.shape[-1]].masked_fill(forbidden, 0.0)
    clean_value = torch.where(value.isfinite(), value, 0.0)
    entropy_terms = torch.special.entr(weights)
    return {
        "scores": scores,
        "logits": logits,
        "weights": weights,
        "logsumexp": torch.logsumexp(columns, dim=-1) if columns.shape[-1] else exact["logsumexp"],
        "entropy": entropy_terms.sum(-1),
        "context": weights @ clean_value,
        "weight_totals": weights.sum(2),
    }


def asked_outputs(problem: AttentionProblem) -> tuple[str, ...]:
    asked = problem.options.outputs
    return (*asked, "top_keys") if "top_weights" in asked else asked


def _rounded_to(name: str, dtype: torch.dtype) -> torch.dtype:
    if name in ("context", "weights", "top_weights"):
        return dtype
    return torch.float64 if dtype == torch.float64 else torch.float32


def _unit_in_the_last_place(number: float, dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    if number < info.tiny:
        return info.tiny * info.eps
    return float(2.0 ** math.floor(math.log2(number)) * info.eps)


def as_asked(name: str, tensor: Tensor, problem: AttentionProblem) -> Tensor:
    options = problem.options
    if options.select_heads is not None and (name in SELECTABLE_BY_HEAD or name == "top_keys"):
        tensor = tensor[:, list(options.select_heads)]
    if options.select_rows is not None and (name in SELECTABLE_BY_ROW or name == "top_keys"):
        tensor = tensor[:, :, list(options.select_rows)]
    if name == "context":
        tensor = in_layout(tensor, options.layout)
    missing = 4 - problem.query.ndim if options.layout == "bhtd" else 0
    return tensor.reshape(tensor.shape[missing:])


def _assert_top(problem: AttentionProblem, result: AttentionResult, exact: dict[str, Tensor], *, error: float) -> None:
    """The keys named are the ones that weigh what is said, each once, and the allowed ones come before -1."""
    top_weights, top_keys = result.outputs["top_weights"].double(), result.outputs["top_keys"]
    assert top_keys.dtype == torch.int64 and top_keys.is_contiguous()
    weights = as_asked("top_weights", exact["weights"], problem)
    truth_keys = as_asked("top_keys", exact["top_keys"], problem)
    assert top_keys.shape == truth_keys.shape
    assert torch.equal(top_keys < 0, truth_keys < 0)
    assert torch.equal(top_weights[top_keys < 0], torch.zeros(int((top_keys < 0).sum()), dtype=torch.float64))
    if top_keys.numel() == 0:
        return
    named = weights.gather(-1, top_keys.clamp(min=0)).masked_fill(top_keys < 0, 0.0)
    assert_close(top_weights, named, error=error, name="top_weights of the keys named")
    ordered = top_keys.masked_fill(top_keys < 0, 0) + torch.where(
        top_keys < 0, -1 - torch.arange(top_keys.shape[-1]), 0
    )
    assert bool((ordered.sort(-1).values.diff(dim=-1) != 0).all()), "a key is named twice"
    falls, level = top_weights.diff(dim=-1) < 0, top_weights.diff(dim=-1) == 0
    rises = top_keys.diff(dim=-1) > 0
    filled = top_keys[..., 1:] < 0
    finite = top_weights[..., 1:].isfinite()
    assert bool((falls | (level & rises) | filled | ~finite).all()), "not in order"


def _operands(problem: AttentionProblem) -> tuple[Tensor, Tensor, Tensor]:
    """query, key and value as ``[batch, num_heads, tokens, width]``, shared heads repeated."""
    options = problem.options

    def bhtd(tensor: Tensor, num_heads: int | None) -> Tensor:
        if options.layout == "bthd":
            return tensor.transpose(1, 2)
        if options.layout == "btd":
            assert num_heads is not None
            batch, tokens, columns = tensor.shape
            return tensor.reshape(batch, tokens, num_heads, columns // num_heads).transpose(1, 2)
        return tensor.reshape((1,) * (4 - tensor.ndim) + tuple(tensor.shape))

    query = bhtd(problem.query, options.num_heads)
    if problem.key is None or problem.value is None:
        return query, query, query
    kv_heads = options.num_kv_heads if options.num_kv_heads is not None else options.num_heads
    key, value = bhtd(problem.key, kv_heads), bhtd(problem.value, kv_heads)
    group_size = query.shape[1] // key.shape[1]
    return query, key.repeat_interleave(group_size, dim=1), value.repeat_interleave(group_size, dim=1)


def _positions(problem: AttentionProblem, seq_len_q: int, seq_len_kv: int) -> Tensor:
    i = torch.arange(seq_len_q).view(1, 1, -1, 1)
    if problem.query_offset is not None:
        return i + problem.query_offset.view(-1, 1, 1, 1)
    if problem.options.causal == "lower_right":
        keys = torch.tensor([seq_len_kv]) if problem.key_lengths is None else problem.key_lengths
        queries = torch.tensor([seq_len_q]) if problem.query_lengths is None else problem.query_lengths
        return i + (keys - queries).view(-1, 1, 1, 1)
    return i


def _distances(problem: AttentionProblem, shape: torch.Size) -> Tensor:
    j = torch.arange(shape[3]).view(1, 1, 1, -1)
    return (_positions(problem, shape[2], shape[3]) - j).abs().double()


def _forbidden(problem: AttentionProblem, shape: torch.Size) -> Tensor:
    options = problem.options
    place = _positions(problem, shape[2], shape[3])
    i, j = torch.arange(shape[2]).view(1, 1, -1, 1), torch.arange(shape[3]).view(1, 1, 1, -1)
    forbidden = torch.zeros(shape, dtype=torch.bool)
    if options.causal is not False:
        forbidden = forbidden | (j > place)
    if options.window_left is not None:
        forbidden = forbidden | (place - j > min(options.window_left, 2**60))
    if options.window_right is not None:
        forbidden = forbidden | (j - place > min(options.window_right, 2**60))
    if problem.key_lengths is not None:
        forbidden = forbidden | (j >= problem.key_lengths.view(-1, 1, 1, 1))
    if problem.query_lengths is not None:
        forbidden = forbidden | (i >= problem.query_lengths.view(-1, 1, 1, 1))
    if problem.allow_mask is not None:
        forbidden = forbidden | ~problem.allow_mask
    if problem.block_mask is not None:
        forbidden = forbidden | problem.block_mask
    if problem.bias is not None:
        forbidden = forbidden | problem.bias.isneginf()
    return forbidden
