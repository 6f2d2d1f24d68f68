"""For all tests: a file that collects no test is a mistake, and fails; machines to test on (netns.py)."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator

import pytest

from netns import make_machines as make_machines

if os.environ.get("TANDEM_DEVICE"):  # as for all ranks: runners without a usable GPU
    from tandem.loading.memory import choose_device

    choose_device("auto")

Reports = Generator[None, pytest.CollectReport, pytest.CollectReport]

# What a script starts in the background ignores SIGINT, and hands that on to all processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Reports:
    report = yield
    if isinstance(collector, pytest.Module) and report.outcome == "passed" and not report.result:
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid}: no test is collected from this file"
    return report
