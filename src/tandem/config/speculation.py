"""Speculative decoding as vLLM's users write it: one option with a JSON object."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from tandem.config.options import by_name
from tandem.config.settings import SpeculationSettings
from tandem.errors import ConfigError

MOST_DRAFTS = 32
"""Positions more than that cost more than any guess is worth, and sliding windows keep room for them all."""
MOST_LOOKUP = 64
_NAMES = {"method": "speculative_method", "num_speculative_tokens": "num_speculative_tokens",
          "prompt_lookup_max": "prompt_lookup_max", "prompt_lookup_min": "prompt_lookup_min"}
"""vLLM's key -> our field."""


def with_speculative_config(settings: SpeculationSettings, label: str = "--speculative-config") -> SpeculationSettings:
    """`settings` with what its JSON text says. Raises ConfigError naming `label`, the key and what is allowed."""
    if settings.speculative_config is None:
        return settings
    try:
        entries = json.loads(settings.speculative_config)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{label}: is not JSON: {error}", param="speculative_config") from None
    if not isinstance(entries, dict):
        raise ConfigError(f"{label}: must be a JSON object, such as {{\"method\": \"ngram\"}}",
                          param="speculative_config")
    values: dict[str, Any] = {}
    for key, value in entries.items():
        if key not in _NAMES:
            raise ConfigError(f"{label}: there is no {key!r}; known are {', '.join(_NAMES)}",
                              param="speculative_config")
        option = by_name()[_NAMES[key]]
        values[option.name] = option.convert(value, label=f"{label} {key}")
    return replace(settings, speculative_config=None, **values)
