"""What a load test found, to JSON and back; what is not whole is refused before anything stands on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
from hdrh.histogram import HdrHistogram

from service.load.results import Distribution, UnreadableResults, read_results
from tests.support.load_results import make_results


@pytest.mark.parametrize("given", [{}, {"concurrencies": (1, 8)}, {"num_failed": 3, "wrong": ("x",), "late": ("y",)}])
def test_what_is_written_is_read_again(given: dict[str, Any]) -> None:
    results = make_results(**given)
    assert read_results(results.to_json()) == results


def changed(path: list[Any], value: Any) -> bytes:
    members = orjson.loads(make_results(concurrencies=(8,)).to_json())
    node = members
    for step in path[:-1]:
        node = node[step]
    node[path[-1]] = value
    return orjson.dumps(members)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        make_results().to_json()[:-100],
        changed(["format"], 2),
        changed(["steps", 0, "latency", "histogram"], "garbage"),
        changed(["steps", 0, "latency", "histogram"], ""),
        changed(["steps", 0, "stages", "queue", "histogram"], "HISTFAAAAAx42g=="),
        changed(["ceilings", 0, "latency", "histogram"], "garbage"),
        changed(["steps", 0, "latency", "percentiles_ms"], {}),
        changed(["steps", 0, "rate_s"], None),
        changed(["steps", 0, "loop"], "half"),
        changed(["steps", 2, "concurrency"], None),
        changed(["steps", 0, "checked"], 5),
    ],
)
def test_what_is_not_whole_is_refused(text: bytes) -> None:
    with pytest.raises(UnreadableResults, match="no results of this version's load test"):
        read_results(text)


@pytest.mark.parametrize("count", [1, 3, 5000])
def test_percentiles_are_those_of_the_numbers_to_three_digits_and_never_beyond_the_largest(count: int) -> None:
    seconds = np.random.default_rng(count).exponential(0.02, count)
    found = Distribution.of(seconds)
    assert found.count == count and found.max_ms == pytest.approx(seconds.max() * 1e3)
    for at, value in found.percentiles_ms.items():
        # The nearest rank.
        expected = np.sort(seconds * 1e3)[max(1, int(float(at) / 100 * count + 0.5)) - 1]
        assert value == pytest.approx(expected, rel=2e-3) and value <= found.max_ms


def test_the_text_of_a_histogram_is_that_of_its_own_tools() -> None:
    found = Distribution.of(np.array([0.001, 0.002, 0.003]))
    histogram = HdrHistogram.decode(found.histogram)
    assert histogram.get_total_count() == 3 and histogram.get_value_at_percentile(50) == 2000
    assert found.curve([0, 50, 100])[1] == pytest.approx(2.0)


def test_nothing_is_a_distribution_too() -> None:
    found = Distribution.of(np.zeros(0))
    assert (found.count, found.percentiles_ms, found.p99_ms) == (0, {}, 0.0)
    assert Distribution.of(np.zeros(3)).percentiles_ms["99"] == 0.0
