"""What each model has done: counted by its name, and forgotten with it."""

from __future__ import annotations

import pytest

from service.statistics import Statistics


@pytest.fixture
def statistics() -> Statistics:
    return Statistics(wall_clock=lambda: 1.5)


def answer(statistics: Statistics, model: str) -> None:
    statistics.succeeded(model, total_s=1e-3, queue_s=1e-4, input_s=2e-4, infer_s=3e-4, output_s=4e-4)


def test_an_answer_raises_every_count_alike(statistics: Statistics) -> None:
    answer(statistics, "a")
    answer(statistics, "a")
    statistics.failed("a", total_s=1.0)
    figures = statistics.of("a").as_dict(name="a", version="1")
    stats = figures["inference_stats"]
    assert {name: each["count"] for name, each in stats.items()} == {
        **dict.fromkeys(("success", "queue", "compute_input", "compute_infer", "compute_output"), 2),
        "fail": 1,
        "cache_hit": 0,
        "cache_miss": 0,
    }
    assert stats["success"]["ns"] == 2_000_000
    assert figures["last_inference"] == 1500 and figures["inference_count"] == 2


def test_a_model_that_takes_the_name_of_one_forgotten_begins_at_zero(statistics: Statistics) -> None:
    answer(statistics, "a")
    answer(statistics, "b")
    statistics.forget("a")
    statistics.forget("never there")
    assert statistics.of("a").success.count == 0
    assert statistics.of("b").success.count == 1
    answer(statistics, "a")
    assert statistics.of("a").success.count == 1
