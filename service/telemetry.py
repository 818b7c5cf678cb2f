"""The names of all metrics and log fields, and what may stand in their labels."""

from __future__ import annotations

import itertools
import json
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

# The time at which a series began would be a series more for each.
disable_created_metrics()  # type: ignore[no-untyped-call]

STAGES = ("read", "parse", "queue", "compute", "encode")
BUCKETS_S = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0,
)  # fmt: skip
OTHER_ROUTE = "other"
"""The label of every path that is none of ours: a stranger's paths never become series."""


class Series:
    """The observations of one series of a histogram."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Histogram(Collector):
    """A histogram for the event loop alone: without the library's locks an observation costs a third of its own.

    Each request makes six of them, which was a tenth of what the smallest request takes.
    """

    def __init__(
        self, name: str, documentation: str, label: str | None = None, *, buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:  # fmt: skip
        self._name = name
        self._documentation = documentation
        self._label = label
        self._buckets = buckets
        self._series: dict[str, Series] = {}
        registry.register(self)

    def labels(self, value: str) -> Series:
        series = self._series.get(value)
        if series is None:
            series = self._series[value] = Series(self._buckets)
        return series

    def observe(self, value: float) -> None:
        """Of a histogram without a label."""
        self.labels("").observe(value)

    def describe(self) -> Iterator[HistogramMetricFamily]:
        yield HistogramMetricFamily(self._name, self._documentation)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        names = [] if self._label is None else [self._label]
        family = HistogramMetricFamily(self._name, self._documentation, labels=names)
        if self._label is None:
            self.labels("")
        bounds = [*(floatToGoString(bound) for bound in self._buckets), "+Inf"]  # type: ignore[no-untyped-call]
        for value, series in self._series.items():
            buckets = list(zip(bounds, itertools.accumulate(series.counts), strict=True))
            family.add_metric([value] * len(names), buckets=buckets, sum_value=series.total)
        yield family


class Metrics:
    """Every series of one service, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        new: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("attn_requests_total", "Requests answered.", ["route", "outcome"], **new)
        self.request_seconds = Histogram(
            "attn_request_seconds", "From the head of a request to the end of its answer.", "route",
            buckets=BUCKETS_S, **new,
        )  # fmt: skip
        self.stage_seconds = Histogram(
            "attn_stage_seconds", "Time of one request in one stage.", "stage", buckets=BUCKETS_S, **new
        )
        self.batch_requests = Histogram(
            "attn_batch_requests", "Requests that were computed together.", buckets=(1, 2, 4, 8, 16, 32, 64, 128), **new
        )
        self.refused = Counter("attn_refused_requests_total", "Requests refused unread or unqueued.", ["reason"], **new)
        self.bytes_in = Counter("attn_received_bytes_total", "Bytes of request bodies.", **new)
        self.bytes_out = Counter("attn_sent_bytes_total", "Bytes of answer bodies.", **new)
        self.flops = Counter("attn_computed_flops_total", "Floating point operations of answered problems.", **new)
        self.paths = Counter("attn_path_requests_total", "Problems by the kernel that answered.", ["path"], **new)
        self.empty_rows = Counter("attn_empty_rows_total", "Rows that might attend no key.", **new)
        self.nonfinite_rows = Counter("attn_nonfinite_rows_total", "Rows that came out with NaN or infinity.", **new)
        self.queue_depth = Gauge("attn_queue_requests", "Problems that wait for the engine.", **new)
        self.in_flight = Gauge(
            "attn_in_flight_requests", "Requests inside: read, waiting, computed or answered.", **new
        )
        self.ready = Gauge("attn_ready", "1 while the service takes work.", **new)
        self.layers = Gauge("attn_named_layers", "Layers that are kept by name.", **new)
        self.layer_bytes = Gauge("attn_named_layer_bytes", "Bytes of their weights.", **new)
        # Looked up once: labels() costs more than the increment.
        self._paths: dict[str, Any] = {}
        self._stages = {stage: self.stage_seconds.labels(stage) for stage in STAGES}

    def prepare(self, *, routes: Iterable[str], paths: Iterable[str], reasons: Iterable[str]) -> None:
        """Make the series of every route, kernel and reason now, so that traffic adds hardly any."""
        for route in (*routes, OTHER_ROUTE):
            self.requests.labels(route, "ok")
            self.request_seconds.labels(route)
        for path in paths:
            self.paths.labels(path)
        for reason in reasons:
            self.refused.labels(reason)

    def observe_stages(self, seconds: dict[str, float]) -> None:
        for stage, value in seconds.items():
            self._stages[stage].observe(value)

    def plain_answered(
        self,
        *,
        read_s: float,
        parse_s: float,
        compute_s: float,
        encode_s: float,
        received_bytes: int,
        sent_bytes: int,
        path: str,
        flops: int,
    ) -> None:
        """Count a request that was answered where it was read: everything but its outcome and its time."""
        stages = self._stages
        stages["read"].observe(read_s)
        stages["parse"].observe(parse_s)
        stages["compute"].observe(compute_s)
        stages["encode"].observe(encode_s)
        self.bytes_in.inc(received_bytes)
        self.bytes_out.inc(sent_bytes)
        self.flops.inc(flops)
        self._path(path).inc()
        self.batch_requests.observe(1)

    def _path(self, path: str) -> Any:
        series = self._paths.get(path)
        if series is None:
            series = self._paths[path] = self.paths.labels(path)
        return series

    def watch_memory(self, read: Callable[[], dict[str, float]]) -> None:
        """Report the device's memory, by kind, at each scrape."""
        self.registry.register(_MemoryCollector(read))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _MemoryCollector(Collector):
    def __init__(self, read: Callable[[], dict[str, float]]) -> None:
        self._read = read

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "attn_device_memory_bytes", "Memory of the device; on CPU of the host process.", labels=["kind"]
        )
        for kind, value in self._read().items():
            family.add_metric([kind], value)
        yield family


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and what the record brings as ``fields``."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """One line to read, with the same fields behind it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s%(given)s")

    def format(self, record: logging.LogRecord) -> str:
        record.given = "".join(f" {name}={value}" for name, value in getattr(record, "fields", {}).items())
        return super().format(record)


def set_up_logging(*, level: str, as_json: bool) -> None:
    """Everything of this process to stderr, in one form."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    for name in ("uvicorn", "grpc"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
