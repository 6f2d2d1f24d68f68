"""Ranges of sampling parameters: the one table that HTTP, the command line, the Python API and the engine read."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """The values that a parameter may have."""

    low: float
    high: float
    above: bool = False
    """`low` itself is not allowed."""
    off: str = ""
    """The value that turns the parameter off, in words."""

    def __contains__(self, value: float) -> bool:
        # Compared, not converted: an integer may be more than a float can hold. Nothing compares with NaN.
        return abs(value) < math.inf and value <= self.high and (
            value > self.low if self.above else value >= self.low)

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.above else f"at least {self.low:g}"
        words = low if self.high == math.inf else f"{low} and at most {self.high:g}"
        return f"{words} ({self.off} turns it off)" if self.off else words

    @property
    def bounds(self) -> dict[str, float]:
        """Arguments of pydantic's `Field`."""
        low = {"gt" if self.above else "ge": self.low}
        return low if self.high == math.inf else {**low, "le": self.high}


RANGES: dict[str, Range] = {
    "max_tokens": Range(1, math.inf),
    "min_tokens": Range(0, math.inf),
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, above=True),
    "top_k": Range(0, 2**31 - 1, off="0"),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0, 10, above=True),
    "frequency_penalty": Range(-2, 2),
    "presence_penalty": Range(-2, 2),
}
BIAS = Range(-100, 100)
MAX_STOPS = 16
"""Stop strings. OpenAI takes 4; more cost time per token, as each is searched for."""
MAX_LOGPROBS = 20
MAX_BIASES = 1024
