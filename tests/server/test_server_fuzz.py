"""The server against requests drawn from its own OpenAPI description: no 5xx, documented statuses and shapes."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
FUZZ = settings(
    max_examples=25, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
WITH_BODY = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages",
             "/v1/messages/count_tokens", "/v1/responses", "/tokenize", "/detokenize"]
ROUTES = [
    *WITH_BODY,
    "/v1/models",
    "/v1/models/{model_id}",
    "/v1/requests/{request_id}/cancel",
    "/v1/status",
    "/metrics",
    "/health",
    "/health/ready",
    "/health/live",
    "/model/info",
    "/",
]


@pytest.fixture(scope="module")
def operations(shared):
    schema = schemathesis.openapi.from_url(f"{shared.url}/openapi.json")
    return {operation.ok().path: operation.ok() for operation in schema.get_all_operations()}


def test_every_route_is_drawn_from(operations):
    assert set(operations) >= set(ROUTES)


@pytest.mark.parametrize(
    ("route", "mode"),
    [(route, GenerationMode.POSITIVE) for route in ROUTES] + [(route, GenerationMode.NEGATIVE) for route in WITH_BODY],
)
def test_requests_of_the_described_kind_and_others(operations, shared, route, mode):
    @FUZZ
    @given(case=operations[route].as_strategy(generation_mode=mode))
    def ask(case):
        if isinstance(case.body, dict):
            case.body.pop("timeout", None)  # one of a nanosecond is rightly answered with 504
        case.call_and_validate(checks=CHECKS, timeout=30)

    ask()
    assert shared.chat().status_code == 200
