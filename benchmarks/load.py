"""The load generator of `tandem bench`, pointed at the servers of the harness. A failed request ends the benchmark."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from harness import Server

from tandem.bench import client
from tandem.bench.client import BenchRequest, Target, Timed
from tandem.bench.summary import duration
from tandem.bench.workload import PromptSource, offer

__all__ = ["Timed", "BenchRequest", "PromptSource", "closed_loop", "one", "rate"]


def one(server: Server, job: BenchRequest) -> Timed:
    """One request, alone."""
    [answer] = _checked(server, [asyncio.run(client.send(_target(server), job))])
    return answer


def closed_loop(server: Server, jobs: Sequence[BenchRequest], concurrency: int, **body: Any) -> list[Timed]:
    """Work through `jobs` with `concurrency` clients, each sending its next one when its last is answered. `body` are
    more fields of the requests, which are greedy otherwise."""
    return _checked(server, asyncio.run(offer(_target(server, **body), jobs, concurrency=concurrency)))


def rate(answers: Sequence[Timed]) -> float:
    """Generated tokens of all answers per second, from the first request to the last answer."""
    return sum(a.tokens for a in answers) / duration(answers)


def _target(server: Server, **body: Any) -> Target:
    return Target(base_url=f"http://127.0.0.1:{server.port}", model=server.model, body={"temperature": 0.0, **body})


def _checked(server: Server, answers: list[Timed]) -> list[Timed]:
    for answer in answers:
        if answer.error:
            raise SystemExit(f"{server.name}: {answer.error}")
    return answers
