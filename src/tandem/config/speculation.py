"""Speculative decoding options in vLLM's form: one JSON object."""

from __future__ import annotations

import json
from dataclasses import replace

from tandem.config.options import by_name
from tandem.config.settings import SpeculationSettings
from tandem.errors import ConfigError
from tandem.json_types import JsonObject

_NAMES = {"method": "speculative_method", "model": "draft_model"}
_NAMES |= {name: name for name in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")}
"""vLLM's key -> settings field."""


def with_speculative_config(
    settings: SpeculationSettings, label: str = "--speculative-config", *, head: bool = False
) -> SpeculationSettings:
    """Return `settings` merged with its JSON object, with `auto` resolved to a definite method. `head`: True if the model
    carries a draft head.

    Raises ConfigError that names `label`, the key and the allowed values.
    """
    if settings.speculative_config is None:
        return _resolved(settings, head)
    try:
        entries = json.loads(settings.speculative_config)
    except (ValueError, RecursionError) as error:
        why = f"{settings.speculative_config!r:.200} is not JSON ({error}); in a shell, put it between single quotes"
        raise ConfigError(f"{label}: {why}", param="speculative_config") from None
    if not isinstance(entries, dict):
        raise ConfigError(f'{label}: must be a JSON object, such as {{"method": "ngram"}}', param="speculative_config")
    values: JsonObject = {}
    for key, value in entries.items():
        if key not in _NAMES:
            raise ConfigError(f"{label}: there is no {key!r}; known are {', '.join(_NAMES)}", param="speculative_config")
        if key == "method" and isinstance(value, str) and value.endswith("_mtp"):
            value = "mtp"  # vLLM also takes names by family, such as deepseek_mtp
        option = by_name()[_NAMES[key]]
        # null, as vLLM has it, is a key that is not given
        values[option.name] = getattr(settings, option.name) if value is None else option.convert(value, label=f"{label} {key}")
    return _resolved(replace(settings, speculative_config=None, **values), head)


def _resolved(settings: SpeculationSettings, head: bool) -> SpeculationSettings:
    """Return settings with `auto` resolved. Raises ConfigError when method and draft model contradict one another."""
    method, model = settings.speculative_method, settings.draft_model
    if method == "auto":
        method = "draft_model" if model else "mtp" if head else "none"
    named = {"draft_model": "a small model with the same tokenizer"}
    named |= dict.fromkeys(("eagle3", "dflash"), "the head's directory or hub id")
    if method in named and not model:
        raise ConfigError(f"--speculative-method {method}: needs --draft-model MODEL, {named[method]}", param="draft_model")
    if model and method not in (*named, "mtp"):
        raise ConfigError(
            f"--draft-model {model}: is not used by --speculative-method {method}; leave one out", param="draft_model"
        )
    return replace(settings, speculative_method=method)
