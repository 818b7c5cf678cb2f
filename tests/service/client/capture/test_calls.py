"""What is kept of calls: how it is found, and that it outlives the mode it was made in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from service.client.capture import Captured, capture_attention
from service.client.capture.capturing import Keep
from tests.service.client.capture.models import Attention, Stack, tokens


@pytest.fixture
def captured() -> Captured:
    model = Stack(Attention(), Attention())
    with torch.no_grad(), capture_attention(model, keep="none") as captured:
        model(tokens())
        model(tokens())
    return captured


def test_calls_are_found_from_the_end_and_by_ranges(captured: Captured) -> None:
    assert [call.index for call in captured[1:3]] == [1, 2]
    assert [call.index for call in captured[-1:]] == [3]
    assert captured[:] == tuple(captured)
    assert captured[-4] is captured[0]


def test_whole_numbers_of_numpy_find_calls(captured: Captured) -> None:
    assert captured[np.int64(1)] is captured[1]
    name = captured.names[0]
    assert captured[name, np.int64(1)] is captured.of(name)[1]


@pytest.mark.parametrize("which", [None, 1.5])
def test_what_is_no_place_and_no_name_is_refused_with_the_names(which: object, captured: Captured) -> None:
    with pytest.raises(KeyError, match=captured.names[0]):
        captured[which]  # type: ignore[call-overload]


@pytest.mark.parametrize("keep", ["weights", "top_weights", "entropy"])
@pytest.mark.parametrize("is_around", [True, False], ids=["around the capture", "inside it"])
def test_what_is_kept_of_a_model_in_inference_mode_can_be_trained_on(keep: Keep, is_around: bool) -> None:
    query = torch.randn(1, 2, 5, 8)
    with torch.inference_mode(is_around), capture_attention(keep=keep) as captured, torch.inference_mode():
        F.scaled_dot_product_attention(query, query, query)
    outputs = captured[0].outputs
    assert not any(output.is_inference() for output in outputs.values())
    factor = torch.ones((), requires_grad=True)
    (outputs[keep] * factor).sum().backward()  # type: ignore[no-untyped-call]
    assert factor.grad is not None
