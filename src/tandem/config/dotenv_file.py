"""The file `.env` of the ring project, which the profile `ring` reads."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

from dotenv import dotenv_values
from dotenv.parser import parse_stream

from tandem.errors import ConfigError
from tandem.system.files import read_text

NAME = ".env"


def read_dotenv(directory: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """What `.env` in `directory` adds to `environment`, whose own variables win; nothing where there is no such file.

    Raises ConfigError, in one line, for a file that cannot be read, and for a line that is not NAME=VALUE.
    """
    path = directory / NAME
    try:
        text = read_text(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", param="profile") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text", param="profile") from None
    for binding in parse_stream(io.StringIO(text)):
        # A name alone is right for python-dotenv, and sets nothing.
        if binding.error or (binding.key is not None and binding.value is None):
            said = binding.original.string
            number = binding.original.line + said[:len(said) - len(said.lstrip())].count("\n")
            start = said.strip().splitlines()[0].partition("=")[0][:40]
            raise ConfigError(f"{path}, line {number}: {start!r} is not followed by a value: lines are NAME=VALUE, or "
                              "begin with #", param="profile")
    values = dotenv_values(stream=io.StringIO(text))
    return {name: value for name, value in values.items() if value is not None and name not in environment}
