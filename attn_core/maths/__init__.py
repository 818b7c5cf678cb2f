"""Attention as mathematics: each step a pure function of tensors, usable alone."""

from attn_core.maths.context import weighted_context, weighted_context_of_allowed
from attn_core.maths.heads import group_heads, merge_heads, split_heads, ungroup_heads
from attn_core.maths.masks import (
    allowed_pairs,
    attends_any,
    bits_of,
    causal_mask,
    combine_masks,
    fill_forbidden_,
    key_positions,
    length_mask,
    query_positions,
    window_mask,
)
from attn_core.maths.merge import merge_partials
from attn_core.maths.scores import alibi_distances, logits_from_scores, score_matrix, softcap_scores
from attn_core.maths.softmax import masked_softmax, row_entropy, row_logsumexp

__all__ = [
    "alibi_distances",
    "allowed_pairs",
    "attends_any",
    "bits_of",
    "causal_mask",
    "combine_masks",
    "fill_forbidden_",
    "group_heads",
    "key_positions",
    "length_mask",
    "logits_from_scores",
    "masked_softmax",
    "merge_heads",
    "merge_partials",
    "query_positions",
    "row_entropy",
    "row_logsumexp",
    "score_matrix",
    "softcap_scores",
    "split_heads",
    "ungroup_heads",
    "weighted_context",
    "weighted_context_of_allowed",
    "window_mask",
]
