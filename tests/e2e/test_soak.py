"""A short seed of each form of soak: what must hold on a slow machine too. ``make soak`` runs the long ones."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop

from tests.benchmarks.processes import Server, free_ports
from tests.benchmarks.soak import bits, disconnects, fuzz, overload, peaks, text
from tests.benchmarks.soak.outcome import Law, Outcome
from tests.benchmarks.soak.service import serving
from tests.support.server import RunningServer

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="the load generator needs a C compiler")
MAX_WAIT_S = 2.0


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Little room, so that it is soon full."""
    settings = disconnects.SETTINGS | {"ATTN_MAX_QUEUE_REQUESTS": "8", "ATTN_MAX_WAIT_S": str(MAX_WAIT_S)}
    with serving(tmp_path_factory.mktemp("soak"), settings) as running:
        yield running


@pytest.fixture
def shared_server(server: RunningServer, tmp_path: Path) -> Server:
    """The server of other tests, as benchmarks see it."""
    log = tmp_path / "service.log"
    log.touch()
    return Server("service", server.port, log, cast(Any, server.process))


def broken(laws: list[Law]) -> list[Law]:
    return [law for law in laws if not law.is_kept and not law.is_timed]


def broken_of(outcome: Outcome) -> tuple[list[Law], list[str]]:
    return broken(outcome.laws), outcome.notes


def test_answers_have_equal_bits_alone_and_in_company(shared_server: Server) -> None:
    tally = uvloop.run(bits.compare(shared_server.port, num_problems=120, connections=8, seed=7))
    assert broken(bits.laws_of(tally)) == [], tally.differences[:3]
    assert min(tally.num_compared.values()) >= 3


@needs_compiler
def test_a_flood_is_answered_to_its_last_request(small_server: Server, tmp_path: Path) -> None:
    outcome = overload.measure(
        small_server,
        tmp_path,
        seconds=1.0,
        factor=10.0,
        connections=64,
        closed_seconds=0.1,
        max_wait_s=MAX_WAIT_S,
    )
    assert broken_of(outcome) == ([], [])


def test_clients_that_leave_give_their_places_back(small_server: Server) -> None:
    outcome = uvloop.run(disconnects.measure_leaving(small_server, count=400, warm_up=20, seed=6))
    assert broken_of(outcome) == ([], [])


def test_a_stop_under_load_leaves_nobody_without_an_answer(tmp_path: Path) -> None:
    with serving(tmp_path, {}, ends_itself=True) as server:
        stop = uvloop.run(disconnects.stop_under_load(server, requests_before=100))
    _, laws, reasons = disconnects.stop_outcome([stop])
    assert broken(laws) == [], reasons


@needs_compiler
def test_text_and_binary_bodies_are_answered_beside_each_other(shared_server: Server, tmp_path: Path) -> None:
    outcome = text.measure(shared_server, tmp_path, seconds=0.2, rounds=1)
    assert broken_of(outcome) == ([], [])


def test_no_mutated_request_is_a_mistake_of_the_server(tmp_path: Path) -> None:
    (grpc_port,) = free_ports(1)
    with serving(tmp_path, fuzz.SETTINGS | {"ATTN_GRPC_PORT": str(grpc_port)}) as server:
        outcome = fuzz.measure(server, grpc_port, count=1500, seed=3, warm_up=300)
    assert broken_of(outcome) == ([], [])


def test_memory_of_random_problems_is_within_its_estimate_and_near_it() -> None:
    outcome = peaks.outcome_of(peaks.measure(peaks.draw_cases(7, seed=8, kinds=tuple(peaks.KINDS))))
    assert broken_of(outcome) == ([], [])
