"""Sending requests: at a rate, or by a number of clients of which each waits for its answer."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence

from tandem.bench.client import Job, Target, Timed, send

Progress = Callable[[Timed], None]


async def offer(target: Target, jobs: Sequence[Job], *, rate: float = math.inf, burstiness: float = 1.0,
                concurrency: int | None = None, seed: int = 0, progress: Progress | None = None) -> list[Timed]:
    """Answers in the order of `jobs`.

    `rate` is in requests a second: the times between two are drawn from a gamma distribution with shape `burstiness`
    (1 is a Poisson process, less is burstier); with an infinite rate all are sent at once. Of those, at most
    `concurrency` are under way at a time.
    """
    draw = random.Random(seed)
    limit = asyncio.Semaphore(concurrency or len(jobs) or 1)

    async def one(job: Job) -> Timed:
        async with limit:
            answer = await send(target, job)
        if progress is not None:
            progress(answer)
        return answer

    loop = asyncio.get_running_loop()
    tasks, due = [], loop.time()
    for job in jobs:
        await asyncio.sleep(max(due - loop.time(), 0.0))
        tasks.append(asyncio.create_task(one(job)))
        due += draw.gammavariate(burstiness, 1 / (rate * burstiness)) if math.isfinite(rate) else 0.0
    return await asyncio.gather(*tasks)
