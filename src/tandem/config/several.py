"""Several models in one configuration: their list, and the settings of each."""

from __future__ import annotations

import dataclasses
import re

from tandem.config.options import Option, by_name, nearest, renamed
from tandem.config.settings import ModelsSettings, NamedModel, Settings
from tandem.errors import ConfigError
from tandem.json_types import JsonObject

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@+-]{0,127}")
_SECTIONS = ("model", "parallel", "scheduler", "speculation")
_SERVER = ("default_max_tokens", "tool_parser", "reasoning_parser", "thinking_budget", "thinking_message")
_NOT_OWN = ("served_name",)
"""Settings not allowed in a model's table: its name determines them."""
_LAYOUT = (
    "pipeline_parallel_size",
    "tensor_parallel_size",
    "parallel",
    "tensor_split",
    "expert_parallel",
    "layer_split",
    "micro_batches",
)
"""Layout settings: a model's table that has one of them inherits none of them from the main model."""


def check_table(name: str, entries: JsonObject, source: str, warnings: list[str]) -> NamedModel:
    """Validate a table [models.NAME] and return its model. Former names add to `warnings`. Raises ConfigError."""
    known = {option.name: option for option in _allowed()}
    values: JsonObject = {}
    for written, value in entries.items():
        label = f"{source} {written}"
        key = written if written == "keep" else renamed(written, label, warnings)
        values[key] = value
        if key == "keep":
            if not isinstance(value, bool):
                raise ConfigError(f"{label}: {value!r} is not true or false", param=key)
        elif key not in known:
            hint = "; that is for all models alike" if key in by_name() else nearest(key, [*known, "keep"])
            raise ConfigError(f"{label}: a model has no such setting{hint}", param=key)
        else:
            known[key].convert(value, label=label)
    return NamedModel(name=name, values=values, source=source)


def named_models(settings: Settings) -> tuple[NamedModel, ...]:
    """Return the models in addition to `settings.model`, in order. Raises ConfigError for an invalid or duplicate name."""
    found = [_pair(text, "--extra-models", "model", "small=org/small-model") for text in settings.models.extra_models]
    found += settings.named
    checked = [*_adapters(settings), *found]
    names = [*settings.model.served_name, *(one.name for one in checked)]
    for one in checked:
        if not usable_name(one.name):
            raise ConfigError(
                f"{one.source}: {one.name!r} cannot be a model's name; use letters, digits and _.:/@+-, "
                "and not `default`, which means the first",
                param="extra_models",
            )
        if names.count(one.name) > 1:
            raise ConfigError(f"{one.source}: there are two models of the name {one.name}", param="extra_models")
        if not (one.values.get("model") or settings.model.model):
            raise ConfigError(f"{one.source}: needs `model`: a directory, a GGUF file, a hub id or demo", param="model")
    return tuple(found)


def lora_modules(settings: Settings) -> dict[str, str]:
    """Return the directories of `--lora-modules` by name. Raises ConfigError."""
    return {one.name: one.values["adapter_path"] for one in _adapters(settings)}


def _adapters(settings: Settings) -> list[NamedModel]:
    return [_pair(text, "--lora-modules", "adapter_path", "sql=./adapters") for text in settings.model.lora_modules]


def usable_name(name: str) -> bool:
    """Return True if `name` can be a model's name; `default` means the first."""
    return _NAME.fullmatch(name) is not None and name != "default"


def _pair(text: str, flag: str, field: str, example: str) -> NamedModel:
    name, equals, value = text.partition("=")
    if not (equals and value):
        raise ConfigError(f"{flag} {text}: must be NAME={field.upper()}, such as {example}", param=flag[2:].replace("-", "_"))
    return NamedModel(name=name, values={field: value}, source=f"{flag} {name}")


def settings_of(settings: Settings, one: NamedModel) -> Settings:
    """Return the settings of one additional model, as if served alone under its name. Raises ConfigError."""
    sections: dict[str, dict[str, object]] = {section: {} for section in (*_SECTIONS, "server")}
    if "model" in one.values:  # another model than the main one inherits no settings specific to that model
        sections["model"] |= dict.fromkeys(("revision", "chat_template", "max_context", "adapter_path"))
        sections["parallel"]["layer_split"] = None
    if one.values.keys() & set(_LAYOUT):
        sections["parallel"] |= {name: by_name()[name].default for name in _LAYOUT}
    for option in _allowed():
        if option.name in one.values and option.section in sections:
            sections[option.section][option.name] = option.convert(one.values[option.name], label=one.label(option.name))
    if one.values and "lora_modules" not in one.values:  # adapters are for the main model, which is listed without values
        sections["model"]["lora_modules"] = ()
    sections["model"]["served_name"] = (one.name, *(settings.model.served_name if one.source == "MODEL" else ()))
    replaced = {name: dataclasses.replace(getattr(settings, name), **fields) for name, fields in sections.items()}
    return alone(dataclasses.replace(settings, **replaced))


def alone(settings: Settings) -> Settings:
    """Return the settings without additional models."""
    return dataclasses.replace(settings, models=ModelsSettings(), named=())


def unload_after(settings: Settings, one: NamedModel) -> float | None:
    """Return the seconds of idleness after which a model is unloaded; None for never."""
    value = one.values.get("unload_after", settings.models.unload_after)
    return None if value is None else float(value)


def _allowed() -> list[Option]:
    """Return the options allowed in a table [models.NAME], in addition to `keep`."""
    return [
        option
        for option in by_name().values()
        if option.name not in _NOT_OWN and (option.section in _SECTIONS or option.name in (*_SERVER, "unload_after"))
    ]
