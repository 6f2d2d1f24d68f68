"""Options of the Python API are checked as those of the command line are, under the names that they have there."""

from __future__ import annotations

import pytest

from tandem import LLM
from tandem.errors import ConfigError
from tandem.testing import tiny_model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill_chunk": 0}, "prefill_chunk: 0 is out of range: must be 1 or more"),
        ({"memory_fraction": 1.5}, "memory_fraction: 1.5 is out of range"),
        ({"pipeline_parallel_size": 2, "layer_split": (1, 2, 3)}, "layer_split: 1,2,3 is for 3 stage"),
        ({"channel": "ring"}, "channel: 'ring' is not one of auto, tcp, mlx"),
        ({"micro_batches": "two"}, "micro_batches: 'two' is not a whole number"),
        ({"kv_token": 5}, "unknown option 'kv_token'"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("/nowhere", **options)


def test_calls_without_parameters_take_the_models_own(tmp_path) -> None:
    model = tiny_model(tmp_path / "tiny")
    (model / "generation_config.json").write_text('{"temperature": 0, "max_new_tokens": 3}')
    with LLM(str(model)) as llm:
        assert llm.default_sampling.given() == {"temperature": 0.0, "max_tokens": 3}
        assert len(llm.generate([5, 6, 7])[0].token_ids) <= 3
        assert llm.generate([5, 6, 7])[0].token_ids == llm.generate([5, 6, 7])[0].token_ids
    with LLM(str(model), generation_config="none") as llm:
        assert llm.default_sampling.given() == {}
