"""For all tests: their order; a file that collects no test is a mistake, and fails; machines to test on (netns.py);
what tests were skipped for (system_packages.py)."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
from collections.abc import Generator, Iterator
from contextlib import suppress

import pytest

from netns import make_machines as make_machines
from system_packages import advice
from tandem.models.families.table import family_of

if os.environ.get("TANDEM_DEVICE"):  # as for all ranks: runners without a usable GPU
    from tandem.loading.memory import choose_device

    choose_device("auto")

with suppress(ImportError):  # tests with vLLM do without it
    from hypothesis import settings

    settings.load_profile("ci")  # the same examples each time, however slowly they are made

LONGEST = {
    "test_pages_commands.py",
    "test_e2e_ray.py",
    "test_selftest_served.py",
    "test_engine_soak.py",
    "test_e2e_kinds.py",
    "test_faults_ranks.py",
    "test_loading_shard_parity.py",
}
"""Files that take minutes."""

Reports = Generator[None, pytest.CollectReport, pytest.CollectReport]

# What a script starts in the background ignores SIGINT, and hands that on to all processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def sigint() -> None:
    """Ctrl-C interrupts each test that sends it: `tandem serve`, run in this process by one before, leaves its own."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def logging_ends() -> Iterator[None]:
    """A command that is run in this process logs to the stderr of its test, which is closed afterwards, and at a level
    of its own."""
    root, ours = logging.getLogger(), logging.getLogger("tandem")
    levels = root.level, ours.level
    yield
    for handler in root.handlers[:]:
        if not type(handler).__module__.startswith("_pytest"):
            root.removeHandler(handler)
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Reports:
    report = yield
    if isinstance(collector, pytest.Module) and report.outcome == "passed" and not report.result:
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid}: no test is collected from this file"
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, then others with slow tests: where several run, none is left alone at the end. Types of
    mlx-vlm are tested where it is installed."""
    if importlib.util.find_spec("mlx_vlm") is None:
        for item in items:
            parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
            if any(isinstance(value, str) and family_of(value).source == "mlx_vlm" for value in parameters):
                item.add_marker(pytest.mark.skip(reason="mlx-vlm is not installed"))
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path.name not in LONGEST, item.path not in slow))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
    yield
    reasons = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", ())]
    if text := advice(reasons):
        terminalreporter.write_line(text, yellow=True)
