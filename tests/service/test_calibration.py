"""Rates measured at start: what the clock says, and sound whatever it says."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from attn_core import AttentionError, AttentionResult, Engine, InvalidProblem
from attn_core.errors import Checkpoint, Fault
from attn_core.prepared import Prepared
from attn_core.problem import Problem
from attn_core.support import PATHS
from service.calibration import ENOUGH_S, NUM_RUNS, PROBES, measure_rates
from service.pace import PAIRS_PER_S, Pace
from tests.support.clock import FakeClock
from tests.support.factory import make_problem

RATES = {"fused": 2e9, "manual": 5e8, "blocked": 3e8, "gradients": 1e9}
OVERHEAD_S = 1e-3


def kernel_of(prepared: Prepared) -> str:
    return prepared.cost.kernel or prepared.path


class TimedEngine(Engine):
    """Takes on the clock what the rates say, and every other time ``delay_s`` more; notes the kernels it was given."""

    def __init__(self, clock: FakeClock, *, delay_s: float = 0.0, rates: dict[str, float] | None = None) -> None:
        super().__init__()
        self._clock = clock
        self._delay_s = delay_s
        self._rates = RATES if rates is None else rates
        self.kernels: list[str] = []

    def run(
        self, problems: Sequence[Problem | Prepared], checkpoints: Sequence[Checkpoint | None] | None = None
    ) -> list[AttentionResult | AttentionError]:
        (prepared,) = problems
        assert isinstance(prepared, Prepared)
        self.kernels.append(kernel_of(prepared))
        cost = prepared.cost
        self._clock.now += OVERHEAD_S + cost.flops / self._rates[self.kernels[-1]] + cost.pair_passes / PAIRS_PER_S
        self._clock.now += self._delay_s * (len(self.kernels) % 2)
        return super().run(problems, checkpoints)


@pytest.mark.parametrize("delay_s", [0.0, ENOUGH_S / 10])
def test_rates_are_those_of_the_fastest_runs_on_each_kernel(delay_s: float) -> None:
    clock = FakeClock()
    # So fast that every kernel runs more than once.
    quick = {kernel: 100 * rate for kernel, rate in RATES.items()}
    engine = TimedEngine(clock, delay_s=delay_s, rates=quick)
    overhead_s, rates = measure_rates(engine, clock=clock)
    assert overhead_s == pytest.approx(OVERHEAD_S, rel=0.02)
    assert rates == pytest.approx(quick, rel=0.05)
    assert set(engine.kernels) == set(PROBES) == set(rates)


def test_a_slow_machine_is_measured_once_for_each_kernel() -> None:
    clock = FakeClock()
    engine = TimedEngine(clock, rates=dict.fromkeys(RATES, 1e7))
    measure_rates(engine, clock=clock)
    for kernel in PROBES:
        # The smallest problem is one of the fused kernel, and quick.
        assert engine.kernels.count(kernel) == 1 + NUM_RUNS * (kernel == "fused")


def test_no_kernel_counts_as_faster_than_the_fused_one() -> None:
    clock = FakeClock()
    _, rates = measure_rates(TimedEngine(clock, rates=RATES | {"manual": 1e15}), clock=clock)
    assert rates["manual"] == rates["fused"]


def test_a_clock_that_stands_still_gives_rates_that_can_be_reckoned_with() -> None:
    overhead_s, rates = measure_rates(Engine(), clock=FakeClock())
    assert overhead_s > 0 and all(0 < rate < math.inf for rate in rates.values())
    pace = Pace()
    pace.set_rates(overhead_s=overhead_s, flops_per_s=rates)
    for path in PATHS:
        outputs = ("logsumexp",) if path == "fused" else ("entropy",)
        prepared = Engine().prepare(make_problem(batch=0, outputs=outputs, path=path))
        pace.observe(prepared.cost, prepared.path, 0.0)
        assert pace.estimate_s(prepared.cost, prepared.path) > 0


def test_every_path_is_measured_on_this_machine() -> None:
    overhead_s, rates = measure_rates(Engine())
    assert 0 < overhead_s < math.inf
    assert set(PATHS) < set(rates) and all(0 < rate < math.inf for rate in rates.values())
    for kernel, make in PROBES.items():
        assert kernel_of(Engine().prepare(make())) == kernel


def test_a_kernel_that_refuses_stops_the_start() -> None:
    class Refusing(Engine):
        def run(
            self, problems: Sequence[Problem | Prepared], checkpoints: Sequence[Checkpoint | None] | None = None
        ) -> list[AttentionResult | AttentionError]:
            return [InvalidProblem([Fault("query", "this", "that")])]

    with pytest.raises(InvalidProblem):
        measure_rates(Refusing())
