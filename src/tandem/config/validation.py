"""Validation of merged settings: ranges, and consistency between fields. Errors and warnings name the source."""

from __future__ import annotations

import dataclasses
import importlib.util
import ipaddress
import math
import os
import re
import stat
from collections.abc import Callable, Collection

from tandem.config.api_keys import ClientLimits, read_key_file
from tandem.config.options import Option, by_name, options
from tandem.config.settings import ABOVE_0, ParallelSettings, Settings
from tandem.config.sizes import memory_size, wired_bytes
from tandem.config.speculation import with_speculative_config
from tandem.errors import ConfigError

Label = Callable[[str], str]
"""Function from a field's name to the source of its value: `--port`, `TANDEM_PORT`, `tandem.toml [server] port`."""

LONGEST_SOCKET = 98
"""Bytes allowed for a Unix socket's path: 103 on macOS, minus room for a replica's suffix (`-123`)."""
_BEYOND = 2**63
"""Exclusive limit of all numbers: settings travel between processes as 64-bit numbers."""


def default_label(name: str) -> str:
    """Return the flag of a field."""
    return by_name()[name].flag


def validate(settings: Settings, label: Label = default_label) -> list[str]:
    """Check everything that does not need the model. Return warnings. Raises ConfigError."""
    for option in options():
        value = getattr(getattr(settings, option.section), option.name)
        for item in value if option.repeated and value is not None else (value,):
            _check_item(option, item, label)
    wired_bytes(settings.scheduler.wired, label("wired"))
    if settings.scheduler.max_memory is not None:
        memory_size(settings.scheduler.max_memory, label("max_memory"), "max_memory")
    if settings.scheduler.kv_disk is not None and settings.scheduler.prefix_cache == 0:
        raise ConfigError(
            f"{label('kv_disk')}: is about the prefix cache, which {label('prefix_cache')} 0 turns off; leave one out",
            param="kv_disk",
        )
    if settings.scheduler.kv_disk_gb is not None and settings.scheduler.kv_disk is None:
        why = f"limits the directory of {label('kv_disk')}, which is not set; add {label('kv_disk')} DIR, or leave it out"
        raise ConfigError(f"{label('kv_disk_gb')}: {why}", param="kv_disk_gb")
    _check_socket(settings.process.engine_socket, label)
    _check_layer_split(settings, label)
    _check_roles(settings, label)
    _check_launcher(settings.parallel, label)
    _check_speculation(settings, label)
    _check_names(settings, label)
    warnings = _check_keys(settings, label)
    if settings.model.trust_remote_code:
        warnings.append(f"{label('trust_remote_code')}: Python code that comes with the model will run on this machine")
    return warnings


def client_limits(settings: Settings) -> ClientLimits:
    """Return the default limits of a client."""
    server = settings.server
    return ClientLimits(
        max_concurrent_requests=server.max_concurrent_requests,
        requests_per_minute=server.requests_per_minute,
        tokens_per_minute=server.tokens_per_minute,
    )


def api_keys(settings: Settings, *, label: str = "--api-key-file") -> dict[str, ClientLimits]:
    """Return all API keys with their limits. Raises ConfigError when the key file is unreadable or invalid."""
    limits, server = client_limits(settings), settings.server
    found = dict.fromkeys(server.api_key, limits)
    return found if server.api_key_file is None else found | read_key_file(server.api_key_file, limits, label=label)


def is_among(name: str, hosts: Collection[str]) -> bool:
    """Return whether a host's name, in lower case, is one of `hosts` or in a domain of theirs (`*.example.com`)."""
    return any(name == host.lower() or (host.startswith("*.") and name.endswith(host[1:].lower())) for host in hosts)


def is_loopback(host: str) -> bool:
    """Return True for an address that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_item(option: Option, value: object, label: Label) -> None:
    """Check a number's range, and that a text is not empty. Raises ConfigError."""
    name = option.name
    if option.within is not None and value == "":
        raise ConfigError(f"{label(name)}: must not be empty", param=name)
    if option.within is None or not isinstance(value, int | float):
        return
    low, high = option.within
    if low <= value <= high and value < _BEYOND:
        return
    if low == ABOVE_0:
        allowed = "above 0" if math.isinf(high) else f"above 0 and at most {high:g}"
    else:
        allowed = f"{low:g} or more" if math.isinf(high) else f"{low:g} to {high:g}"
    if low <= value <= high:
        allowed += ", and less than 2^63"
    raise ConfigError(f"{label(name)}: {value} is out of range: must be {allowed}", param=name)


def _check_socket(path: str | None, label: Label) -> None:
    """Check the length of the socket's path against the shortest limit of all systems. Raises ConfigError."""
    if path is not None and (length := len(os.fsencode(path))) > LONGEST_SOCKET:
        raise ConfigError(
            f"{label('engine_socket')}: {path} has {length} bytes, and macOS takes {LONGEST_SOCKET} with "
            "room for a replica's number; choose a shorter path",
            param="engine_socket",
        )


def _check_layer_split(settings: Settings, label: Label) -> None:
    parallel = settings.parallel
    source, stages = "pipeline_parallel_size", parallel.pipeline_parallel_size
    if parallel.parallel is not None:
        source, stages = "parallel", len(parallel.parallel)
    split = parallel.layer_split
    by_hosts = parallel.hostfile is not None and source == "pipeline_parallel_size" and stages == 1
    if split is not None and len(split) != stages and not by_hosts:
        given = ",".join(map(str, split))
        raise ConfigError(
            f"{label('layer_split')}: {given} is for {len(split)} stage(s), but {label(source)} asks for {stages}",
            param="layer_split",
        )


