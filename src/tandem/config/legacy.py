"""Settings of the ring project (`--profile ring`): its `.env` file, and its variables mapped to Tandem's settings."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

from dotenv import dotenv_values
from dotenv.parser import parse_stream

from tandem.config.options import by_name
from tandem.errors import ConfigError
from tandem.system.files import read_text

MAPPED = {
    "MODEL_REPO": "model",
    "API_HOST": "host",
    "API_PORT": "port",
    "SOCKET_PATH": "engine_socket",
    "NUM_DEVICES": "pipeline_parallel_size",
    "DISTRIBUTED_BACKEND": "backend",
    "KV_CACHE_MAX_SIZE": "kv_tokens",
    "MAX_SEQUENCE_LENGTH": "max_context",
    "REQUEST_TIMEOUT_SECONDS": "request_timeout",
    "DEFAULT_MAX_TOKENS": "default_max_tokens",
    "LOG_LEVEL": "log_level",
}
"""Legacy variable -> settings field."""

RING_DEFAULTS = {"port": 8100, "keep_conversations": 3600.0}
"""Defaults of the profile, below all other sources."""

NOT_MAPPED = {
    "MODEL_CACHE_DIR": "set HF_HUB_CACHE, the hub's own variable for where models are kept",
    "WORKER_HOSTS": "use --hostfile, which names the machines of the ranks; `tandem hosts write` makes the file",
    "WORKER_SSH": "use --hostfile, which says how machines are reached; `tandem hosts write hosts.json 127.0.0.1 "
    "USER@HOST` makes the file",
    "KV_CACHE_RESERVED_MEMORY_MB": "use --memory-fraction or --kv-tokens, which limit the KV cache",
    "MAX_PROMPT_LEN_BYTES": "use --max-context, which counts tokens; prompts have no limit in bytes",
    "POLL_INTERVAL_SECONDS": "leave it out; nothing is polled",
    "FILE_DESCRIPTOR_SOFT_LIMIT": "leave it out; the limit is raised to 10240 where the hard one lets it",
    "FILE_DESCRIPTOR_HARD_LIMIT": "use `ulimit -Hn` in the shell that starts Tandem",
    "MODEL_LOAD_WAIT_SECONDS": "use --start-timeout; `tandem up` returns when requests can be served",
    "REQUEST_FILE_PATH": "leave it out; requests do not travel through files",
    "RESPONSE_FILE_PATH": "leave it out; answers do not travel through files",
    "SERVER_LOG_PATH": "use `tandem up`, whose log `tandem logs` prints, or redirect stderr of `tandem serve`",
    "API_LOG_PATH": "use `tandem up`, whose log `tandem logs` prints, or redirect stderr of `tandem serve`",
}
"""Legacy variable without effect -> what to use instead."""


def ring_values(environment: Mapping[str, str]) -> tuple[dict[str, tuple[object, str]], list[str]]:
    """Return (value, variable) by field name, and warnings about variables without effect.

    Empty variables count as unset. Raises ConfigError for a value of the wrong type.
    """
    values: dict[str, tuple[object, str]] = {}
    for variable, name in MAPPED.items():
        text = environment.get(variable, "").strip()
        if text:
            values[name] = (by_name()[name].parse([text], label=variable), variable)
    set_in_vain = (variable for variable in NOT_MAPPED if environment.get(variable, "").strip())
    return values, [f"{variable} has no effect: {NOT_MAPPED[variable]}" for variable in set_in_vain]


def read_dotenv(directory: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in `.env` of `directory` that `environment` lacks; empty if the file does not exist.

    Raises a one-line ConfigError for an unreadable file, and for a line that is not NAME=VALUE.
    """
    path = directory / ".env"
    try:
        text = read_text(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", param="profile") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text", param="profile") from None
    for binding in parse_stream(io.StringIO(text)):
        # python-dotenv accepts a name without a value, which sets nothing.
        if binding.error or (binding.key is not None and binding.value is None):
            line = binding.original.string
            number = binding.original.line + line[: len(line) - len(line.lstrip())].count("\n")
            start = line.strip().splitlines()[0].partition("=")[0][:40]
            raise ConfigError(
                f"{path}, line {number}: {start!r} is not followed by a value: lines are NAME=VALUE, or begin with #",
                param="profile",
            )
    values = dotenv_values(stream=io.StringIO(text))
    return {name: value for name, value in values.items() if value is not None and name not in environment}
