"""Schemathesis: whatever can be made from /openapi.json, the server answers it without a mistake of its own."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from tests.support.fixtures import forgotten
from tests.support.server import RunningServer

__all__ = ["forgotten"]

POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        ("POST", "/v1/attention", POSITIVE),
        ("POST", "/v1/attention", NEGATIVE),
        ("POST", "/v1/attention/gradients", POSITIVE),
        ("POST", "/v1/attention/gradients", NEGATIVE),
        ("POST", "/v1/attention/plan", POSITIVE),
        ("POST", "/v1/attention/plan", NEGATIVE),
        ("POST", "/v1/weighted_sum", POSITIVE),
        ("POST", "/v1/weighted_sum", NEGATIVE),
        ("POST", "/v1/layer", POSITIVE),
        ("POST", "/v1/layer", NEGATIVE),
        ("POST", "/v1/layer/gradients", POSITIVE),
        ("POST", "/v1/layer/gradients", NEGATIVE),
        ("PUT", "/v1/layers/{name}", POSITIVE),
        ("PUT", "/v1/layers/{name}", NEGATIVE),
        ("POST", "/v1/layers/{name}/forward", POSITIVE),
        ("POST", "/v1/layers/{name}/forward", NEGATIVE),
        ("POST", "/v1/layers/{name}/gradients", POSITIVE),
        ("GET", "/v1/layers", POSITIVE),
        ("GET", "/v1/layers/{name}", POSITIVE),
        ("DELETE", "/v1/layers/{name}", POSITIVE),
        ("POST", "/v2/models/{model}/infer", POSITIVE),
        ("POST", "/v2/models/{model}/infer", NEGATIVE),
        ("POST", "/v2/repository/index", POSITIVE),
        ("POST", "/v2/repository/index", NEGATIVE),
        ("GET", "/v2", POSITIVE),
        ("GET", "/v2/models", POSITIVE),
        ("GET", "/v2/models/{model}", POSITIVE),
        ("GET", "/v2/models/{model}/ready", POSITIVE),
        ("GET", "/v2/models/{model}/config", POSITIVE),
        ("GET", "/v2/models/{model}/stats", POSITIVE),
        ("GET", "/v2/models/stats", POSITIVE),
        ("GET", "/v2/health/live", POSITIVE),
        ("GET", "/v2/health/ready", POSITIVE),
        ("GET", "/v1", POSITIVE),
        ("GET", "/readyz", POSITIVE),
        ("GET", "/metrics", POSITIVE),
    ],
)
def test_nothing_made_from_the_document_is_answered_500(
    server: RunningServer, method: str, path: str, mode: GenerationMode
) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operation = schema[path][method]

    @settings(max_examples=20, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        response = case.call(base_url=server.url)
        case.validate_response(response, checks=[not_a_server_error])

    run()
