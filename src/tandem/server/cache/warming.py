"""Prompts that are computed before anybody asks for their continuation, at every replica."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from tandem.errors import RequestError, UnavailableError
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.server.context import get_group
from tandem.server.engines.served_model import Served
from tandem.server.generation.lifetime import Running
from tandem.server.ids import new_id


@dataclass(frozen=True)
class _Errand:
    replica: int
    prompt: list[int]


class _Warming(Running):
    """Prompts at some replicas, all at once."""

    def __init__(self, http: Request, served: Served, jobs: list[_Errand], timeout: float | None,
                 on_disk: bool) -> None:
        request_id, params = new_id("warm"), SamplingParams(max_tokens=0)
        requests = [EngineRequest(request_id=f"{request_id}-{index}", prompt=job.prompt, params=params, warms=True,
                                  group=get_group(http), on_disk=on_disk) for index, job in enumerate(jobs)]
        self._where = {request.request_id: job for request, job in zip(requests, jobs, strict=True)}
        self.cached: dict[str, int] = {}
        super().__init__(http, served, requests, request_id=request_id, choices=len(requests),
                         prompt_tokens=sum(len(job.prompt) for job in jobs), stream=False, timeout=timeout,
                         replicas=[job.replica for job in jobs])

    @property
    def done(self) -> bool:
        """True when all are computed."""
        return len(self.cached) == len(self._where)

    async def run(self) -> dict[int, int]:
        """Tokens that were there before, by replica. Closes the request; raises RequestError."""
        try:
            while not self.done:
                for output in await self.subscription.get():
                    self.cached[output.request_id] = output.cached_tokens
        finally:
            self.close()
        found: dict[int, int] = {}
        for name, job in self._where.items():
            found[job.replica] = found.get(job.replica, 0) + self.cached[name]
        return found


async def warm(http: Request, served: Served, prompts: list[list[int]], *, timeout: float | None = None,
               replicas: Iterable[int] | None = None, on_disk: bool = True) -> dict[str, Any]:
    """Have the prompts in the caches of all replicas that are ready, or of these; what came of it, as the API says it.

    Where replicas share a disk, the first computes, and the others read. Raises RequestError.
    """
    started = time.monotonic()
    ready = [one.replica for one in served.client.replicas() if one.state == "ready"]
    ready = [one for one in ready if replicas is None or one in replicas]
    if not ready:
        served.status()
        raise UnavailableError("No replica is ready to warm a prompt; try again shortly.")
    status = served.status()
    if status.prefix_cache.startswith("off"):
        raise RequestError(f"This server keeps no prefixes ({status.prefix_cache}), so nothing can be warmed; start it "
                           "with --prefix-cache above 0.", code="prefix_cache_off")
    shared = status.kv_disk == "on"
    cached: dict[int, int] = {}
    for group in ([ready[:1], ready[1:]] if shared and len(ready) > 1 else [ready]):
        if shared:  # ranks look once they have written what waits, and see what others have put there
            for some in (cached, group):
                await asyncio.gather(*(served.client.cache(replica=one) for one in some))
        jobs = [_Errand(replica, prompt) for replica in group for prompt in prompts]
        cached |= await _Warming(http, served, jobs, timeout, on_disk).run()
    parts = [await _replica(served, replica, prompts, cached[replica]) for replica in ready]
    total = sum(map(len, prompts))
    return {"object": "cache.warmed", "model": served.name, "prompts": len(prompts), "prompt_tokens": total,
            "computed_tokens": sum(one["computed_tokens"] for one in parts), "replicas": parts,
            "seconds": round(time.monotonic() - started, 3)}


async def _replica(served: Served, replica: int, prompts: list[list[int]], cached: int) -> dict[str, Any]:
    """What one has of the prompts now."""
    reports = [(await served.client.cache(prompt, replica=replica)).get(replica) for prompt in prompts]
    known = [one for one in reports if one is not None]
    return {"replica": replica, "cached_tokens": cached, "computed_tokens": sum(map(len, prompts)) - cached,
            "memory_tokens": sum(one.memory_has for one in known), "disk_tokens": sum(one.disk_has for one in known)}
