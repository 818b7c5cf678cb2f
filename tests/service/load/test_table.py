"""CSV of a load test."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import pytest

from service.load.results import PERCENTILES, Results, StepResult, read_results
from service.load.table import STAGES, csv_text
from tests.support.load_results import make_results


def rows_of(results: Results) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(csv_text(results))))


def number(cell: str) -> float | None:
    return float(cell) if cell else None


def test_every_number_of_a_step_is_in_its_row_to_the_last_digit() -> None:
    results = make_results(rates=(50, 200), concurrencies=(4,), num_failed=3, late=("slow client",), wrong=("off",))
    for row, step in zip(rows_of(results), results.steps, strict=True):
        assert (row["form"], row["loop"], row["arrivals"]) == (step.form, step.loop, step.arrivals or "")
        for name in ("rate_s", "concurrency", "ramp_s", "warm_up_s", "duration_s", "planned", "answered", "failed"):
            assert number(row[name]) == getattr(step, name)
        for name in ("requests_s", "sent_mb_s", "received_mb_s", "ceiling_share"):
            assert number(row[name]) == getattr(step, name)
        assert_durations(row, step)
        assert int(row["errors"]) == sum(step.errors.values()) == 3
        assert (row["late"], row["checked_answers"], row["wrong_answers"], row["same_bits"]) == (
            "yes",
            "32",
            "1",
            "yes",
        )


def assert_durations(row: dict[str, str], step: StepResult) -> None:
    of_prefix = {"": step.latency, "service_time_": step.service_time, "lateness_": step.lateness}
    of_prefix |= {f"{stage}_": step.stages[stage] for stage in STAGES}
    for prefix, durations in of_prefix.items():
        for at in PERCENTILES:
            name = f"{prefix}p{at:g}_ms".replace(".", "_")
            assert number(row[name]) == durations.percentiles_ms.get(f"{at:g}")
        has_any = durations.count > 0
        assert number(row[f"{prefix}mean_ms"]) == (durations.mean_ms if has_any else None)
        assert number(row[f"{prefix}max_ms"]) == (durations.max_ms if has_any else None)


def test_the_columns_are_the_same_whatever_was_run() -> None:
    usual = list(rows_of(make_results())[0])
    bare = make_results(rates=(), concurrencies=(1,), num_answers=0)
    unchecked = replace(bare, steps=tuple(replace(step, checked=None, stages={}) for step in bare.steps))
    assert list(rows_of(unchecked)[0]) == usual
    assert {"rate_s", "p50_ms", "p99_9_ms", "max_ms", "queue_p50_ms", "lateness_p99_ms", "service_time_p99_ms"} <= set(
        usual
    )


def test_a_stage_of_another_service_gets_columns_behind_the_known_ones() -> None:
    made = make_results(rates=(50, 100))
    first = replace(made.steps[0], stages={**made.steps[0].stages, "fetch": made.steps[0].latency})
    rows = rows_of(replace(made, steps=(first, made.steps[1])))
    assert [number(row["fetch_p50_ms"]) for row in rows] == [first.latency.p50_ms, None]
    assert list(rows[0]).index("fetch_mean_ms") > list(rows[0]).index("encode_max_ms")


@pytest.mark.parametrize("name", ["a,b", 'a"b', "a\nb"])
def test_no_name_can_break_a_row(name: str) -> None:
    assert [row["form"] for row in rows_of(make_results(forms=(name,)))] == [name, name]


def test_a_step_without_answers_has_empty_cells_and_no_zeros_for_its_times() -> None:
    row = rows_of(make_results(rates=(50,), num_answers=0, num_failed=5))[0]
    assert row["answered"] == "0" and row["failed"] == "5"
    assert {row[name] for name in ("mean_ms", "p50_ms", "p99_ms", "max_ms", "queue_mean_ms")} == {""}


def test_results_that_were_stored_give_the_same_table() -> None:
    made = make_results(num_failed=2, concurrencies=(3,))
    assert csv_text(read_results(made.to_json())) == csv_text(made)


def test_no_steps_are_an_empty_table() -> None:
    assert rows_of(make_results(rates=(), was_cut=True)) == []
