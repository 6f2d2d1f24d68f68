"""The OpenAPI description is valid, and the server holds to it: no 5xx, documented statuses and shapes."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from openapi_spec_validator import OpenAPIV31SpecValidator
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance

from tandem.config.settings import Settings
from tandem.server.app import create_app
from tandem.server.engines.replicas import Replicas
from tandem.server.engines.router import Router

CHECKS = [schemathesis.checks.not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
FUZZ = settings(max_examples=15, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
DESCRIPTION = create_app(Settings(), Replicas(Router())).openapi()
OPERATIONS = [
    (method, path, mode)
    for path, operations in DESCRIPTION["paths"].items()
    for method, operation in operations.items()
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    if mode is GenerationMode.POSITIVE or "requestBody" in operation or path == "/v1/plan"
]


@pytest.fixture(scope="module")
def operations(shared):
    schema = schemathesis.openapi.from_url(f"{shared.url}/openapi.json")
    found = [operation.ok() for operation in schema.get_all_operations()]
    return {(operation.method, operation.path): operation for operation in found}


def test_the_description_is_valid():
    assert not list(OpenAPIV31SpecValidator(DESCRIPTION).iter_errors())
    paths = DESCRIPTION["paths"]
    assert {"/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/requests/{request_id}"} <= set(paths)
    for operation in (operation for operations in paths.values() for operation in operations.values()):
        assert operation["responses"].keys() >= {"200", "4XX", "5XX"}


@pytest.mark.parametrize(("method", "route", "mode"), OPERATIONS)
def test_requests_of_the_described_kind_and_others(operations, shared, method, route, mode):
    @FUZZ
    @given(case=operations[method, route].as_strategy(generation_mode=mode))
    def ask(case):
        if isinstance(case.body, dict):
            case.body.pop("timeout", None)  # one of a nanosecond is rightly answered with 504
        case.call_and_validate(checks=CHECKS, timeout=240)

    ask()
    assert shared.chat().status_code == 200
