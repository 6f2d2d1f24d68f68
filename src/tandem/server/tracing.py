"""OpenTelemetry traces: a span for each request, with queue, prefill, decode and replays below it.

Needs the extra `otel`; nothing of it is imported unless `--otlp-traces-endpoint` is set.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from starlette.types import Scope

from tandem.version import __version__

if TYPE_CHECKING:
    from tandem.server.generation import Running

ATTRIBUTES = {
    "status": "http.response.status_code",
    "method": "http.request.method",
    "path": "url.path",
    "client": "client.address",
    "error": "error.type",
    "request_id": "tandem.request_id",
    "replica": "tandem.replica",
    "job": "tandem.job",
    "id": "gen_ai.request.id",
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "queue_s": "gen_ai.latency.time_in_queue",
    "first_token_s": "gen_ai.latency.time_to_first_token",
    "seconds": "gen_ai.latency.e2e",
}
"""Attribute of a request's span for each member of its log line: OpenTelemetry's name where there is one, else vLLM's."""


def exporter(endpoint: str) -> Any:
    """Return the exporter of spans to `endpoint`, by OTLP over HTTP."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint)


class Traces:
    """Exporter of one trace for each request. OpenTelemetry's own variables (OTEL_*) apply."""

    def __init__(self, endpoint: str) -> None:
        """Export to `endpoint`, in batches, from a thread of its own."""
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)  # else each retry of a collector that is away has a line
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace, self._propagator = trace, TraceContextTextMapPropagator()
        resource = Resource({"service.name": "tandem", "service.version": __version__}).merge(Resource.create())
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "tandem"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter(endpoint)))
        self._tracer = self._provider.get_tracer("tandem", __version__)

    def record(self, scope: Scope, route: str, facts: Mapping[str, object], running: Running | None, seconds: float) -> str:
        """Record a request that has ended after `seconds`, and return its trace id.

        A W3C `traceparent` among its headers makes it part of the client's trace. `facts`: members of its log line.
        """
        now, clock = time.time_ns(), time.monotonic()
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        span = self._tracer.start_span(
            f"{scope['method']} {route}",
            self._propagator.extract(carrier),
            self._trace.SpanKind.SERVER,
            {"http.route": route} | {name: facts[fact] for fact, name in ATTRIBUTES.items() if fact in facts},
            start_time=now - int(seconds * 1e9),
        )
        if "error" in facts and facts["error"] != "client_disconnected" and not str(facts.get("status")).startswith("4"):
            span.set_status(self._trace.StatusCode.ERROR, str(facts["error"]))
        below = self._trace.set_span_in_context(span)
        for name, start, end in phases(running):
            child = self._tracer.start_span(name, below, start_time=now - int((clock - start) * 1e9))
            child.end(now - int((clock - end) * 1e9))
        span.end(now)
        return f"{span.get_span_context().trace_id:032x}"

    def close(self) -> None:
        """Export what waits, and stop. Blocks for some seconds when the collector does not answer."""
        self._provider.shutdown()


def phases(running: Running | None) -> Iterator[tuple[str, float, float]]:
    """Yield name, start and end (`time.monotonic()`) of what the engines did for a request."""
    if running is None:
        return
    begun: set[str] = set()
    for name, at, timing in running.timings:
        joined = at - timing.prefill_s
        if name in begun:
            yield "replay", joined - timing.queue_s, at
        else:
            yield "queue", joined - timing.queue_s, joined
            yield "prefill", joined, at
        begun.add(name)
    if running.first_at:
        yield "decode", running.first_at, running.last_at
