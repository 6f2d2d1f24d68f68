"""`tandem hosts pair`: the head's part of pairing."""

from __future__ import annotations

import socket
import sys
from typing import TypeVar

import msgspec
import zmq

from tandem.errors import TransportError, UsageError
from tandem.launchers.agent.pairing import HeadSide
from tandem.launchers.agent.trust import Peer, Trust, checked_name
from tandem.protocol.agent import (
    PairDone,
    PairElement,
    PairHello,
    PairIdentity,
    PairRefused,
    PairReply,
    PairRequest,
)
from tandem.protocol.codec import Decoder
from tandem.system.privacy import silent_because

ANSWER_S = 5.0
T = TypeVar("T", bound=PairReply)


def pair_with(address: str, port: int, code: str | None) -> str:
    """Pair with the agent whose sessions are at `port`; its name. Raises UsageError."""
    trust = Trust("head")
    own = trust.identity()
    name = checked_name(socket.gethostname().split(".")[0] or "head")
    with zmq.Context() as context, context.socket(zmq.DEALER) as link:
        link.linger = 0
        link.maxmsgsize = 64 * 1024
        link.connect(f"tcp://{address}:{port + 1}")
        there = f"{address}:{port + 1}"
        hello = PairHello(name, own.public)
        agent = _ask(link, there, hello, PairIdentity)
        found = checked_name(agent.name)
        head = HeadSide(code or _asked_for(found), hello, agent)
        element = _ask(link, there, head.start(), PairElement)
        head.check(_ask(link, there, head.confirm(element), PairDone))
    trust.add(found, Peer(agent.public, f"{address}:{port}"))
    return found


def _asked_for(name: str) -> str:
    if not sys.stdin.isatty():
        return sys.stdin.readline().strip()
    return input(f"code that {name} shows: ").strip()


def _ask(link: zmq.Socket[bytes], there: str, request: PairRequest, kind: type[T]) -> T:
    link.send(msgspec.msgpack.encode(request))
    if not link.poll(int(ANSWER_S * 1000)):
        host, _, port = there.rpartition(":")
        why = silent_because(host, int(port))
        raise UsageError(f"no agent answers at {there}{f' ({why})' if why else ''}; is `tandem agent` running there, "
                         "and the port open?")
    try:
        reply = Decoder[PairReply](PairReply).decode(link.recv())
    except TransportError as error:
        raise UsageError(f"what answers at {there} is no agent of this version: {error}") from None
    if isinstance(reply, PairRefused):
        raise UsageError(f"not paired: {reply.reason}")
    if not isinstance(reply, kind):
        raise UsageError(f"what answers at {there} does not keep to the order of pairing; try again")
    return reply
