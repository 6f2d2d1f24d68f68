"""Options of the Python API are checked as those of the command line are, under the names that they have there."""

from __future__ import annotations

import pytest

from tandem import LLM
from tandem.errors import ConfigError


@pytest.mark.parametrize(("options", "message"), [
    ({"prefill_chunk": 0}, "prefill_chunk: 0 is out of range: must be 1 or more"),
    ({"memory_fraction": 1.5}, "memory_fraction: 1.5 is out of range"),
    ({"pipeline_parallel_size": 2, "layer_split": (1, 2, 3)}, "layer_split: 1,2,3 is for 3 stage"),
    ({"kv_token": 5}, "unknown option 'kv_token'"),
])
def test_options_out_of_range_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("/nowhere", **options)