def _check_roles(settings: Settings, label: Label) -> None:
    roles, count = settings.parallel.roles, settings.parallel.data_parallel_size
    if roles is None:
        return
    given = f"{label('roles')}: {','.join(roles)}"
    if len(roles) != count:
        raise ConfigError(
            f"{given} is for {len(roles)} replica(s), but {label('data_parallel_size')} asks for {count}; name one role for each",
            param="roles",
        )
    for role, other in (("prefill", "decode"), ("decode", "prefill")):
        if set(roles) == {role}:
            raise ConfigError(f"{given} has nobody to {other}; make one of them {other} or both", param="roles")
    if set(roles) != {"both"} and settings.scheduler.kv_disk is None:
        raise ConfigError(
            f"{given} needs {label('kv_disk')} DIR, over which prompts go from replica to replica; add it, or leave roles out",
            param="roles",
        )
    if set(roles) != {"both"} and settings.speculation.draft_model is not None:
        raise ConfigError(
            f"{given} with {label('draft_model')}: a draft model's KV does not go from replica to replica; leave one out",
            param="roles",
        )


def _check_launcher(parallel: ParallelSettings, label: Label) -> None:
    """Check that options specific to a launcher match the chosen one, and that its required ones are set. Raises ConfigError."""
    chosen = parallel.chosen_launcher
    for field in dataclasses.fields(parallel):
        taker, needed = field.metadata.get("launcher", chosen), field.metadata.get("needed")
        given = getattr(parallel, field.name) is not None
        if taker == chosen and needed and not given:
            raise ConfigError(
                f"{label('launcher')} {chosen}: needs {by_name()[field.name].flag} FILE: {needed}", param=field.name
            )
        if taker != chosen and given:
            raise ConfigError(
                f"{label(field.name)}: is for {label('launcher')} {taker}, not {chosen}; leave one out", param=field.name
            )


def _check_speculation(settings: Settings, label: Label) -> None:
    """Check the JSON form of these settings, and that the minimum lookup does not exceed the maximum. Raises ConfigError."""
    chosen = with_speculative_config(settings.speculation, label("speculative_config"))
    if settings.speculation.speculative_config is not None:
        for name in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"):
            _check_item(by_name()[name], getattr(chosen, name), lambda name: f"{label('speculative_config')} {name}")
    if chosen.prompt_lookup_min > chosen.prompt_lookup_max:
        raise ConfigError(
            f"{label('prompt_lookup_min')}: {chosen.prompt_lookup_min} is more than the "
            f"{chosen.prompt_lookup_max} of {label('prompt_lookup_max')}; lower it",
            param="prompt_lookup_min",
        )


def _check_names(settings: Settings, label: Label) -> None:
    """Check hosts, web origins and proxies, and that a private key has a certificate. Raises ConfigError."""
    server = settings.server
    for field, example in (("allowed_host", "gpu.example.com"), ("image_hosts", "images.example.com or *.example.com")):
        for host in getattr(server, field):
            every = field == "image_hosts" and "*" in host.removeprefix("*.")
            if not host or any(mark in host for mark in "/ @") or host.count(":") == 1 or every:
                raise ConfigError(
                    f"{label(field)}: {host!r} is not the name of a host; write it without scheme and port, such as {example}",
                    param=field,
                )
    for origin in server.allowed_origin:
        scheme, separator, rest = origin.rstrip("/").partition("://")
        if origin != "*" and not (scheme and separator and rest and "/" not in rest):
            raise ConfigError(
                f"{label('allowed_origin')}: {origin!r} is not a web origin; write scheme and host, and "
                "the port if it has one, such as https://chat.example.com",
                param="allowed_origin",
            )
    for proxy in server.trusted_proxies:
        try:
            ipaddress.ip_network(proxy)
        except ValueError as error:
            raise ConfigError(
                f"{label('trusted_proxies')}: {error}; name proxies by address or network, such as 10.0.0.2 or 10.0.0.0/24",
                param="trusted_proxies",
            ) from None
    if (endpoint := server.otlp_traces_endpoint) is not None:
        if not re.match(r"https?://[^/]", endpoint):
            raise ConfigError(
                f"{label('otlp_traces_endpoint')} {endpoint}: must be an address of OTLP over HTTP, such as "
                "http://localhost:4318/v1/traces",
                param="otlp_traces_endpoint",
            )
        if not _has_module("opentelemetry.exporter.otlp.proto.http"):
            raise ConfigError(
                f"{label('otlp_traces_endpoint')}: needs OpenTelemetry: pip install 'mlx-tandem[otel]', or "
                "'.[otel]' in a checkout",
                param="otlp_traces_endpoint",
            )
    if server.tls_key is not None and server.tls_cert is None:
        raise ConfigError(f"{label('tls_key')}: needs --tls-cert FILE, the certificate of the key", param="tls_cert")


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _check_keys(settings: Settings, label: Label) -> list[str]:
    """Check that API keys are not empty. Return warnings about an open server or a key file readable by others."""
    server = settings.server
    warnings = []
    if any(not key.strip() for key in server.api_key):
        raise ConfigError(f"{label('api_key')}: a key must not be empty", param="api_key")
    if server.api_key_file is not None:
        api_keys(settings, label=label("api_key_file"))
        if os.stat(server.api_key_file).st_mode & (stat.S_IRGRP | stat.S_IROTH):
            path = server.api_key_file
            warnings.append(f"{label('api_key_file')}: others on this machine can read {path}; chmod 600 mends that")
    elif not server.api_key and not is_loopback(server.host):
        warnings.append(
            f"{label('host')} {server.host}: anyone who reaches this address may use the server; "
            "set TANDEM_API_KEY or --api-key-file to ask for a key"
        )
    return warnings
