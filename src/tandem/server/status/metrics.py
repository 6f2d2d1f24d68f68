"""Prometheus metrics of the api process."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from tandem.version import __version__

LATENCY_BUCKETS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
"""Histogram buckets, in seconds, from a refused request to a long answer."""


class ApiMetrics:
    """Metrics of one api process, in their own registry."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = own = CollectorRegistry()
        Info("tandem_build", "Version of the server", registry=own).info({"version": __version__})
        ProcessCollector(registry=own)
        self.requests = Counter(
            "tandem_http_requests", "HTTP requests by route, method and status", ["route", "method", "status"], registry=own
        )
        self.in_flight = Gauge("tandem_http_requests_in_flight", "HTTP requests being served", registry=own)
        self.seconds = Histogram(
            "tandem_http_request_seconds",
            "Seconds from the first byte of a request to the last of its response",
            ["route"],
            buckets=LATENCY_BUCKETS,
            registry=own,
        )
        self.first_token = Histogram(
            "tandem_api_time_to_first_token_seconds",
            "Seconds from a validated request to its first token, as the api sees it",
            ["model"],
            buckets=LATENCY_BUCKETS,
            registry=own,
        )
        self.disconnects = Counter("tandem_http_disconnects", "Requests whose client left before the end", registry=own)
        self.journal_errors = Counter(
            "tandem_journal_errors", "Times that the journal could not be written or synced", registry=own
        )
        self.journal_bytes = Gauge("tandem_journal_bytes", "Size of the journal", registry=own)
        self.journal_open = Gauge(
            "tandem_journal_open_requests", "Requests in the journal without an answer on disk", registry=own
        )

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)
