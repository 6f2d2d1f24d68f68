"""Options of speculative decoding: two ways to say the same, and what contradicts itself."""

from __future__ import annotations

import pytest

from tandem.config.loading import load
from tandem.config.settings import SpeculationSettings
from tandem.config.speculation import with_speculative_config
from tandem.errors import ConfigError


def chosen(**flags: str) -> SpeculationSettings:
    return with_speculative_config(load({name: [text] for name, text in flags.items()}).settings.speculation)


def test_flags_and_vllms_json_say_the_same() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 4, "prompt_lookup_min": 3}'
    assert chosen(speculative_config=text) == chosen(
        speculative_method="ngram", num_speculative_tokens="7", prompt_lookup_max="4", prompt_lookup_min="3"
    )
    assert chosen(speculative_config='{"model": "small"}') == chosen(draft_model="small")
    nulls = '{"method": null, "model": null, "num_speculative_tokens": null}'
    assert chosen(speculative_config=nulls, speculative_method="ngram") == chosen(speculative_method="ngram")
    for name in ("mtp", "deepseek_mtp"):
        assert chosen(speculative_config=f'{{"method": "{name}"}}') == chosen(speculative_method="mtp")


def test_auto_is_a_draft_model_where_one_is_named_or_the_models_head() -> None:
    for flags, method in (({}, "mtp"), ({"draft_model": "small"}, "draft_model"), ({"speculative_method": "none"}, "none")):
        settings = load({name: [text] for name, text in flags.items()}).settings.speculation
        assert with_speculative_config(settings, head=True).speculative_method == method
    assert chosen().speculative_method == "none"
    assert chosen(draft_model="small").speculative_method == "draft_model"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"speculative_config": "{method: ngram}"}, "--speculative-config: '{method: ngram}' is not JSON (Expecting property"),
        ({"speculative_config": "ngram"}, "; in a shell, put it between single quotes"),
        ({"speculative_config": '{"metod": null}'}, "there is no 'metod'"),
        ({"speculative_config": "[1]"}, "must be a JSON object"),
        ({"speculative_config": '{"metod": "ngram"}'}, "there is no 'metod'; known are method, model"),
        ({"speculative_config": '{"method": "eagle"}'}, "--speculative-config method: 'eagle' is not one of auto, none"),
        ({"speculative_config": '{"num_speculative_tokens": "5"}'}, "num_speculative_tokens: '5' is not a whole number"),
        ({"speculative_config": '{"num_speculative_tokens": 33}'}, "num_speculative_tokens: 33 is out of range"),
        ({"num_speculative_tokens": "0"}, "--num-speculative-tokens: 0 is out of range"),
        ({"prompt_lookup_min": "6"}, "6 is more than the 5 of --prompt-lookup-max; lower it"),
        ({"speculative_method": "draft_model"}, "needs --draft-model MODEL"),
        ({"speculative_method": "ngram", "draft_model": "small"}, "is not used by --speculative-method ngram"),
        ({"speculative_config": '{"method": "none", "model": "a"}'}, "is not used by --speculative-method none"),
    ],
)
def test_nonsense_is_refused_by_name(flags: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        chosen(**flags)
    assert words in error.value.message
