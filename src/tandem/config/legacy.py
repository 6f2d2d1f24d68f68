"""Settings of the ring project (`--profile ring`): its `.env` file, and its variables mapped to Tandem's settings."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Collection, Mapping
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
    "NUM_DEVICES": "tensor_parallel_size",
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

COMBINED = {
    "MODEL_CACHE_DIR": "it does not end in /hub; set HF_HUB_CACHE, the hub's own variable for where models are kept",
    **dict.fromkeys(("WORKER_HOSTS", "WORKER_SSH"), "the machines come from --hostfile or --launcher"),
}
"""Legacy variable that is no setting by itself -> why it has no effect, where it has none (see `ring_values`)."""

NOT_MAPPED = {
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


def ring_values(environment: Mapping[str, str], chosen: Collection[str] = ()) -> tuple[dict[str, tuple[object, str]], list[str]]:
    """Return (value, variable) by field name, and warnings about variables without effect.

    Empty variables count as unset. `chosen`: fields that come from elsewhere; a layout or hosts among them replace
    NUM_DEVICES or WORKER_HOSTS. Raises ConfigError for a value of the wrong type, and for workers that do not fit together.
    """
    values: dict[str, tuple[object, str]] = {}
    laid_out = not {"pipeline_parallel_size", "tensor_parallel_size", "parallel"}.isdisjoint(chosen)
    for variable, name in MAPPED.items():
        if (text := environment.get(variable, "").strip()) and not (laid_out and variable == "NUM_DEVICES"):
            values[name] = (by_name()[name].parse([text], label=variable), variable)
    effective = {"MODEL_CACHE_DIR"} if hub_cache(environment) else set()
    if {"hostfile", "launcher"}.isdisjoint(chosen) and (workers := _workers(environment)):
        effective |= {"WORKER_HOSTS", "WORKER_SSH"}
        count = len(workers) + 1
        if not laid_out and (devices := values.setdefault("tensor_parallel_size", (count, "NUM_DEVICES"))[0]) != count:
            why = f"this machine and those of WORKER_HOSTS are {count}; set NUM_DEVICES={count}"
            raise ConfigError(f"NUM_DEVICES={devices}: {why}", param="tensor_parallel_size")
        hosts = [{"ssh": "127.0.0.1"}, *({"ssh": ssh, "ips": [address]} for address, ssh in workers.items())]
        home = f"{Path.home()}/"  # each machine has its own, which readers of the variable expand from ~
        named = [(name, path.startswith(home), path.removeprefix(home)) for name, path in hub_cache(environment).items()]
        envs = [f"{name}={'~/' if below else ''}{path}" for name, below, path in named]
        values["hostfile"] = (json.dumps({"envs": envs, "hosts": hosts}), "WORKER_HOSTS")
    reasons = {**COMBINED, **NOT_MAPPED}
    in_vain = (variable for variable in reasons if variable not in effective and environment.get(variable, "").strip())
    return values, [f"{variable} has no effect: {reasons[variable]}" for variable in in_vain]


def hub_cache(environment: Mapping[str, str]) -> dict[str, str]:
    """Return HF_HUB_CACHE for the hub cache that MODEL_CACHE_DIR names; empty if it names none."""
    path = Path(os.path.expanduser(environment.get("MODEL_CACHE_DIR", "").strip()))
    return {"HF_HUB_CACHE": environment.get("HF_HUB_CACHE") or str(path)} if path.name == "hub" else {}


def _workers(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the ssh destination of each worker by address; empty without workers. Raises ConfigError."""
    addresses, logins = (environment.get(name, "").replace(",", " ").split() for name in ("WORKER_HOSTS", "WORKER_SSH"))
    if len(addresses) != len(logins):
        counts = f"WORKER_HOSTS has {len(addresses)} address(es) and WORKER_SSH {len(logins)}"
        raise ConfigError(f"{counts}; set USER@HOST for each", param="hostfile")
    if twice := next((text for texts in (addresses, logins) for text in texts if texts.count(text) > 1), None):
        raise ConfigError(f"WORKER_HOSTS and WORKER_SSH: {twice} is there twice; name each machine once", param="hostfile")
    return dict(zip(addresses, logins, strict=True))


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
