"""One `tandem serve` for all clients, with a tiny random model that sees, whose context is long enough for their prompts,
and one with the demo model for those that look at what comes. `make test-clients` counts the requests of each client."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from seeing import served_model
from served import served

CONTEXT = 16384
COUNTS = Counter[str]()
"""Requests by client."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = served_model(tmp_path_factory.mktemp("model"), CONTEXT)
    (model / "generation_config.json").write_text('{"temperature": 0}')  # a random model says something else each time
    journal = str(tmp_path_factory.mktemp("journal"))
    with served(str(model), "--max-context", str(CONTEXT), "--default-max-tokens", "32", "--journal", journal) as address:
        yield address


@pytest.fixture(scope="module")
def demo() -> Iterator[str]:
    with served("demo", "--enable-tokenizer-info-endpoint") as address:
        yield address


@pytest.fixture(autouse=True)
def _counted(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every client must have asked the server for something."""
    name = next((name for name in ("url", "demo") if name in request.fixturenames), None)
    if name is None or "TANDEM_CLIENTS_PYTHON" not in os.environ:
        yield
        return
    address: str = request.getfixturevalue(name)
    client = request.node.callspec.params["heading"] if hasattr(request.node, "callspec") else request.node.name
    before = requests_of(address)
    yield
    count = requests_of(address) - before
    COUNTS[client.removeprefix("test_")] += count
    assert count or request.node.stash.get(SKIPPED, False), f"{client} asked the server for nothing"


def requests_of(address: str) -> int:
    """HTTP requests that it has answered, but those for its metrics."""
    lines = httpx.get(f"{address}/metrics", timeout=240).text.splitlines()
    return sum(
        int(float(line.split()[-1]))
        for line in lines
        if re.match(r"tandem_http_requests_total\{", line) and 'route="/metrics"' not in line
    )


SKIPPED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.skipped:
        item.stash[SKIPPED] = True
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if COUNTS:
        terminalreporter.section("requests of each client")
        for client, count in COUNTS.items():
            terminalreporter.write_line(f"{count:5}  {client}")
