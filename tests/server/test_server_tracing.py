"""Traces of requests, as an exporter in memory gets them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tandem.config.loading import load
from tandem.errors import ConfigError
from tandem.protocol.control import Timing
from tandem.server import tracing

CHAT = {"messages": [{"role": "user", "content": "my secret"}]}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans(monkeypatch):
    memory = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "exporter", lambda endpoint: memory)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    return memory


def finished(spans, wait_until, count):
    wait_until(lambda: len(spans.get_finished_spans()) >= count)
    return {span.name: span for span in spans.get_finished_spans()}


def test_a_request_is_a_span_of_its_clients_trace_with_its_phases_below(serve, engine, spans, wait_until, caplog):
    caplog.set_level("INFO", logger="tandem")
    server = serve(otlp_traces_endpoint="http://localhost:4318/v1/traces")
    engine.timing = Timing(0.25, 0.5)
    engine.interrupted = Timing(2.0, 1.0)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "r-1"}
    assert server.http.post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 200
    found = finished(spans, wait_until, 5)
    request = found.pop("POST /v1/chat/completions")
    assert (f"{request.context.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE, PARENT)
    assert set(found) == {"queue", "prefill", "decode", "replay"}
    assert {span.parent.span_id for span in found.values()} == {request.context.span_id}
    lasted = {name: (span.end_time - span.start_time) / 1e9 for name, span in found.items()}
    assert lasted["queue"] == pytest.approx(0.25) and lasted["prefill"] == pytest.approx(0.5)
    assert lasted["replay"] == pytest.approx(3.0)
    assert found["queue"].end_time == found["prefill"].start_time
    facts = request.attributes
    assert (facts["http.response.status_code"], facts["gen_ai.request.model"], facts["tandem.request_id"]) == (200, "tiny", "r-1")
    assert facts["gen_ai.usage.output_tokens"] == len(engine.reply) + 1
    assert request.resource.attributes["service.name"] == "tandem"
    assert "secret" not in request.to_json()
    wait_until(lambda: f"trace_id={TRACE}" in caplog.text)  # the line is written after the answer


def test_a_clients_mistake_is_no_error_of_the_server_and_health_checks_are_no_spans(serve, spans, wait_until):
    server = serve(otlp_traces_endpoint="http://localhost:4318/v1/traces", log_requests=False)
    for path in ("/health/ready", "/metrics", "/v1/made-up", "/v1/made-up"):
        server.http.get(path)
    wait_until(lambda: len(spans.get_finished_spans()) >= 2)
    first, second = spans.get_finished_spans()
    assert first.status.status_code.name == "UNSET" and first.attributes["error.type"] == "unknown_url"
    assert first.name == "GET unmatched" and first.parent is None
    assert first.context.trace_id != second.context.trace_id


def test_what_waits_is_sent_at_the_end(serve, spans, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    server = serve(otlp_traces_endpoint="http://localhost:4318/v1/traces")
    server.chat()
    assert not spans.get_finished_spans()
    server.stop()
    assert len(spans.get_finished_spans()) == 2


@pytest.mark.parametrize("given", ["localhost:4317", "grpc://localhost:4317", "http://"])
def test_an_address_that_cannot_be_is_refused_with_an_example(given):
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint .*such as http://localhost:4318/v1/traces"):
        load({"otlp_traces_endpoint": [given]})


def test_without_the_extra_the_remedy_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto", None)
    with pytest.raises(ConfigError, match=r"pip install 'mlx-tandem\[otel\]'"):
        load({"otlp_traces_endpoint": ["http://localhost:4318/v1/traces"]})


def test_without_the_setting_nothing_of_it_is_imported():
    code = "import tandem.server.app, sys; sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
