"""Requests of a benchmark with prompts of given lengths, identical for every server and run with the same seed.

No dataset is downloaded: lengths are drawn from distributions.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.bench.client import BenchRequest, Target, Timed, send
from tandem.checkpoints.config import MOST
from tandem.errors import UsageError
from tandem.system.files import read_text

WORDS = (
    "time",
    "person",
    "year",
    "way",
    "day",
    "thing",
    "man",
    "world",
    "life",
    "hand",
    "part",
    "child",
    "eye",
    "woman",
    "place",
    "work",
    "week",
    "case",
    "point",
    "company",
    "number",
    "group",
    "problem",
    "fact",
    "river",
    "mountain",
    "window",
    "garden",
    "letter",
    "music",
    "paper",
    "stone",
    "bridge",
    "winter",
    "summer",
)
"""Words that are one token of most vocabularies when a space precedes them."""
DATASETS = ("random", "sharegpt", "prefix_repetition", "long")


class PromptSource:
    """Generator of prompts with a given number of tokens and no common prefix, so that no prefix cache helps."""

    def __init__(self, tokenizer: Path | None = None, seed: int = 0) -> None:
        """Read the tokenizer.json in the directory `tokenizer`. Without one, count words, which is off by a few tokens.

        Raises UsageError when it cannot be read.
        """
        self._random = random.Random(seed)
        self._tokenizer = None
        if tokenizer is not None:
            from tokenizers import Tokenizer

            try:
                self._tokenizer = Tokenizer.from_str(read_text(tokenizer / "tokenizer.json", MOST))
            except Exception as error:
                raise UsageError(
                    f"--tokenizer {tokenizer}: its tokenizer.json cannot be read: {error}", param="tokenizer"
                ) from error

    def length(self, shortest: int, longest: int) -> int:
        """Draw a length from a uniform distribution, both ends included."""
        return self._random.randint(shortest, longest)

    def log_normal(self, mean: float, sigma: float, lowest: int, highest: int) -> int:
        """Draw a length from a log-normal distribution with this mean, clamped to `lowest` and `highest`."""
        drawn = mean * self._random.lognormvariate(-sigma * sigma / 2, sigma)
        return min(max(round(drawn), lowest), highest)

    def make(self, tokens: int) -> str:
        """Return a text of about `tokens` tokens: a random number followed by random words."""
        number = str(self._random.randrange(10**4 if tokens < 8 else 10**9))
        words = [number, *self._random.choices(WORDS, k=tokens)]
        if self._tokenizer is None:
            return " ".join(words[: max(tokens - len(number) + 1, 1)])  # most tokenizers use a token per digit
        ids = self._tokenizer.encode(" ".join(words), add_special_tokens=False).ids
        return str(self._tokenizer.decode(ids[:tokens], skip_special_tokens=False))


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Number of requests and their lengths in tokens."""

    dataset: str = "random"
    """One of `DATASETS`."""
    count: int = 100
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    """Relative spread for `random`: lengths are drawn from length * (1 - ratio) to length * (1 + ratio)."""
    prefix_len: int = 256
    """Tokens of each shared prefix for `prefix_repetition`; `num_prefixes` exist, each followed by `suffix_len` unique tokens."""
    suffix_len: int = 256
    num_prefixes: int = 10
    long_len: int = 8192
    """Prompt length for `long`: the fraction `long_share` of the requests has it, the rest have `input_len`."""
    long_share: float = 0.25

    def jobs(self, prompts: PromptSource) -> list[BenchRequest]:
        """Return the requests in sending order."""
        if self.dataset == "sharegpt":
            # Means of ShareGPT conversations as serving benchmarks filter them: about 220 tokens in, 200 out.
            return [
                BenchRequest(prompts.make(prompts.log_normal(220, 1.1, 4, 1024)), prompts.log_normal(200, 1.0, 4, 1024))
                for _ in range(self.count)
            ]
        if self.dataset == "prefix_repetition":
            prefixes = [prompts.make(self.prefix_len) for _ in range(self.num_prefixes)]
            return [
                BenchRequest(f"{prefixes[i % self.num_prefixes]} {prompts.make(self.suffix_len)}", self.output_len)
                for i in range(self.count)
            ]
        if self.dataset == "long":
            due = [math.ceil(i * self.long_share - 1e-9) for i in range(self.count + 1)]
            return [
                BenchRequest(prompts.make(self.long_len if due[i + 1] > due[i] else self.input_len), self.output_len)
                for i in range(self.count)
            ]
        return [
            BenchRequest(prompts.make(self._around(prompts, self.input_len)), self._around(prompts, self.output_len))
            for _ in range(self.count)
        ]

    def _around(self, prompts: PromptSource, length: int) -> int:
        spread = int(length * self.range_ratio)
        return prompts.length(max(length - spread, 1), length + spread)


Progress = Callable[[Timed], None]


async def offer(
    target: Target,
    jobs: Sequence[BenchRequest],
    *,
    rate: float = math.inf,
    burstiness: float = 1.0,
    concurrency: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Timed]:
    """Send the jobs and return their answers in the same order.

    `rate` is in requests per second. Intervals follow a gamma distribution with shape `burstiness` (1: a Poisson process;
    less: burstier). An infinite rate sends all at once. At most `concurrency` requests run at a time.
    """
    draw = random.Random(seed)
    limit = asyncio.Semaphore(concurrency or len(jobs) or 1)

    async def answered(job: BenchRequest) -> Timed:
        async with limit:
            answer = await send(target, job)
        if progress is not None:
            progress(answer)
        return answer

    loop = asyncio.get_running_loop()
    tasks, due = [], loop.time()
    for job in jobs:
        await asyncio.sleep(max(due - loop.time(), 0.0))
        tasks.append(asyncio.create_task(answered(job)))
        due += draw.gammavariate(burstiness, 1 / (rate * burstiness)) if math.isfinite(rate) else 0.0
    return await asyncio.gather(*tasks)
