"""One table of ranges: HTTP takes what the engine takes, and refuses what it refuses."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from tandem.errors import RequestError
from tandem.protocol.ranges import RANGES, check_params
from tandem.protocol.request import SamplingParams
from tandem.server.openai.schemas import SamplingFields

WHOLE = ("max_tokens", "min_tokens", "top_k")


def values(name: str) -> list[float]:
    """Around both ends of a range."""
    allowed = RANGES[name]
    ends = [allowed.low] if allowed.high == math.inf else [allowed.low, allowed.high]
    step = 1 if name in WHOLE else 0.001
    around = [end + step * sign for end in ends for sign in (-1, 0, 1)]
    return [int(value) for value in around] if name in WHOLE else around


@pytest.mark.parametrize("name", RANGES)
def test_http_and_engine_agree_on_every_parameter(name):
    for value in values(name):
        try:
            check_params(SamplingParams(**{"max_tokens": 2**40, **{name: value}}), 100)
            engine = True
        except RequestError as error:
            assert error.param == name
            engine = False
        try:
            SamplingFields(**{name: value})
            http = (name, value) != ("max_tokens", 0)  # which is looked at where it is known what else is asked for
        except ValidationError:
            http = False
        assert (engine, http) == (value in RANGES[name], value in RANGES[name] or (name == "top_k" and value == -1))


def test_the_value_that_turns_a_parameter_off_stands_in_its_range() -> None:
    assert str(RANGES["top_k"]).endswith(" (0 turns it off)")
    assert str(RANGES["top_p"]) == "above 0 and at most 1"


def test_integers_beyond_floats_and_what_is_no_number_are_told_apart() -> None:
    assert 10**400 in RANGES["max_tokens"] and 10**400 not in RANGES["top_k"] and -(10**400) not in RANGES["max_tokens"]
    assert not any(value in allowed for value in (math.nan, math.inf, -math.inf) for allowed in RANGES.values())
