"""Names of metrics, bounds of their labels, and the two forms of a log line."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from attn_core.support import PATHS
from service.errors import REFUSAL_REASONS
from service.failures import FAILURES, INTERNAL
from service.telemetry import OTHER_ROUTE, STAGES, JsonFormatter, Metrics, TextFormatter, set_up_logging

UNITS = ("_total", "_seconds", "_bytes", "_requests", "_layers")
STATES = {"attn_ready"}
"""1 or 0: a state has no unit."""
ROUTES = ("/v1/attention", "/v1")
LABELS = {
    "route": {*ROUTES, OTHER_ROUTE},
    "outcome": {"ok"},
    "stage": set(STAGES),
    "reason": set(REFUSAL_REASONS),
    "path": set(PATHS),
    "kind": {"resident", "limit"},
}


def prepared() -> Metrics:
    metrics = Metrics()
    metrics.prepare(routes=ROUTES, paths=PATHS, reasons=REFUSAL_REASONS)
    metrics.watch_memory(lambda: {"resident": 1.0, "limit": 2.0})
    return metrics


def families(metrics: Metrics) -> Iterator[Metric]:
    return iter(text_string_to_metric_families(metrics.text().decode()))


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {(s.name, frozenset(s.labels.items())): s.value for family in families(metrics) for s in family.samples}


def test_every_name_begins_with_ours_and_ends_in_its_unit() -> None:
    names = {family.name + ("_total" if family.type == "counter" else "") for family in families(prepared())}
    assert len(names) >= 14
    for name in names:
        assert name.startswith("attn_") and (name.endswith(UNITS) or name in STATES), name


def test_every_metric_says_what_it_means() -> None:
    assert all(family.documentation.endswith((".", "process.")) for family in families(prepared()))


def test_labels_are_ours_and_their_values_are_known_before_any_traffic() -> None:
    for family in families(prepared()):
        for sample in family.samples:
            for label, value in sample.labels.items():
                assert label == "le" or value in LABELS[label], (sample.name, label, value)


def test_traffic_of_known_kinds_adds_no_series_but_outcomes() -> None:
    metrics = prepared()
    before = samples(metrics)
    outcomes = {row.name for row in (*FAILURES.values(), INTERNAL)} | {"ok", "disconnected", "cancelled"}
    for outcome in outcomes:
        for route in LABELS["route"]:
            metrics.requests.labels(route, outcome).inc()
            metrics.request_seconds.labels(route).observe(0.1)
    for path in PATHS:
        metrics.paths.labels(path).inc()
    for reason in REFUSAL_REASONS:
        metrics.refused.labels(reason).inc()
    metrics.observe_stages(dict.fromkeys(STAGES, 0.1))
    new = samples(metrics).keys() - before.keys()
    assert {name for name, _ in new} == {"attn_requests_total"}
    assert len(new) == len(LABELS["route"]) * (len(outcomes) - 1)


def test_a_stage_that_is_none_of_ours_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        prepared().observe_stages({"nap": 1.0})


def test_memory_is_read_at_each_scrape() -> None:
    metrics, values = Metrics(), iter([1.0, 2.0])
    metrics.watch_memory(lambda: {"resident": next(values)} if metrics_are_scraped else {})
    metrics_are_scraped = True
    key = ("attn_device_memory_bytes", frozenset({("kind", "resident")}))
    assert [samples(metrics)[key], samples(metrics)[key]] == [1.0, 2.0]


def test_two_services_of_one_process_count_apart() -> None:
    first, second = Metrics(), Metrics()
    first.bytes_in.inc(5)
    key = ("attn_received_bytes_total", frozenset[tuple[str, str]]())
    assert (samples(first)[key], samples(second)[key]) == (5.0, 0.0)


def make_record(message: str, *args: object, **fields: object) -> logging.LogRecord:
    record = logging.LogRecord("attn.test", logging.WARNING, "file.py", 1, message, args, None)
    record.created, record.msecs = 1.007, 7.0
    if fields:
        record.fields = fields
    return record


def test_a_json_line_has_its_fields_and_stays_one_line() -> None:
    line = JsonFormatter().format(make_record("two\nlines of %s", "é", request_id="r-1", status=503))
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:01.007Z",
        "level": "warning",
        "logger": "attn.test",
        "message": "two\nlines of é",
        "request_id": "r-1",
        "status": 503,
    }


def test_a_json_line_has_the_exception_in_it() -> None:
    record = make_record("unexpected")
    try:
        raise ValueError("deep")
    except ValueError:
        record.exc_info = sys.exc_info()
    line = JsonFormatter().format(record)
    assert "\n" not in line and "ValueError: deep" in json.loads(line)["exception"]


def test_a_text_line_has_the_same_fields() -> None:
    formatter = TextFormatter()
    line = formatter.format(make_record("answered", request_id="r-1", status=503))
    assert line.endswith("WARNING attn.test: answered request_id=r-1 status=503")
    assert formatter.format(make_record("plain")).endswith("attn.test: plain")


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    """The root logger, put back afterwards."""
    root, uvicorn = logging.getLogger(), logging.getLogger("uvicorn")
    handlers, level, uvicorn_level = list(root.handlers), root.level, uvicorn.level
    root.handlers.clear()
    yield root
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    uvicorn.setLevel(uvicorn_level)


@pytest.mark.parametrize(("level", "seen"), [("debug", ["debug", "info"]), ("info", ["info"]), ("error", [])])
def test_the_level_holds_for_ours_and_uvicorn_tells_warnings_alone(
    root_logger: logging.Logger, capsys: pytest.CaptureFixture[str], level: str, seen: list[str]
) -> None:
    set_up_logging(level=level, as_json=True)
    logging.getLogger("attn.x").debug("from us")
    logging.getLogger("attn.x").info("from us")
    logging.getLogger("uvicorn.error").info("Started server process")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["level"] for line in lines] == seen
    assert all(line["message"] == "from us" for line in lines)
