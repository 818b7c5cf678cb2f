"""Rates measured at start: what the clock says, and sound whatever it says."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from attn_core import AttentionError, AttentionResult, Engine
from attn_core.errors import Checkpoint
from attn_core.prepared import Prepared
from attn_core.problem import Problem
from service.calibration import OUTPUTS, measure_rates
from service.pace import Pace
from tests.support.clock import FakeClock
from tests.support.factory import make_problem

RATES = {"fused": 2e9, "manual": 5e8}
OVERHEAD_S = 1e-3


class TimedEngine(Engine):
    """Takes on the clock what the rates say, and every other time ``delay_s`` more; notes the kernels it was given."""

    def __init__(self, clock: FakeClock, *, delay_s: float = 0.0) -> None:
        super().__init__()
        self._clock = clock
        self._delay_s = delay_s
        self.paths: list[str] = []

    def run(
        self, problems: Sequence[Problem | Prepared], checkpoints: Sequence[Checkpoint | None] | None = None
    ) -> list[AttentionResult | AttentionError]:
        (prepared,) = problems
        assert isinstance(prepared, Prepared)
        self.paths.append(prepared.path)
        self._clock.now += OVERHEAD_S + prepared.cost.flops / RATES[prepared.path]
        self._clock.now += self._delay_s * (len(self.paths) % 2)
        return super().run(problems, checkpoints)


@pytest.mark.parametrize("delay_s", [0.0, 3.0])
def test_rates_are_those_of_the_fastest_runs_on_each_kernel(delay_s: float) -> None:
    clock = FakeClock()
    engine = TimedEngine(clock, delay_s=delay_s)
    overhead_s, rates = measure_rates(engine, clock=clock)
    assert overhead_s == pytest.approx(OVERHEAD_S, rel=0.01)
    assert rates == pytest.approx(RATES, rel=0.01)
    assert set(engine.paths) == set(OUTPUTS) == set(rates)


def test_a_clock_that_stands_still_gives_rates_that_can_be_reckoned_with() -> None:
    overhead_s, rates = measure_rates(Engine(), clock=FakeClock())
    assert overhead_s > 0 and all(0 < rate < math.inf for rate in rates.values())
    pace = Pace()
    pace.set_rates(overhead_s=overhead_s, flops_per_s=rates)
    for path in rates:
        prepared = Engine().prepare(make_problem(batch=0, outputs=OUTPUTS[path]))
        pace.observe(prepared.cost, prepared.path, 0.0)
        assert pace.estimate_s(prepared.cost, prepared.path) > 0


def test_every_kernel_that_is_chosen_has_a_rate_on_this_machine() -> None:
    overhead_s, rates = measure_rates(Engine())
    assert 0 < overhead_s < math.inf
    for outputs in OUTPUTS.values():
        assert 0 < rates[Engine().prepare(make_problem(outputs=outputs)).path] < math.inf
