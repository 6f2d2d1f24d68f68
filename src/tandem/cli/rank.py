"""`tandem rank`: join this machine to a head, manually or under `mlx.launch`."""

from __future__ import annotations

import argparse
import math

import msgspec

from tandem.errors import ConfigError
from tandem.launchers.host_facts import launched_process_group
from tandem.launchers.manual import read_token
from tandem.launchers.node_agent import host_ranks
from tandem.log import set_up
from tandem.processes.child import NoPayload, receive_payload
from tandem.protocol.payloads import HostPayload


def run(arguments: argparse.Namespace) -> int:
    """Join a head and run a rank at each of its requests, until the head releases this machine. Raises UsageError."""
    payload = _received() if arguments.stdin else _payload(arguments)
    set_up(payload.log_level, prefix="[node agent]", log_format=payload.log_format)
    return host_ranks(payload)


def _received() -> HostPayload:
    try:
        return msgspec.json.decode(receive_payload(), type=HostPayload)
    except (NoPayload, msgspec.DecodeError):
        raise ConfigError(
            "--stdin: is for Tandem's launchers, which write what to do there; use --join and --token-file"
        ) from None


def _payload(arguments: argparse.Namespace) -> HostPayload:
    if arguments.join is None or arguments.token_file is None:
        raise ConfigError(
            "--join HOST[:PORT] and --token-file FILE are needed: the head's address, and a copy of its token file", param="join"
        )
    if not 0 < arguments.join_timeout < math.inf:
        raise ConfigError(f"--join-timeout: {arguments.join_timeout:g} is out of range: must be above 0", param="join_timeout")
    slot = arguments.rank if arguments.rank is not None else launched_process_group().rank
    if slot is not None and slot < 0:
        raise ConfigError(f"--rank: {slot} is out of range: must be 0 or more", param="rank")
    return HostPayload(
        keys=read_token(arguments.token_file),
        endpoints=[_endpoint(arguments.join)],
        slot=slot,
        address=arguments.address,
        join_timeout=arguments.join_timeout,
        rejoin=True,
        log_level=arguments.log_level,
        log_format=arguments.log_format,
    )


def _endpoint(text: str) -> str:
    from tandem.config.settings import ParallelSettings

    host, colon, port = text.partition(":")
    if not host or (colon and not (port.isdecimal() and 0 < int(port) < 65536)):
        raise ConfigError(f"--join: {text!r} is not HOST or HOST:PORT", param="join")
    return f"{host}:{port or ParallelSettings().join_port}"
