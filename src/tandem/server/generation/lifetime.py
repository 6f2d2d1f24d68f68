"""One HTTP request that has sequences in the engine: its quota, its client's leaving, its time limit, and its end."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from msgspec.structs import replace

from tandem.borders import start_task
from tandem.errors import RequestError, ServerError, TimeoutExceeded
from tandem.protocol.control import Output
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.server.context import get_api, get_group, gone
from tandem.server.engines.served_model import Served
from tandem.server.failures import ClientGone
from tandem.server.ids import new_id
from tandem.server.quotas import Lease

logger = logging.getLogger(__name__)


class Running(ABC):
    """Runs the sequences of one HTTP request. Whoever opened it must `close` it, which stops what still runs.

    A client that leaves, a timeout, a cancel and the engine's loss all end a wait for `subscription` with a
    RequestError.
    """

    def __init__(self, http: Request, served: Served, requests: Sequence[EngineRequest], *, request_id: str,
                 prompt_tokens: int, stream: bool, timeout: float | None, choices: int = 0,
                 replicas: Sequence[int] | None = None) -> None:
        """Submit `requests`, each to its replica if these are named. `choices`: with those that are submitted later.

        Raises UnavailableError, OverloadedError.
        """
        self.request_id, self.model, self.route, self.stream = request_id, served.name, http.url.path, stream
        self.prompt_tokens, self.completion_tokens = prompt_tokens, 0
        self.choices = choices or len(requests)
        self.created, self.started_at = time.time(), time.monotonic()
        self.group = get_group(http)
        api = self.api = get_api(http)
        self._served = served
        self._lease: Lease = http.scope["tandem.lease"]
        self._lease.prompt(prompt_tokens)
        self._open(requests, replicas)
        api.live[request_id] = self
        self._watcher = start_task(self._watch(http), name="client-watch", on_failure=self._unwatched)
        self._deadline = self._limit(timeout)

    @property
    @abstractmethod
    def done(self) -> bool:
        """True when everything has been answered."""

    def _open(self, requests: Sequence[EngineRequest], replicas: Sequence[int] | None = None, *,
              accepted: bool = False) -> None:
        weighted = [replace(request, weight=self._lease.weight) for request in requests]
        self.subscription = self._served.client.requests.open(weighted, replicas, accepted=accepted)

    def go_on(self, requests: Sequence[EngineRequest]) -> None:
        """Submit more, once those before are answered. Raises RequestError, also what has ended it meanwhile."""
        if self.subscription.error is not None:
            raise self.subscription.error
        self.subscription.close()
        self._open(requests, accepted=True)

    def end(self, error: RequestError) -> None:
        """Stop what still runs; whoever waits for it gets the error."""
        self.subscription.close()
        self.subscription.fail(error)

    def close(self) -> None:
        """Stop what still runs and forget the request. Safe to call again."""
        if self.api.live.pop(self.request_id, None) is None:
            return
        self._lease.end()
        self._watcher.cancel()
        if self._deadline is not None:
            self._deadline.cancel()
        self.subscription.close()
        if self.api.settings.server.log_requests:
            how = "finished" if self.done else "ended early"
            seconds = time.monotonic() - self.started_at
            counts = (self.prompt_tokens, self.completion_tokens)
            logger.info("%s %s: %d prompt and %d output tokens, %.2f s", self.request_id, how, *counts, seconds)

    def _unwatched(self, error: BaseException) -> None:
        """It could not be told any more when the client leaves."""
        self.subscription.fail(ServerError("Internal server error", code="internal_error"))

    async def _watch(self, http: Request) -> None:
        """End the request as soon as its client leaves."""
        await gone(http)
        if self.done:  # the server's own end of the connection
            return
        self.api.metrics.disconnects.inc()
        self.end(ClientGone("The client left."))

    def _limit(self, timeout: float | None) -> asyncio.TimerHandle | None:
        limits = [limit for limit in (timeout, self.api.settings.server.request_timeout) if limit is not None]
        if not limits:
            return None
        seconds = min(limits)
        message = f"Request timeout after {seconds:g}s. Server may be overloaded."
        error = TimeoutExceeded(message, code="request_timeout")

        return asyncio.get_running_loop().call_later(seconds, self.end, error)


class Prompts(Running):
    """Prompts that are only computed: one output each, and no text.

    At most `window` are submitted at once, so that a long list does not fill the engine's queue.
    """

    def __init__(self, http: Request, served: Served, prefix: str, prompts: Sequence[list[int]], *,
                 timeout: float | None, replicas: Sequence[int] | None = None, window: int | None = None,
                 **fields: Any) -> None:
        """Submit the first `window`, or all. `fields` are those of each engine request beside its prompt.

        Raises UnavailableError, OverloadedError.
        """
        request_id, params, group = new_id(prefix), SamplingParams(max_tokens=0), get_group(http)
        self._requests = [EngineRequest(request_id=f"{request_id}-{index}", prompt=prompt, params=params, group=group,
                                        **fields) for index, prompt in enumerate(prompts)]
        self._window = self._sent = window or len(prompts)
        self._outputs: dict[str, Output] = {}
        super().__init__(http, served, self._requests[:self._sent], request_id=request_id, stream=False,
                         timeout=timeout, prompt_tokens=sum(map(len, prompts)), choices=len(prompts),
                         replicas=replicas)

    @property
    def done(self) -> bool:
        """True when all are computed."""
        return len(self._outputs) == len(self._requests)

    async def outputs(self) -> list[Output]:
        """Return the output of each prompt. Closes the request; raises RequestError."""
        try:
            while not self.done:
                for output in await self.subscription.get():
                    self._outputs[output.request_id] = output
                if not self.done and len(self._outputs) == self._sent:
                    self._sent += self._window
                    self.go_on(self._requests[len(self._outputs):self._sent])
        finally:
            self.close()
        return [self._outputs[request.request_id] for request in self._requests]
