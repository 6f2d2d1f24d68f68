"""Messages between parts that may be of two versions have the names on the wire that they always had."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tandem.protocol import agent_messages as agent
from tandem.protocol import control
from tandem.protocol import supervisor_messages as supervisor


@pytest.mark.parametrize(
    ("message", "name"),
    [
        (agent.PairHello("head", "key"), "PairHello"),
        (agent.PairIdentity("agent", "key"), "PairIdentity"),
        (agent.PairStart(b"e"), "PairStart"),
        (agent.PairElement(b"e"), "PairElement"),
        (agent.PairConfirm(b"p"), "PairConfirm"),
        (agent.PairProof(b"p"), "PairDone"),
        (supervisor.Done(1), "ReplicaChanged"),
        (control.QuarantineNotice("r", resting=False), "QuarantineNotice"),
        (control.QuarantineAck("r", resting=False), "QuarantineAck"),
        (control.Neighbours([("d", "tcp://1")]), "Neighbours"),
    ],
)
def test_names_on_the_wire(message: msgspec.Struct, name: str) -> None:
    fields: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    assert fields["type"] == name


def test_each_end_reads_what_the_other_sends() -> None:
    for kind, messages in (
        (agent.PairRequest, [agent.PairHello("h", "k"), agent.PairStart(b"e"), agent.PairConfirm(b"p")]),
        (agent.PairReply, [agent.PairIdentity("h", "k"), agent.PairElement(b"e"), agent.PairProof(b"p")]),
        (control.ApiMessage, [control.QuarantineAck("r", resting=True), control.Neighbours([])]),
    ):
        for message in messages:
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind) == message
