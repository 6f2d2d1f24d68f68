"""Several models in one configuration."""

from __future__ import annotations

import pytest

from tandem.config.loading import from_json, load, to_json
from tandem.config.several import lora_modules, named_models, settings_of, unload_after
from tandem.errors import ConfigError

FILE = """
[model]
model = "org/main"
max_context = 4096
adapter_path = "/adapters"
[parallel]
layer_split = [20, 16]
pipeline_parallel_size = 2
[models]
unload_after = 60
[models.small]
model = "org/small"
tensor_parallel_size = 2
tool_parser = "hermes"
keep = true
unload_after = 5
[models."main:long"]
max_context = 8192
"""


def loaded(tmp_path, text=FILE, **flags):
    file = tmp_path / "tandem.toml"
    file.write_text(text)
    return load({name: [value] for name, value in flags.items()}, config_file=str(file)).settings


def test_each_model_has_settings_of_its_own_and_shares_the_rest(tmp_path):
    settings = loaded(tmp_path, also="third=org/third", lora_modules="sql=/sql", max_batch_size="3")
    models = {one.name: settings_of(settings, one) for one in named_models(settings)}
    assert list(models) == ["third", "small", "main:long"] and lora_modules(settings) == {"sql": "/sql"}
    small, long, third = (models[name] for name in ("small", "main:long", "third"))
    assert (small.model.model, small.model.served_name, small.model.max_context) == ("org/small", ("small",), None)
    assert small.parallel.tensor_parallel_size == 2 and small.parallel.pipeline_parallel_size == 1
    assert small.parallel.layer_split is None and small.model.adapter_path is None
    assert small.server.tool_parser == "hermes" and settings.server.tool_parser == "auto"
    assert (long.model.model, long.model.max_context, long.parallel.layer_split) == ("org/main", 8192, (20, 16))
    assert not any(one.model.lora_modules for one in models.values())
    assert third.parallel.pipeline_parallel_size == 2 and third.parallel.layer_split is None
    assert all(one.scheduler.max_batch_size == 3 for one in models.values())
    assert [unload_after(settings, one) for one in named_models(settings)] == [60.0, 5.0, 60.0]


def test_children_get_it_as_it_is(tmp_path):
    settings = loaded(tmp_path)
    assert from_json(to_json(settings)) == settings


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[models.a]\nmodle = "x"', ("[models.a] modle", "did you mean model")),
        ("[models.a]\nmodel = 3", ("[models.a] model", "3")),
        ('[models.a]\nmodel = "x"\nkeep = "yes"', ("[models.a] keep", "true or false")),
        ('[models.a]\nmodel = "x"\nport = 3', ("[models.a] port", "all models alike")),
        ('[models.a]\nmodel = "x"\nmax_context = 0', ("[models.a] max_context", "1 or more")),
        ('[models.a]\nmodel = "x"\nunload_after = -5', ("[models.a] unload_after", "above 0")),
        ("[models.a]\nkeep = true", ("[models.a]", "needs `model`")),
        ("[models]\nmax_loaded = 0", ("max_loaded", "1 or more")),
        ('[models.default]\nmodel = "x"', ("'default' cannot be",)),
        ('[models."a b"]\nmodel = "x"', ("'a b' cannot be",)),
        ('[models]\nextra_models = ["a=x", "a=y"]', ("two models of the name a",)),
        ('[models]\nextra_models = ["a"]', ("--extra-models a", "NAME=MODEL")),
        ('[model]\nlora_modules = ["=x"]\nmodel = "m"', ("'' cannot be",)),
        ('[model]\nlora_modules = ["a=x"]\nmodel = "m"\n[models.a]\nmax_context = 9', ("two models of the name a",)),
        ('[model]\nmodel = "m"\nserved_name = "a"\n[models]\nextra_models = ["a=x"]', ("two models of the name a",)),
    ],
)
def test_mistakes_are_named(tmp_path, text, words):
    with pytest.raises(ConfigError) as error:
        loaded(tmp_path, text)
    assert all(word in error.value.message for word in words), error.value.message
