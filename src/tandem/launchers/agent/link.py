"""The head's connections to an agent: pairing, and a session command that replaces ssh.

The command is `python -m tandem.launchers agent NAME PROGRAM`.

It forwards standard input and output and returns the program's exit code. Without a session it prints the reason and returns
255, like ssh.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from contextlib import suppress
from typing import TypeVar

import zmq

from tandem.errors import TransportError, UsageError
from tandem.launchers.agent.trust import Identity, Peer, Trust
from tandem.printable import printable
from tandem.processes.interpreter import module_command
from tandem.protocol.agent_messages import (
    Beat,
    Data,
    Ended,
    OpenSession,
    PairRefused,
    PairReply,
    PairRequest,
    SessionReply,
    SessionRequest,
)
from tandem.protocol.keys import ClusterKeys
from tandem.protocol.payloads import LAUNCHERS
from tandem.system.privacy import silent_because
from tandem.transport.bus import SpokeSocket

PREFIX = "agent:"
"""Prefix of an `ssh` entry in a hosts file that names an agent."""
FAILED = 255
ANSWER_S = 5.0
"""Seconds to wait for each of the agent's answers during pairing."""
BEAT_S, SILENCE_S = 2.0, 8.0
"""Seconds between heartbeats in both directions, and of silence after which the other end counts as lost."""
MAX_FRAME = 1024 * 1024
CHUNK = 64 * 1024

T = TypeVar("T", bound=PairReply)


def agent_name(ssh: str) -> str | None:
    """Return the agent's name in an `ssh` entry; None for an ssh destination."""
    return ssh.removeprefix(PREFIX) if ssh.startswith(PREFIX) else None


def link_command(name: str, program: str) -> list[str]:
    """Return the command that runs `program` on the machine of agent `name`."""
    return module_command(LAUNCHERS, "agent", name, program)


def paired_agent(name: str) -> Peer:
    """Return the paired agent of this name. Raises UsageError if there is none."""
    peer = Trust("head").peers().get(name)
    if peer is None:
        raise UsageError(f"agent {name} is not paired with this machine; `tandem hosts pair {name}`")
    return peer


class PairingLink(SpokeSocket[PairRequest, PairReply]):
    """The head's end of a pairing, over an unencrypted socket."""

    def __init__(self, host: str, port: int) -> None:
        """Connect without waiting for the agent."""
        super().__init__(PairReply, None, secrets.token_bytes(16), max_frame=CHUNK, linger_ms=0)
        self._host, self._port = host, port
        self._connect(f"tcp://{host}:{port}")

    def ask(self, request: PairRequest, kind: type[T]) -> T:
        """Send a request and return the agent's answer. Raises UsageError after `ANSWER_S` seconds, a refusal or another type."""
        there = f"{self._host}:{self._port}"
        self.send(request)
        try:
            reply = self.receive(ANSWER_S)
        except TransportError as error:
            raise UsageError(f"what answers at {there} is no agent of this version: {error}") from None
        if reply is None:
            why = silent_because(self._host, self._port)
            raise UsageError(
                f"no agent answers at {there}{f' ({why})' if why else ''}; is `tandem agent` running there, and the port open?"
            )
        if isinstance(reply, PairRefused):
            raise UsageError(f"not paired: {reply.reason}")
        if not isinstance(reply, kind):
            raise UsageError(f"what answers at {there} does not keep to the order of pairing; try again")
        return reply


class HeadSession(SpokeSocket[SessionRequest, SessionReply]):
    """The head's end of one session."""

    def __init__(self, identity: Identity, peer: Peer, program: str) -> None:
        """Connect and request `program`, without waiting for the agent."""
        super().__init__(
            SessionReply,
            ClusterKeys(peer.public, "", identity.public, identity.secret),
            secrets.token_bytes(16),
            max_frame=MAX_FRAME,
            linger_ms=500,
            drops=True,
        )
        self._address = peer.address
        self._connect(f"tcp://{peer.address}")
        self.send(OpenSession(program))

    def run(self) -> tuple[int, str]:
        """Forward standard input and output until the session ends. Return the exit code, and a reason if the session failed."""
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(0, zmq.POLLIN)
        heard, beaten, ever = time.monotonic(), 0.0, False
        while True:
            ready = dict(poller.poll(500))
            now = time.monotonic()
            if self.socket in ready:
                heard, ever = now, True
                message = None
                with suppress(TransportError):
                    message = self.receive(0.0)
                if isinstance(message, Ended):
                    return message.code, message.reason
                if isinstance(message, Data):
                    sys.stdout.buffer.write(message.data)
                    sys.stdout.buffer.flush()
            if 0 in ready:
                data = os.read(0, CHUNK)
                self.send(Data(data))
                if not data:
                    poller.unregister(0)
            if now - beaten >= BEAT_S:
                beaten = now
                self.send(Beat())
            if now - heard > SILENCE_S:
                if ever:
                    return FAILED, "the agent has ended there, or its machine is off or cut off; `tandem agent` starts it again"
                host, _, port = self._address.rpartition(":")
                why = silent_because(host, int(port))
                return FAILED, (
                    f"the agent does not answer{f' ({why})' if why else ''}: is it running there, and "
                    "still paired with this machine?"
                )


def main(name: str, program: str) -> int:
    """Run `program` on the machine of agent `name`. Return its exit code, or 255 after printing the reason of a failure."""
    try:
        link = HeadSession(Trust("head").identity(), paired_agent(name), program)
    except UsageError as error:
        sys.stderr.write(f"tandem: {error.message}\n")
        return FAILED
    try:
        code, reason = link.run()
    except KeyboardInterrupt:
        return 130
    finally:
        link.close()
    if reason:
        sys.stderr.write(printable(f"tandem: agent {name}: {reason}\n"))
    return code if code >= 0 else 128 - code
