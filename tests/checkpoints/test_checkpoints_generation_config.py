"""Defaults of sampling: the model's file, another one, none, and what the command line says instead."""

from __future__ import annotations

import json

import pytest

from tandem.checkpoints.generation_config import sampling_defaults
from tandem.errors import BrokenModel, ConfigError
from tandem.protocol.request import SamplingDefaults

QWEN = {
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "eos_token_id": [1, 2],
    "transformers_version": "4.51.0",
}


def write(directory, content):
    directory.mkdir(exist_ok=True)
    (directory / "generation_config.json").write_text(json.dumps(content))
    return directory


def test_the_file_beside_the_weights_counts_unless_it_is_turned_off(tmp_path):
    model = write(tmp_path, QWEN)
    assert sampling_defaults(model, "auto", None) == SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20)
    assert sampling_defaults(model, "none", None) == SamplingDefaults()


def test_a_model_without_a_file_has_no_defaults(tmp_path):
    assert sampling_defaults(tmp_path, "auto", None) == SamplingDefaults()


def test_another_directory_and_single_values(tmp_path):
    model, other = write(tmp_path / "a", QWEN), write(tmp_path / "b", {"max_new_tokens": 64, "repetition_penalty": 1.1})
    assert sampling_defaults(model, str(other), None) == SamplingDefaults(max_tokens=64, repetition_penalty=1.1)
    assert sampling_defaults(model, "auto", '{"temperature": 0, "max_tokens": 9}') == SamplingDefaults(
        temperature=0.0, top_p=0.95, top_k=20, max_tokens=9
    )


@pytest.mark.parametrize("value", [None, "0.5", True, -1, 7, float("nan"), 10**400])
def test_what_makes_no_sense_in_a_file_is_left_out(tmp_path, value):
    model = write(tmp_path, {"temperature": value, "top_p": 0.5})
    assert sampling_defaults(model, "auto", None) == SamplingDefaults(top_p=0.5)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("{", "--override-generation-config: is not JSON"),
        ("[1]", "--override-generation-config: must be a JSON object"),
        ('{"temprature": 1}', "there is no 'temprature'; known are temperature, top_p"),
        ('{"temperature": 5}', "temperature is 5; it must be a number, at least 0 and at most 2"),
        ('{"top_k": 1.5}', "top_k is 1.5; it must be a whole number"),
    ],
)
def test_what_makes_no_sense_on_the_command_line_is_refused(tmp_path, override, said):
    with pytest.raises(ConfigError, match=said):
        sampling_defaults(tmp_path, "auto", override)


def test_a_directory_that_is_named_must_have_one_and_a_broken_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="--generation-config .*gone: .*give auto, none, or a directory"):
        sampling_defaults(tmp_path, str(tmp_path / "gone"), None)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(BrokenModel, match=r"generation_config\.json: is not valid JSON"):
        sampling_defaults(tmp_path, "auto", None)
