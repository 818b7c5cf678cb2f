"""What each model of the Open Inference Protocol has done since the start, over all doors that speak the protocol."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Duration:
    """How often something took place, and how long all of it took. Neither ever falls."""

    count: int = 0
    ns: int = 0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.ns += max(0, round(seconds * 1e9))

    def as_dict(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}


@dataclass(slots=True)
class ModelStatistics:
    """Of one model. Requests refused by a check count nowhere."""

    last_inference_ms: int = 0
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)

    def as_dict(self, *, name: str, version: str) -> dict[str, Any]:
        """As the protocol writes it. Each inference is an execution of its own: problems that wait together are
        computed at their own shapes."""
        never = Duration().as_dict()
        computed = {
            "compute_input": self.compute_input.as_dict(),
            "compute_infer": self.compute_infer.as_dict(),
            "compute_output": self.compute_output.as_dict(),
        }
        return {
            "name": name,
            "version": version,
            "last_inference": self.last_inference_ms,
            "inference_count": self.success.count,
            "execution_count": self.success.count,
            "inference_stats": {
                "success": self.success.as_dict(),
                "fail": self.fail.as_dict(),
                "queue": self.queue.as_dict(),
                **computed,
                "cache_hit": never,
                "cache_miss": never,
            },
            "response_stats": {},
            "batch_stats": [{"batch_size": 1, **computed}] if self.success.count else [],
            "memory_usage": [],
        }


class Statistics:
    """Used from the event loop alone; ``wall_clock`` gives seconds since 1970.

    Whoever asks or counts knows that there is such a model, and whoever takes one away says so: no other has figures.
    """

    def __init__(self, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._models: dict[str, ModelStatistics] = {}

    def of(self, model: str) -> ModelStatistics:
        """The figures of a model, all 0 before its first request."""
        figures = self._models.get(model)
        if figures is None:
            figures = self._models[model] = ModelStatistics()
        return figures

    def forget(self, model: str) -> None:
        """A model is there no more: one that takes its name later begins at 0."""
        self._models.pop(model, None)

    def succeeded(
        self, model: str, *, total_s: float, queue_s: float, input_s: float, infer_s: float, output_s: float
    ) -> None:
        """Count an answer: ``total_s`` from its arrival on, the others parts of it."""
        figures = self.of(model)
        figures.last_inference_ms = int(self._wall_clock() * 1e3)
        figures.success.add(total_s)
        figures.queue.add(queue_s)
        figures.compute_input.add(input_s)
        figures.compute_infer.add(infer_s)
        figures.compute_output.add(output_s)

    def failed(self, model: str, *, total_s: float) -> None:
        """Count a request that was taken and not answered: the engine failed, or its time was over."""
        self.of(model).fail.add(total_s)
