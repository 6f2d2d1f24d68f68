"""Variables of the ring project (`--profile ring`): those that mean something here, and why the others do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.config.options import by_name

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
"""Legacy variable -> field."""

NOT_MAPPED = {
    "MODEL_CACHE_DIR": "the hub's own HF_HUB_CACHE says where models are kept",
    "WORKER_HOSTS": "--hostfile names the machines of the ranks",
    "WORKER_SSH": "--hostfile says how machines are reached over ssh",
    "KV_CACHE_RESERVED_MEMORY_MB": "--memory-fraction or --kv-tokens limit the KV cache",
    "MAX_PROMPT_LEN_BYTES": "prompts have no byte limit; --max-context counts tokens",
    "POLL_INTERVAL_SECONDS": "nothing is polled",
    "FILE_DESCRIPTOR_SOFT_LIMIT": "ulimit -n sets it for every process",
    "FILE_DESCRIPTOR_HARD_LIMIT": "ulimit -n sets it for every process",
    "MODEL_LOAD_WAIT_SECONDS": "readiness is asked for, not waited for; --start-timeout limits it",
    "REQUEST_FILE_PATH": "requests do not travel through files",
    "RESPONSE_FILE_PATH": "answers do not travel through files",
    "SERVER_LOG_PATH": "logs go to stderr; redirect it",
    "API_LOG_PATH": "logs go to stderr; redirect it",
}
"""Legacy variable -> why it has no effect."""


def ring_values(environment: Mapping[str, str]) -> tuple[dict[str, tuple[Any, str]], list[str]]:
    """Values by field name with the variable that each came from, and warnings about variables without effect.

    Empty variables count as unset. Raises ConfigError for a value of the wrong type.
    """
    values: dict[str, tuple[Any, str]] = {}
    for variable, name in MAPPED.items():
        text = environment.get(variable, "").strip()
        if text:
            values[name] = (by_name()[name].parse([text], label=variable), variable)
    set_in_vain = (variable for variable in NOT_MAPPED if environment.get(variable, "").strip())
    return values, [f"{variable} has no effect: {NOT_MAPPED[variable]}" for variable in set_in_vain]
